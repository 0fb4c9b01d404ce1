"""openForward in tables in memory: whose connections are let through, and where."""

from __future__ import annotations

import pytest
from unit.hostport.iptworld import Kernel, Runner, Toolbox
from unit.hostport.test_iptables import NODE, placed
from unit.hostport.world import pod

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport.forward import ForwardRules, WithForward
from cni_hostport.hostport.iptables import IptablesBackend
from cni_hostport.model import Family

OPEN = pod("open", "8001:80", "192.0.2.1:8002:81/udp", open_forward=True)
SHUT = pod("shut", "8003:80", ips=("10.1.0.3/16",))


class Filters:
    """Two flavours; which of them filter is for the test to say."""

    def __init__(self) -> None:
        self.kernels = {"nft": Kernel(), "legacy": Kernel()}
        self.runners = {name: Runner(k, name) for name, k in self.kernels.items()}
        self.active: dict[str, frozenset[Family]] = {}

    def filtering(self) -> dict[str, frozenset[Family]]:
        return self.active

    def fixed(self, flavour: str) -> Runner:
        return self.runners[flavour]

    def accepted(self, flavour: str, family: Family = Family.V4) -> list[str]:
        return self.kernels[flavour].rules(family, "filter", "HOSTPORT-MANAGER-OPEN")


class Lab:
    def __init__(self) -> None:
        self.filters = Filters()
        self.forward = ForwardRules(self.filters)
        self.main = {name: IptablesBackend(Toolbox(Runner(Kernel()))) for name in ("a", "b")}
        self.backends = {}
        for name, main in self.main.items():
            main.name = name
            self.backends[name] = WithForward(main, self.forward)
            self.backends[name].assume({}, NODE)


def test_only_who_asks_is_let_through_and_only_where_somebody_filters() -> None:
    lab = Lab()
    lab.backends["a"].place({OPEN.key: placed(OPEN), SHUT.key: placed(SHUT)}, NODE)
    assert lab.filters.accepted("nft") == lab.filters.accepted("legacy") == []
    lab.filters.active = {"legacy": frozenset({Family.V4})}
    lab.backends["a"].repair()
    first, second = lab.filters.accepted("legacy")
    assert "--ctorigdstport 8001 --ctreplsrc 10.1.0.2 --ctreplsrcport 80 -j ACCEPT" in first
    assert "--ctproto 17 --ctorigdstport 8002" in second
    assert lab.filters.accepted("legacy", Family.V6) == []
    assert lab.filters.accepted("nft") == []
    (hook,) = lab.filters.kernels["legacy"].rules(Family.V4, "filter", "FORWARD")
    assert hook.endswith("--ctstate DNAT -j HOSTPORT-MANAGER-FORWARD")


def test_it_goes_with_its_last_user() -> None:
    lab = Lab()
    lab.filters.active = {"nft": frozenset(Family)}
    before = repr(lab.filters.kernels["nft"].tables)
    backend = lab.backends["a"]
    backend.place({OPEN.key: placed(OPEN), SHUT.key: placed(SHUT)}, NODE)
    assert backend.check(OPEN.key) == []
    backend.place({OPEN.key: None}, NODE)
    assert repr(lab.filters.kernels["nft"].tables) == before
    assert backend.in_use


def test_a_move_between_backends_keeps_it() -> None:
    lab = Lab()
    lab.filters.active = {"nft": frozenset({Family.V4})}
    lab.backends["a"].place({OPEN.key: placed(OPEN)}, NODE)
    before = lab.filters.accepted("nft")
    lab.backends["b"].place({OPEN.key: placed(OPEN)}, NODE)
    lab.backends["a"].place({OPEN.key: None}, NODE)
    assert lab.filters.accepted("nft") == before
    lab.backends["b"].place({OPEN.key: None}, NODE)
    assert lab.filters.accepted("nft") == []


@pytest.mark.parametrize("side", ["forward", "main"])
def test_a_failure_of_either_leaves_both_as_they_were(side: str) -> None:
    lab = Lab()
    lab.filters.active = {"nft": frozenset({Family.V4})}
    backend = lab.backends["a"]
    backend.place({SHUT.key: placed(SHUT)}, NODE)
    before = repr(lab.filters.kernels["nft"].tables)
    main = lab.main["a"].runner
    assert isinstance(main, Runner)
    runner = lab.filters.runners["nft"] if side == "forward" else main
    runner.failures = [NetfilterFailed("no"), NetfilterFailed("no")]
    with pytest.raises(NetfilterFailed):
        backend.place({OPEN.key: placed(OPEN)}, NODE)
    runner.failures = []
    assert repr(lab.filters.kernels["nft"].tables) == before
    assert "8001" not in repr(main.kernel.tables)
    backend.place({OPEN.key: placed(OPEN)}, NODE)
    assert lab.filters.accepted("nft")


def test_flushed_rules_come_back_and_are_counted() -> None:
    lab = Lab()
    lab.filters.active = {"nft": frozenset({Family.V4})}
    backend = lab.backends["a"]
    backend.place({OPEN.key: placed(OPEN)}, NODE)
    whole = lab.filters.accepted("nft")
    kernel = lab.filters.kernels["nft"]
    kernel.tables[Family.V4]["filter"]["FORWARD"].clear()
    kernel.tables[Family.V4]["filter"]["HOSTPORT-MANAGER-OPEN"].clear()
    kernel.generation += 1
    assert backend.check(OPEN.key)
    assert backend.repair().missing == 3
    assert lab.filters.accepted("nft") == whole
