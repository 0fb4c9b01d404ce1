"""Holding ports on the real kernel: who is kept out, who is not, and at every instant."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import pytest

from cni_hostport.host import sockets
from cni_hostport.model import Family, HostPort, Protocol
from lab.private_net import ip, private_net

pytestmark = pytest.mark.lab

PORT = 8080
HERE4, HERE6 = "192.0.2.1", "2001:db8::1"
STYLES = list(itertools.product((0, 1), (0, 1)))  # SO_REUSEADDR, SO_REUSEPORT
TCP_AND_UDP = pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP])
BOTH_FAMILIES = pytest.mark.parametrize("family", [Family.V4, Family.V6])
LOCAL = {Family.V4: ("127.0.0.1", HERE4), Family.V6: ("::1", HERE6)}
ELSEWHERE = {Family.V4: "198.51.100.7", Family.V6: "2001:db8:7::7"}


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    with private_net():
        ip("addr", "add", HERE4 + "/32", "dev", "lo")
        ip("addr", "add", HERE6 + "/128", "dev", "lo", "nodad")
        yield


def claim(protocol: Protocol, address: str | None, family: Family = Family.V4) -> HostPort:
    parsed = None if address is None else ip_address(address)
    return HostPort(family=family, address=parsed, port=PORT, protocol=protocol)


def compete(
    protocol: Protocol, address: str, reuse: int, reuseport: int, *, v6only: int = 0
) -> socket.socket | None:
    """Try to serve the port in one style; the socket if it worked, None for EADDRINUSE."""
    tcp = protocol is Protocol.TCP
    s = socket.socket(
        socket.AF_INET6 if ":" in address else socket.AF_INET,
        socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM,
    )
    try:
        if ":" in address:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6only)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, reuseport)
        s.bind((address, PORT))
        if tcp:
            s.listen()
    except OSError as error:
        s.close()
        assert error.errno == errno.EADDRINUSE
        return None
    return s


def wins(protocol: Protocol, address: str, *, v6only: int = 0) -> set[tuple[int, int]]:
    won = set()
    for style in STYLES:
        s = compete(protocol, address, *style, v6only=v6only)
        if s is not None:
            s.close()
            won.add(style)
    return won


ALL = set(STYLES)


@TCP_AND_UDP
@BOTH_FAMILIES
def test_wildcard_holder_keeps_out_every_style(protocol: Protocol, family: Family) -> None:
    held = sockets.open_holder(claim(protocol, None, family))
    wildcard = "0.0.0.0" if family is Family.V4 else "::"
    for address in (wildcard, *LOCAL[family]):
        assert wins(protocol, address) == set(), address
    assert wins(protocol, "::") == set()  # dual stack takes both families
    other = Family.V6 if family is Family.V4 else Family.V4
    for address in LOCAL[other]:
        assert wins(protocol, address) == ALL
    if family is Family.V4:
        assert wins(protocol, "::", v6only=1) == ALL
    held.close()
    assert wins(protocol, wildcard) == ALL


@TCP_AND_UDP
@BOTH_FAMILIES
def test_specific_holder_blocks_its_address_and_the_wildcard(
    protocol: Protocol, family: Family
) -> None:
    loopback, here = LOCAL[family]
    held = sockets.open_holder(claim(protocol, here, family))
    assert wins(protocol, here) == set()
    assert wins(protocol, "0.0.0.0" if family is Family.V4 else "::") == set()
    assert wins(protocol, loopback) == ALL
    held.close()


@pytest.mark.parametrize("family", [Family.V4, Family.V6])
def test_protocols_are_independent(family: Family) -> None:
    with sockets.open_holder(claim(Protocol.TCP, None, family)):
        assert wins(Protocol.UDP, "::") == ALL
    with sockets.open_holder(claim(Protocol.UDP, None, family)):
        assert wins(Protocol.TCP, "::") == ALL


@TCP_AND_UDP
@BOTH_FAMILIES
def test_absent_address_is_held_before_it_comes(protocol: Protocol, family: Family) -> None:
    absent = ELSEWHERE[family]
    held = sockets.open_holder(claim(protocol, absent, family))
    ip("addr", "add", absent, "dev", "lo", *(["nodad"] if ":" in absent else []))
    assert wins(protocol, absent) == set()
    held.close()


def test_tentative_address_can_be_held() -> None:
    ip("link", "add", "br0", "type", "bridge")
    ip("link", "set", "br0", "up")
    ip("addr", "add", "2001:db8:5::5/64", "dev", "br0")
    sockets.open_holder(claim(Protocol.TCP, "2001:db8:5::5", Family.V6)).close()


@TCP_AND_UDP
def test_second_holder_is_refused(protocol: Protocol) -> None:
    with sockets.open_holder(claim(protocol, HERE4)):
        sockets.open_holder(claim(protocol, "127.0.0.1")).close()
        for taken in (HERE4, None):
            with pytest.raises(OSError) as failure:
                sockets.open_holder(claim(protocol, taken))
            assert failure.value.errno == errno.EADDRINUSE


def test_failure_leaks_no_descriptor() -> None:
    with sockets.open_holder(claim(Protocol.TCP, None)):
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            with pytest.raises(OSError):
                sockets.open_holder(claim(Protocol.TCP, None))
        assert len(os.listdir("/proc/self/fd")) == before


def test_sctp_is_never_asked_for() -> None:
    with pytest.raises(ValueError):
        sockets.open_holder(claim(Protocol.SCTP, None))


@TCP_AND_UDP
def test_holder_is_closed_on_exec(protocol: Protocol) -> None:
    with sockets.open_holder(claim(protocol, None)) as held:
        assert not held.get_inheritable()


@BOTH_FAMILIES
def test_tcp_client_is_refused_at_once(family: Family) -> None:
    with sockets.open_holder(claim(Protocol.TCP, None, family)):
        start = time.monotonic()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((LOCAL[family][0], PORT), timeout=5)
        assert time.monotonic() - start < 1


def test_udp_holder_swallows_without_keeping() -> None:
    with (
        sockets.open_holder(claim(Protocol.UDP, None)) as held,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client,
    ):
        for _ in range(50):
            client.sendto(b"x" * 500, ("127.0.0.1", PORT))
        held.setblocking(False)
        with pytest.raises(BlockingIOError):
            held.recv(1)


def _leave_time_wait(reuse: int) -> None:
    """A server on PORT that closed first: its side stays in TIME_WAIT."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        server.bind(("0.0.0.0", PORT))
        server.listen()
        client = socket.create_connection(("127.0.0.1", PORT))
        accepted, _ = server.accept()
        accepted.close()
        assert client.recv(1) == b""
        client.close()


