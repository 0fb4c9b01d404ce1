"""portmap's own list of unit tests (P1 to P27), as tests of their meaning.

Names of chains, hostPort 0 and the default backend are ours; everything else
that a conflist for portmap relies on must hold in both backends.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from unit.cni_cases import attachment, config, parse, refused
from unit.hostport.test_iptables import NODE, Lab, chain, placed

from cni_hostport.hostport import portmap
from cni_hostport.hostport.nftplan import attachment_elements
from cni_hostport.model import Attachment, Family
from cni_hostport.netfilter import elements as nft
from cni_hostport.netfilter import nftprofiles, restore

RESULT: dict[str, Any] = {
    "cniVersion": "1.0.0",
    "interfaces": [{"name": "host"}, {"name": "eth0", "sandbox": "/var/run/netns/blue"}],
    "ips": [
        {"address": "192.168.0.1/24", "interface": 0},
        {"address": "2001:db8:1::2/64", "interface": 1},
        {"address": "10.0.0.2/24", "interface": 1},
    ],
}
TWO = (
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 8081, "containerPort": 81, "protocol": "udp"},
)
EIGHT = (
    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 8081, "containerPort": 80, "protocol": "tcp"},
    {"hostPort": 8080, "containerPort": 81, "protocol": "udp"},
    {"hostPort": 8082, "containerPort": 82, "protocol": "udp"},
    {"hostPort": 8083, "containerPort": 83, "protocol": "tcp", "hostIP": "192.0.2.1"},
    {"hostPort": 8084, "containerPort": 84, "protocol": "tcp", "hostIP": "0.0.0.0"},
    {"hostPort": 8085, "containerPort": 85, "protocol": "tcp", "hostIP": "2001:db8::1"},
    {"hostPort": 8086, "containerPort": 86, "protocol": "tcp", "hostIP": "::"},
)


def wanted(*mappings: Any, version: str = "1.0.0", **keys: Any) -> Attachment:
    keys = {"prevResult": RESULT, "cniVersion": version, **keys}
    return attachment(config(*mappings, **keys))


def translated(lab: Lab, family: Family) -> dict[int, tuple[str, str | None]]:
    """Target and destination match of each host port, read out of the rules."""
    out = {}
    nat = lab.kernel.tables[family]["nat"]
    for args in nat.get("KUBE-HOSTPORTS", []):
        jump = restore.Rule(args)
        for rule in map(restore.Rule, nat[str(jump.target)]):
            if rule.target == "DNAT":
                port = int(jump.value("--dport") or 0)
                key = port if jump.value("-p") == "tcp" else -port
                out[key] = (str(rule.value("--to-destination")), rule.value("-d"))
    return out


def sources(lab: Lab, family: Family) -> set[str | None]:
    """Sources that are masqueraded."""
    rules = lab.kernel.tables[family]["nat"].get("HOSTPORT-MANAGER-SNAT", [])
    return {restore.Rule(r).value("-s") for r in rules}


def maps(one: Attachment, family: Family) -> set[str]:
    """What the nftables maps hold for it."""
    found = attachment_elements(placed(one), NODE)
    names = ("ports", "hostip_ports")
    return {nft.describe(e) for e in found if e.family is family and e.set.startswith(names)}


@pytest.mark.parametrize("version", ["0.3.0", "0.3.1", "0.4.0", "1.0.0"])
def test_p1_add_is_parsed(version: str) -> None:
    result = {**RESULT, "cniVersion": version}
    if version < "1":
        result["ips"] = [
            {**ip, "version": "6" if ":" in ip["address"] else "4"} for ip in result["ips"]
        ]
    found = wanted(
        *TWO,
        version=version,
        prevResult=result,
        snat=False,
        conditionsV4=["-s", "1.2.3.4"],
        conditionsV6=["!", "-s", "12::34"],
    )
    assert found.options.conditions_v4 == ("-s", "1.2.3.4")
    assert found.options.conditions_v6 == ("!", "-s", "12::34")
    assert not found.options.snat
    assert str(found.address(Family.V4)) == "10.0.0.2/24"
    assert str(found.address(Family.V6)) == "2001:db8:1::2/64"


def test_p2_del_needs_neither_mappings_nor_result() -> None:
    call = parse(config(drop_=("prevResult",)), "DEL")
    assert call.identity is not None


def test_p3_port_zero_is_not_mapped_and_a_negative_one_refused() -> None:
    assert wanted({"hostPort": 0, "containerPort": 80, "protocol": "tcp"}, *TWO).mappings == (
        wanted(*TWO).mappings
    )
    refused(config({"hostPort": -1, "containerPort": 80}), 7, "hostPort", "-1")


def test_p4_to_p8_the_backend_asked_for_or_needed() -> None:
    assert wanted(*TWO).options.backend == "auto"
    assert wanted(*TWO, backend="nftables").options.backend == "nftables"
    conditions = {"conditionsV4": ["a", "b"], "conditionsV6": ["c", "d"]}
    assert wanted(*TWO, backend="nftables", **conditions).options.backend == "nftables"
    refused(config(*TWO, backend="iptables", **conditions), 7, "iptables", "conditionsV4",
            "conditionsV6")  # fmt: skip
    iptables = {"conditionsV4": ["-s", "1.2.3.4"], "externalSetMarkChain": "KUBE-MARK-MASQ"}
    refused(config(*TWO, backend="nftables", **iptables), 7, "nftables", "conditionsV4",
            "externalSetMarkChain")  # fmt: skip


def test_p9_an_address_without_interface_counts() -> None:
    found = wanted(*TWO, prevResult={**RESULT, "ips": [{"address": "10.0.0.7/24"}]})
    assert str(found.address(Family.V4)) == "10.0.0.7/24"


V4 = {
    8080: ("10.0.0.2:80", None), 8081: ("10.0.0.2:80", None), -8080: ("10.0.0.2:81", None),
    -8082: ("10.0.0.2:82", None), 8083: ("10.0.0.2:83", "192.0.2.1"), 8084: ("10.0.0.2:84", None),
}  # fmt: skip
V6 = {
    8080: ("[2001:db8:1::2]:80", None), 8081: ("[2001:db8:1::2]:80", None),
    -8080: ("[2001:db8:1::2]:81", None), -8082: ("[2001:db8:1::2]:82", None),
    8085: ("[2001:db8:1::2]:85", "2001:db8::1"), 8086: ("[2001:db8:1::2]:86", None),
}  # fmt: skip


def test_p10_eight_mappings_in_their_families() -> None:
    lab, one = Lab(), wanted(*EIGHT, conditionsV4=["-s", "192.0.2.0/24"])
    lab.add(one)
    assert translated(lab, Family.V4) == V4
    assert translated(lab, Family.V6) == V6
    assert sources(lab, Family.V4) == {"127.0.0.0/8", "10.0.0.2", "10.0.0.0/24"}
    assert sources(lab, Family.V6) == {"2001:db8:1::2", "2001:db8:1::/64"}
    assert all("-s 192.0.2.0/24" in j for j in lab.jumps(Family.V4))
    assert not any("-s" in j.split() for j in lab.jumps(Family.V6))


def test_p11_without_snat_only_translation_and_none_on_loopback() -> None:
    lab, one = Lab(), wanted(*EIGHT, snat=False)
    lab.add(one)
    rules = map(restore.Rule, lab.kernel.tables[Family.V4]["nat"][chain(one)])
    answered = {r.value("-d") for r in rules if r.target == "DNAT"}
    assert answered == {"192.0.2.1", "10.1.0.1"}
    assert sources(lab, Family.V4) == sources(lab, Family.V6) == set()


def test_p12_an_external_chain_marks() -> None:
    lab = Lab()
    for family in Family:
        lab.kernel.tables[family]["nat"]["PLZ-SET-MARK"] = []
    one = wanted(*EIGHT, externalSetMarkChain="PLZ-SET-MARK")
    assert one.options.backend == "iptables"
    lab.add(one)
    rules = [restore.Rule(r) for r in lab.kernel.tables[Family.V4]["nat"][chain(one)]]
    assert {r.value("-s") for r in rules if r.target == "PLZ-SET-MARK"} == {
        "127.0.0.0/8", "10.0.0.0/24"}  # fmt: skip
    assert [r.target for r in rules][-1] == "DNAT"


def test_p13_only_local_destinations_from_outside_and_from_the_node() -> None:
    lab = Lab()
    lab.add(wanted(*TWO))
    for hook in ("PREROUTING", "OUTPUT"):
        (rule,) = lab.kernel.rules(Family.V4, "nat", hook)
        assert "--dst-type LOCAL -j KUBE-HOSTPORTS" in rule


def test_p14_the_mark_bit_is_accepted_and_not_needed() -> None:
    lab = Lab()
    lab.add(wanted(*TWO, markMasqBit=5))
    assert "mark" not in str(lab.kernel.tables).lower().replace("markmasq", "")
    refused(config(*TWO, markMasqBit=32), 7, "markMasqBit", "32")
    refused(config(*TWO, markMasqBit=5, externalSetMarkChain="X"), 7, "markMasqBit",
            "externalSetMarkChain")  # fmt: skip


def test_p15_to_p18_set_up_and_torn_down_more_than_once() -> None:
    lab, one = Lab(), wanted(*EIGHT)
    nat = lab.kernel.tables[Family.V4]["nat"]
    nat["KUBE-HOSTPORTS"] = [("-m", "comment", "--comment", "canary", "-j", "RETURN")]
    lab.add(one)
    before = str(lab.kernel.tables)
    lab.add(one)
    assert str(lab.kernel.tables) == before
    for _ in range(10):
        lab.remove(one)
    lab.backend.retire()
    assert lab.jumps() == ["-m comment --comment canary -j RETURN"]
    assert lab.kernel.chains(Family.V4, "nat") == {"KUBE-HOSTPORTS"}


def test_p19_the_same_eight_in_nftables() -> None:
    found = maps(wanted(*EIGHT), Family.V4)
    assert found == {
        "tcp . 8080 : 10.0.0.2 . 80", "tcp . 8081 : 10.0.0.2 . 80", "udp . 8080 : 10.0.0.2 . 81",
        "udp . 8082 : 10.0.0.2 . 82", "192.0.2.1 . tcp . 8083 : 10.0.0.2 . 83",
        "tcp . 8084 : 10.0.0.2 . 84",
    }  # fmt: skip
    assert {e.split(" : ")[0] for e in maps(wanted(*EIGHT), Family.V6)} == {
        "tcp . 8080", "tcp . 8081", "udp . 8080", "udp . 8082", "2001:db8::1 . tcp . 8085",
        "tcp . 8086",
    }  # fmt: skip


def test_p19_conditions_in_nftables_are_the_networks_own() -> None:
    near = wanted(*TWO, conditionsV4=["ip", "saddr", "192.0.2.0/24"])
    profile = nftprofiles.profile_of(near.options, Family.V4)
    assert profile is not None
    sets = {e.set for e in attachment_elements(placed(near), NODE) if e.family is Family.V4}
    assert profile.ports in sets
    assert "ports" not in sets
    assert f"translate ip saddr 192.0.2.0/24 jump {profile.chain}" in nftprofiles.profiles_text(
        [profile]
    )
    plain = {e.set for e in attachment_elements(placed(wanted(*TWO)), NODE)}
    assert not any(s.startswith("ports_") for s in plain)


@pytest.mark.parametrize(
    ("options", "v4", "v6"),
    [
        ({"masqAll": True}, {None}, {None}),
        ({"masqAll": False}, {"127.0.0.0/8", "10.0.0.2", "10.0.0.0/24"},
         {"2001:db8:1::2", "2001:db8:1::/64"}),
        ({"snat": False, "masqAll": True}, set(), set()),
    ],
)  # fmt: skip
def test_p20_and_p23_to_p27_masquerade(
    options: dict[str, bool], v4: set[str | None], v6: set[str | None]
) -> None:
    lab, one = Lab(), wanted(*TWO, **options)
    lab.add(one)
    assert (sources(lab, Family.V4), sources(lab, Family.V6)) == (v4, v6)
    assert lab.backend.check(one.key) == []
    sets = {e.set for e in attachment_elements(placed(one), NODE)}
    assert ("masq_all_pods" in sets) == (v4 == {None})
    assert ("hairpins" in sets) == (len(v4) == 3)


def test_p21_and_p22_check_before_between_and_after() -> None:
    lab, one = Lab(), wanted(*EIGHT)
    lab.add(one)
    assert lab.backend.check(one.key) == []
    lab.kernel.tables[Family.V4]["nat"]["HOSTPORT-MANAGER-SNAT"].clear()
    lab.kernel.generation += 1
    assert lab.backend.check(one.key)
    assert not lab.healthy()
    assert lab.backend.check(one.key) == []
    lab.remove(one)
    assert lab.backend.rules_of(one.key) == {}


# -- what portmap left -------------------------------------------------------------------------


def test_a_containers_left_overs_are_found_by_portmaps_naming() -> None:
    mine, other = (portmap.container_chains("net", c)[0] for c in ("one", "two"))
    assert len(mine) == 28
    text = f"""*nat
