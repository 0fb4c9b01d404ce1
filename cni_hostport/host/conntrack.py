"""Stale UDP flows dropped and connections counted, over one open netlink socket.

Decides how the kernel is asked; never which flows are stale. Only ever deletes
flows whose original destination or whose reply source was named: a delete
without a tuple, which would flush the node's table, is never built.

One filtered delete is one walk of the kernel's table (29 ms at 100,000 flows). A
kernel that cannot filter deletes says EINVAL and deletes nothing: then flows are
dumped and deleted one by one.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.model import IPAddress, Protocol
from cni_hostport.netfilter import ctmsg
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.ctmsg import Endpoint, Flow, Match

_AT_ONCE = 64


class ConntrackError(OSError):
    """The kernel's connection tracking cannot be asked; ``errno`` says why."""


class Conntrack:
    """Flows of the network namespace in which it was made. Raises OSError at construction.

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

        Returns the number of flows deleted where the kernel does not filter, else
        the number of requests: it does not say how many it deleted. Raises
        ConntrackError.
        """
        return self._drop([Match("original", Protocol.UDP, a, p) for a, p in dict.fromkeys(pairs)])

    def drop_udp_from(self, addresses: Iterable[IPAddress], port: int | None = None) -> int:
        """Delete UDP flows that one of these (pod) addresses answers, from ``port`` if given.

        Returns and raises as drop_udp_to.
        """
        return self._drop([Match("reply", Protocol.UDP, a, port) for a in dict.fromkeys(addresses)])

    def flows(self, address: IPAddress, port: int, protocol: Protocol) -> int:
        """Number of flows that address:port answers; one walk of the table.

        Raises ConntrackError.
        """
        match = Match("reply", protocol, address, port)
        return sum(1 for flow in self._dump(ctmsg.dump_matching(match, self._next()), [match]))

    def connections(self) -> Counter[Endpoint]:
        """Number of translated flows by who answers them; one walk for all mappings.

        Raises ConntrackError.
        """
        request = ctmsg.dump_translated(self._next())
        return Counter(flow.answerer for flow in self._dump(request, None) if flow.translated)

    def _next(self) -> int:
        self._sequence = (self._sequence + 1) & 0x3FFFFFFF
        return self._sequence

    def _drop(self, matches: Sequence[Match]) -> int:
        if self._filtered:
            errors = self._ask([ctmsg.delete_matching(m, self._next()) for m in matches])
            if errno.EINVAL not in errors:
                self._judge(errors)
                return len(matches)
        dropped = self._drop_singly(matches)
        # known only now: it was the filter that the kernel did not like
        self._filtered = False
        return dropped

    def _drop_singly(self, matches: Sequence[Match]) -> int:
        found = {
            flow
            for match in matches
            for flow in self._dump(ctmsg.dump_matching(match, self._next()), [match])
        }
        errors = self._ask([ctmsg.delete_flow(flow, self._next()) for flow in found])
        self._judge(errors)
        return len(found) - errors.count(errno.ENOENT)

    @staticmethod
    def _judge(errors: Iterable[int]) -> None:
        for number in errors:
            if number != errno.ENOENT:
                raise ConntrackError(number, f"cannot delete flows: {os.strerror(number)}")

    def _ask(self, requests: Sequence[bytes]) -> list[int]:
        """Send requests; returns the errno of each one that was refused."""
        answers: list[bytes] = []
        try:
            for start in range(0, len(requests), _AT_ONCE):
                self._sock.send(b"".join(requests[start : start + _AT_ONCE]))
                answers += self._sock.drain()
        except OSError as error:
            raise _broken(error) from None
        acks = [
            nl.ack(msg)
            for data in answers
            for msg in nl.messages(data)
            if msg.kind == nl.NLMSG_ERROR
        ]
        if len(acks) != len(requests):
            raise ConntrackError(errno.EPROTO, "conntrack did not answer every request")
        return [ack.errno for ack in acks if ack.errno]

    def _dump(self, request: bytes, wanted: Sequence[Match] | None) -> Iterator[Flow]:
        """Flows of a dump, looked at again ourselves: an older kernel does not filter."""
        try:
            self._sock.send(request)
            while data := self._sock.receive():
                for msg in nl.messages(data):
                    if msg.kind in (nl.NLMSG_ERROR, nl.NLMSG_DONE):
                        number = nl.ack(msg).errno
                        if number:
                            raise ConntrackError(number, f"cannot list: {os.strerror(number)}")
                        return
                    flow = ctmsg.flow(msg)
                    if flow and (wanted is None or any(flow.matches(m) for m in wanted)):
                        yield flow
            raise ConntrackError(errno.EPROTO, "conntrack's list has no end")
        except ConntrackError:
            raise
        except OSError as error:
            raise _broken(error) from None
        finally:
            self._sock.drain()


def _broken(error: OSError) -> ConntrackError:
    return ConntrackError(error.errno or errno.EIO, f"conntrack cannot be asked: {error}")