def test_time_wait_of_a_reuseaddr_server_is_no_obstacle() -> None:
    _leave_time_wait(1)
    with pytest.raises(OSError), socket.socket() as plain:
        plain.bind(("0.0.0.0", PORT))
    held = sockets.open_holder(claim(Protocol.TCP, None))
    assert wins(Protocol.TCP, "0.0.0.0") == set()
    # Also while it is moved.
    held2 = sockets.replace_wildcard(held, [claim(Protocol.TCP, "127.0.0.1")])
    assert wins(Protocol.TCP, "127.0.0.1") == set()
    back = sockets.replace_specific(held2, claim(Protocol.TCP, None))
    assert wins(Protocol.TCP, "0.0.0.0") == set()
    back.close()


def test_time_wait_of_a_plain_server_is_in_use() -> None:
    _leave_time_wait(0)
    with pytest.raises(OSError) as failure:
        sockets.open_holder(claim(Protocol.TCP, None))
    assert failure.value.errno == errno.EADDRINUSE


def _compete_for_ever(
    protocol: Protocol, addresses: tuple[str, ...], stop: Event, report: Connection
) -> None:
    won: list[tuple[str, tuple[int, int]]] = []
    attempts = 0
    while not stop.is_set():
        for address, style in itertools.product(addresses, STYLES):
            attempts += 1
            s = compete(protocol, address, *style)
            if s is not None:
                won.append((address, style))
                s.close()
    report.send((attempts, won))


