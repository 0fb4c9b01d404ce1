"""Holding host ports: which sockets are open, and for whom.

Keeps the books; how a set of sockets becomes another is ``holdchange.py``'s. The
sockets themselves are opened by an injected opener (``host/sockets.py`` or a
fake). Never listens, never reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cni_hostport.hostport.holdchange import Held, HoldChange
from cni_hostport.hostport.opener import Blocker, Holder, Opener, in_use
from cni_hostport.model import HostPort, ReservePorts


class Holds:
    """All sockets of the node, by attachment key. Runs under the helper's one lock."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._held: dict[str, Held] = {}
        self._waiting: set[str] = set()
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
        return frozenset(entry.waiting) if entry else frozenset()

    def missing(self, key: str, wanted: Iterable[HostPort]) -> list[str]:
        """Names the sockets an attachment lacks, and who has the port where somebody has.

        One that waits only for connections to end (TIME_WAIT, a source port) is
        not missing: nobody else can serve the port meanwhile.
        """
        held, waiting = self.held(key), self.waiting(key)
        names = []
        for port in wanted:
            if port in held:
                continue
            blocker = self._opener.blocker(port) if port in waiting else None
            if blocker is not None:
                names.append(f"socket that holds {port} ({blocker.text()} has it)")
            elif port not in waiting:
                names.append(f"socket that holds {port}")
        return names

    def keys(self) -> tuple[str, ...]:
        """Attachments that hold or wait for something."""
        return tuple(self._held)

    def keys_waiting(self) -> tuple[str, ...]:
        """Attachments that wait for something."""
        return tuple(self._waiting)

    def items(self) -> list[tuple[str, HostPort, Holder]]:
        """Every socket with its owner and port."""
        return [(k, p, s) for k, e in self._held.items() for p, s in e.sockets.items()]

    def adopt(self, key: str, port: HostPort, holder: Holder) -> None:
        """Take over an open socket (restart or upgrade); a second one for a port is closed."""
        sockets = self._held.setdefault(key, Held()).sockets
        if port in sockets:
            holder.close()
        else:
            sockets[port] = holder

    def change(
        self,
        key: str,
        wanted: Iterable[HostPort],
        policy: ReservePorts,
        scan: Iterable[HostPort] = (),
        *,
        patient: bool = False,
    ) -> PendingChange:
        """Hold those wanted too; the caller keeps or undoes the change.

        Under ``require`` a port somebody listens on raises PortInUse (code 101)
        and everything is as before; one that is busy only as the source port of
        a connection, or in TIME_WAIT, is waited for. Under ``try`` every busy
        port is waited for. No descriptor left: TryAgain (code 11). ``patient``:
        whatever cannot be held is waited for, nothing raises. ``scan``: wildcards
        whose loopback listeners have to be looked for (``answering``).
        """
        before = self._held.get(key, Held())
        if policy is ReservePorts.REQUIRE and not patient:
            self._scan(scan)
        step = HoldChange(self._opener, before, tuple(dict.fromkeys(wanted)), policy, patient)
        try:
            step.run()
        except BaseException:
            self._set(key, step.undo())
            raise
        self._set(key, step.during())
        return PendingChange(self, key, step)

    def resync(
        self,
        key: str,
        wanted: Iterable[HostPort],
        policy: ReservePorts,
        scan: Iterable[HostPort] = (),
        *,
        patient: bool = False,
    ) -> None:
        """Make the attachment's sockets exactly those wanted; raises as ``change``."""
        self.change(key, wanted, policy, scan, patient=patient).keep()

    def release(self, key: str) -> None:
        """Close all of the attachment's sockets; fine if it has none."""
        entry = self._held.pop(key, None)
        self._waiting.discard(key)
        if entry is not None:
            for holder in entry.sockets.values():
                holder.close()
            self._tell(key)

    def retry(self, key: str) -> frozenset[HostPort]:
        """Try to hold what is waited for; returns the ports gained."""
        entry = self._held.get(key)
        if entry is None or not entry.waiting:
            return frozenset()
        before = frozenset(entry.sockets)
        self.resync(key, entry.wanted or entry.waiting, ReservePorts.TRY, patient=True)
        return self.held(key) - before

    def _set(self, key: str, entry: Held) -> None:
        (self._waiting.add if entry.waiting else self._waiting.discard)(key)
        if entry.sockets or entry.waiting:
            self._held[key] = entry
        else:
            self._held.pop(key, None)

    def _scan(self, ports: Iterable[HostPort]) -> None:
        for port in ports:
            blocker = self._opener.loopback_listener(port)
            if blocker is not None:
                raise in_use(port, blocker.text())


class PendingChange:
    """Sockets old and new are open; one of the two methods ends that, once."""

    def __init__(self, holds: Holds, key: str, step: HoldChange) -> None:
        self._holds = holds
        self._key = key
        self._step = step

    @property
    def held(self) -> frozenset[HostPort]:
        """Ports that are held once the change is kept."""
        return frozenset(self._step.during().sockets) - frozenset(self._step.closing())

    def keep(self) -> None:
        """Close what is no longer wanted."""
        changed = self._step.changed
        self._step.keep()
        self._holds._set(self._key, self._step.during())
        if changed:
            self._holds._tell(self._key)

    def undo(self) -> None:
        """Hold what was held before."""
        self._holds._set(self._key, self._step.undo())
        self._holds._tell(self._key)


__all__ = ["Blocker", "Holder", "Holds", "Opener", "PendingChange"]
