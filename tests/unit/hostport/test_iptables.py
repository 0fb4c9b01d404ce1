"""The iptables backend on tables in memory: names, order, steps, failures, damage."""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.hostport.iptworld import Kernel, Runner, Toolbox
from unit.hostport.world import ADDRESSES, Machine, Opener, Store, World, pod

from cni_hostport.errors import HostPortError, InvalidConfig, NetfilterFailed, PortInUse, TryAgain
from cni_hostport.hostport import iptnames
from cni_hostport.hostport.iptables import IptablesBackend
from cni_hostport.hostport.manager import HostPortManager, PodPortMapping
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Attachment, Family, HostPort, PodRef, PortMapping, Protocol
from cni_hostport.netfilter import restore, rulewords

DATA = json.loads((Path(__file__).parents[2] / "data/hostport_manager.json").read_text())
NODE = NodeView.of((ip_address(a), link) for a, link in ADDRESSES)
BRIDGE = PodLink("cni0", 7, True)


class Lab:
    """A backend on a fresh kernel."""

    def __init__(self, kernel: Kernel | None = None, flavour: str = "nft") -> None:
        self.kernel = kernel or Kernel()
        self.runner = Runner(self.kernel, flavour)
        self.toolbox = Toolbox(self.runner)
        self.backend = IptablesBackend(self.toolbox)
        self.backend.assume({}, NODE)

    def add(self, *attachments: Attachment, node: NodeView = NODE) -> None:
        for attachment in attachments:
            self.backend.place({attachment.key: placed(attachment)}, node)

    def remove(self, *attachments: Attachment) -> None:
        self.backend.place({a.key: None for a in attachments}, NODE)

    def jumps(self, family: Family = Family.V4) -> list[str]:
        return self.kernel.rules(family, "nat", "KUBE-HOSTPORTS")

    def targets(self, family: Family = Family.V4) -> list[str]:
        return [line.split()[-1] for line in self.jumps(family)]

    def healthy(self) -> bool:
        """Whether a look that trusts nothing finds nothing to do."""
        self.kernel.generation += 1
        return not self.backend.repair()


def placed(attachment: Attachment) -> Placed:
    held = frozenset(c for c in attachment.claims() if c.protocol is not Protocol.SCTP)
    return Placed(attachment, BRIDGE, held)


def chain(attachment: Attachment, number: int = 0) -> str:
    return iptnames.mapping_chain(attachment, attachment.mappings[number])


WEB = pod("web", "8080:80", "8080:80/udp")
OTHER = pod("other", "9090:80", ips=("10.1.0.3/16", "fd00::3/64"))


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", DATA["chain_suffixes"], ids=lambda v: v["suffix"])
def test_chain_names_are_the_hostport_managers(vector: dict[str, Any]) -> None:
    protocol = Protocol(vector["protocol"].lower())
    found = iptnames.suffix(vector["id"], vector["hostPort"], protocol, vector["hostIP"])
    assert found == vector["suffix"]


def test_rules_of_a_mapping_are_the_hostport_managers() -> None:
    lab = Lab()
    lab.add(WEB)
    name, comment = chain(WEB), '-m comment --comment "web_shop hostport 8080"'
    assert f"{comment} -m tcp -p tcp --dport 8080 -j {name}" in lab.jumps()
    rules = lab.kernel.rules(Family.V4, "nat", name)
    assert rules[-1] == f"{comment} -m tcp -p tcp -j DNAT --to-destination 10.1.0.2:80"
    v6 = lab.kernel.rules(Family.V6, "nat", name)
    assert v6[-1].endswith('-j DNAT --to-destination "[fd00::2]:80"')
    portals = '-m comment --comment "kube hostport portals" -m addrtype --dst-type LOCAL'
    for hook in ("PREROUTING", "OUTPUT"):
        assert lab.kernel.rules(Family.V4, "nat", hook) == [f"{portals} -j KUBE-HOSTPORTS"]


