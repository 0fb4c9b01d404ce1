"""sock_diag's bytes, and who is blamed for a port, without a kernel."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import ip_address

import pytest

from cni_hostport.host import owner
from cni_hostport.host.owner import Blocker, find_blocker, loopback_listener, processes_of
from cni_hostport.host.sockdiag import DiagSocket, SockDiag, parse, request
from cni_hostport.model import Family, HostPort, Protocol
from cni_hostport.netfilter import nlwire


def claim(address: str | None = None, family: Family = Family.V4, **more: object) -> HostPort:
    parsed = None if address is None else ip_address(address)
    return HostPort(family, parsed, 80, Protocol.TCP)._replace(**more)


def answer(family: int, local: str, remote: str | None = None, **attributes: bytes) -> bytes:
    packed = [ip_address(a).packed.ljust(16, b"\0") for a in (local, remote or local)]
    if remote is None:
        packed[1] = bytes(16)
    head = struct.pack("!BBBBHH", family, 10, 0, 0, 80, 5000 if remote else 0)
    tail = struct.pack("=IIIIIIII", 0, 0, 0, 0, 0, 0, 1000, 4711)
    extra = b"".join(nlwire.attr(int(k[1:]), v) for k, v in attributes.items())
    return head + packed[0] + packed[1] + tail + extra


def test_request_names_the_port_twice() -> None:
    body = request(socket.AF_INET, 6, 1 << 10, 0x1234)
    assert len(body) == 56 + 4 + 16
    assert body[:8] == struct.pack("=BBBBI", 2, 6, 0, 0, 1 << 10)
    assert body[8:10] == b"\x12\x34"
    (program,) = [payload for kind, payload in nlwire.attributes(body, 56) if kind == 1]
    assert struct.unpack("=BBHBBHBBHBBH", program) == (
        2,
        8,
        20,
        0,
        0,
        0x1234,
        3,
        8,
        12,
        0,
        0,
        0x1234,
    )


@pytest.mark.parametrize(
    ("family", "local", "expected"),
    [
        (2, "192.0.2.1", "192.0.2.1"),
        (2, "0.0.0.0", None),
        (10, "2001:db8::1", "2001:db8::1"),
        (10, "::", None),
        (10, "::ffff:192.0.2.1", "192.0.2.1"),
    ],
)
def test_addresses(family: int, local: str, expected: str | None) -> None:
    found = parse(answer(family, local))
    assert found.address == (None if expected is None else ip_address(expected))
    assert (found.port, found.state, found.uid, found.inode) == (80, 10, 1000, 4711)
    assert (found.v6only, found.remote) == (None, None)


def test_remote_and_v6only() -> None:
    assert parse(answer(2, "192.0.2.1", "192.0.2.9")).remote == (ip_address("192.0.2.9"), 5000)
    for raw, value in ((b"\0", False), (b"\1", True)):
        assert parse(answer(10, "::", a11=raw)).v6only is value


def sock(
    address: str | None, family: int = 4, *, inode: int = 1, v6only: bool = False
) -> DiagSocket:
    parsed = None if address is None else ip_address(address)
    only = v6only if family == 6 else None
    return DiagSocket(family, parsed, 80, 10, inode, 0, only, None)


class Answers(SockDiag):
    def __init__(
        self,
        listeners: tuple[DiagSocket, ...] = (),
        bound: tuple[DiagSocket, ...] = (),
        clients: tuple[DiagSocket, ...] = (),
    ) -> None:
        self.asked: list[str] = []
        self._answers = {"listeners": listeners, "bound": bound, "clients": clients}

    def _say(self, what: str) -> list[DiagSocket]:
        self.asked.append(what)
        return list(self._answers[what])

    def listeners(self, port: int, protocol: Protocol) -> list[DiagSocket]:
        return self._say("listeners")

    def bound_inactive(self, port: int) -> list[DiagSocket]:
        return self._say("bound")

    def clients(self, port: int, protocol: Protocol) -> list[DiagSocket]:
        return self._say("clients")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "processes_of", lambda inodes: {i: (i, "web") for i in inodes})


WILD4, HERE4, WILD6, HERE6 = (
    claim(),
    claim("192.0.2.1"),
    claim(None, Family.V6),
    claim("2001:db8::1", Family.V6),
)


@pytest.mark.parametrize(
    ("other", "blocked"),
    [
        (sock(None), (WILD4, HERE4)),
        (sock("192.0.2.1"), (WILD4, HERE4)),
        (sock("192.0.2.2"), (WILD4,)),
        (sock(None, 6), (WILD4, HERE4, WILD6, HERE6)),
        (sock(None, 6, v6only=True), (WILD6, HERE6)),
        (sock("192.0.2.1", 6), (WILD4, HERE4)),
        (sock("2001:db8::1", 6), (WILD6, HERE6)),
        (sock("2001:db8::2", 6), (WILD6,)),
    ],
)
def test_overlap(other: DiagSocket, blocked: tuple[HostPort, ...]) -> None:
    for port in (WILD4, HERE4, WILD6, HERE6):
        blocker = find_blocker(port, diag=Answers((other,)))
        assert blocker is not None
        assert (blocker.kind == "listener") is (port in blocked)


def test_questions_stop_at_the_first_answer() -> None:
    diag = Answers((sock(None),))
    find_blocker(WILD4, diag=diag)
    assert diag.asked == ["listeners"]
    diag = Answers((), (sock(None),))
    find_blocker(WILD4, diag=diag)
    assert diag.asked == ["listeners", "bound"]
    udp = Answers()
    find_blocker(claim(protocol=Protocol.UDP), diag=udp)
    assert udp.asked == ["listeners", "clients"]


def test_only_clients_are_no_conflict() -> None:
    assert find_blocker(WILD4, diag=Answers(clients=(sock("192.0.2.1"),))) is None
    blocker = find_blocker(HERE4, diag=Answers(clients=(sock("192.0.2.2"),)))
    assert blocker == Blocker("unknown", HERE4)
    assert blocker.text() == "a socket that the kernel does not show"


def test_own_inodes_are_passed_over() -> None:
    diag = Answers((sock(None, inode=5), sock("192.0.2.1", inode=6)))
    blocker = find_blocker(WILD4, {5}, diag)
    assert blocker is not None
    assert blocker.pid == 6


def test_words() -> None:
    blocker = Blocker("listener", WILD4, None, 4711, "nginx")
    assert (blocker.text(), blocker.where) == ("process nginx (pid 4711)", "0.0.0.0:80/tcp")
    assert (
        Blocker("listener", WILD6, ip_address("2001:db8::1"), 1, "x").where
        == "[2001:db8::1]:80/tcp"
    )


def test_loopback_listener_skips_localhost_and_our_own() -> None:
    sockets = (sock("127.0.0.1"), sock(None), sock("::1", 6), sock("127.0.0.9", inode=9))
    found = loopback_listener(80, Protocol.TCP, diag=Answers(sockets))
    assert found is not None
    assert found.pid == 9
    assert loopback_listener(80, Protocol.TCP, {9}, Answers(sockets)) is None


def test_no_inode_is_no_process() -> None:
    assert processes_of(()) == {}
    assert processes_of((0,)) == {}


def test_our_own_process_is_found_too() -> None:
    with socket.socket() as mine:
        inode = os.fstat(mine.fileno()).st_ino
        assert processes_of((inode,))[inode][0] == os.getpid()