class Competitors:
    """A process that tries every style, over and over, and tells what it won."""

    def __init__(self, protocol: Protocol, addresses: tuple[str, ...]) -> None:
        fork = multiprocessing.get_context("fork")
        self.attempts = 0
        self.won: list[tuple[str, tuple[int, int]]] = []
        self._stop = fork.Event()
        self._report, theirs = fork.Pipe(duplex=False)
        self._process = fork.Process(
            target=_compete_for_ever, args=(protocol, addresses, self._stop, theirs)
        )

    def __enter__(self) -> Competitors:
        self._process.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self.attempts, self.won = self._report.recv()
        self._process.join()


@TCP_AND_UDP
@BOTH_FAMILIES
def test_nobody_gets_in_while_a_holder_is_moved_to_and_fro(
    protocol: Protocol, family: Family
) -> None:
    addresses = LOCAL[family]
    wildcard = claim(protocol, None, family)
    wanted = [claim(protocol, a, family) for a in (*addresses, ELSEWHERE[family])]
    held = sockets.open_holder(wildcard)
    everywhere = ("0.0.0.0" if family is Family.V4 else "::", "::", *addresses)
    with Competitors(protocol, everywhere) as competitors:
        end = time.monotonic() + 1.0
        rounds = 0
        while time.monotonic() < end:
            specific = sockets.replace_wildcard(held, wanted)
            held = sockets.replace_specific(specific, wildcard)
            rounds += 1
    assert competitors.won == []
    assert rounds > 50
    assert competitors.attempts > 500
    held.close()