HOSTILE = (
    '"; -j DROP', "a\nb", "\r\n-A INPUT -j DROP", "-j DROP", "-t filter", "x" * 300, "\\",
    "'`$(id)",
    "ü" * 200, "\x00\x1f\x85\u2028", '\\"', "-m", "!", "", "COMMIT", "*filter", "\udcff",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_names_of_pods_are_only_comments(name: str) -> None:
    usual, hostile = Lab(), Lab()
    plain = pod("web", "8080:80")
    usual.add(plain)
    evil = plain.model_copy({"pod": PodRef(namespace=name, name=name)})
    hostile.add(evil)

    def skeleton(lab: Lab) -> list[tuple[str, frozenset[rulewords.Option]]]:
        return [
            (c, frozenset(o for o in rulewords.parse_options(r) if o.name != "--comment"))
            for tables in lab.kernel.tables.values()
            for t in tables.values()
            for c, rules in t.items()
            for r in rules
        ]

    assert skeleton(hostile) == skeleton(usual)
    assert hostile.healthy()
    hostile.remove(evil)
    assert hostile.targets() == []


# -- order --------------------------------------------------------------------------------------


def test_one_address_comes_before_all_and_ours_before_anybody_elses() -> None:
    lab = Lab()
    stale = lab.kernel.tables[Family.V4]["nat"]
    stale["KUBE-HOSTPORTS"] = [("-p", "tcp", "--dport", "8080", "-j", "KUBE-HP-DEADDEADDEADDEAD")]
    stale["KUBE-HP-DEADDEADDEADDEAD"] = [
        ("-p", "tcp", "-j", "DNAT", "--to-destination", "9.9.9.9:1")
    ]
    both = pod("both", "8080:80", "192.0.2.1:8080:81")
    lab.add(both)
    assert lab.targets() == [chain(both, 1), chain(both, 0), "KUBE-HP-DEADDEADDEADDEAD"]
    lab.remove(both)
    assert lab.backend.retire()
    assert lab.targets() == ["KUBE-HP-DEADDEADDEADDEAD"]
    assert lab.kernel.chains(Family.V4, "nat") == {"KUBE-HOSTPORTS", "KUBE-HP-DEADDEADDEADDEAD"}


def test_a_jump_that_somebody_put_above_ours_goes_below_at_the_next_repair() -> None:
    lab = Lab()
    lab.add(WEB)
    nat = lab.kernel.tables[Family.V4]["nat"]
    nat["KUBE-HP-DEADDEADDEADDEAD"] = []
    nat["KUBE-HOSTPORTS"].insert(
        0, ("-p", "tcp", "--dport", "8080", "-j", "KUBE-HP-DEADDEADDEADDEAD")
    )
    assert not lab.healthy()
    assert [t for t in lab.targets() if t in (chain(WEB), "KUBE-HP-DEADDEADDEADDEAD")] == [
        chain(WEB),
        "KUBE-HP-DEADDEADDEADDEAD",
    ]
    assert lab.healthy()


# -- what is there and what is not ---------------------------------------------------------------


def test_nothing_is_left_and_nothing_of_others_is_touched() -> None:
    lab = Lab()
    before = json.dumps(lab.kernel.tables)
    lab.kernel.tables[Family.V4]["nat"]["CANARY"] = [("-j", "RETURN")]
    lab.kernel.tables[Family.V4]["nat"]["PREROUTING"] = [("-j", "CANARY")]
    lab.add(WEB, OTHER)
    lab.remove(WEB)
    lab.remove(OTHER)
    assert lab.backend.retire()
    lab.kernel.tables[Family.V4]["nat"].pop("CANARY")
    lab.kernel.tables[Family.V4]["nat"]["PREROUTING"] = []
    assert json.dumps(lab.kernel.tables) == before
    assert lab.backend.retire() is False


def test_chains_that_were_there_before_us_stay() -> None:
    lab = Lab()
    lab.kernel.tables[Family.V4]["nat"]["KUBE-HOSTPORTS"] = []
    lab.add(pod("web", "8080:80", ips=("10.1.0.2/16",)))
    lab.remove(pod("web", "8080:80"))
    lab.backend.retire()
    assert lab.kernel.chains(Family.V4, "nat") == {"KUBE-HOSTPORTS"}
    assert lab.kernel.chains(Family.V6, "nat") == set()


@pytest.mark.parametrize("flavour", ["nft", "legacy"])
def test_one_restore_a_family_and_no_save_once_the_chains_are_there(flavour: str) -> None:
    lab = Lab(flavour=flavour)
    lab.add(WEB)
    lab.runner.saves, lab.runner.restores = 0, []
    lab.add(OTHER)
    lab.remove(OTHER)
    assert (lab.runner.saves, len(lab.runner.restores)) == (0, 4)
    assert all("9090" in text and "8080" not in text for text in lab.runner.restores)


def test_own_changes_are_verified_without_reading_and_foreign_ones_are_read() -> None:
    lab = Lab()
    lab.add(WEB, OTHER)
    lab.runner.saves = 0
    assert not lab.backend.repair()
    assert lab.backend.check(WEB.key) == []
    assert lab.runner.saves == 0
    lab.kernel.generation += 1
    assert not lab.backend.repair()
    assert lab.runner.saves == 2


def test_udp_that_reaches_a_holder_is_refused_only_where_it_is_held() -> None:
    lab = Lab()
    lab.backend.place({WEB.key: Placed(WEB, BRIDGE, frozenset())}, NODE)
    assert lab.kernel.rules(Family.V4, "filter", "HOSTPORT-MANAGER-HELD") == []
    held = HostPort(family=Family.V4, address=None, port=8080, protocol=Protocol.UDP)
    lab.backend.place({WEB.key: Placed(WEB, BRIDGE, frozenset({held}))}, NODE)
    assert len(lab.kernel.rules(Family.V4, "filter", "HOSTPORT-MANAGER-HELD")) == 1
    assert lab.kernel.rules(Family.V6, "filter", "HOSTPORT-MANAGER-HELD") == []


def test_addresses_of_the_node_are_followed() -> None:
    lab = Lab()
    lab.add(WEB)
    more = NodeView.of(
        [
            *((ip_address(a), n) for a, n in ADDRESSES),
            (ip_address("10.96.0.1"), "kube-ipvs0"),
            (ip_address("192.0.2.9"), "eth0"),
        ]
    )
    lab.backend.set_node(more)
    assert lab.kernel.rules(Family.V4, "nat", "HOSTPORT-MANAGER-EXCLUDED") == [
        "-d 10.96.0.1 -j ACCEPT"
    ]
    masq = lab.kernel.rules(Family.V4, "nat", "HOSTPORT-MANAGER-MASQ")
    assert any("192.0.2.9" in rule for rule in masq)
    assert not any("10.96.0.1" in rule for rule in masq)
    lab.backend.set_node(NODE)
    assert lab.kernel.rules(Family.V4, "nat", "HOSTPORT-MANAGER-EXCLUDED") == []
    assert lab.healthy()


# -- options ------------------------------------------------------------------------------------


def test_masquerade_by_option() -> None:
    snat = "HOSTPORT-MANAGER-SNAT"
    for options, words in (
        ({}, ["127.0.0.0/8", "-s 10.1.0.2 ", "10.1.0.0/16"]),
        ({"masq_all": True}, [""]),
        ({"snat": False}, []),
        ({"external_set_mark_chain": "KUBE-MARK-MASQ"}, []),
    ):
        lab = Lab()
        lab.kernel.tables[Family.V4]["nat"]["KUBE-MARK-MASQ"] = []
        lab.add(pod("web", "8080:80", ips=("10.1.0.2/16",), **options))
        rules = lab.kernel.rules(Family.V4, "nat", snat)
        assert len(rules) == len(words)
        assert all(w in r for w, r in zip(words, rules, strict=True))


def test_a_foreign_mark_chain_is_jumped_to_before_the_translation() -> None:
    lab = Lab()
    lab.kernel.tables[Family.V4]["nat"]["KUBE-MARK-MASQ"] = []
    one = pod("web", "8080:80", ips=("10.1.0.2/16",), external_set_mark_chain="KUBE-MARK-MASQ")
    lab.add(one)
    targets = [
        r.split(" -j ")[-1].split()[0]
        for r in lab.kernel.rules(Family.V4, "nat", chain(one))
        if " -j " in r
    ]
    assert targets == ["HOSTPORT-MANAGER-EXCLUDED", "KUBE-MARK-MASQ", "KUBE-MARK-MASQ", "DNAT"]
    two = pod("two", "8081:80", ips=("10.1.0.3/16",), external_set_mark_chain="NOBODYS")
    before = json.dumps(lab.kernel.tables)
    with pytest.raises(NetfilterFailed, match="NOBODYS"):
        lab.add(two)
    assert json.dumps(lab.kernel.tables) == before
    lab.add(OTHER)


def test_conditions_stand_in_the_jump_of_their_own_attachment() -> None:
    lab = Lab()
    near = pod("near", "8080:80", conditions_v4=("-s", "192.0.2.0/24"))
    lab.add(near, OTHER)
    assert lab.jumps()[1].endswith(f"-p tcp --dport 8080 -s 192.0.2.0/24 -j {chain(near)}")
    assert "192.0.2.0/24" not in lab.jumps()[0]
    assert "-s" not in lab.jumps(Family.V6)[1].split()
    assert lab.healthy()
    lab.remove(near)
    assert lab.targets() == [chain(OTHER)]


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("-s 10.0.0.0/8,192.0.2.0/24", ["-s 10.0.0.0/8", "-s 192.0.2.0/24"]),
        ("-i up -s 10.1.1.1,10.1.1.1", ["-i up -s 10.1.1.1"]),
        ("--src 10.0.0.1,10.0.0.2 -d 192.0.2.1,192.0.2.5", [
            f"--src 10.0.0.{a} -d 192.0.2.{b}" for a in (1, 2) for b in (1, 5)
        ]),
        ("! -s 10.0.0.1,10.0.0.2", ["! -s 10.0.0.1,10.0.0.2"]),
        ("-s 10.0.0.1 ! -d 10.0.0.2,10.0.0.3", ["-s 10.0.0.1 ! -d 10.0.0.2,10.0.0.3"]),
    ],
)  # fmt: skip
def test_a_list_of_addresses_is_a_jump_for_each(words: str, rules: list[str]) -> None:
    lab = Lab()
    near = pod("near", "8080:80", conditions_v4=tuple(words.split()))
    lab.add(near)
    assert [j.partition("--dport 8080 ")[2] for j in lab.jumps()] == [
        f"{rule} -j {chain(near)}" for rule in rules
    ]
    assert lab.healthy()
    lab.remove(near)
    assert lab.jumps() == []


