"""Holding host ports: which sockets are open, for whom, and what to do when one is busy.

Decides between conflict, "map now and hold later" and giving up. The sockets
themselves are opened by an injected opener (``host/sockets.py`` or a fake).
Never listens, never reads.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from cni_hostport.errors import IOFailure, PortInUse, TryAgain
from cni_hostport.model import HostPort, ReservePorts


class Holder(Protocol):
    """An open socket that reserves a port."""

    def close(self) -> None: ...
    def fileno(self) -> int: ...


class Blocker(Protocol):
    """Somebody who has a port; ``text()`` names process and pid."""

    @property
    def kind(self) -> str:
        """``listener``, ``bound`` or ``unknown``."""

    def text(self) -> str: ...


class Opener(Protocol):
    """Opens, converts and explains; errors are OSError."""

    def open(self, port: HostPort) -> Holder: ...
    def narrow(self, wide: Holder, ports: Sequence[HostPort]) -> list[Holder]: ...
    def widen(self, narrow: Sequence[Holder], port: HostPort) -> Holder: ...
    def blocker(self, port: HostPort) -> Blocker | None: ...
    def loopback_listener(self, port: HostPort) -> Blocker | None: ...


@dataclass(slots=True)
class Held:
    """One attachment's sockets and what it still waits for."""

    sockets: dict[HostPort, Holder] = field(default_factory=dict)
    waiting: frozenset[HostPort] = frozenset()