@TCP_AND_UDP
@BOTH_FAMILIES
def test_every_step_of_a_move_keeps_out_every_style(
    protocol: Protocol, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two system calls of the exchange, look who could get in."""
    steps = []
    real = sockets._set_apart
    addresses = LOCAL[family]

    def looked_at(holder: socket.socket, device: int) -> None:
        real(holder, device)
        steps.append(device)
        for address in ("0.0.0.0" if family is Family.V4 else "::", "::", *addresses):
            assert wins(protocol, address) == set(), (steps, address)

    held = sockets.open_holder(claim(protocol, None, family))
    monkeypatch.setattr(sockets, "_set_apart", looked_at)
    specific = sockets.replace_wildcard(held, [claim(protocol, a, family) for a in addresses])
    assert held.fileno() == -1
    for address in addresses:
        assert wins(protocol, address) == set()
    back = sockets.replace_specific(specific, claim(protocol, None, family))
    assert [s.fileno() for s in specific] == [-1, -1]
    assert len(steps) == 9
    for address in addresses:
        assert wins(protocol, address) == set()
    back.close()


@TCP_AND_UDP
@BOTH_FAMILIES
def test_after_a_move_other_addresses_are_free(protocol: Protocol, family: Family) -> None:
    loopback, here = LOCAL[family]
    held = sockets.open_holder(claim(protocol, None, family))
    moved = sockets.replace_wildcard(held, [claim(protocol, here, family)])
    assert wins(protocol, here) == set()
    assert wins(protocol, loopback) == ALL
    server = compete(protocol, loopback, 1, 0)
    assert server is not None
    # Now the way back is blocked, and the old holders stay.
    with pytest.raises(OSError) as failure:
        sockets.replace_specific(moved, claim(protocol, None, family))
    assert failure.value.errno == errno.EADDRINUSE
    assert wins(protocol, here) == set()
    server.close()
    sockets.replace_specific(moved, claim(protocol, None, family)).close()


@TCP_AND_UDP
@BOTH_FAMILIES
def test_failed_move_leaves_the_old_holder(
    protocol: Protocol, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = sockets.open_holder(claim(protocol, None, family))
    loopback, here = LOCAL[family]
    good = claim(protocol, here, family)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError):  # the same address twice
        sockets.replace_wildcard(held, [good, claim(protocol, loopback, family), good])
    assert len(os.listdir("/proc/self/fd")) == before
    for address in (loopback, here):
        assert wins(protocol, address) == set()
    with (
        pytest.raises(OSError),
        socket.socket(held.family, held.type) as device_bound,
    ):
        device_bound.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
        device_bound.bind((loopback, PORT))
    held.close()


@TCP_AND_UDP
@BOTH_FAMILIES
def test_kernels_without_device_numbers_use_reuseaddr(
    protocol: Protocol, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_SO_BINDTOIFINDEX", 9999)
    addresses = LOCAL[family]
    held = sockets.open_holder(claim(protocol, None, family))
    moved = sockets.replace_wildcard(held, [claim(protocol, a, family) for a in addresses])
    for address in (*addresses, "::"):
        assert wins(protocol, address) == set()
    back = sockets.replace_specific(moved, claim(protocol, None, family))
    for address in (*addresses, "::"):
        assert wins(protocol, address) == set()
    assert back.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0
    back.close()


def _passed(items: list[tuple[str, socket.socket]]) -> list[tuple[str, socket.socket]]:
    here, there = socket.socketpair()
    got: list[tuple[str, socket.socket]] = []
    with here, there:
        receiver = threading.Thread(target=lambda: got.extend(sockets.recv_holders(there)))
        receiver.start()
        assert sockets.send_holders(here, items) == len(items)
        receiver.join()
    return got


def test_holders_pass_through_a_unix_socket() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    try:
        items = []
        for number in range(600):
            port = claim((Protocol.TCP, Protocol.UDP)[number % 2], None)
            port = port._replace(port=20000 + number)
            items.append((f"key-{number}", sockets.open_holder(port)))
        names = [s.getsockname() for _, s in items]
        got = _passed(items)
        for _, s in items:
            s.close()
        assert [name for name, _ in got] == [f"key-{n}" for n in range(600)]
        assert [s.getsockname() for _, s in got] == names
        assert all(s.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == 0 for _, s in got)
        assert not any(s.get_inheritable() for _, s in got)
        with pytest.raises(OSError), socket.socket() as late:
            late.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            late.bind(("0.0.0.0", 20000))
            late.listen()
        for _, s in got:
            s.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_nothing_to_pass() -> None:
    assert _passed([]) == []


def test_sender_that_ends_early_leaves_nothing_open() -> None:
    here, there = socket.socketpair()
    with there, sockets.open_holder(claim(Protocol.TCP, None)) as held:
        before = len(os.listdir("/proc/self/fd"))

        def send_half() -> None:
            message = sockets._BATCH_HEADER.pack(1, 5) + b'["a"]'
            socket.send_fds(here, [message], [held.fileno()])
            here.recv(1)
            here.close()

        sender = threading.Thread(target=send_half)
        sender.start()
        with pytest.raises(ConnectionError):
            sockets.recv_holders(there)
        sender.join()
        assert len(os.listdir("/proc/self/fd")) == before - 1  # only "here" is gone


def test_lost_descriptors_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = socket.socketpair()
    held = [sockets.open_holder(claim(p, None)) for p in (Protocol.TCP, Protocol.UDP)]
    held += [sockets.open_holder(claim(p, None, Family.V6)) for p in (Protocol.TCP, Protocol.UDP)]
    with here, there:
        message = sockets._BATCH_HEADER.pack(4, 20) + b'["a","b","c","d"]   '
        socket.send_fds(here, [message], [s.fileno() for s in held])
        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(sockets, "_BATCH", 2)
        with pytest.raises(OSError) as failure:
            sockets.recv_holders(there)
        assert failure.value.errno == errno.EMFILE
        assert len(os.listdir("/proc/self/fd")) == before
    for s in held:
        s.close()


def test_receiver_that_gives_up_is_noticed() -> None:
    here, there = socket.socketpair()
    with here, sockets.open_holder(claim(Protocol.TCP, None)) as held:
        there.close()
        with pytest.raises(OSError):
            sockets.send_holders(here, [("a", held)])
        assert wins(Protocol.TCP, "0.0.0.0") == set()
