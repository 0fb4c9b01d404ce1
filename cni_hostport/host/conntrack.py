"""Stale UDP flows dropped and connections counted, over one open netlink socket.

Decides how the kernel is asked; never which flows are stale. Only ever deletes
flows whose original destination or whose reply source was named: a delete
without a tuple, which would flush the node's table, is never built.

IPv4: one filtered delete is one walk of the kernel's table (29 ms at 100,000
flows). A kernel that cannot filter deletes says EINVAL and deletes nothing. There,
and for IPv6, whose addresses the kernel's filter compares the wrong way round,
flows are dumped by protocol and port, compared here, and deleted one by one.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.model import Family, IPAddress, Protocol, family_of
from cni_hostport.netfilter import ctmsg
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.ctmsg import Endpoint, Flow, Match

_AT_ONCE = 64


class ConntrackError(OSError):
    """The kernel's connection tracking cannot be asked; ``errno`` says why."""


class Conntrack:
    """Flows of the network namespace in which it was made. Raises OSError at construction.

    One instance belongs to one thread: whoever counts needs one of his own.
    ``filtered`` False never tries the filtered delete (older kernels).
    """

    def __init__(self, filtered: bool = True) -> None:
        self._sock = NetfilterSocket(receive_limit=8 << 20)
        self._filtered = filtered
        self._sequence = 0

    @property
    def filtered(self) -> bool:
        """Whether the kernel is believed to filter deletes itself."""
        return self._filtered

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def drop_udp_to(self, pairs: Iterable[tuple[IPAddress, int]]) -> int:
        """Delete UDP flows whose original destination is one of these (address, port).

        Returns the number of IPv6 flows deleted plus the number of IPv4 requests
        (the kernel does not say how many flows those were). Raises ConntrackError.
        """
        return self._drop([Match("original", Protocol.UDP, a, p) for a, p in dict.fromkeys(pairs)])

    def drop_udp_from(self, addresses: Iterable[IPAddress], port: int | None = None) -> int:
        """Delete UDP flows that one of these (pod) addresses answers, from ``port`` if given.

        Returns and raises as drop_udp_to.
        """
        return self._drop([Match("reply", Protocol.UDP, a, port) for a in dict.fromkeys(addresses)])

    def drop_udp_untranslated(self, pairs: Collection[tuple[IPAddress, int]]) -> int:
        """Delete UDP flows to one of these (address, port) that were not translated.

        One walk a family, however many pairs. Returns how many there were. Raises
        ConntrackError.
        """
        wanted = frozenset(pairs)
        found: set[Flow] = set()
        for family in Family:
            needles = {a.packed for a, _ in wanted if family_of(a) is family}
            if not needles:
                continue
            for data in self._parts(ctmsg.dump_untranslated(family, Protocol.UDP, self._next())):
                if any(needle in data for needle in needles):
                    flows = map(ctmsg.flow, nl.messages(data))
                    found.update(f for f in flows if f and _is_untranslated(f, wanted))
        errors = self._ask([ctmsg.delete_flow(flow, self._next()) for flow in found])
        self._judge(errors)
        return len(found)

    def flows(self, address: IPAddress, port: int, protocol: Protocol) -> int:
        """Number of flows that address:port answers; one walk of the table.

        Raises ConntrackError.
        """
        match = Match("reply", protocol, address, port)
        return sum(1 for flow in self._dump(ctmsg.dump_matching([match], self._next()), [match]))

    def connections(self) -> Counter[Endpoint]:
        """Number of translated flows by who answers them; one walk for all mappings.

        Raises ConntrackError.
        """
        found: Counter[bytes] = Counter()
        for data in self._parts(ctmsg.dump_translated(self._next())):
            answerers = map(ctmsg.translated_answerer, nl.messages(data))
            found.update(raw for raw in answerers if raw)
        return Counter({ctmsg.endpoint(raw): number for raw, number in found.items()})

    def translations(self) -> Counter[tuple[Endpoint, Endpoint]]:
        """Number of translated flows by (original destination, who answers); one walk.

        Raises ConntrackError.
        """
        found: Counter[tuple[Endpoint, Endpoint]] = Counter()
        for data in self._parts(ctmsg.dump_translated(self._next())):
            flows = (ctmsg.flow(msg) for msg in nl.messages(data))
            found.update((f.destination, f.answerer) for f in flows if f and f.translated)
        return found

    def _next(self) -> int:
        self._sequence = (self._sequence + 1) & 0x3FFFFFFF
        return self._sequence

    def _drop(self, matches: Sequence[Match]) -> int:
        singly = [m for m in matches if family_of(m.address) is Family.V6]
        at_once = [m for m in matches if family_of(m.address) is Family.V4]
        if not self._filtered or not self._walks_are_cheaper(len(at_once)):
            return self._drop_singly(matches)
        errors = self._ask([ctmsg.delete_matching(m, self._next()) for m in at_once])
        if errno.EINVAL in errors:
            dropped = self._drop_singly(matches)
            # known only now: it was the filter that the kernel did not like
            self._filtered = False
            return dropped
        self._judge(errors)
        return len(at_once) + self._drop_singly(singly)

    def _walks_are_cheaper(self, walks: int) -> bool:
        """Whether so many filtered deletes cost less than one dump at its worst.

        Measured in ms: a walk 0.25 and 1 for 1,000 flows; a dump 12 and 4.
        """
        if walks <= 1:
            return True
        answers = self._exchange(ctmsg.get_count(self._next()))
        flows = max((ctmsg.count(m) for m in answers if m.kind == ctmsg.CT_STATS), default=0)
        return walks * (0.25 + flows / 1000) <= 12 + flows / 250

    def _drop_singly(self, matches: Sequence[Match]) -> int:
        found: set[Flow] = set()
        for family in Family:
            members = [m for m in matches if family_of(m.address) is family]
            if members:
                # one dump for all: an almost empty table already takes 10 ms
                found.update(self._dump(ctmsg.dump_matching(members, self._next()), members))
        errors = self._ask([ctmsg.delete_flow(flow, self._next()) for flow in found])
        self._judge(errors)
        return len(found) - errors.count(errno.ENOENT)

    @staticmethod
    def _judge(errors: Iterable[int]) -> None:
        for number in errors:
            if number != errno.ENOENT:
                raise ConntrackError(number, f"cannot delete flows: {os.strerror(number)}")

    def _exchange(self, data: bytes) -> list[nl.Message]:
        try:
            self._sock.send(data)
            return [msg for part in self._sock.drain() for msg in nl.messages(part)]
        except OSError as error:
            raise _broken(error) from None

    def _ask(self, requests: Sequence[bytes]) -> list[int]:
        """Send requests; returns the errno of each one that was refused."""
        answers: list[nl.Message] = []
        for start in range(0, len(requests), _AT_ONCE):
            answers += self._exchange(b"".join(requests[start : start + _AT_ONCE]))
        acks = [nl.ack(msg) for msg in answers if msg.kind == nl.NLMSG_ERROR]
        if len(acks) != len(requests):
            raise ConntrackError(errno.EPROTO, "conntrack did not answer every request")
        return [ack.errno for ack in acks if ack.errno]

    def _dump(self, request: bytes, wanted: Sequence[Match]) -> Iterator[Flow]:
        """Flows that one of the matches means: the kernel may send more."""
        needles = [match.address.packed for match in wanted]
        for data in self._parts(request):
            if any(needle in data for needle in needles):
                flows = map(ctmsg.flow, nl.messages(data))
                yield from (f for f in flows if f and any(f.matches(m) for m in wanted))

    def _parts(self, request: bytes) -> Iterator[bytes]:
        """Datagrams of a dump, to its end."""
        try:
            self._sock.send(request)
            while data := self._sock.receive():
                end = ctmsg.end_of_dump(data)
                if end is not None and end.errno:
                    raise ConntrackError(end.errno, f"cannot list flows: {os.strerror(end.errno)}")
                yield data
                if end is not None:
                    return
            raise ConntrackError(errno.EPROTO, "conntrack's list has no end")
        except ConntrackError:
            raise
        except OSError as error:
            raise _broken(error) from None
        finally:
            self._sock.drain()


def _is_untranslated(flow: Flow, wanted: Collection[tuple[IPAddress, int]]) -> bool:
    end = flow.destination
    udp = end.protocol == Protocol.UDP.number
    return udp and not flow.translated and (end.address, end.port) in wanted


def _broken(error: OSError) -> ConntrackError:
    return ConntrackError(error.errno or errno.EIO, f"conntrack cannot be asked: {error}")