# -- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [TryAgain("lock"), NetfilterFailed("no"), NetfilterFailed("x", "y")]
)
@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_at_any_restore_leaves_everything_as_before(
    error: HostPortError, when: int, first: bool
) -> None:
    lab = Lab()
    if not first:
        lab.add(OTHER)
    before = json.dumps(lab.kernel.tables)
    lab.runner.failures = [*[RuntimeError("")] * when, error, error]
    try:
        lab.add(WEB)
    except HostPortError:
        lab.runner.failures = []
        lab.backend.repair()
        assert json.dumps(lab.kernel.tables) == before
    lab.runner.failures = []
    lab.add(WEB)
    assert lab.healthy()


def test_a_change_that_somebody_made_impossible_is_mended_and_made() -> None:
    lab = Lab()
    lab.add(WEB, OTHER)
    for tables in lab.kernel.tables.values():
        for table in tables.values():
            for name in table:
                table[name] = []
    lab.remove(WEB)
    assert lab.healthy()
    assert lab.targets() == [chain(OTHER)]


def test_only_the_family_without_tools_is_hurt() -> None:
    lab = Lab()
    lab.runner.missing = {Family.V6}
    v4 = pod("v4", "8081:80", ips=("10.1.0.9/16",))
    lab.add(v4)
    with pytest.raises(NetfilterFailed, match="ip6tables"):
        lab.add(WEB)
    assert lab.targets() == [chain(v4)]
    lab.remove(v4)
    lab.backend.retire()


