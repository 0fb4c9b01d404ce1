"""Asks the DNS server, and tells answers of this node's own from those of others.

Decides how a question is sent and whether an answer came from the local server:
while the rules are away, kube-proxy sends a question to the cluster's DNS, and
that one's answer must not count. Never waits: ``send`` and ``receive`` return at
once. What silence means is the caller's business.
"""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

Address = IPv4Address | IPv6Address
_IP_PKTINFO = 8
_LOOPBACK = 1  # ifindex of lo in every net namespace
_PKTINFO4 = struct.Struct("=I4s4s")
_PKTINFO6 = struct.Struct("=16sI")


@dataclass
class Target:
    """One address: its socket, when it last answered, and the oldest question that waits.

    Times are the caller's clock, in seconds. ``elsewhere`` is when an answer
    last came in by a link that does not hold the address; ``refused`` whether
    the kernel ever said that nobody has the port.
    """

    address: Address
    sock: socket.socket | None = None
    number: int = 0
    asked: float | None = None
    answered: float | None = None
    elsewhere: float | None = None
    sent: int = 0
    refused: bool = False

    def waits(self, now: float) -> float:
        """Seconds that the oldest unanswered question has waited; 0 where none does."""
        return 0.0 if self.asked is None else now - self.asked


class Prober:
    """Questions to every address of the cache, over UDP.

    ``own_links`` gives the links on which an answer is the local server's, None:
    every answer is;
    ``make`` the bytes of a question with that number; ``accept`` whether bytes
    answer it.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        port: int,
        make: Callable[[int], bytes],
        accept: Callable[[bytes, int], bool],
    ) -> None:
        self.targets = tuple(Target(address) for address in addresses)
        self.own_links: dict[str, set[int]] | None = {}
        self.make = make
        self._port = port
        self._accept = accept

    def sockets(self) -> tuple[socket.socket, ...]:
        """What to wait on."""
        return tuple(t.sock for t in self.targets if t.sock is not None)

    def reset(self) -> None:
        """Forget every question and answer."""
        for target in self.targets:
            self._close(target)
            target.asked = target.answered = target.elsewhere = None

    def forget_questions(self) -> None:
        """Ask anew: what was sent before the rules changed went another way."""
        for target in self.targets:
            self._close(target)
            target.asked = None

    def send(self, now: float) -> None:
        """Ask every address. One that cannot be asked at all counts as asked."""
        for target in self.targets:
            if target.sent % 8 == 0 or target.sock is None:
                # A new source port now and then: one server thread of several
                # serves each, and each must be heard.
                self._open(target)
            target.sent += 1
            if target.asked is None:
                target.asked = now
                target.number = random.randrange(0x10000)  # noqa: S311  (no secret)
            if target.sock is not None:
                with suppress(OSError):
                    target.sock.send(self.make(target.number))

    def receive(self, now: float) -> None:
        """Take in every answer that has come."""
        for target in self.targets:
            while target.sock is not None:
                try:
                    data, ancillary, _, _ = target.sock.recvmsg(512, 128)
                except BlockingIOError:
                    break
                except OSError:  # refused: nobody listens
                    target.refused = True
                    break
                if not self._accept(data, target.number):
                    continue
                if self._is_own(target, ancillary):
                    target.answered, target.asked = now, None
                else:
                    target.elsewhere, target.asked = now, None

    def _is_own(self, target: Target, ancillary: list[tuple[int, int, bytes]]) -> bool:
        if self.own_links is None:
            return True
        links = self.own_links.get(str(target.address), set()) | {_LOOPBACK}
        for level, kind, data in ancillary:
            if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO):
                return _PKTINFO4.unpack(data[: _PKTINFO4.size])[0] in links
            if (level, kind) == (socket.IPPROTO_IPV6, socket.IPV6_PKTINFO):
                return _PKTINFO6.unpack(data[: _PKTINFO6.size])[1] in links
        return False

    def _open(self, target: Target) -> None:
        self._close(target)
        four = target.address.version == 4
        sock = socket.socket(
            socket.AF_INET if four else socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        )
        try:
            if four:
                sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
            else:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            sock.connect((str(target.address), self._port))
        except OSError:
            sock.close()
            return
        target.sock = sock

    @staticmethod
    def _close(target: Target) -> None:
        if target.sock is not None:
            target.sock.close()
            target.sock = None


def ask_once(address: Address, port: int, question: bytes, timeout: float) -> bytes:
    """One question over TCP and its answer; ``timeout`` seconds for all. Raises OSError."""
    with socket.create_connection((str(address), port), timeout) as sock:
        sock.settimeout(timeout)
        sock.sendall(struct.pack(">H", len(question)) + question)
        head = _exactly(sock, 2)
        return _exactly(sock, int(struct.unpack(">H", head)[0]))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise ConnectionError("the server closed the connection")
        data += part
    return data


def is_bound(address: Address, port: int) -> bool:
    """Whether some process has this UDP port on this address, or on every one."""
    name = "udp" if address.version == 4 else "udp6"
    exact = f"{_hex(address.packed)}:{port:04X}"
    wildcards = (f"{'0' * 8}:{port:04X}", f"{'0' * 32}:{port:04X}")
    places = [exact, *wildcards]
    for table in {name, "udp6"}:
        with suppress(OSError):
            text = Path(f"/proc/thread-self/net/{table}").read_text(encoding="ascii")
            # The second column is the local end; the third may be our own probe's far end.
            if any(line.split()[1] in places for line in text.splitlines()):
                return True
    return False


def _hex(packed: bytes) -> str:
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words)
