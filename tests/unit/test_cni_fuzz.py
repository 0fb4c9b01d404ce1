"""Whatever comes in, only a ``HostPortError`` comes out, or something within bounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from cni_cases import DUAL, config, env, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cni_hostport import cni
from cni_hostport.cni_fields import ifname_error
from cni_hostport.errors import HostPortError
from cni_hostport.model import Protocol

bounded = settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

COMMANDS = ("ADD", "DEL", "CHECK", "GC", "STATUS")
KEYS = st.sampled_from(
    words(
        "portMappings runtimeConfig prevResult cniVersion name backend snat masqAll conditionsV4"
        " conditionsV6 markMasqBit externalSetMarkChain reservePorts nodeAddresses openForward"
        " excludeInterfaces portMappingsAnnotation portMappingsAnnotationPorts"
        " io.kubernetes.cri.pod-annotations cni.dev/valid-attachments cni.dev/attachments hostPort"
        " containerPort protocol hostIP interfaces ips ip4 ip6 ip address interface sandbox"
        " containerID ifname"
    )
)
WORDS = st.sampled_from(
    [
        *words("tcp UDP 1.1.0 0.2.0 eth0 10.0.0.2/24 fd00::2/64 10.0.0.2 ::1 :: nftables iptables"),
        *words("require -j accept ! 80-90 []"),
        "",
        '[{"hostPort":1}]',
    ]
)
NUMBERS = st.sampled_from([-1, 0, 1, 2, 80, 65535, 65536, 2**31, 2**64, 8080.0, 0.5])
SCALARS = st.none() | st.booleans() | NUMBERS | st.integers() | WORDS | st.text(max_size=20)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=20,
)
ENV_TEXT = st.text(
    st.characters(min_codepoint=1, max_codepoint=0xFFFF, exclude_categories=()), max_size=20
)


def sound(call: cni.Call) -> None:
    """Use a call in every way; what it accepts must be within bounds and printable."""
    for use in (cni.from_annotation, cni.gc_of, cni.result_bytes):
        quietly(lambda use=use: use(call))  # type: ignore[misc]
    assert isinstance(cni.wants_mappings(call), bool)
    quietly(lambda: sound_attachment(call))


def quietly(use: Callable[[], object]) -> None:
    """Run it; a refusal must be one printable line with a known code, anything else is a bug."""
    try:
        use()
    except HostPortError as error:
        printed = json.loads(cni.error_bytes(error, "1.1.0"))
        assert printed["code"] in (1, 4, 5, 6, 7, 8)
        assert all(str(value).isprintable() for value in printed.values())
        assert len(json.dumps(printed)) < 20_000


def sound_attachment(call: cni.Call) -> None:
    found = cni.attachment_of(call)
    for mapping in found.mappings:
        assert 1 <= mapping.host_port <= 65535
        assert 1 <= mapping.container_port <= 65535
        assert type(mapping.host_port) is type(mapping.container_port) is int
        assert mapping.protocol in Protocol
        assert mapping.host_ip is None or not mapping.host_ip.is_multicast
    claims = found.claims()
    assert len(set(claims)) == len(claims)
    assert len({address.version for address in found.addresses}) == len(found.addresses) <= 2
    assert found.addresses or not found.mappings
    options = found.options
    assert options.mark_masq_bit is None or 0 <= options.mark_masq_bit <= 31
    for word in (*options.conditions_v4, *options.conditions_v6):
        assert word.isascii()
        assert word.isprintable()
        assert not set(word) & set(" ;{}#'\"\\")
        assert word.lower() not in ("accept", "drop", "jump", "goto", "dnat", "-j", "-g")
    for name in (*found.interfaces, *options.exclude_interfaces):
        assert ifname_error(name) is None
    json.loads(found.model_dump_json())
    assert json.loads(cni.result_bytes(call))["cniVersion"] == call.cni_version


def run(environment: dict[str, str], stdin: bytes, same_netns: bool = False) -> None:
    assert cni.cni_version_of(stdin) in cni.SUPPORTED_VERSIONS
    quietly(lambda: sound(cni.parse_call(environment, stdin, same_netns)))


@bounded
@given(st.binary(max_size=200), st.sampled_from(COMMANDS))
def test_any_bytes(stdin: bytes, command: str) -> None:
    run(env(command), stdin)


@bounded
@given(VALUES, st.sampled_from(COMMANDS))
def test_any_json(document: Any, command: str) -> None:
    run(env(command), json.dumps(document).encode("utf-8", "surrogatepass"))


@settings(bounded, max_examples=250)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.sampled_from(COMMANDS))
def test_any_keys_in_a_good_configuration(keys: dict[str, Any], command: str) -> None:
    run(env(command), json.dumps({**config(prevResult=DUAL), **keys}).encode())


PORTS = st.sampled_from([0, 1, 2, 65535, 65536, -1, "80", 80.0, True, None]) | st.integers(1, 3)
ENTRIES = st.fixed_dictionaries(
    {"hostPort": PORTS, "containerPort": st.integers(1, 2) | PORTS},
    optional={
        "protocol": st.sampled_from(["tcp", "UDP", "", None, "icmp"]),
        "hostIP": st.sampled_from(
            ["", "0.0.0.0", "::", "::ffff:0.0.0.0", "::1", "10.0.0.1", None, "x", "224.0.0.1"]
        ),
    },
)
FEW_TARGETS = st.lists(ENTRIES, max_size=5)


@settings(bounded, max_examples=250)
@given(FEW_TARGETS)
def test_any_mappings(entries: list[Any]) -> None:
    run(env(), json.dumps(config(*entries, prevResult=DUAL)).encode())


@settings(bounded, max_examples=150)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "hostPort": st.integers(0, 2),
                "containerPort": st.just(80),
                "hostIP": st.sampled_from(["", "0.0.0.0", "::", "::1", "10.0.0.1"]),
            }
        ),
        min_size=1,
        max_size=6,
    )
)
def test_collapsing_loses_no_claim(entries: list[dict[str, Any]]) -> None:
    """Every entry's claims are covered by what remains."""
    data = json.dumps(config(*entries, prevResult=DUAL)).encode()
    whole = cni.attachment_of(cni.parse_call(env(), data)).claims()
    for entry in entries:
        alone = json.dumps(config(entry, prevResult=DUAL)).encode()
        for claim in cni.attachment_of(cni.parse_call(env(), alone)).claims():
            assert claim in whole


