"""Clients in the namespaces of a lab node: they ask a server and tell how it went.

A question is one message; the answer says who answered and which source address
the server saw (``echo.py`` is the other end). Sockets are opened in the wanted
namespace and used from here, so nothing runs in the pods. Clients close with a
reset: no TIME_WAIT of theirs disturbs a test.
"""

from __future__ import annotations

import errno
import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final, Literal

from lab.node import Node

Protocol = Literal["tcp", "udp"]

_KINDS: Final = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
_OUTCOMES: Final = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EADDRNOTAVAIL: "no such address",
    errno.ECONNRESET: "reset",
    errno.EPERM: "prohibited",
    errno.EADDRINUSE: "address in use",
}
_ABORT: Final = struct.pack("ii", 1, 0)


def family_of(address: str) -> socket.AddressFamily:
    """Socket family of an address in text."""
    return socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET


def open_socket(
    node: Node,
    address: str,
    port: int,
    protocol: Protocol,
    *,
    netns: str | None = None,
    options: Sequence[int] = (),
    dual: bool = False,
    listen: bool = False,
) -> socket.socket:
    """A bound socket in a namespace of the node; OSError as the kernel says it.

    ``options`` are SOL_SOCKET options set before bind; ``dual`` lets ``::``
    take IPv4 as well; ``listen`` makes a TCP listener of it.
    """
    with node.within(netns):
        sock = socket.socket(family_of(address), _KINDS[protocol])
    try:
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if dual else 1)
        for option in options:
            sock.setsockopt(socket.SOL_SOCKET, option, 1)
        sock.bind((address, port))
        if listen and protocol == "tcp":
            sock.listen(64)
    except OSError:
        sock.close()
        raise
    return sock


@dataclass(frozen=True)
class Answer:
    """What a client got: ``outcome`` is ``ok`` or how it failed; the rest is the server's word."""

    outcome: str
    server: str = ""
    source: str = ""
    source_port: int = 0
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Whether a server answered."""
        return self.outcome == "ok"

    def refused_at_once(self) -> bool:
        """Refused, and long before a client would time out."""
        return self.outcome == "refused" and self.seconds < 0.3


class Client:
    """One connected socket that can ask again and again from the same port."""

    def __init__(
        self,
        node: Node,
        host: str,
        port: int,
        protocol: Protocol = "tcp",
        *,
        netns: str | None = None,
        source: str | None = None,
        source_port: int = 0,
        timeout: float = 1.0,
    ) -> None:
        with node.within(netns):
            self._sock = socket.socket(family_of(host), _KINDS[protocol])
        self._target = (host, port)
        self._source = (source, source_port) if source or source_port else None
        self._protocol = protocol
        self._connected = False
        self._sock.settimeout(timeout)

    def _connect(self) -> None:
        if self._connected:
            return
        if self._protocol == "tcp":
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        if self._source:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((self._source[0] or "", self._source[1]))
        self._sock.connect(self._target)
        self._connected = True

    def ask(self, timeout: float | None = None) -> Answer:
        """Connect if need be, send one message, and say what came back."""
        start = time.monotonic()
        if timeout is not None:
            self._sock.settimeout(timeout)
        try:
            self._connect()
            self._sock.send(b"who are you?\n")
            data = self._sock.recv(2048)
        except TimeoutError:
            return Answer("timeout", seconds=time.monotonic() - start)
        except OSError as error:
            outcome = _OUTCOMES.get(error.errno or 0, str(error))
            return Answer(outcome, seconds=time.monotonic() - start)
        seconds = time.monotonic() - start
        if not data:
            return Answer("closed", seconds=seconds)
        words = json.loads(data)
        return Answer("ok", words["server"], words["source"], words["port"], seconds)

    def close(self) -> None:
        """Close it; a TCP connection is reset."""
        self._sock.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def probe(
    node: Node,
    host: str,
    port: int,
    protocol: Protocol = "tcp",
    *,
    netns: str | None = None,
    source: str | None = None,
    source_port: int = 0,
    timeout: float = 1.0,
) -> Answer:
    """One question from a namespace of the node (None: the node itself)."""
    with Client(
        node,
        host,
        port,
        protocol,
        netns=netns,
        source=source,
        source_port=source_port,
        timeout=timeout,
    ) as client:
        return client.ask()
