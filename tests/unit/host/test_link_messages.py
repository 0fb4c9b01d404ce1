"""Reading link messages, and which events are let through, without a kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from cni_hostport.host import links, sysctl
from cni_hostport.host.links import NodeAddress, NodeAddresses
from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.host.rtnl import parse_link
from cni_hostport.model import Family
from cni_hostport.netfilter import nlwire


def link(name: str, index: int = 7, family: int = 0, flags: int = 1, *more: bytes) -> bytes:
    head = struct.pack("=BxHiII", family, 1, index, flags, 0)
    return head + nlwire.attr(3, nlwire.string(name)) + b"".join(more)


def test_plain_link() -> None:
    found = parse_link(link("eth0"))
    assert (found.index, found.name, found.kind, found.up) == (7, "eth0", "", True)
    assert (found.master, found.hairpin, found.route_localnet) == (None, None, None)
    assert not parse_link(link("eth0", flags=0x1002)).up


@pytest.mark.parametrize("hairpin", [False, True])
def test_bridge_port(hairpin: bool) -> None:
    slave = nlwire.nest(5, nlwire.attr(4, bytes([hairpin])))
    info = nlwire.nest(18, nlwire.attr(1, b"veth\0"), nlwire.attr(4, b"bridge\0"), slave)
    conf = struct.pack("=30I", *(int(i == 25) for i in range(30)))
    af_spec = nlwire.nest(26, nlwire.nest(2, nlwire.attr(1, conf)))
    found = parse_link(link("veth0", 7, 0, 1, nlwire.attr(10, struct.pack("=I", 3)), info, af_spec))
    assert (found.kind, found.master, found.hairpin) == ("veth", 3, hairpin)
    assert found.route_localnet is True


def test_port_of_another_kind_of_master_has_no_hairpin() -> None:
    info = nlwire.nest(18, nlwire.attr(4, b"bond\0"), nlwire.nest(5, nlwire.attr(4, b"\1")))
    assert parse_link(link("eth1", 7, 0, 1, info)).hairpin is None


def message(kind: int, body: bytes) -> nlwire.Message:
    return nlwire.Message(kind, 0, 0, 0, body)


def address_body(text: str, index: int = 7, length: int = 24) -> bytes:
    address = ip_address(text)
    family, scope = (2, 0) if address.version == 4 else (10, 253 if address.is_link_local else 0)
    attributes = nlwire.attr(1, address.packed)
    if address.version == 4:
        attributes += nlwire.attr(2, address.packed)
    return struct.pack("=BBBBI", family, length, 0, scope, index) + attributes


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> NodeAddresses:
    monkeypatch.setattr(links.socket, "if_indextoname", lambda index: f"eth{index}")
    made = NodeAddresses()
    assert links._apply(made, message(20, address_body("192.0.2.1")))
    return made


@pytest.fixture
def _nothing_decoded(known: NodeAddresses, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(raw: object) -> Iterator[object]:
        raise AssertionError("decoded")

    monkeypatch.setattr(links, "_decode", never)


def test_new_address(known: NodeAddresses) -> None:
    assert known.addresses == {NodeAddress(ip_address("192.0.2.1"), 24, "eth7")}
    assert not links._apply(known, message(20, address_body("192.0.2.1")))
    assert links._apply(known, message(20, address_body("2001:db8::1", length=64)))
    assert links._apply(known, message(21, address_body("192.0.2.1")))
    assert known.addresses == {NodeAddress(ip_address("2001:db8::1"), 64, "eth7")}
    assert not links._apply(known, message(21, address_body("192.0.2.1")))


@pytest.mark.usefixtures("_nothing_decoded")
@pytest.mark.parametrize(
    "event",
    [
        message(20, address_body("fe80::1")),
        message(21, address_body("fe80::1")),
        message(16, link("veth12345678", 99)),
        message(17, link("veth12345678", 99)),
        message(16, link("eth7", 7)),
        message(17, link("eth7", 7, family=7)),
        message(28, b"neighbour"),
    ],
)
def test_what_does_not_matter(known: NodeAddresses, event: nlwire.Message) -> None:
    before = known.addresses
    assert not links._apply(known, event)
    assert known.addresses is before


def test_renamed_and_removed(known: NodeAddresses) -> None:
    assert links._apply(known, message(16, link("lan", 7)))
    assert [a.link for a in known.addresses] == ["lan"]
    assert links._apply(known, message(17, link("lan", 7)))
    assert known.addresses == frozenset()
    assert known.knows(7) is None


def test_link_that_is_gone_already(known: NodeAddresses, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(index: int) -> str:
        raise OSError

    monkeypatch.setattr(links.socket, "if_indextoname", gone)
    assert not links._apply(known, message(20, address_body("192.0.2.9", index=8)))


class FakeNetlink:
    """A netlink socket whose first dumps are overtaken by a change."""

    interrupted = 0
    error: OSError | None = None

    def __init__(self, protocol: int) -> None:
        assert protocol == links.socket.NETLINK_ROUTE

    def __enter__(self) -> FakeNetlink:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    whole_dump = NetlinkSocket.whole_dump

    def check_strictly(self) -> None:
        return None

    def dump(self, kind: int, body: bytes) -> list[nlwire.Message]:
        if FakeNetlink.error:
            raise FakeNetlink.error
        if kind != 22:  # RTM_GETADDR; there are no routes
            return []
        FakeNetlink.interrupted -= 1
        flags = 0x12 if FakeNetlink.interrupted >= 0 else 2
        address = f"192.0.2.{max(FakeNetlink.interrupted, 0) + 10}"
        plain = message(20, address_body(address, index=1))
        return [nlwire.Message(plain.kind, flags, plain.sequence, plain.portid, plain.body)]


@pytest.mark.parametrize(("interrupted", "last"), [(0, 10), (3, 10), (9, 14)])
def test_overtaken_dump_is_read_again(
    monkeypatch: pytest.MonkeyPatch, interrupted: int, last: int
) -> None:
    monkeypatch.setattr(links, "NetlinkSocket", FakeNetlink)
    monkeypatch.setattr(FakeNetlink, "interrupted", interrupted)
    monkeypatch.setattr(links.socket, "if_nameindex", lambda: [(1, "eth0")])
    known = NodeAddresses()
    assert known.refresh()
    assert known.addresses == {NodeAddress(ip_address(f"192.0.2.{last}"), 24, "eth0")}


def test_failed_dump_changes_nothing(known: NodeAddresses, monkeypatch: pytest.MonkeyPatch) -> None:
    before = known.addresses
    monkeypatch.setattr(links, "NetlinkSocket", FakeNetlink)
    monkeypatch.setattr(FakeNetlink, "error", OSError(105, "no buffer space"))
    with pytest.raises(OSError) as failure:
        known.refresh()
    assert failure.value.errno == 105
    assert known.addresses == before


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysctl, "_ROOT", str(tmp_path))
    assert sysctl.bridge_nf_call(Family.V4) is None
    assert sysctl.ip_forward(Family.V6) is None
    (tmp_path / "net/bridge").mkdir(parents=True)
    (tmp_path / "net/bridge/bridge-nf-call-iptables").write_text("1\n")
    (tmp_path / "net/bridge/bridge-nf-call-ip6tables").write_text("0\n")
    assert sysctl.bridge_nf_call(Family.V4) is True
    assert sysctl.bridge_nf_call(Family.V6) is False
    (tmp_path / "word").write_text("on\n")
    with pytest.raises(ValueError):
        sysctl.read_int("word")
