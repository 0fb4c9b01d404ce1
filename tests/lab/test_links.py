"""Links, routes, addresses, settings and namespaces on the real kernel."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path

import pytest

from cni_hostport.helper.machine import TOGETHER, KernelMachine
from cni_hostport.host import links, netns, sysctl
from cni_hostport.host.links import AddressEvents, NodeAddress, NodeAddresses
from cni_hostport.host.rtnl import Link, Rtnl
from cni_hostport.model import Attachment, AttachmentID, Family, PodAddress
from lab.private_net import ip, private_net

pytestmark = pytest.mark.lab


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    with private_net():
        yield


@pytest.fixture
def rtnl() -> Iterator[Rtnl]:
    made = Rtnl()
    yield made
    made.close()


def node(address: str, link: str) -> NodeAddress:
    text, _, length = address.partition("/")
    return NodeAddress(ip_address(text), int(length), link)


LO = {node("127.0.0.1/8", "lo"), node("::1/128", "lo")}


def make_bridge() -> None:
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "add", "veth0", "type", "veth", "peer", "name", "veth1")
    ip("link", "set", "veth0", "master", "br0")
    ip("link", "set", "br0", "up")


class TestRtnl:
    def test_link_by_number_and_name(self, rtnl: Rtnl) -> None:
        make_bridge()
        bridge, port, lo = rtnl.link("br0"), rtnl.link("veth0"), rtnl.link(1)
        assert bridge is not None
        assert port is not None
        assert lo is not None
        assert (bridge.name, bridge.kind, bridge.master, bridge.up) == ("br0", "bridge", None, True)
        assert bridge.hairpin is None
        assert (port.kind, port.master, port.up) == ("veth", bridge.index, False)
        assert port.hairpin is False
        assert (lo.index, lo.name, lo.kind, lo.up) == (1, "lo", "", True)
        assert rtnl.link(port.index) == port

    @pytest.mark.parametrize("which", [4711, "nothere", "a" * 40, "a" * 200, "", "å"])
    def test_no_such_link(self, rtnl: Rtnl, which: int | str) -> None:
        assert rtnl.link(which) is None

    def test_route_link(self, rtnl: Rtnl) -> None:
        make_bridge()
        ip("addr", "add", "10.88.0.1/16", "dev", "br0")
        ip("addr", "add", "2001:db8:88::1/64", "dev", "br0", "nodad")
        bridge = rtnl.link("br0")
        assert bridge is not None
        assert rtnl.route_link(ip_address("10.88.3.4")) == bridge.index
        assert rtnl.route_link(ip_address("2001:db8:88::34")) == bridge.index
        assert rtnl.route_link(ip_address("127.0.0.1")) == 1
        for nowhere in ("198.51.100.1", "2001:db8:99::1"):
            assert rtnl.route_link(ip_address(nowhere)) is None
        for kind in ("unreachable", "blackhole", "prohibit"):
            for nowhere in ("203.0.113.7", "2001:db8:77::7"):
                ip("route", "add", kind, nowhere)
                assert rtnl.route_link(ip_address(nowhere)) is None, kind
                ip("route", "del", kind, nowhere)

    def test_hairpin(self, rtnl: Rtnl) -> None:
        make_bridge()
        port = rtnl.link("veth0")
        assert port is not None
        for wanted in (True, True, False):
            rtnl.set_hairpin(port.index, wanted)
            now = rtnl.link("veth0")
            assert now is not None
            assert now.hairpin is wanted
            assert rtnl.hairpins() == {port.index: wanted}

    def test_without_a_bridge_there_are_no_ports(self, rtnl: Rtnl) -> None:
        assert rtnl.hairpins() == {}

    def test_hairpin_needs_a_port(self, rtnl: Rtnl) -> None:
        with pytest.raises(OSError):
            rtnl.set_hairpin(1, True)
        with pytest.raises(OSError):
            rtnl.set_hairpin(4711, True)
        assert rtnl.link("lo") is not None  # the socket is still in step

    def test_route_localnet(self, rtnl: Rtnl) -> None:
        make_bridge()
        bridge = rtnl.link("br0")
        assert bridge is not None
        assert bridge.route_localnet is False
        for wanted in (True, False):
            rtnl.set_route_localnet(bridge.index, wanted)
            now = rtnl.link("br0")
            assert now is not None
            assert now.route_localnet is wanted
            assert sysctl.read_int("net", "ipv4", "conf", "br0", "route_localnet") == wanted
            others = rtnl.link("veth0")
            assert others is not None
            assert others.route_localnet is False

    def test_namespace_is_that_of_its_making(self, rtnl: Rtnl) -> None:
        make_bridge()
        with private_net():
            assert rtnl.link("br0") is not None
            assert socket.if_nameindex() == [(1, "lo")]


class TestNodeAddresses:
    def test_full_list(self) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        ip("addr", "add", "169.254.20.10/32", "dev", "lo")
        ip("addr", "add", "2001:db8::1/64", "dev", "br0")  # tentative
        ip("addr", "add", "2001:db8::2/64", "dev", "br0", "nodad", "preferred_lft", "0")
        ip("addr", "add", "fe80::5/64", "dev", "br0", "nodad")
        ip("addr", "add", "198.51.100.1", "peer", "198.51.100.2/32", "dev", "veth0")
        known = NodeAddresses()
        assert known.addresses == frozenset()
        assert known.refresh()
        on_bridge = {
            node("192.0.2.1/24", "br0"),
            node("2001:db8::1/64", "br0"),
            node("2001:db8::2/64", "br0"),
        }
        assert known.addresses == LO | on_bridge | {
            node("169.254.20.10/32", "lo"),
            node("198.51.100.1/32", "veth0"),
        }
        assert known.on(["br0", "nothere"]) == on_bridge
        assert not known.refresh()

    def test_leaves_no_thread_and_no_descriptor(self) -> None:
        """Also from a worker thread, while asyncio runs elsewhere."""
        NodeAddresses().refresh()
        before = set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(3):
                    NodeAddresses().refresh()
            except BaseException as error:
                errors.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert not errors
        deadline = time.monotonic() + 2.0  # /proc shows a thread a little longer than join does
        while set(os.listdir("/proc/self/task")) != before[1] and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/proc/self/task"))) == before


class Watched:
    def __init__(self) -> None:
        self.events = AddressEvents()
        self.addresses = NodeAddresses()
        self.addresses.refresh()
        self.drain()

    def drain(self) -> bool:
        return self.events.drain(self.addresses)

    def is_right(self) -> bool:
        fresh = NodeAddresses()
        fresh.refresh()
        return fresh.addresses == self.addresses.addresses


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.events.close()


class TestAddressEvents:
    def test_nothing_new(self, watched: Watched) -> None:
        assert not watched.drain()

    def test_addresses_come_and_go(self, watched: Watched) -> None:
        make_bridge()
        assert not watched.drain()
        for address in ("192.0.2.1/24", "2001:db8::1/64"):
            ip("addr", "add", address, "dev", "br0")
            assert watched.drain()
            assert node(address, "br0") in watched.addresses.addresses
            assert watched.is_right()
        for address in ("192.0.2.1/24", "2001:db8::1/64"):
            ip("addr", "del", address, "dev", "br0")
            assert watched.drain()
            assert watched.is_right()
        assert watched.addresses.addresses == LO

    def test_same_address_twice_on_a_link_and_on_two(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        ip("addr", "add", "192.0.2.1/16", "dev", "br0")
        ip("addr", "add", "192.0.2.1/24", "dev", "veth0")
        assert watched.drain()
        assert watched.is_right()
        ip("addr", "del", "192.0.2.1/16", "dev", "br0")
        assert watched.drain()
        assert watched.is_right()
        assert node("192.0.2.1/24", "veth0") in watched.addresses.addresses

    def test_two_peers_of_one_address(self, watched: Watched) -> None:
        make_bridge()
        for peer in ("198.51.100.2", "198.51.100.3"):
            ip("addr", "add", "198.51.100.1", "peer", peer, "dev", "veth0")
        assert watched.drain()
        ip("addr", "del", "198.51.100.1", "peer", "198.51.100.2", "dev", "veth0")
        watched.drain()
        assert node("198.51.100.1/32", "veth0") in watched.addresses.addresses
        assert watched.is_right()

    def test_addresses_local_by_a_route(self, watched: Watched) -> None:
        make_bridge()
        for virtual in ("203.0.113.7", "2001:db8:77::7"):
            ip("route", "add", "local", virtual, "dev", "br0", "proto", "66")
            assert watched.drain()
            assert NodeAddress(ip_address(virtual), len(ip_address(virtual).packed) * 8, "br0") in (
                watched.addresses.addresses
            )
            assert watched.is_right()
        ip("addr", "add", "203.0.113.7/24", "dev", "br0")
        assert watched.drain()
        ip("addr", "del", "203.0.113.7/24", "dev", "br0")
        watched.drain()
        assert watched.is_right()
        for address in ("203.0.113.1/24", "203.0.113.2/24"):
            ip("addr", "add", address, "dev", "br0")
        ip("route", "add", "local", "203.0.113.7", "dev", "br0", "proto", "66")
        assert watched.drain()
        ip("link", "set", "br0", "down")
        watched.drain()
        assert watched.is_right()
        ip("link", "set", "br0", "up")
        ip("route", "del", "local", "203.0.113.7", "dev", "br0", "proto", "66")
        assert watched.drain()
        ip("link", "del", "br0")
        assert watched.drain()
        assert watched.is_right()
        assert watched.addresses.addresses == LO

    def test_routes_of_others_wake_nobody(self, watched: Watched) -> None:
        make_bridge()
        watched.drain()
        for route in ("198.51.100.0/24", "2001:db8:9::/64"):
            ip("route", "add", *route.split(), "dev", "br0")
        with pytest.raises(BlockingIOError):
            watched.events._socket.recv(1 << 16, socket.MSG_PEEK)
        ip("route", "add", "local", "203.0.113.0/24", "dev", "br0")
        assert not watched.drain()
        assert watched.is_right()
        assert watched.addresses.addresses == LO

    def test_flags_that_an_add_sets_wake_nobody(self, watched: Watched, rtnl: Rtnl) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        watched.drain()
        port, bridge = socket.if_nametoindex("veth0"), socket.if_nametoindex("br0")
        for on in (True, False):
            rtnl.set_hairpin(port, on)
            assert sysctl.set_route_localnet(bridge, on)
        with pytest.raises(BlockingIOError):
            watched.events._socket.recv(1 << 16, socket.MSG_PEEK)
        ip("link", "set", "veth0", "nomaster")
        ip("link", "del", "br0")
        assert watched.drain()
        assert watched.addresses.addresses == LO

    def test_renamed_link(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        assert watched.drain()
        ip("link", "set", "br0", "down")
        ip("link", "set", "br0", "name", "cni0")
        assert watched.drain()
        assert node("192.0.2.1/24", "cni0") in watched.addresses.addresses
        ip("link", "set", "cni0", "name", "cni1")
        ip("addr", "add", "192.0.2.2/24", "dev", "cni1")
        assert watched.drain()
        assert watched.is_right()

    def test_deleted_link(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        assert watched.drain()
        ip("link", "del", "br0")
        assert watched.drain()
        assert watched.addresses.addresses == LO

    def test_link_that_comes_and_goes_before_we_look(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        ip("link", "del", "br0")
        watched.drain()
        assert watched.addresses.addresses == LO
        assert watched.is_right()

    def test_link_down_takes_ipv6_addresses(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "2001:db8::1/64", "dev", "br0", "nodad")
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        assert watched.drain()
        ip("link", "set", "br0", "down")
        assert watched.drain()
        assert watched.is_right()
        assert watched.addresses.on(["br0"]) == {node("192.0.2.1/24", "br0")}

    def test_port_that_leaves_a_bridge_keeps_its_addresses(self, watched: Watched) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "veth0")
        assert watched.drain()
        ip("link", "set", "veth0", "nomaster")  # tells RTM_DELLINK in the bridge's family
        assert not watched.drain()
        assert watched.is_right()

    def test_pod_links_are_not_decoded(
        self, watched: Watched, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_bridge()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        assert watched.drain()

        def never(message: object) -> Iterator[object]:
            raise AssertionError("decoded")

        monkeypatch.setattr(links, "_decode", never)
        ip("link", "add", "pod0", "type", "veth", "peer", "name", "pod1")
        ip("link", "set", "pod0", "master", "br0")
        ip("link", "set", "pod0", "up")
        ip("link", "set", "pod1", "up")
        ip("addr", "add", "fe80::77/64", "dev", "pod0", "nodad")
        assert not watched.drain()
        ip("link", "del", "pod0")
        assert not watched.drain()

    def test_lost_events_mean_a_full_list(self) -> None:
        make_bridge()
        events = AddressEvents()
        events._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        known = NodeAddresses()
        known.refresh()
        ip("addr", "add", "192.0.2.1/24", "dev", "br0")
        for number in range(30):
            ip("link", "set", "veth1", "mtu", str(1400 + number))
        ip("addr", "add", "192.0.2.2/24", "dev", "br0")
        assert events.drain(known)
        assert known.on(["br0"]) == {node("192.0.2.1/24", "br0"), node("192.0.2.2/24", "br0")}
        assert not events.drain(known)
        events.close()


class TestSysctl:
    def test_forwarding_is_the_reading_threads(self) -> None:
        assert sysctl.ip_forward(Family.V4) is False
        for name in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            Path("/proc/sys/net", name).write_text("1")
        assert sysctl.ip_forward(Family.V4) is True
        assert sysctl.ip_forward(Family.V6) is True
        with private_net():
            assert sysctl.ip_forward(Family.V4) is False

    @pytest.mark.parametrize("family", list(Family))
    def test_bridge_nf_call(self, family: Family) -> None:
        name = {Family.V4: "iptables", Family.V6: "ip6tables"}[family]
        setting = Path(f"/proc/sys/net/bridge/bridge-nf-call-{name}")
        if not setting.exists():
            assert sysctl.bridge_nf_call(family) is None
            pytest.skip("kernel lacks br_netfilter")
        for value in (0, 1):
            setting.write_text(str(value))
            assert sysctl.bridge_nf_call(family) is bool(value)

    def test_route_localnet_is_the_numbers_alone(self, rtnl: Rtnl) -> None:
        make_bridge()
        ip("link", "add", "br0.5", "type", "bridge")
        for name in ("br0", "br0.5", "veth0"):
            index = socket.if_nametoindex(name)
            for wanted in (True, False, True):
                assert sysctl.set_route_localnet(index, wanted)
                link = rtnl.link(index)
                assert link is not None
                assert link.route_localnet is wanted
            assert sysctl.set_route_localnet(index, False)
        index = socket.if_nametoindex("br0")
        ip("link", "set", "br0", "down")
        ip("link", "set", "br0", "name", "br1")
        ip("link", "add", "br0", "type", "bridge")
        assert sysctl.set_route_localnet(index, True)
        assert [link and link.route_localnet for link in map(rtnl.link, ("br0", "br1"))] == [
            False,
            True,
        ]
        assert not sysctl.set_route_localnet(4711, True)

    def test_a_name_that_changes_hands_is_left_alone(
        self, rtnl: Rtnl, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Between the look at the name and the opening of its file."""
        make_bridge()
        monkeypatch.setattr(socket, "if_indextoname", lambda _index: "br0")
        assert not sysctl.set_route_localnet(socket.if_nametoindex("veth0"), True)
        bridge = rtnl.link("br0")
        assert bridge is not None
        assert bridge.route_localnet is False

    def test_link_names_with_dots(self) -> None:
        ip("link", "add", "br0.5", "type", "bridge")
        assert sysctl.read_int("net", "ipv4", "conf", "br0.5", "forwarding") == 0
        assert sysctl.read_int("net", "ipv4", "conf", "nothere", "forwarding") is None


