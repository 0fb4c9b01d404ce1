"""Names who has a host port when binding it failed with EADDRINUSE.

Decides whether the port is somebody's (a listener, a silent holder) or only the
local port of connections, which is no conflict. It must never run on a path
that succeeds: finding a process reads every descriptor in /proc, about 9
microseconds each.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Literal

from cni_hostport.host.sockdiag import DiagSocket, SockDiag
from cni_hostport.model import Family, HostPort, IPAddress, Protocol

_LOOPBACK = IPv4Network("127.0.0.0/8")
_LOCALHOST = IPv4Address("127.0.0.1")


@dataclass(frozen=True, slots=True)
class Blocker:
    """Who keeps a port from being held.

    ``listener`` serves it, ``bound`` has it without listening, ``unknown``: the
    kernel shows nobody (before Linux 6.8 it hides bound sockets that do not
    listen). ``pid`` None: no process is visible from here that has the socket
    open. ``address`` None is the wildcard.
    """

    kind: Literal["listener", "bound", "unknown"]
    port: HostPort
    address: IPAddress | None = None
    pid: int | None = None
    process: str = ""

    @property
    def loopback(self) -> bool:
        """Whether it sits on a loopback address; then no other address is blocked."""
        return self.address is not None and self.address.is_loopback

    @property
    def where(self) -> str:
        """The address and port it has, as ``0.0.0.0:8080/tcp``."""
        family = self.port.family if self.address is None else Family(self.address.version)
        return str(self.port._replace(address=self.address, family=family))

    def text(self) -> str:
        """Who it is, for an error: ``process nginx (pid 4711)``."""
        if self.kind == "unknown":
            return "a socket that the kernel does not show"
        if self.pid is None:
            return "a kernel service or a process of another pid namespace"
        return f"process {self.process} (pid {self.pid})"


def find_blocker(
    port: HostPort, own_inodes: Collection[int] = (), diag: SockDiag | None = None
) -> Blocker | None:
    """Who has ``port``, after binding it failed with EADDRINUSE.

    None: only connections have it as their local port (TIME_WAIT included),
    which is no conflict; map now and hold it later. Sockets whose inode is in
    ``own_inodes`` are ours and not looked at. Where several block, one that is
    not on a loopback address is named first. Raises ValueError for SCTP, and
    OSError when the kernel does not answer.
    """
    asked = diag or SockDiag()
    try:
        kind: Literal["listener", "bound"] = "listener"
        found = list(_blocking(port, asked.listeners(port.port, port.protocol), own_inodes))
        if not found and port.protocol is Protocol.TCP:
            kind = "bound"
            found = list(_blocking(port, asked.bound_inactive(port.port), own_inodes))
        if not found:
            clients = asked.clients(port.port, port.protocol)
            return None if any(_overlaps(port, s) for s in clients) else Blocker("unknown", port)
    finally:
        if diag is None:
            asked.close()
    return _named(kind, port, min(found, key=_on_loopback))


def loopback_listener(
    port: int,
    protocol: Protocol,
    own_inodes: Collection[int] = (),
    diag: SockDiag | None = None,
) -> Blocker | None:
    """A listener in 127.0.0.0/8 on another address than 127.0.0.1, if there is one.

    Where addresses are held one by one, 127.0.0.1 is the only one of the 2^24
    that gets a holder, yet all of them answer. Raises as ``find_blocker``.
    """
    asked = diag or SockDiag()
    try:
        sockets = asked.listeners(port, protocol)
    finally:
        if diag is None:
            asked.close()
    for found in sockets:
        address = found.address
        if (
            isinstance(address, IPv4Address)
            and address in _LOOPBACK
            and address != _LOCALHOST
            and found.inode not in own_inodes
        ):
            claim = HostPort(family=Family.V4, address=address, port=port, protocol=protocol)
            return _named("listener", claim, found)
    return None


def _blocking(
    port: HostPort, sockets: Iterable[DiagSocket], own_inodes: Collection[int]
) -> Iterator[DiagSocket]:
    return (s for s in sockets if s.inode not in own_inodes and _overlaps(port, s))


def _overlaps(port: HostPort, other: DiagSocket) -> bool:
    """Whether the kernel lets a holder of ``port`` and ``other`` not be bound together.

    Holders of IPv6 are V6ONLY, so only a dual-stack wildcard crosses families.
    """
    if other.address is None:
        crosses = other.family == 6 and not other.v6only
        return other.family == port.family or (port.family is Family.V4 and crosses)
    if other.address.version != port.family:
        return False
    return port.address is None or port.address == other.address


def _on_loopback(found: DiagSocket) -> bool:
    return found.address is not None and found.address.is_loopback


def _named(kind: Literal["listener", "bound"], port: HostPort, found: DiagSocket) -> Blocker:
    pid, process = processes_of({found.inode}).get(found.inode, (None, ""))
    address = found.address
    if address is None and found.family == 6 and port.family is Family.V4:
        # A dual-stack listener: say ``[::]``, as ss(8) would show it.
        port = port._replace(family=Family.V6, address=None)
    return Blocker(kind, port, address, pid, process)


def processes_of(inodes: Collection[int]) -> dict[int, tuple[int, str]]:
    """(pid, name) of a process that has each of these sockets open; one scan of /proc.

    The lowest pid that has it is taken, usually the parent of its workers, and
    this process last. Sockets of processes in other pid namespaces are missing
    from the answer. The name is the kernel's, at most 15 characters.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes if inode}
    owners: dict[int, tuple[int, str]] = {}
    mine = os.getpid()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    # Our own table may be the longest of all, and our holders are not asked about.
    for pid in sorted(pids, key=lambda p: (p == mine, p)):
        for link in _descriptors(pid):
            if (inode := wanted.pop(link, None)) is not None:
                owners[inode] = (pid, _name(pid))
        if not wanted:
            break
    return owners


def _descriptors(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd/"
    # Processes end and descriptors close while we look. os, not Path: thrice as fast.
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                yield os.readlink(folder + descriptor)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").rstrip("\n")
    except OSError:
        return "?"
