"""Which backend an attachment gets, and how a node is asked what works."""

from __future__ import annotations

import pytest

from cni_hostport.errors import InvalidConfig, NetfilterFailed, NotAvailable
from cni_hostport.helper import backends
from cni_hostport.helper.backends import Working, choose
from cni_hostport.hostport.iptflavour import choose_flavour, has_ours
from cni_hostport.model import Options


class Node:
    """A node on which some backends work; counts how often it is asked."""

    def __init__(self, *works: str) -> None:
        self.works = set(works)
        self.asked: list[str] = []

    def working(self) -> Working:
        return Working({name: lambda n=name: self._ask(n) for name in ("nftables", "iptables")})

    def _ask(self, name: str) -> None:
        self.asked.append(name)
        if name not in self.works:
            raise NetfilterFailed(f"no {name} here")


@pytest.mark.parametrize(
    ("backend", "works", "chosen"),
    [
        ("auto", ("nftables", "iptables"), "nftables"),
        ("auto", ("iptables",), "iptables"),
        ("iptables", ("nftables", "iptables"), "iptables"),
        ("nftables", ("nftables",), "nftables"),
        ("nftables", ("iptables",), InvalidConfig),
        ("iptables", ("nftables",), InvalidConfig),
        ("auto", (), NotAvailable),
        ("iptables", (), NotAvailable),
    ],
)
def test_choice(backend: str, works: tuple[str, ...], chosen: str | type[Exception]) -> None:
    available = Node(*works).working()
    if isinstance(chosen, str):
        assert choose(Options(backend=backend), available) == chosen
    else:
        with pytest.raises(chosen, match="work"):
            choose(Options(backend=backend), available)


def test_nobody_is_asked_without_need() -> None:
    node = Node("nftables", "iptables")
    working = node.working()
    for _ in range(3):
        choose(Options(), working)
        working.look()
    assert node.asked == ["nftables"]
    assert working.problem() == ""
    assert working.known() == ("nftables",)


def test_what_did_not_work_is_asked_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr(backends.time, "monotonic", lambda: now[0])
    node = Node()
    working = node.working()
    assert working.problem() == "", "nothing is known yet"
    working.look()
    working.look()
    assert node.asked == ["nftables", "iptables"]
    assert working.problem() == "nftables: no nftables here; iptables: no iptables here"
    node.works.add("nftables")
    now[0] += backends.ASK_AGAIN + 1
    assert choose(Options(), working) == "nftables"
    working.doubt("nftables")
    node.works.clear()
    with pytest.raises(NotAvailable):
        choose(Options(), working)


@pytest.mark.parametrize(
    ("found", "path", "chosen"),
    [
        ({}, "legacy", "legacy"),
        ({}, "nft", "nft"),
        ({}, None, "nft"),
        ({"legacy": ["KUBE-KUBELET-CANARY"], "nft": ["KUBE-SERVICES"]}, "nft", "legacy"),
        ({"legacy": ["KUBE-SERVICES"]}, "nft", "legacy"),
        ({"legacy": ["HOSTPORT-MANAGER-SNAT"]}, "nft", "legacy"),
        ({"legacy": ["HOSTPORT-MANAGER-SNAT"], "nft": ["KUBE-PROXY-CANARY"]}, "legacy", "nft"),
        ({"legacy": ["KUBE-HOSTPORTS"]}, "nft", "legacy"),
        ({"legacy": ["DOCKER"]}, "nft", "nft"),
    ],
)
def test_flavour(found: dict[str, list[str]], path: str | None, chosen: str) -> None:
    assert choose_flavour(found, ("nft", "legacy"), path) == chosen
    assert choose_flavour(found, ("legacy",), path) == "legacy"
    assert choose_flavour(found, (), path) is None


def test_ours_are_told_by_name() -> None:
    assert has_ours(["X", "HOSTPORT-MANAGER-HELD"])
    assert not has_ours(["KUBE-HOSTPORTS", "CNI-HOSTPORT-MASQ"])
