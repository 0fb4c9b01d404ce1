"""Events of nf_tables: who changed what, drained without ever waiting.

Decides when enough has been read. Judges nothing: whether a change calls for a
repair is the reconciler's business. Belongs to the network namespace in which
it was made.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.netfilter.nfevent import EventDigest
from cni_hostport.netfilter.nftrules import TABLE

_GROUP_NFTABLES = 7
_BUFFER = 8 << 20
_AT_MOST = 50_000


@dataclass(frozen=True, slots=True)
class NftEvent:
    """What happened since the last read, added up.

    ``overflow``: events were lost, everything must be looked at. ``ours``: a
    table of our name was touched, by the sockets in ``writers`` (port ids; 0 is
    the kernel itself). ``created``: names of other tables that appeared.
    ``processes``: name of the process behind each port id that committed
    something (15 characters at most). ``generation``: the newest seen, or 0.
    ``iptables``, ``portmap``: as in ``EventDigest``.
    """

    overflow: bool
    ours: bool
    writers: frozenset[int]
    created: frozenset[str]
    processes: Mapping[int, str]
    generation: int
    iptables: bool = False
    portmap: bool = False

    def foreign(self, own: Collection[int]) -> bool:
        """Whether somebody other than the sockets ``own`` touched our tables."""
        return self.overflow or any(writer not in own for writer in self.writers)

    def culprits(self, own: Collection[int]) -> tuple[str, ...]:
        """Names of the foreign processes that touched our tables, sorted."""
        return tuple(sorted({self.processes.get(w, "?") for w in self.writers if w not in own}))


class NftEvents:
    """A socket that hears every change of the namespace's ruleset. Raises OSError.

    ``own``: port id of a socket whose changes need not be told; it would wake its owner
    for each of its own transactions.
    """

    def __init__(self, table: str = TABLE, own: int | None = None) -> None:
        self._table = table
        self._sock = NetfilterSocket(_BUFFER, _GROUP_NFTABLES)
        if own is not None:
            self._sock.ignore(own)

    def fileno(self) -> int:
        """The descriptor, for an event loop: readable means that something happened."""
        return self._sock.fileno()

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()

    def read(self) -> NftEvent:
        """Everything that is queued now, added up; all empty where there is nothing.

        Stops after 50,000 datagrams (the descriptor then stays readable). Raises
        OSError only where the socket itself is broken.
        """
        digest = EventDigest(self._table)
        overflow = False
        for _ in range(_AT_MOST):
            try:
                data = self._sock.receive()
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                overflow = True
                continue
            if not data:
                break
            digest.feed(data)
        return NftEvent(
            overflow,
            digest.ours,
            frozenset(digest.writers),
            frozenset(digest.created),
            digest.processes,
            digest.generation,
            digest.iptables,
            digest.portmap,
        )
