"""Who has a port: what sock_diag shows, and which process it is, on the real kernel."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from cni_hostport.host import sockets
from cni_hostport.host.owner import find_blocker, loopback_listener, processes_of
from cni_hostport.host.sockdiag import SockDiag
from cni_hostport.model import Family, HostPort, Protocol
from lab.private_net import child, ip, private_net

pytestmark = pytest.mark.lab

PORT = 8080
HERE4, HERE6 = "192.0.2.1", "2001:db8::1"


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    with private_net():
        ip("addr", "add", HERE4 + "/32", "dev", "lo")
        ip("addr", "add", HERE6 + "/128", "dev", "lo", "nodad")
        yield


@pytest.fixture
def diag() -> Iterator[SockDiag]:
    made = SockDiag()
    yield made
    made.close()


def claim(
    address: str | None = None, family: Family = Family.V4, protocol: Protocol = Protocol.TCP
) -> HostPort:
    parsed = None if address is None else ip_address(address)
    return HostPort(family=family, address=parsed, port=PORT, protocol=protocol)


def bound(address: str, *, tcp: bool = True, v6only: int = 0, port: int = PORT) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(tcp))
    if ":" in address:
        s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
    s.bind((address, port))
    return s


def listening(address: str, *, v6only: int = 0, port: int = PORT) -> socket.socket:
    s = bound(address, v6only=v6only, port=port)
    s.listen()
    return s


def inode(s: socket.socket) -> int:
    return os.fstat(s.fileno()).st_ino


def test_listener_is_described(diag: SockDiag) -> None:
    with listening(HERE4) as server, listening("127.0.0.1", port=PORT + 1):
        (found,) = diag.listeners(PORT, Protocol.TCP)
        assert (found.family, found.address, found.port) == (4, ip_address(HERE4), PORT)
        assert (found.inode, found.uid, found.remote) == (inode(server), 0, None)
        assert diag.listeners(PORT, Protocol.UDP) == []


@pytest.mark.parametrize("v6only", [0, 1])
def test_v6only_is_told(diag: SockDiag, v6only: int) -> None:
    with listening("::", v6only=v6only):
        (found,) = diag.listeners(PORT, Protocol.TCP)
        assert (found.family, found.address, found.v6only) == (6, None, bool(v6only))
    with bound("::", tcp=False, v6only=v6only):
        (found,) = diag.listeners(PORT, Protocol.UDP)
        assert (found.family, found.address, found.v6only) == (6, None, bool(v6only))


def test_mapped_address_is_ipv4(diag: SockDiag) -> None:
    with listening(f"::ffff:{HERE4}"):
        (found,) = diag.listeners(PORT, Protocol.TCP)
        assert (found.family, found.address) == (6, ip_address(HERE4))


def test_udp_connected_is_a_client(diag: SockDiag) -> None:
    with bound(HERE4, tcp=False) as s:
        assert len(diag.listeners(PORT, Protocol.UDP)) == 1
        s.connect(("127.0.0.1", 53))
        assert diag.listeners(PORT, Protocol.UDP) == []
        (found,) = diag.clients(PORT, Protocol.UDP)
        assert found.remote == (ip_address("127.0.0.1"), 53)


def test_silent_holder_is_found_by_port(diag: SockDiag) -> None:
    others = [sockets.open_holder(claim()._replace(port=p)) for p in (81, 82)]
    with sockets.open_holder(claim()) as held:
        assert diag.listeners(PORT, Protocol.TCP) == []
        (found,) = diag.bound_inactive(PORT)
        assert (found.inode, found.port, found.address) == (inode(held), PORT, None)
    for s in others:
        s.close()
    assert diag.bound_inactive(PORT) == []


def test_sctp_is_not_asked(diag: SockDiag) -> None:
    with pytest.raises(ValueError):
        diag.listeners(PORT, Protocol.SCTP)


SERVE = """
import socket
s = socket.socket(socket.{family}, socket.{kind})
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(({address!r}, 8080))
{listen}
open('/proc/self/comm', 'w').write('webserver')
"""


def serve(address: str, *, tcp: bool = True, listen: bool = True) -> str:
    return SERVE.format(
        family="AF_INET6" if ":" in address else "AF_INET",
        kind="SOCK_STREAM" if tcp else "SOCK_DGRAM",
        address=address,
        listen="s.listen()" if listen and tcp else "",
    )


@pytest.mark.parametrize("tcp", [True, False])
@pytest.mark.parametrize(
    ("address", "port", "where"),
    [
        ("0.0.0.0", claim(), "0.0.0.0:8080"),
        ("0.0.0.0", claim(HERE4), "0.0.0.0:8080"),
        (HERE4, claim(), f"{HERE4}:8080"),
        (HERE4, claim(HERE4), f"{HERE4}:8080"),
        ("::", claim(), "[::]:8080"),
        ("::", claim(HERE4), "[::]:8080"),
        ("::", claim(None, Family.V6), "[::]:8080"),
        (HERE6, claim(None, Family.V6), f"[{HERE6}]:8080"),
        (HERE6, claim(HERE6, Family.V6), f"[{HERE6}]:8080"),
        (f"::ffff:{HERE4}", claim(), f"{HERE4}:8080"),
    ],
)
def test_process_is_named(tcp: bool, address: str, port: HostPort, where: str) -> None:
    protocol = Protocol.TCP if tcp else Protocol.UDP
    port = port._replace(protocol=protocol)
    with child(serve(address, tcp=tcp)) as server:
        with pytest.raises(OSError):
            sockets.open_holder(port)
        blocker = find_blocker(port)
        assert blocker is not None
        assert (blocker.kind, blocker.pid, blocker.process) == ("listener", server.pid, "webserver")
        assert blocker.text() == f"process webserver (pid {server.pid})"
        assert blocker.where == f"{where}/{protocol}"


def test_bound_process_is_named() -> None:
    with child(serve("0.0.0.0", listen=False)) as server:
        blocker = find_blocker(claim(HERE4))
        assert blocker is not None
        assert (blocker.kind, blocker.pid) == ("bound", server.pid)


def test_others_on_the_port_are_not_blamed() -> None:
    with listening("127.0.0.1"), listening("::", v6only=1), bound("0.0.0.0", tcp=False):
        sockets.open_holder(claim(HERE4)).close()
        blocker = find_blocker(claim(HERE4))
        assert blocker is not None
        assert (blocker.kind, blocker.pid) == ("unknown", None)


def test_own_sockets_are_not_blamed() -> None:
    with sockets.open_holder(claim()) as held, listening("::", v6only=1) as other:
        mine = find_blocker(claim())
        assert mine is not None
        assert (mine.kind, mine.pid) == ("bound", os.getpid())
        unknown = find_blocker(claim(), {inode(held)})
        assert unknown is not None
        assert unknown.kind == "unknown"
        assert find_blocker(claim(None, Family.V6), {inode(held)}) is not None
        assert other.fileno() >= 0


def test_listener_off_loopback_is_named_first() -> None:
    with listening("127.0.0.1"), listening(HERE4), listening("127.0.0.5"):
        blocker = find_blocker(claim())
        assert blocker is not None
        assert (str(blocker.address), blocker.loopback) == (HERE4, False)
    with listening("127.0.0.1"):
        blocker = find_blocker(claim())
        assert blocker is not None
        assert blocker.loopback


def test_client_source_port_is_no_conflict() -> None:
    with listening("127.0.0.1", port=9999) as server, socket.socket() as client:
        client.bind(("127.0.0.1", PORT))
        client.connect(server.getsockname())
        with pytest.raises(OSError):
            sockets.open_holder(claim())
        assert find_blocker(claim()) is None
        # Of another address it explains nothing.
        assert find_blocker(claim(HERE4)) is not None


def test_udp_client_source_port_is_no_conflict() -> None:
    port = claim(protocol=Protocol.UDP)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.bind(("127.0.0.1", PORT))
        client.connect(("127.0.0.1", 9))
        with pytest.raises(OSError):
            sockets.open_holder(port)
        assert find_blocker(port) is None


@pytest.mark.parametrize("server_address", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_time_wait_is_no_conflict(server_address: str) -> None:
    family = socket.AF_INET6 if ":" in server_address else socket.AF_INET
    with socket.socket(family) as server:  # without SO_REUSEADDR
        server.bind((server_address, PORT))
        server.listen()
        client = socket.create_connection(("127.0.0.1", PORT))
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
        client.close()
    with pytest.raises(OSError):
        sockets.open_holder(claim())
    assert find_blocker(claim()) is None


def test_socket_in_no_visible_process_has_no_pid() -> None:
    server = listening("0.0.0.0")
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"x"], [server.fileno()])
        server.close()  # it lives on in the queue, open in no process
        blocker = find_blocker(claim())
        assert blocker is not None
        assert (blocker.kind, blocker.pid) == ("listener", None)
        assert "another pid namespace" in blocker.text()


def test_one_scan_finds_several_processes() -> None:
    with child(serve("127.0.0.1")) as one, child(serve("127.0.0.2")) as two, listening(HERE4) as me:
        diag = SockDiag()
        inodes = {s.inode for s in diag.listeners(PORT, Protocol.TCP)}
        diag.close()
        owners = processes_of(inodes)
        assert set(owners.values()) == {
            (one.pid, "webserver"),
            (two.pid, "webserver"),
            (os.getpid(), owners[inode(me)][1]),
        }


@pytest.mark.parametrize("tcp", [True, False])
def test_loopback_listener(tcp: bool) -> None:
    protocol = Protocol.TCP if tcp else Protocol.UDP

    def serving(address: str) -> socket.socket:
        return listening(address) if tcp else bound(address, tcp=False)

    with serving("127.0.0.1"), serving(HERE4), serving(HERE6):
        assert loopback_listener(PORT, protocol) is None
        with serving("127.0.0.53") as stub:
            found = loopback_listener(PORT, protocol)
            assert found is not None
            assert str(found.address) == "127.0.0.53"
            assert found.pid == os.getpid()
            assert loopback_listener(PORT, protocol, {inode(stub)}) is None
        with serving("::ffff:127.0.0.54"):
            found = loopback_listener(PORT, protocol)
            assert found is not None
            assert str(found.address) == "127.0.0.54"


def test_questions_leave_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    find_blocker(claim())
    loopback_listener(PORT, Protocol.TCP)
    assert len(os.listdir("/proc/self/fd")) == before