@pytest.fixture
def other() -> Iterator[int]:
    """A descriptor of another net namespace."""
    with private_net():
        fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def by_entering(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel before 6.18, whose descriptors of a namespace do not tell its cookie."""
    monkeypatch.setattr(netns, "_ids_are_cookies", lambda: False)


@pytest.fixture(params=["by ioctl", "by entering"])
def either_way(request: pytest.FixtureRequest) -> None:
    """Both ways to a cookie, where the kernel has both."""
    if request.param == "by entering":
        request.getfixturevalue("by_entering")


def own_inode() -> int:
    return os.stat("/proc/thread-self/ns/net").st_ino


class TestNetns:
    @pytest.mark.usefixtures("either_way")
    def test_cookie_of_another_namespace(self, other: int) -> None:
        home = own_inode()
        here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        theirs, ours = netns.cookie(other), netns.cookie(here)
        assert theirs is not None
        assert ours is not None
        assert theirs != ours
        assert netns.cookie(other) == theirs
        assert own_inode() == home
        with socket.socket() as probe:
            raw = probe.getsockopt(socket.SOL_SOCKET, 71, 8)
        assert int.from_bytes(raw, "little") == ours
        assert netns.same_namespace(here, here)
        assert not netns.same_namespace(here, other)
        os.close(here)

    def test_both_ways_give_one_number(self, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
        cookie = netns.cookie(other)
        monkeypatch.setattr(netns, "_ids_are_cookies", lambda: False)
        assert netns.cookie(other) == cookie

    def test_numbers_that_are_no_cookies_are_not_used(
        self, other: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shown by our own namespace's, once."""
        right = netns.cookie(other)
        netns._ids_are_cookies.cache_clear()
        try:
            monkeypatch.setattr(netns, "_id", lambda _fd: 1 << 62)
            assert netns.cookie(other) == right
        finally:
            netns._ids_are_cookies.cache_clear()

    @pytest.mark.usefixtures("either_way")
    def test_cookie_leaves_no_descriptor(self, other: int) -> None:
        before = os.listdir("/proc/self/fd")
        for _ in range(5):
            netns.cookie(other)
        assert os.listdir("/proc/self/fd") == before

    @pytest.mark.usefixtures("by_entering")
    def test_failure_inside_comes_home(self, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
        home = own_inode()

        def fail() -> int:
            assert own_inode() != home
            raise MemoryError

        monkeypatch.setattr(netns, "_cookie_here", fail)
        with pytest.raises(MemoryError):
            netns.cookie(other)
        assert own_inode() == home

    @pytest.mark.usefixtures("by_entering")
    def test_process_ends_where_there_is_no_way_home(
        self, other: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ended: list[bool] = []
        monkeypatch.setattr(netns, "_enter", lambda fd: -1)
        monkeypatch.setattr(os, "abort", lambda: ended.append(True))
        assert netns.cookie(other) is None
        assert ended == [True]

    def test_what_is_no_net_namespace(self, tmp_path: Path) -> None:
        plain = tmp_path / "plain"
        plain.write_text("")
        for path in (str(plain), "/proc/self/ns/mnt", "/dev/null", str(tmp_path)):
            fd = os.open(path, os.O_RDONLY)
            assert not netns.is_netns(fd)
            assert netns.cookie(fd) is None
            os.close(fd)
        assert netns.cookie(9999) is None

    def test_state(self, other: int, tmp_path: Path) -> None:
        path = f"/proc/self/fd/{other}"
        known = netns.cookie(other)
        assert known is not None
        assert netns.state(path, known) == "alive"
        assert netns.state(path, known + 1) == "gone"
        assert netns.state(path, None) == "unknown"
        assert netns.state("", known) == "unknown"
        assert netns.state(str(tmp_path / "none"), known) == "gone"
        assert netns.state(str(tmp_path / "none" / "none"), known) == "gone"
        plain = tmp_path / "plain"
        plain.write_text("")
        assert netns.state(str(plain), known) == "gone"
        assert netns.state(str(plain / "below"), known) == "gone"
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        assert netns.state(str(fifo), known) == "gone"
        loop = tmp_path / "loop"
        loop.symlink_to(loop)
        assert netns.state(str(loop), known) == "unknown"

    def test_new_namespace_in_the_old_place(self, tmp_path: Path) -> None:
        place = tmp_path / "net"
        with private_net():
            first = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        known = netns.cookie(first)
        place.symlink_to(f"/proc/{os.getpid()}/fd/{first}")
        assert netns.state(str(place), known) == "alive"
        with private_net():
            second = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        os.dup2(second, first)
        assert netns.state(str(place), known) == "gone"
        os.close(first)
        os.close(second)


class TestTogether:
    """What calls of one moment ask of the same bridge."""

    @pytest.fixture
    def machine(self, monkeypatch: pytest.MonkeyPatch) -> KernelMachine:
        make_bridge()
        ip("addr", "add", "10.88.0.1/16", "dev", "br0")
        self.asked: list[int | str] = []
        plain = Rtnl.link

        def counted(rtnl: Rtnl, which: int | str) -> Link | None:
            self.asked.append(which)
            return plain(rtnl, which)

        monkeypatch.setattr(Rtnl, "link", counted)
        return KernelMachine()

    def pod(self, number: int) -> Attachment:
        return Attachment(
            identity=AttachmentID(network="n", container_id=str(number), ifname="eth0"),
            addresses=(PodAddress(ip_address(f"10.88.0.{number}"), 16),),
            mappings=(),
            interfaces=("br0", "veth0"),
        )

    def test_a_bridge_is_asked_once(self, machine: KernelMachine) -> None:
        alone = machine.pod_link(self.pod(2))
        machine.together(True)
        assert [machine.pod_link(self.pod(n)) for n in (2, 3, 4)] == [alone] * 3
        assert len(self.asked) == 2
        machine.together(False)
        machine.pod_link(self.pod(2))
        assert len(self.asked) == 3
        assert alone.ports == ((socket.if_nametoindex("veth0"), "veth0"),)

    def test_a_change_of_ours_is_seen(self, machine: KernelMachine) -> None:
        machine.together(True)
        link = machine.pod_link(self.pod(2))
        assert link.route_localnet == 0
        machine.set_route_localnet(link.index, 1)
        assert machine.pod_link(self.pod(3)).route_localnet == 1

    def test_an_answer_is_not_good_for_long(
        self, machine: KernelMachine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        machine.together(True)
        machine.pod_link(self.pod(2))
        later = time.monotonic() + TOGETHER + 1
        monkeypatch.setattr(time, "monotonic", lambda: later)
        ip("link", "set", "br0", "down")
        ip("link", "set", "br0", "name", "br1")
        ip("link", "set", "br1", "up")
        assert machine.pod_link(self.pod(3)).name == "br1"

    @pytest.mark.parametrize("family", list(Family))
    def test_netfilter_of_bridges(self, machine: KernelMachine, family: Family) -> None:
        name = {Family.V4: "iptables", Family.V6: "ip6tables"}[family]
        setting = Path(f"/proc/sys/net/bridge/bridge-nf-call-{name}")
        if not setting.exists():
            pytest.skip("kernel lacks br_netfilter")
        for value in (True, False):
            machine.together(False)
            setting.write_text(str(int(value)))
            assert machine.bridge_netfilter(family) is value
            machine.together(True)
            assert machine.bridge_netfilter(family) is value
            setting.write_text(str(int(not value)))
            assert machine.bridge_netfilter(family) is value
