"""The kernel's nf_tables over one open netlink socket: elements written, everything read.

Decides how a transaction is sent and when an answer is complete. Never decides
what should be in a table and never makes chains or rules (``nftcmd.py`` does, as
text). One instance belongs to one thread and to the network namespace in which
it was made.

Kernel facts: a batch is committed, and every refusal queued, when send()
returns. Closing such a socket after a delete blocks for about 8 ms: keep it open.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence

from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.model import Family
from cni_hostport.netfilter import nfelem, nfmsg, nfreply
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.elements import Element, describe
from cni_hostport.netfilter.nfreply import Chain, Rule, SetInfo
from cni_hostport.netfilter.nftrules import TABLE

_READS_AT_ONCE = 64
_DUMP_TRIES = 20
_DUMP_PAUSE = 0.05  # seconds at most between two tries

Failure = tuple[Element, nfmsg.Verb, int]


class NftError(OSError):
    """The kernel refused: nothing was changed, or nothing could be read.

    ``errno`` is the first refusal's; ``failed`` names each refused element with
    "add" or "delete" and its errno (empty when the whole transaction was refused).
    """

    def __init__(self, number: int, words: str, failed: Sequence[Failure] = ()) -> None:
        super().__init__(number, words)
        self.failed = list(failed)


class Nftables:
    """Our two tables in the kernel, IPv4 and IPv6, named ``table``."""

    def __init__(self, table: str = TABLE) -> None:
        self.table = table
        self._sock = NetfilterSocket()
        self._sequence = 0

    @property
    def portid(self) -> int:
        """By this the kernel names our changes in events."""
        return self._sock.portid

    def close(self) -> None:
        """Only for the end of the process: waits about 8 ms after a delete."""
        self._sock.close()

    def apply(self, add: Sequence[Element], delete: Sequence[Element]) -> None:
        """Change elements of both families in one transaction, deletes first.

        Raises NftError with nothing changed: EEXIST for a key that exists
        (whatever its value), ENOENT for one that does not, or a set that is
        missing. Raises ValueError for a comment that is too long.
        """
        if add or delete:
            self._transact(nfmsg.change(self.table, add, delete, self._sequence + 1))

    def empty(self, sets: Iterable[tuple[Family, str]]) -> None:
        """Take every element out of these sets in one transaction. Raises NftError."""
        self._transact(nfmsg.empty(self.table, sets, self._sequence + 1))

    def delete_tables(self) -> None:
        """Remove our tables with all they hold in one transaction; missing ones are well."""
        for _ in range(_DUMP_TRIES):
            present = [family for family in Family if self.has_table(family)]
            if not present:
                return
            try:
                self._transact(nfmsg.delete_tables(self.table, present, self._sequence + 1))
            except NftError as error:
                if error.errno != errno.ENOENT:
                    raise
            else:
                return

    def get(self, elements: Sequence[Element]) -> list[Element | None]:
        """The kernel's element for the key of each given one, None where there is none.

        Cost is flat in the size of the sets. A missing set or table reads as None
        too. Raises NftError for any other refusal.
        """
        found: list[Element | None] = []
        for start in range(0, len(elements), _READS_AT_ONCE):
            found += self._get(elements[start : start + _READS_AT_ONCE])
        return found

    def dump(self, family: Family, set_name: str) -> list[Element]:
        """Every element of a set, as it was at one instant.

        Raises NftError: ENOENT where the set or the table is missing, EAGAIN when
        others change the ruleset faster than it can be read.
        """
        seen = -1
        for turn in range(_DUMP_TRIES):
            found = nfelem.elements(
                self._dump(lambda n: nfmsg.dump_elements(self.table, family, set_name, n))
            )
            # the kernel resizes a hash table some time after a change, and a dump
            # meanwhile loses elements and shows others twice (8,000 different ones of
            # 10,000, and 10,000 in all): as many keys as the set counts must be there.
            # Two dumps that agree prove little (a resize may wait for a busy core, and
            # both lose the same): they have to do only where an older kernel does not count
            keys = len({element.key for element in found})
            count = self._count(family, set_name)
            if keys == len(found) == (seen if count is None else count):
                return found
            seen = keys
            time.sleep(min(0.001 * 2**turn, _DUMP_PAUSE))
        raise _churn()

    def rules(self, family: Family) -> list[Rule]:
        """Rules of our table in order; empty where the table is missing. Raises NftError."""
        return nfreply.rules(self._objects(nfmsg.GETRULE, family), self.table)

    def chains(self, family: Family) -> list[Chain]:
        """Chains of our table; empty where the table is missing. Raises NftError."""
        return nfreply.chains(self._objects(nfmsg.GETCHAIN, family), self.table)

    def sets(self, family: Family) -> list[SetInfo]:
        """Sets and maps of our table; empty where the table is missing. Raises NftError."""
        return nfreply.sets(self._objects(nfmsg.GETSET, family), self.table)

    def has_table(self, family: Family) -> bool:
        """Whether our table of that family exists. Raises NftError."""
        try:
            self._request(nfmsg.get_table(self.table, family, self._next()))
        except NftError as error:
            if error.errno == errno.ENOENT:
                return False
            raise
        return True

    def tables(self) -> list[tuple[int, str]]:
        """(family number, name) of every table there is. Raises NftError."""
        return nfreply.tables(self._dump(nfmsg.dump_tables))

    def generation(self) -> int:
        """Number of the ruleset: as long as it stays the same, nobody changed anything."""
        for msg in self._request(nfmsg.get_generation(self._next())):
            if msg.kind == nfmsg.NEWGEN:
                return nfreply.generation(msg)[0]
        raise NftError(errno.EPROTO, "nf_tables gave no generation")

    def _next(self) -> int:
        self._sequence = (self._sequence + 1) & 0x3FFFFFFF
        return self._sequence

    def _exchange(self, data: bytes) -> list[bytes]:
        """Send a request and take everything that the kernel answered."""
        try:
            self._sock.send(data)
            return self._sock.drain()
        except OSError as error:
            raise _lost(error) from None

    def _transact(self, batch: nfmsg.Batch) -> None:
        self._sequence = (self._sequence + len(batch.steps)) & 0x3FFFFFFF
        try:
            self._sock.send(batch.data)
            answer = self._sock.receive()
            if nl.is_success(answer, batch.last):
                return
            answers = [answer, *self._sock.drain()]
        except OSError as error:
            raise _lost(error) from None
        acks = [
            nl.ack(msg)
            for data in answers
            for msg in nl.messages(data)
            if msg.kind == nl.NLMSG_ERROR and batch.first <= msg.sequence <= batch.last
        ]
        refused = [ack for ack in acks if ack.errno]
        if refused or not acks:
            raise self._refusal(batch, refused)

    def _refusal(self, batch: nfmsg.Batch, refused: Sequence[nl.Ack]) -> NftError:
        if not refused:
            return NftError(errno.EPROTO, "nf_tables did not answer a transaction")
        failed: list[Failure] = []
        for ack in refused:
            step = batch.step(ack.sequence)
            if step is not None:
                bad = nfmsg.bad_elements(batch, ack, self.table)
                failed += [(element, step.verb, ack.errno) for element in bad]
        words = refused[0].text or os.strerror(refused[0].errno)
        if failed:
            element, verb, _ = failed[0]
            more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
            words = f"{words} ({verb} {element.set} {{ {describe(element)} }}{more})"
        return NftError(refused[0].errno, words, failed)

    def _request(self, data: bytes) -> list[nl.Message]:
        answers = [
            msg
            for datagram in self._exchange(data)
            for msg in nl.messages(datagram)
            if msg.sequence == self._sequence
        ]
        for msg in answers:
            if msg.kind == nl.NLMSG_ERROR and (ack := nl.ack(msg)).errno:
                raise NftError(ack.errno, ack.text or os.strerror(ack.errno))
        return answers

    def _get(self, elements: Sequence[Element]) -> list[Element | None]:
        first = self._next()
        self._sequence += len(elements) - 1
        request = b"".join(
            [nfmsg.get_element(self.table, e, first + i) for i, e in enumerate(elements)]
        )
        found: list[Element | None] = [None] * len(elements)
        failure: NftError | None = None
        for data in self._exchange(request):
            for msg in nl.messages(data):
                at = msg.sequence - first
                if not 0 <= at < len(elements):
                    continue
                if msg.kind == nfmsg.NEWSETELEM:
                    found[at] = next(iter(nfelem.message_elements(msg.body)), None)
                elif msg.kind == nl.NLMSG_ERROR:
                    number = nl.ack(msg).errno
                    if number not in (0, errno.ENOENT):
                        what = f"{os.strerror(number)} (get {describe(elements[at])})"
                        failure = NftError(number, what)
        if failure is not None:
            raise failure
        return found

    def _count(self, family: Family, set_name: str) -> int | None:
        for msg in self._request(nfmsg.get_set(self.table, family, set_name, self._next())):
            if msg.kind == nfmsg.NEWSET:
                return nfreply.set_count(msg)
        return None

    def _objects(self, kind: int, family: Family) -> list[bytes]:
        try:
            return self._dump(lambda n: nfmsg.dump_objects(kind, self.table, family, n))
        except NftError as error:
            if error.errno == errno.ENOENT:
                return []
            raise

    def _dump(self, build: Callable[[int], bytes]) -> list[bytes]:
        """A dump during which nobody changed anything: the generation stays the same.

        That the generation is the same in all messages of a dump (their res_id)
        would not do: a change while the last one is filled shows in none.
        """
        for _ in range(_DUMP_TRIES):
            before = nfmsg.get_generation(self._next())
            datagrams = self._exchange(before + build(self._next()))
            end = nfreply.dump_end(datagrams, self._sequence)
            if end.errno:
                raise NftError(end.errno, end.text or os.strerror(end.errno))
            if not end.overtaken and end.generation == self.generation():
                return datagrams
        raise _churn()


def _churn() -> NftError:
    return NftError(errno.EAGAIN, "the ruleset changes faster than it can be read")


def _lost(error: OSError) -> NftError:
    return NftError(error.errno or errno.EIO, f"nf_tables cannot be asked: {error}")
