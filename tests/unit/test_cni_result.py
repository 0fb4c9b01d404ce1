"""The previous result: which addresses are the pod's, and what is passed on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cni_cases import DUAL, MAPPING, PREV, attachment, config, parse, refused

from cni_hostport import cni

OLD, MIDDLE, NEW = ("0.1.0", "0.2.0"), ("0.3.0", "0.3.1", "0.4.0"), ("1.0.0", "1.1.0")
POD = {"name": "eth0", "sandbox": "/x"}


def addresses(*ips: Any, interfaces: Any = (POD,)) -> list[str]:
    prev = {"interfaces": list(interfaces), "ips": list(ips)}
    return [str(a) for a in attachment(config(MAPPING, prevResult=prev)).addresses]


def at(address: str, **keys: Any) -> dict[str, Any]:
    return {"address": address, **keys}


def test_both_families_the_host_side_skipped() -> None:
    """P7 and portmap's own test: a host-side address first, then the container's, IPv6 first."""
    interfaces = [{"name": "cni0"}, {"name": "eth0"}, POD, {"name": "net1", "sandbox": "/x"}]
    found = addresses(
        at("10.9.9.9/24", interface=0),
        at("10.8.8.8/24", interface=1),
        at("10.7.7.7/24", interface=3),
        at("2001:db8:1::2/64", interface=2),
        at("10.0.0.2/24", interface=2),
        at("10.0.0.3/24", interface=2),
        interfaces=interfaces,
    )
    assert found == ["10.0.0.2/24", "2001:db8:1::2/64"]


@pytest.mark.parametrize("index", [None, -1, -2, 1, 99, 2**70])
def test_an_index_that_points_nowhere_counts(index: int | None) -> None:
    assert addresses(at("10.0.0.2/24", interface=index)) == ["10.0.0.2/24"]
    assert addresses(at("10.0.0.2/24"), interfaces=()) == ["10.0.0.2/24"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("2001:DB8:0::5/64", "2001:db8::5/64"),
        ("10.0.0.2/32", "10.0.0.2/32"),
        ("::ffff:10.0.0.2/120", "10.0.0.2/24"),
        ("169.254.1.2/16", "169.254.1.2/16"),
    ],
)
def test_addresses_are_canonical(text: str, wanted: str) -> None:
    assert addresses(at(text)) == [wanted]


def test_names_are_matched_in_any_case_of_keys() -> None:
    prev = {"Interfaces": [{"NAME": "eth0", "Sandbox": "/x"}], "IPs": [{"Address": "10.0.0.2/24"}]}
    assert len(attachment(config(MAPPING, prevResult=prev)).addresses) == 1


@pytest.mark.parametrize("version", OLD)
def test_results_of_the_oldest_versions(version: str) -> None:
    prev = {"ip6": {"ip": "fd00::2/64"}, "ip4": {"ip": "10.0.0.2/24", "gateway": "10.0.0.1"}}
    found = attachment(config(MAPPING, cniVersion=version, prevResult=prev))
    assert [str(a) for a in found.addresses] == ["10.0.0.2/24", "fd00::2/64"]
    refused(config(cniVersion=version, prevResult={"ip4": {"ip": "x"}}), 7, "prevResult.ip4.ip")
    refused(config(cniVersion=version, prevResult={"ip6": []}), 7, "prevResult.ip6")
    assert attachment(config(cniVersion=version, prevResult={"ip4": None})).addresses == ()


def test_links_on_the_hosts_side_in_order() -> None:
    assert attachment(config()).interfaces == ("cni0", "veth12")
    odd = [{"name": "b"}, POD, {"name": "a", "sandbox": ""}, {"mac": "x"}, {"name": "x" * 16}]
    prev = {"interfaces": [*odd, {"name": "a b"}]}
    assert attachment(config(prevResult=prev)).interfaces == ("b", "a")


BAD_ADDRESSES = [
    "10.1.0.5",
    "10.1.0.5/33",
    "10.1.0/24",
    "x/24",
    "",
    "/",
    "10.1.0.5/",
    "fd00::5/129",
]
BAD_ADDRESSES += ["10.1.0.5/24\n", "fe80::1%eth0/64", "10.1.0.5/255.255.0.0", "::ffff:10.0.0.2/64"]


@pytest.mark.parametrize("value", [*BAD_ADDRESSES, None, 5, True, [], {}])
def test_bad_addresses(value: Any) -> None:
    """Named by their place, whether they would be used or not."""
    prev = {**PREV, "ips": [*PREV["ips"], {"address": value, "interface": 0}]}
    for mappings in ((), (MAPPING,)):
        refused(config(*mappings, prevResult=prev), 7, "prevResult.ips[1].address: ")
    refused(config(prevResult={"ips": [{}]}), 7, "prevResult.ips[0].address: null")


@pytest.mark.parametrize(
    ("prev", "text"),
    [
        ({"ips": "x"}, "prevResult.ips: "),
        ({"ips": {}}, "prevResult.ips: "),
        ({"ips": [None]}, "prevResult.ips[0]: null"),
        ({"ips": ["10.0.0.2/24"]}, "prevResult.ips[0]: "),
        ({"ips": [at("10.0.0.2/24", interface="0")]}, 'ips[0].interface: "0" is not an integer'),
        ({"ips": [at("10.0.0.2/24", interface=0.0)]}, "ips[0].interface: 0.0 is not an integer"),
        ({"ips": [at("10.0.0.2/24", interface=False)]}, "interface: false is not an integer"),
        ({"interfaces": {}}, "prevResult.interfaces: "),
        ({"interfaces": [5]}, "prevResult.interfaces[0]: 5"),
        ({"interfaces": [{"name": 5}]}, "prevResult.interfaces[0].name: 5"),
        ({"interfaces": [{"name": "x", "sandbox": True}]}, "interfaces[0].sandbox: true"),
    ],
)
def test_malformed_results(prev: dict[str, Any], text: str) -> None:
    refused(config(prevResult=prev), 7, text)


@pytest.mark.parametrize("prev", ["x", 5, [], True, 1.5])
def test_a_result_that_is_no_object(prev: Any) -> None:
    refused(config(prevResult=prev), 6, "prevResult")


NO_ADDRESS = [
    "0.0.0.0/0",
    "127.0.0.1/8",
    "224.0.0.1/4",
    "::/0",
    "::1/128",
    "fe80::1/64",
    "ff02::1/16",
]


@pytest.mark.parametrize("prev", [{}, {"ips": []}, {"ips": None, "interfaces": None}])
def test_mappings_without_an_address(prev: dict[str, Any]) -> None:
    refused(config(MAPPING, prevResult=prev), 7, "CNI_IFNAME", '"eth0"')
    assert attachment(config(prevResult=prev)).addresses == ()


def test_addresses_of_other_interfaces_do_not_count() -> None:
    refused(config(MAPPING), 7, "CNI_IFNAME", '"net1"', CNI_IFNAME="net1")


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_addresses_that_nothing_can_be_sent_to(text: str) -> None:
    refused(config(MAPPING, prevResult={"ips": [at(text)]}), 7, "CNI_IFNAME")
    assert len(addresses(at(text), at("10.0.0.2/24"), at("fd00::2/64"))) == 2


# --- passing on ----------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [*OLD, *MIDDLE, *NEW])
@pytest.mark.parametrize("version", [*OLD, *MIDDLE, *NEW])
def test_versions_of_one_shape_only(own: str, version: str) -> None:
    """A result is rewritten inside its family of versions and refused across them."""
    document = config(cniVersion=version, prevResult={"cniVersion": own, "x": 0})
    if any({own, version} <= set(shape) for shape in (OLD, MIDDLE, NEW)):
        assert json.loads(cni.result_bytes(parse(document))) == {"cniVersion": version, "x": 0}
    else:
        refused(document, 7, "prevResult.cniVersion", own, version)


@pytest.mark.parametrize("own", [5, 1.0, True, [], {}])
def test_a_results_version_that_is_no_string(own: Any) -> None:
    refused(config(prevResult={"cniVersion": own}), 6, "prevResult.cniVersion")


def test_a_results_version_that_nobody_knows() -> None:
    refused(config(prevResult={"cniVersion": "2.0.0"}), 7, "2.0.0")


@pytest.mark.parametrize("own", [{}, {"cniVersion": None}, {"cniVersion": ""}])
@pytest.mark.parametrize("version", [*OLD, *MIDDLE, *NEW])
def test_a_result_without_a_version(own: dict[str, Any], version: str) -> None:
    printed = cni.result_bytes(parse(config(cniVersion=version, prevResult=own)))
    assert json.loads(printed) == {"cniVersion": version}


def test_nothing_else_is_changed() -> None:
    prev = {
        "CNIVERSION": "1.0.0",
        "ips": [
            {"address": "2001:DB8:0::5/64", "interface": 0},
            {"address": "10.0.0.2/24", "interface": -1},
        ],
        "interfaces": [{"name": "eth0", "sandbox": "/x", "vendor": {"a": [None, False, 0, ""]}}],
        "routes": [{"dst": "::/0", "mtu": 1400, "scope": 0}],
        "dns": {},
        "big": 2**70,
        "float": 1.5,
        "text": 'ä\n"\u2028<>&',
        "prevResult": None,
    }
    printed = cni.result_bytes(parse(config(MAPPING, prevResult=prev)))
    wanted = {k: v for k, v in prev.items() if k != "CNIVERSION"}
    assert json.loads(printed) == {"cniVersion": "1.1.0", **wanted}
    assert printed.endswith(b"}\n")
    assert printed.count(b"\n") == 1


def test_dual_stack() -> None:
    found = attachment(config(MAPPING, prevResult=DUAL))
    assert [str(claim) for claim in found.claims()] == ["0.0.0.0:8080/tcp", "[::]:8080/tcp"]
