"""The work list: sources, spellings, and every way in which an entry can be wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cni_cases import MAPPING, PREV, attachment, config, parse, refused

from cni_hostport import cni
from cni_hostport.model import PortMapping, ReservePorts

RUNTIME = "runtimeConfig.portMappings"


def entry(**changed: Any) -> dict[str, Any]:
    return {**MAPPING, **changed}


def mapped(*entries: Any, **keys: Any) -> list[str]:
    """Mappings as text, with their target."""
    found = attachment(config(*entries, **keys)).mappings
    return [f"{mapping}>{mapping.container_port}" for mapping in found]


@pytest.mark.parametrize(
    "spelled",
    [
        {"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
        {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""},
        {"hostport": 8080, "CONTAINERPORT": 80, "protocol": "TCP", "hostIp": None},
        {"hostPort": 8080, "containerPort": 80},
        {"hostPort": 8080, "containerPort": 80, "protocol": "", "name": "http"},
        {"hostPort": 1, "HostPort": 8080, "containerPort": 80},
    ],
)
def test_spellings_of_runtimes(spelled: dict[str, Any]) -> None:
    """P1: containerd's capitals, podman's short form; of two spellings the last counts."""
    found = attachment(config(spelled)).mappings
    assert found == (PortMapping(host_port=8080, container_port=80),)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ("", None),
        ("0.0.0.0", "0.0.0.0"),
        ("::", "::"),
        ("0:0::0", "::"),
        ("127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("2001:DB8:0::5", "2001:db8::5"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::ffff:0.0.0.0", "0.0.0.0"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_host_ip(text: str | None, wanted: str | None) -> None:
    """P2: canonical once, here; only "" is a wildcard of both families."""
    (mapping,) = attachment(config(entry(hostIP=text))).mappings
    assert (mapping.host_ip and str(mapping.host_ip)) == wanted


@pytest.mark.parametrize("text", ["tcp", "TCP", "Tcp", "udp", "UDP", "sctp", "SCTP"])
def test_protocol(text: str) -> None:
    """P3."""
    (mapping,) = attachment(config(entry(protocol=text))).mappings
    assert mapping.protocol == text.lower()


NOT_PORTS = [-1, 65536, 70000, 2**31, 2**64, 10**30]
NOT_INTEGERS = ["8080", "", 80.0, 80.5, 1e3, True, False, None, [], [80], {}, {"a": 1}]
BAD_ENTRIES = [
    *[("hostPort", v, f"{json.dumps(v)} is not in 1..65535") for v in NOT_PORTS],
    *[("containerPort", v, f"{json.dumps(v)} is not in 1..65535") for v in [0, *NOT_PORTS]],
    *[(f, v, "is not an integer") for f in ("hostPort", "containerPort") for v in NOT_INTEGERS],
    *[
        ("protocol", v, "is not tcp, udp or sctp")
        for v in (
            "icmp",
            "tcp ",
            " tcp",
            "tcp\n",
            "tcp,udp",
            "6",
            6,
            True,
            [],
            {},
            "\u017fctp",
            "x" * 999,
        )
    ],
    *[
        ("hostIP", v, "is not an IP address")
        for v in (
            "localhost",
            "1.2.3",
            "1.2.3.4.5",
            "1.2.3.256",
            "01.2.3.4",
            "1.2.3.4/24",
            "[::1]",
            "::1%lo",
            "fe80::1%eth0",
            ":::",
            " 1.2.3.4",
            "1.2.3.4\n",
            "1.2.3.4;",
            "\u0661.2.3.4",
            "*",
            "x" * 999,
            7,
            True,
            [],
            {},
        )
    ],
    *[
        ("hostIP", v, "is not an address that a node can have")
        for v in ("224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:224.0.0.1")
    ],
]


@pytest.mark.parametrize(("key", "value", "text"), BAD_ENTRIES)
def test_bad_entries(key: str, value: Any, text: str) -> None:
    """P4, and all else: code 7 with the entry's index, its field and the value."""
    error = refused(config(MAPPING, entry(hostPort=0), entry(**{key: value})), 7, text)
    assert error.msg.startswith(f"{RUNTIME}[2].{key}: ")
    assert len(error.msg) < 400
    static = refused(config(portMappings=[entry(**{key: value})]), 7, text)
    assert static.msg.startswith(f"portMappings[0].{key}: ")


@pytest.mark.parametrize("key", ["hostPort", "containerPort"])
def test_missing_ports(key: str) -> None:
    refused(
        config({k: v for k, v in MAPPING.items() if k != key}), 7, f"{RUNTIME}[0].{key}: missing"
    )