# -- damage and crashes -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_damage_is_mended(data: st.DataObject) -> None:
    lab = Lab()
    lab.add(WEB, OTHER, pod("spec", "192.0.2.1:7000:80/udp", ips=("10.1.0.4/16",)))
    whole = {k: sorted(map(str, v)) for f in Family for k, v in lab.kernel.tables[f]["nat"].items()}
    for _ in range(data.draw(st.integers(1, 4))):
        places = list(lab.kernel.every_rule())
        if not places:
            break
        family, table, name, number = data.draw(st.sampled_from(places))
        rules = lab.kernel.tables[family][table][name]
        match data.draw(st.sampled_from(["delete", "double", "flush", "swap"])):
            case "delete":
                del rules[number]
            case "double":
                rules.append(rules[number])
            case "flush":
                rules.clear()
            case "swap":
                rules.reverse()
    lab.kernel.generation += 1
    lab.backend.repair()
    assert lab.healthy()
    assert whole == {
        k: sorted(map(str, v)) for f in Family for k, v in lab.kernel.tables[f]["nat"].items()
    }


def test_a_wiped_node_is_whole_again() -> None:
    lab = Lab()
    lab.add(WEB, OTHER)
    before = json.dumps(lab.kernel.tables)
    lab.kernel.tables = Kernel().tables
    lab.kernel.generation += 1
    assert lab.backend.repair().missing
    assert {t: lab.kernel.chains(Family.V4, t) for t in ("nat", "filter")} == {
        t: set(json.loads(before)["4"][t]) - set(Kernel().tables[Family.V4][t])
        for t in ("nat", "filter")
    }
    assert lab.healthy()


