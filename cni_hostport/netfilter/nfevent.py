"""nf_tables events: datagrams in, a sum out.

Decides what a stream of events adds up to; never reads a socket and judges
nothing. Kernel fact: the port id in an event's header is the writer's socket;
the events of one transaction share it, and NEWGEN comes after them.
"""

from __future__ import annotations

from cni_hostport.netfilter import nfmsg, nfreply
from cni_hostport.netfilter import nlwire as nl


class EventDigest:
    """What a stream of events adds up to; fed one datagram at a time.

    Cheap for events of others: a table's name stands in attribute 1 of every
    event, so one substring test tells whether a datagram is about our tables.
    ``writers`` are the port ids whose changes touched our tables (0: the kernel
    itself), ``created`` the names of other tables that appeared, ``processes``
    the name of each port id that committed anything (15 characters at most).
    """

    def __init__(self, table: str) -> None:
        self._mark = nl.attr(1, nl.string(table))
        self._table = table
        self.ours = False
        self.writers: set[int] = set()
        self.created: set[str] = set()
        self.processes: dict[int, str] = {}
        self.generation = 0

    def feed(self, data: bytes) -> None:
        """Take one datagram into account."""
        if self._mark in data:
            self.ours = True
            self.writers.add(nl.HEADER.unpack_from(data)[4])
        at, end = 0, len(data)
        unpack = nl.HEADER.unpack_from
        while at + nl.HEADER_SIZE <= end:
            size, kind, _, _, portid = unpack(data, at)
            if kind == nfmsg.NEWTABLE:
                self._new_table(data[at + nl.HEADER_SIZE : at + size])
            elif kind == nfmsg.NEWGEN:
                msg = next(nl.messages(data[at:]))
                self.generation, self.processes[portid] = nfreply.generation(msg)
            if size < nl.HEADER_SIZE:
                return
            at += (size + 3) & ~3

    def _new_table(self, body: bytes) -> None:
        name = nl.text(nl.attribute_map(body, nl.GENMSG_SIZE).get(1, b""))
        if name != self._table:
            self.created.add(name)