@pytest.mark.parametrize("value", [None, "8080", 8080, {}, {"hostPort": 1}, True])
def test_no_list(value: Any) -> None:
    """P6."""
    refused(config(runtimeConfig={"portMappings": value}), 7, RUNTIME, "is not a list")
    refused(config(portMappings=value), 7, "portMappings: ", "is not a list")


@pytest.mark.parametrize("value", [None, "8080:80", 8080, [], True])
def test_entry_that_is_no_object(value: Any) -> None:
    """P6."""
    refused(config(MAPPING, value), 7, f"{RUNTIME}[1]", "is not an object")


@pytest.mark.parametrize("value", ["x", [], 5, True])
def test_runtime_config_that_is_no_object(value: Any) -> None:
    refused(config(runtimeConfig=value), 7, "runtimeConfig: ", "is not an object")


@pytest.mark.parametrize(
    "keys",
    [{}, {"runtimeConfig": None}, {"runtimeConfig": {}}, {"runtimeConfig": {"portMappings": []}}],
)
def test_nothing_to_map(keys: dict[str, Any]) -> None:
    """P5: no mappings is a plain pass-through, also without an address."""
    found = attachment(config(**keys, prevResult={}))
    assert found.mappings == ()
    assert found.addresses == ()


def test_port_zero_is_skipped_and_its_target_not_looked_at() -> None:
    assert mapped(entry(hostPort=0, containerPort=0), entry()) == ["*:8080/tcp>80"]
    refused(config(entry(hostPort=0, protocol="icmp")), 7, "protocol")


def test_repeats_collapse_and_order_stays() -> None:
    found = mapped(
        entry(hostPort=2), entry(hostPort=1), entry(hostPort=2, protocol="TCP", hostIP="")
    )
    assert found == ["*:2/tcp>80", "*:1/tcp>80"]


def test_what_a_wildcard_covers_collapses() -> None:
    """Two elements of one key would be refused by the kernel."""
    everywhere, four, six = entry(), entry(hostIP="0.0.0.0"), entry(hostIP="::")
    assert mapped(four, six, everywhere) == ["*:8080/tcp>80"]
    assert mapped(everywhere, six) == ["*:8080/tcp>80"]
    assert mapped(four, six) == ["0.0.0.0:8080/tcp>80", "[::]:8080/tcp>80"]


def test_a_specific_address_beside_a_wildcard_stays() -> None:
    found = mapped(entry(), entry(hostIP="127.0.0.1", containerPort=81), entry(protocol="udp"))
    assert found == ["*:8080/tcp>80", "127.0.0.1:8080/tcp>81", "*:8080/udp>80"]


@pytest.mark.parametrize(
    ("first", "second"),
    [("", ""), ("", "0.0.0.0"), ("::", ""), ("::", "::"), ("1.2.3.4", "::ffff:1.2.3.4")],
)
def test_one_host_port_with_two_targets(first: str, second: str) -> None:
    entries = entry(hostIP=first), entry(hostPort=9), entry(hostIP=second, containerPort=81)
    for pair in (entries, entries[::-1]):
        refused(config(*pair), 7, f"{RUNTIME}[0]", f"{RUNTIME}[2]", "8080/tcp", "80", "81")


def test_static_list_serves_where_the_runtime_has_none() -> None:
    static = [entry(hostPort=9)]
    assert mapped(portMappings=static) == ["*:9/tcp>80"]
    assert mapped(portMappings=static, runtimeConfig={"portMappings": []}) == ["*:9/tcp>80"]
    assert mapped(entry(), portMappings=static) == ["*:8080/tcp>80"]
    assert mapped(portMappings=[]) == []


# --- annotation ----------------------------------------------------------------------------------

NAME = "example.com/host-ports"
CAPABILITY = "io.kubernetes.cri.pod-annotations"


def annotated(value: Any, **keys: Any) -> dict[str, Any]:
    keys.setdefault("portMappingsAnnotation", NAME)
    return config(runtimeConfig={CAPABILITY: {NAME: value, NAME.upper(): "junk"}}, **keys)


def test_annotation() -> None:
    text = json.dumps([{"hostPort": 8080, "containerPort": 80, "hostIP": "192.0.2.1"}])
    call = parse(annotated(text, reservePorts="no"))
    found = cni.attachment_of(call)
    assert [str(mapping) for mapping in found.mappings] == ["192.0.2.1:8080/tcp"]
    assert found.options.reserve_ports is ReservePorts.REQUIRE
    assert cni.from_annotation(call)
    assert cni.wants_mappings(call)


