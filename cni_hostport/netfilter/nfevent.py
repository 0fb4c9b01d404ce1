"""nf_tables events: datagrams in, a sum out.

Decides what a stream of events adds up to; never reads a socket and judges
nothing. Kernel fact: the port id in an event's header is the writer's socket;
the events of one transaction share it, and NEWGEN comes after them.
"""

from __future__ import annotations

from cni_hostport.netfilter import nfmsg, nfreply
from cni_hostport.netfilter import nlwire as nl

_IPTABLES = (b"KUBE-HOSTPORTS", b"KUBE-HP-", b"HOSTPORT-MANAGER-")
_PORTMAP = (b"CNI-HOSTPORT-", b"CNI-DN-", b"cni_hostport")
_IPTABLES_TABLES = tuple(nl.string(t) for t in ("nat", "filter", "raw", "mangle"))
_HOOKS = tuple(nl.string(c) for c in ("PREROUTING", "OUTPUT", "POSTROUTING", "INPUT", "FORWARD"))


class EventDigest:
    """What a stream of events adds up to; fed one datagram at a time.

    Cheap for events of others: a table's name stands in attribute 1 of every
    event, so one substring test tells whether a datagram is about our tables.
    ``writers`` are the port ids whose changes touched our tables (0: the kernel
    itself), ``created`` the names of other tables that appeared, ``processes``
    the name of each port id that committed anything (15 characters at most).

    ``iptables``: iptables-nft touched chains of host ports, or removed something
    that may have led to them. ``portmap``: portmap's chains or table changed.
    """

    def __init__(self, table: str) -> None:
        self._mark = nl.attr(1, nl.string(table))
        self._table = table
        self.ours = False
        self.writers: set[int] = set()
        self.created: set[str] = set()
        self.processes: dict[int, str] = {}
        self.generation = 0
        self.iptables = False
        self.portmap = False

    def feed(self, data: bytes) -> None:
        """Take one datagram into account."""
        if self._mark in data:
            self.ours = True
            self.writers.add(nl.HEADER.unpack_from(data)[4])
        self.iptables = self.iptables or any(name in data for name in _IPTABLES)
        self.portmap = self.portmap or any(name in data for name in _PORTMAP)
        at, end = 0, len(data)
        unpack = nl.HEADER.unpack_from
        while at + nl.HEADER_SIZE <= end:
            size, kind, _, _, portid = unpack(data, at)
            if kind == nfmsg.NEWTABLE:
                self._new_table(data[at + nl.HEADER_SIZE : at + size])
            elif kind == nfmsg.NEWGEN:
                msg = next(nl.messages(data[at:]))
                self.generation, self.processes[portid] = nfreply.generation(msg)
            elif kind in (nfmsg.DELTABLE, nfmsg.DELCHAIN, nfmsg.DELRULE) and not self.iptables:
                self.iptables = _may_unhook(kind, data[at + nl.HEADER_SIZE : at + size])
            if size < nl.HEADER_SIZE:
                return
            at += (size + 3) & ~3

    def _new_table(self, body: bytes) -> None:
        name = nl.text(nl.attribute_map(body, nl.GENMSG_SIZE).get(1, b""))
        if name != self._table:
            self.created.add(name)


def _may_unhook(kind: int, body: bytes) -> bool:
    """Whether a removal may have taken a jump to our chains: a table, a hook's chain or rule."""
    found = nl.attribute_map(body, nl.GENMSG_SIZE)
    if found.get(1) not in _IPTABLES_TABLES:
        return False
    chain = found.get(2 if kind == nfmsg.DELRULE else 3)
    return kind == nfmsg.DELTABLE or chain in _HOOKS
