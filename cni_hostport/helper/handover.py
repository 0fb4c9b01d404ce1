"""Sockets from the running helper to its successor, none of them ever free.

The old helper stops accepting, finishes what it was asked, then passes the
listening socket, the clients that have not asked yet, every holder, and last
the lock. Both hold every socket until the successor says that it serves; if it
does not, the old one goes on as if nothing had happened.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cni_hostport import shim
from cni_hostport.host.sockets import recv_holders, send_holders
from cni_hostport.hostport.holds import Holder
from cni_hostport.model import Family, HostPort, Protocol, canonical_ip

log = logging.getLogger(__name__)

LIMIT = 20.0
"""Seconds for the successor to take over and serve."""

_LISTEN, _CLIENT, _HOLD = "listen", "client", "hold:"
_SERVING = b"S"


class HandoverFailed(Exception):
    """The other side broke off; whoever had the sockets still has them."""


@dataclass(slots=True)
class Inheritance:
    """What a successor was given. ``channel`` is answered with ``accept``."""

    channel: socket.socket
    lock: int
    listening: socket.socket
    clients: list[socket.socket] = field(default_factory=list)
    holders: list[tuple[str, socket.socket]] = field(default_factory=list)

    def accept(self) -> None:
        """Tell the old helper that it is no longer needed."""
        self.channel.sendall(_SERVING)
        self.channel.close()


def port_of(holder: socket.socket) -> HostPort | None:
    """The port a holder has, read from the socket itself; None if it is no holder."""
    kinds = {socket.SOCK_STREAM: Protocol.TCP, socket.SOCK_DGRAM: Protocol.UDP}
    families = {socket.AF_INET: Family.V4, socket.AF_INET6: Family.V6}
    protocol, family = kinds.get(holder.type), families.get(holder.family)
    if protocol is None or family is None:
        return None
    host, port = holder.getsockname()[:2]
    address = canonical_ip(host.partition("%")[0])
    if not port:
        return None
    return HostPort(
        family=family,
        address=None if address.is_unspecified else address,
        port=port,
        protocol=protocol,
    )


def give(
    channel: socket.socket,
    lock: int,
    listening: socket.socket,
    clients: Iterable[socket.socket],
    holders: Iterable[tuple[str, HostPort, Holder]],
) -> None:
    """Pass everything and wait until the successor serves. Raises HandoverFailed."""
    channel.settimeout(LIMIT)
    items = [(_LISTEN, listening), *((_CLIENT, c) for c in clients)]
    items += [(_HOLD + key, h) for key, _, h in holders if isinstance(h, socket.socket)]
    try:
        channel.sendall(shim.pack_response(0, b"", b""))
        count = send_holders(channel, items)
        socket.send_fds(channel, [b"L"], [lock])
        log.info("handed over %d sockets, waiting for the successor", count)
        if channel.recv(1) != _SERVING:
            raise HandoverFailed("the successor ended before it served")
    except OSError as error:
        raise HandoverFailed(str(error)) from error


def take(run_dir: Path) -> Inheritance | None:
    """Everything of the running helper; None if none runs. Raises HandoverFailed."""
    try:
        channel = shim.connect(os.fsencode(run_dir), LIMIT)
    except OSError:
        return None
    sock = socket.socket(fileno=channel.detach())
    sock.settimeout(LIMIT)
    try:
        return _take(sock)
    except (OSError, shim.ForeignProtocol) as error:
        sock.close()
        raise HandoverFailed(str(error)) from error


def _take(channel: socket.socket) -> Inheritance:
    body = json.dumps({"op": "handover"}).encode()
    channel.sendall(shim.pack_request(shim.KIND_OPERATOR, 0, {}, body))
    header = b""
    while len(header) < shim.HEADER_SIZE:
        part = channel.recv(shim.HEADER_SIZE - len(header))
        if not part:
            raise OSError("the running helper broke off")
        header += part
    _, status, _, err = shim.parse_response_header(header)
    if status != 0:
        text = channel.recv(err).decode(errors="replace").strip()
        raise OSError(f"the running helper refuses: {text}")
    items = recv_holders(channel)
    _, fds, _, _ = socket.recv_fds(channel, 1, 1)
    listening = next(s for name, s in items if name == _LISTEN)
    inheritance = Inheritance(channel, fds[0], listening)
    for name, sock in items:
        if name == _CLIENT:
            inheritance.clients.append(sock)
        elif name.startswith(_HOLD):
            inheritance.holders.append((name.removeprefix(_HOLD), sock))
    return inheritance