RESULTS = st.fixed_dictionaries(
    {},
    optional={
        "cniVersion": st.sampled_from([*cni.SUPPORTED_VERSIONS, "", None, 1]),
        "interfaces": st.lists(VALUES, max_size=3) | VALUES,
        "ips": st.lists(
            st.dictionaries(st.sampled_from(["address", "interface"]), VALUES), max_size=3
        ),
        "ip4": st.fixed_dictionaries({"ip": WORDS}) | VALUES,
        "extra": VALUES,
    },
)


@settings(bounded, max_examples=150)
@given(RESULTS, st.sampled_from(cni.SUPPORTED_VERSIONS))
def test_any_previous_result(prev: dict[str, Any], version: str) -> None:
    run(env(), json.dumps(config(cniVersion=version, prevResult=prev)).encode())


@bounded
@given(
    st.lists(st.sampled_from(["ip", "-s", "!", "--jump", "x"]) | st.text(max_size=8), max_size=5)
)
def test_any_conditions(given_words: list[str]) -> None:
    run(env(), json.dumps(config(conditionsV4=given_words, conditionsV6=given_words)).encode())


@bounded
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "CNI_COMMAND",
                "CNI_CONTAINERID",
                "CNI_NETNS",
                "CNI_IFNAME",
                "CNI_ARGS",
                "CNI_PATH",
                "CNI_NETNS_OVERRIDE",
            ]
        ),
        ENV_TEXT,
    ),
    st.booleans(),
)
def test_any_environment(changed: dict[str, str], same_netns: bool) -> None:
    """Lone surrogates of any kind included, as bytes arrive from the outside."""
    run(changed, b"{}", same_netns)
    run({**env(), **changed}, json.dumps(config()).encode(), same_netns)