def test_annotation_is_off_by_default_and_last() -> None:
    text = json.dumps([entry()])
    off = annotated(text, portMappingsAnnotation=None)
    assert attachment(off).mappings == ()
    both = annotated(text, portMappings=[entry(hostPort=9)], reservePorts="no")
    assert attachment(both).mappings[0].host_port == 9
    assert attachment(both).options.reserve_ports is ReservePorts.NO
    for document in (off, both, config(MAPPING), config()):
        assert not cni.from_annotation(parse(document))


@pytest.mark.parametrize("annotations", [None, {}, {NAME: None}, {NAME: ""}, {NAME: "[]"}])
def test_no_annotation(annotations: Any) -> None:
    document = config(runtimeConfig={CAPABILITY: annotations}, portMappingsAnnotation=NAME)
    assert attachment(document).mappings == ()


@pytest.mark.parametrize(
    ("value", "texts"),
    [
        ("{", ("is not valid JSON",)),
        ("", ()),
        ("null", ("null is not a list",)),
        ("{}", ("is not a list",)),
        ("[1]", ("[0]: 1 is not an object",)),
        ("[" * 5000, ("is not valid JSON",)),
        ("[NaN]", ("is not valid JSON",)),
        (5, ("5 is not a string",)),
        ([], ("is not a string",)),
        (json.dumps([entry(hostPort=99999)]), ("[0].hostPort: 99999 is not in",)),
        (json.dumps([entry(hostPort=80)]), ("[0].hostPort: 80", "1024-65535")),
        (json.dumps([entry(), entry(hostPort=1023)]), ("[1].hostPort: 1023",)),
        (json.dumps([entry(hostIP="x")]), ('[0].hostIP: "x"',)),
    ],
)
def test_bad_annotations(value: Any, texts: tuple[str, ...]) -> None:
    if not texts:
        assert attachment(annotated(value)).mappings == ()
        return
    refused(annotated(value), 7, f"annotation {NAME}", *texts)


def test_annotations_that_are_no_object() -> None:
    document = config(runtimeConfig={CAPABILITY: "x"}, portMappingsAnnotation=NAME)
    refused(document, 7, CAPABILITY, '"x" is not an object')


@pytest.mark.parametrize("value", ["", 5, True, [], {}])
def test_bad_annotation_names(value: Any) -> None:
    refused(annotated("[]", portMappingsAnnotation=value), 7, "portMappingsAnnotation: ")


@pytest.mark.parametrize(
    ("allowed", "port", "good"),
    [
        (None, 1024, True),
        (None, 1023, False),
        ("80", 80, True),
        ("80", 8080, False),
        ("80,443,1024-65535", 443, True),
        ("80, 443 , 1024-65535", 65535, True),
        ("80,443,1024-65535", 444, False),
        ("1-65535", 1, True),
        (80, 80, True),
        ([80, "400-500"], 443, True),
        ([80, "400-500"], 501, False),
        ([], 8080, False),
    ],
)
def test_ports_an_annotation_may_ask_for(allowed: Any, port: int, good: bool) -> None:
    document = annotated(json.dumps([entry(hostPort=port)]), portMappingsAnnotationPorts=allowed)
    if good:
        assert attachment(document).mappings[0].host_port == port
    else:
        refused(document, 7, f"hostPort: {port}", "portMappingsAnnotationPorts")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "x",
        "80,",
        "80-",
        "-80",
        "0",
        "65536",
        "500-400",
        "1-65536",
        "80\n",
        "8 0",
        "١",
        "999999",
        0,
        -1,
        65536,
        80.0,
        True,
        {},
        [True],
        [None],
        [[80]],
        ["80,443"],
    ],
)
def test_bad_port_ranges(value: Any) -> None:
    refused(config(portMappingsAnnotationPorts=value), 7, "portMappingsAnnotationPorts: ")


# --- pod -----------------------------------------------------------------------------------------


def test_the_pods_name() -> None:
    found = attachment(config(MAPPING), CNI_ARGS='K8S_POD_NAMESPACE=a"b;K8S_POD_NAME=x\ny')
    assert (found.pod.namespace, found.pod.name) == ('a"b', "x\ny")
    assert attachment(config(MAPPING)).pod.name == ""


def test_a_host_ip_of_a_family_the_pod_lacks_claims_nothing() -> None:
    found = attachment(config(entry(hostIP="::1"), prevResult=PREV))
    assert len(found.mappings) == 1
    assert found.claims() == ()


def test_without_prev_result_there_is_no_attachment() -> None:
    call = parse(config(), "DEL")
    with pytest.raises(cni.InvalidConfig, match="must be called as chained plugin"):
        cni.attachment_of(call)
    with pytest.raises(cni.InvalidConfig, match="must be called as chained plugin"):
        cni.result_bytes(call)