:PREROUTING ACCEPT [0:0]
:CNI-HOSTPORT-DNAT - [0:0]
:{mine} - [0:0]
:{other} - [0:0]
-A CNI-HOSTPORT-DNAT -p udp -m comment --comment "dnat name: \\"net\\" id: \\"one\\"" -j {mine}
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \\"net\\" id: \\"one\\"" -j {mine}
-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment "dnat name: \\"net\\" id: \\"two\\"" -j {other}
-A {mine} -p udp -m udp --dport 53 -j DNAT --to-destination 10.0.0.2:53
-A {mine} -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.0.0.2:80
COMMIT
"""
    tables = restore.parse_save(text)
    assert portmap.is_portmaps(tables["nat"].chains)
    rendered = restore.render(portmap.removal(tables, "net", "one").blocks())
    assert rendered.count(f"-j {mine}") == 2
    assert rendered.splitlines()[-3:] == [f"-F {mine}", f"-X {mine}", "COMMIT"]
    assert other not in rendered
    assert [(m.protocol, m.port, m.chain, m.target) for m in portmap.mappings(tables)] == [
        ("udp", 53, mine, "10.0.0.2:53"),
        ("tcp", 80, mine, "10.0.0.2:80"),
    ]
    assert portmap.udp_targets(tables, "net", "one") == (ip_address("10.0.0.2"),)
    assert not portmap.removal(tables, "net", "three")
    rules = {"ip": [("hostports", 7, "one"), ("hostports", 8, "two")], "ip6": []}
    assert portmap.nft_removal(rules, "one") == "delete rule ip cni_hostport hostports handle 7\n"