class Holds:
    """All sockets of the node, by attachment key. Runs under the helper's one lock."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._held: dict[str, Held] = {}
        self._watcher: Callable[[str, list[Holder]], None] = lambda _key, _holders: None

    def watch(self, watcher: Callable[[str, list[Holder]], None]) -> None:
        """Call back with an attachment's sockets whenever they change."""
        self._watcher = watcher

    def _tell(self, key: str) -> None:
        entry = self._held.get(key)
        self._watcher(key, list(entry.sockets.values()) if entry else [])

    def held(self, key: str) -> frozenset[HostPort]:
        """Ports really held for the attachment."""
        entry = self._held.get(key)
        return frozenset(entry.sockets) if entry else frozenset()

    def waiting(self, key: str) -> frozenset[HostPort]:
        """Ports mapped but not held yet."""
        entry = self._held.get(key)
        return entry.waiting if entry else frozenset()

    def keys(self) -> tuple[str, ...]:
        """Attachments that hold or wait for something."""
        return tuple(self._held)

    def items(self) -> list[tuple[str, HostPort, Holder]]:
        """Every socket with its owner and port."""
        return [(k, p, s) for k, e in self._held.items() for p, s in e.sockets.items()]

    def adopt(self, key: str, port: HostPort, holder: Holder) -> None:
        """Take over an open socket (restart or upgrade)."""
        self._held.setdefault(key, Held()).sockets[port] = holder

    def resync(
        self,
        key: str,
        wanted: Iterable[HostPort],
        policy: ReservePorts,
        scan: Iterable[HostPort] = (),
    ) -> None:
        """Make the attachment's sockets exactly those wanted.

        Under ``require`` a port somebody listens on raises PortInUse (code 101)
        and everything is as before; one that is busy only as the source port of
        a connection, or in TIME_WAIT, is waited for. Under ``try`` every busy
        port is waited for. No descriptor left: TryAgain (code 11).
        """
        entry = self._held.get(key, Held())
        want = tuple(dict.fromkeys(wanted))
        if policy is ReservePorts.REQUIRE:
            self._scan(scan)
        surplus = {p: s for p, s in entry.sockets.items() if p not in want}
        new: dict[HostPort, Holder] = {}
        waiting: set[HostPort] = set()
        replaced: dict[HostPort, Holder] = {}
        try:
            for port in want:
                if port in entry.sockets or port in new:
                    continue
                near = _near(port, surplus)
                if near and not (near[0].address is not None and port.address is not None):
                    self._convert(port, near, want, surplus, new, replaced)
                elif not self._open(port, policy, new):
                    waiting.add(port)
        except BaseException:
            self._undo(new, replaced, entry)
            raise
        for port, holder in surplus.items():
            if port not in replaced:
                holder.close()
        kept = {p: s for p, s in entry.sockets.items() if p in want}
        if kept or new or waiting:
            self._held[key] = Held({**kept, **new}, frozenset(waiting))
        else:
            self._held.pop(key, None)
        if new or surplus:
            self._tell(key)

    def release(self, key: str) -> None:
        """Close all of the attachment's sockets; fine if it has none."""
        entry = self._held.pop(key, None)
        if entry is not None:
            for holder in entry.sockets.values():
                holder.close()
            self._tell(key)

    def retry(self, key: str) -> frozenset[HostPort]:
        """Try to hold what is waited for; returns the ports gained."""
        entry = self._held.get(key)
        if entry is None:
            return frozenset()
        gained = set()
        for port in sorted(entry.waiting, key=str):
            try:
                entry.sockets[port] = self._opener.open(port)
            except OSError:
                continue
            gained.add(port)
        entry.waiting -= gained
        if gained:
            self._tell(key)
        return frozenset(gained)

    def _scan(self, ports: Iterable[HostPort]) -> None:
        for port in ports:
            blocker = self._opener.loopback_listener(port)
            if blocker is not None:
                raise _in_use(port, blocker.text())

    def _open(self, port: HostPort, policy: ReservePorts, new: dict[HostPort, Holder]) -> bool:
        try:
            new[port] = self._opener.open(port)
            return True
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                raise TryAgain(
                    f"cannot hold host port {port}", f"{error.strerror}: raise LimitNOFILE"
                ) from error
            if policy is ReservePorts.TRY:
                return False
            if error.errno != errno.EADDRINUSE:
                raise IOFailure(f"cannot hold host port {port}", str(error.strerror)) from error
            return self._explain(port, new, error)

    def _explain(self, port: HostPort, new: dict[HostPort, Holder], error: OSError) -> bool:
        """False if only connections have the port; PortInUse names whoever else does."""
        blocker = self._opener.blocker(port)
        if blocker is None:
            return False
        if blocker.kind == "unknown":  # whoever it was may be gone since
            try:
                new[port] = self._opener.open(port)
                return True
            except OSError:
                pass
        raise _in_use(port, blocker.text()) from error

    def _convert(
        self,
        port: HostPort,
        near: list[HostPort],
        want: Sequence[HostPort],
        surplus: dict[HostPort, Holder],
        new: dict[HostPort, Holder],
        replaced: dict[HostPort, Holder],
    ) -> None:
        try:
            if port.address is None:
                new[port] = self._opener.widen([surplus[p] for p in near], port)
            else:
                group = [p for p in want if p.overlaps(near[0]) and p not in new]
                wide = near[0]
                made = self._opener.narrow(surplus[wide], group)
                new.update(zip(group, made, strict=True))
        except OSError as error:
            blocker = self._opener.blocker(port)
            raise _in_use(port, blocker.text() if blocker else str(error.strerror)) from error
        for p in near:
            replaced[p] = surplus[p]

    def _undo(
        self, new: dict[HostPort, Holder], replaced: dict[HostPort, Holder], entry: Held
    ) -> None:
        for holder in new.values():
            holder.close()
        for port in replaced:
            try:
                entry.sockets[port] = self._opener.open(port)
            except OSError:
                entry.sockets.pop(port, None)
                entry.waiting |= {port}


def _near(port: HostPort, surplus: Iterable[HostPort]) -> list[HostPort]:
    """Sockets about to go that stand in the way of this one."""
    return [p for p in surplus if p.overlaps(port)]


def _in_use(port: HostPort, owner: str) -> PortInUse:
    return PortInUse(
        f"host port {port} is in use by {owner}",
        "stop the owner, choose another hostPort, or set reservePorts to 'try' or 'no'",
    )
