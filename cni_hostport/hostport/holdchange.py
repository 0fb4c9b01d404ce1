"""One attachment's sockets on their way from what was held to what is wanted.

Decides between conflict, "map now and hold later" and giving up, and how each
step is taken back. Until a change is kept, sockets that are no longer wanted
stay open: a change that is undone has freed nothing for an instant. Never
listens, never reads.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass, field

from cni_hostport.errors import IOFailure, TryAgain
from cni_hostport.hostport.opener import Holder, Opener, in_use
from cni_hostport.model import HostPort, ReservePorts

SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""No descriptor or no memory left: passing conditions of this process, not of the port."""


_NOTHING: frozenset[HostPort] = frozenset()
"""One for all: ten thousand empty sets are 2 MB."""


@dataclass(slots=True)
class Held:
    """One attachment's sockets, what it still waits for, and all that it wants."""

    sockets: dict[HostPort, Holder] = field(default_factory=dict)
    waiting: frozenset[HostPort] = _NOTHING
    wanted: tuple[HostPort, ...] = ()


class HoldChange:
    """Open what is missing; then ``keep`` or ``undo``, once.

    ``patient``: nothing is an error, what cannot be held is waited for.
    """

    def __init__(
        self,
        opener: Opener,
        before: Held,
        wanted: tuple[HostPort, ...],
        policy: ReservePorts,
        patient: bool,
    ) -> None:
        self._opener = opener
        self._before = before
        self._wanted = wanted
        self._require = policy is ReservePorts.REQUIRE and not patient
        self._patient = patient
        self._sockets = dict(before.sockets)
        self._new: dict[HostPort, Holder] = {}
        self._waiting: set[HostPort] = set()
        self._converted: list[tuple[list[HostPort], list[HostPort]]] = []

    def run(self) -> None:
        """Take every step; on an error the caller calls ``undo``.

        Raises PortInUse (101), TryAgain (11), IOFailure (5).
        """
        old = self._surplus()  # once: what is opened meanwhile is wanted
        for port in self._wanted:
            if port in self._sockets or port in self._waiting:
                continue
            near = [p for p in old if p.overlaps(port) and p in self._sockets]
            if near:
                self._convert(port, near)
            else:
                self._open(port)

    def _surplus(self) -> list[HostPort]:
        wanted = set(self._wanted)
        return [p for p in self._sockets if p not in wanted]

    @property
    def changed(self) -> bool:
        """Whether a socket came or goes."""
        return bool(self._new or self._surplus())

    def during(self) -> Held:
        """What is held until the change is kept: the old and the new."""
        waiting = frozenset(self._waiting) if self._waiting else _NOTHING
        return Held(self._sockets, waiting, self._wanted)

    def closing(self) -> list[HostPort]:
        """What ``keep`` will close: an own socket in the way of one waited for stays."""
        return [p for p in self._surplus() if not any(p.overlaps(w) for w in self._waiting)]

    def keep(self) -> None:
        """Close what is no longer wanted."""
        for port in self.closing():
            self._sockets.pop(port).close()

    def undo(self) -> Held:
        """Take every step back; returns what is held then, as before."""
        for old, new in reversed(self._converted):
            self._convert_back(old, new)
        for port, holder in self._new.items():
            if self._sockets.get(port) is holder:
                del self._sockets[port]
                holder.close()
        lost = {p for p in self._before.sockets if p not in self._sockets}
        waiting = self._before.waiting | lost
        return Held(self._sockets, waiting, self._before.wanted)

    def _open(self, port: HostPort) -> None:
        try:
            self._new[port] = self._sockets[port] = self._opener.open(port)
        except OSError as error:
            if self._judge(port, error):
                self._waiting.add(port)

    def _judge(self, port: HostPort, error: OSError) -> bool:
        """Raise where the policy says that this failure is one; False: it is over."""
        if self._patient:
            return True
        if error.errno in SHORTAGE:
            raise TryAgain(
                f"cannot hold host port {port}", f"{error.strerror}: raise LimitNOFILE"
            ) from error
        if not self._require:
            return True
        if error.errno != errno.EADDRINUSE:
            raise IOFailure(f"cannot hold host port {port}", str(error.strerror)) from error
        blocker = self._opener.blocker(port)
        if blocker is None:
            return True
        if blocker.kind == "unknown" and not self._stands_in_its_own_way(port):
            with contextlib.suppress(OSError):  # whoever it was may be gone since
                self._new[port] = self._sockets[port] = self._opener.open(port)
                return False
        raise in_use(port, blocker.text()) from error

    def _stands_in_its_own_way(self, port: HostPort) -> bool:
        return any(p.overlaps(port) for p in self._sockets)

    def _convert(self, port: HostPort, near: list[HostPort]) -> None:
        """Wildcard to addresses or back; its own old socket is all that stands in the way."""
        if port.address is None:
            group = [port]
        else:
            group = [p for p in self._wanted if p.overlaps(near[0]) and p not in self._sockets]
        try:
            made = self._exchange(near, group)
        except OSError as error:
            self._judge(port, error)
            self._waiting.update(group)
            return
        self._converted.append((near, group))
        self._new.update(zip(group, made, strict=True))

    def _exchange(self, old: Sequence[HostPort], new: Sequence[HostPort]) -> list[Holder]:
        if new[0].address is None:
            made = [self._opener.widen([self._sockets[p] for p in old], new[0])]
        else:
            made = self._opener.narrow(self._sockets[old[0]], new)
        for port in old:
            del self._sockets[port]
        self._sockets.update(zip(new, made, strict=True))
        return made

    def _convert_back(self, old: list[HostPort], new: list[HostPort]) -> None:
        try:
            self._exchange(new, old)
            return
        except OSError:
            for port in new:
                self._sockets.pop(port).close()
        for port in old:
            try:
                self._sockets[port] = self._opener.open(port)
            except OSError:
                continue  # waited for: HostPort is in before.sockets and not here