def test_what_a_crash_left_goes_with_the_next_start() -> None:
    lab = Lab()
    lab.add(WEB, OTHER)
    nat = lab.kernel.tables[Family.V4]["nat"]
    nat["KUBE-HP-DEADDEADDEADDEAD"] = [("-p", "tcp", "-j", "DNAT", "--to-destination", "9.9.9.9:1")]
    again = Lab(lab.kernel)
    again.backend.assume({OTHER.key: placed(OTHER)}, NODE)
    again.backend.repair()
    assert again.targets() == [chain(OTHER)]
    assert again.healthy()
    assert chain(WEB) not in lab.kernel.chains(Family.V4, "nat")
    last = Lab(lab.kernel)
    last.backend.repair()
    assert lab.kernel.chains(Family.V4, "nat") == {"KUBE-HP-DEADDEADDEADDEAD"}


def test_rules_in_the_other_flavour_are_swept_once_ours_are_there() -> None:
    old = Lab()
    old.add(WEB)
    new = Lab()
    new.toolbox.others = (old.runner,)
    new.backend.assume({WEB.key: placed(WEB)}, NODE)
    new.backend.repair()
    assert new.targets()
    assert old.kernel.chains(Family.V4, "nat") == set()
    assert old.kernel.chains(Family.V6, "filter") == set()


# -- hostport_manager.go's scenarios --------------------------------------------------------------


def mapping(raw: dict[str, Any]) -> PortMapping:
    return PortMapping(
        host_port=raw["hostPort"],
        container_port=raw["containerPort"],
        protocol=raw["protocol"].lower(),
        host_ip=raw["hostIP"] or None,
    )


@pytest.mark.parametrize("name", ["manager_ipv4", "manager_ipv6", "dual_stack"])
def test_scenarios_of_the_hostport_manager(name: str) -> None:
    families = {"manager_ipv4": [Family.V4], "manager_ipv6": [Family.V6]}.get(name, list(Family))
    world, lab = World(), Lab()
    backends = {"iptables": lab.backend, "nftables": lab.backend}
    manager = HostPortManager(Opener(world), backends, Machine(world), Store(world), families)
    wanted: set[tuple[int, str, int, str]] = set()
    for key in ("sockets_after", "sockets_after_ipv4", "sockets_after_ipv6"):
        wanted |= {tuple(s) for s in DATA[name].get(key, [])}
    for number, call in enumerate(DATA[name]["calls"]):
        who, _, namespace = call["pod"].partition("_")
        mappings = tuple(map(mapping, call["portMappings"]))
        request = PodPortMapping(
            namespace=namespace, name=who, port_mappings=mappings, ip=ip_address(call["podIP"])
        )
        error = {"occupied": PortInUse, "family": InvalidConfig}.get(call["expect_error"])
        if error is not None:
            before = json.dumps(lab.kernel.tables)
            with pytest.raises(error):
                manager.add(f"{call['id']}-{number}", request, call["natInterface"])
            assert json.dumps(lab.kernel.tables) == before
        else:
            manager.add(f"{call['id']}-{number}", request, call["natInterface"])
    held = {
        (int(s.port.family), "" if s.port.address is None else str(s.port.address), s.port.port,
         str(s.port.protocol))
        for s in world.sockets
    }  # fmt: skip
    assert held == wanted
    expected = {(f, p, proto) for f, _, p, proto in held}
    found = {
        (int(f), int(r.value("--dport") or 0), r.value("-p"))
        for f in Family
        for args in lab.kernel.tables[f]["nat"][
            "KUBE-HOSTPORTS" if f in lab_families(lab) else "INPUT"
        ]
        for r in [restore.Rule(args)]
    }
    assert {e for e in found if e[2] != "sctp"} == expected
    for number, call in enumerate(DATA[name]["calls"]):
        manager.remove(f"{call['id']}-{number}")
    assert world.sockets == []
    lab.backend.retire()
    assert lab.kernel.tables == Kernel().tables


def lab_families(lab: Lab) -> list[Family]:
    return [f for f in Family if "KUBE-HOSTPORTS" in lab.kernel.tables[f]["nat"]]
