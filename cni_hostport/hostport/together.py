"""Attachments of one moment, step by step side by side: one transaction for all of them.

A step done ten times in a row costs two thirds of what it costs between the other steps,
and the kernel is asked once. Decides which ADDs may go together: those that are new and do
not concern each other in any way. All of them succeed, or nothing was done and each is to
be attached by itself, which then finds out whose fault it was.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from cni_hostport.errors import HostPortError
from cni_hostport.hostport import answering
from cni_hostport.hostport.adding import Adding
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.following import Following
from cni_hostport.hostport.holds import PendingChange
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.record import Record
from cni_hostport.model import Attachment, Family, Protocol

log = logging.getLogger(__name__)


def _takes_long(attachment: Attachment) -> bool:
    """Whether its flows have to be looked for in a dump (ARCHITECTURE.md, kernel facts)."""
    return any(c.family is Family.V6 and c.protocol is Protocol.UDP for c in attachment.claims())


@dataclass(frozen=True, slots=True)
class Wish:
    """What one ADD asks of the manager; see ``HostPortManager.attach``."""

    attachment: Attachment
    backend: str = "nftables"
    netns_cookie: int | None = None
    must_be_local: bool = False


class Together(Adding, Following):
    """ADDs of one moment."""

    def apart(self, wishes: Sequence[Wish]) -> int:
        """How many of the first may go together: at least one, in the order in which they came.

        Each is new, none wants what another attachment has or wants, none is of a container
        that another of them is of (those leave ports to each other), all have one backend.
        None has UDP in IPv6: all would wait for each one's flows.
        """
        ports: set[object] = set()
        containers: set[str] = set()
        for count, wish in enumerate(wishes):
            attachment = wish.attachment
            claims = {(c.port, c.protocol) for c in attachment.claims()}
            container = attachment.identity.container_id
            if (
                not claims
                or _takes_long(attachment)
                or wish.backend != wishes[0].backend
                or container in containers
                or not claims.isdisjoint(ports)
                or self.registry.get(attachment.key) is not None
                or self.registry.conflicts(attachment)
            ):
                return max(count, 1)
            ports |= claims
            containers.add(container)
        return len(wishes)

    def attach_together(self, wishes: Sequence[Wish]) -> bool:
        """Make all their host ports work; False: not possible, and nothing was done.

        They have to be ``apart``. Never raises HostPortError.
        """
        try:
            with ExitStack() as undo:
                done = self._put_all(wishes, undo)
                undo.pop_all()
        except HostPortError as error:
            log.debug("%d attachments one by one: %s", len(wishes), error)
            return False
        for record, change in done:
            self._registered(record, change)
        return True

    def _put_all(
        self, wishes: Sequence[Wish], undo: ExitStack
    ) -> list[tuple[Record, PendingChange]]:
        node = self.follow_addresses()
        for wish in wishes:
            answering.check_host_ips(wish.attachment, node, must_be_local=wish.must_be_local)
        changes = [self._hold(wish.attachment, undo) for wish in wishes]
        prepared = [
            self._prepare(w.attachment, w.backend, w.netns_cookie, None, undo) for w in wishes
        ]
        records = [record for record, _ in prepared]
        for record, seen in prepared:
            undo.callback(self._links.release, record)
            self._links.use(record, seen)
        placed = {
            record.key: Placed(record.attachment, record.pod_link(), change.held)
            for record, change in zip(records, changes, strict=True)
        }
        backend = self._backend(records[0])
        undo.callback(self._none_of, backend, placed)
        backend.place(placed, self._node)
        for record in records:
            self._drop_stale_flows(record, None)
        for record in records:
            undo.callback(self._forget_record, record.key)
            self._store_call(self._store.commit, record.key)
        return list(zip(records, changes, strict=True))

    def _none_of(self, backend: Backend, placed: Mapping[str, Placed]) -> None:
        for key in placed:
            self._rules_back(backend, key, None)

    def _forget_record(self, key: str) -> None:
        """Undo of a commit; what cannot be deleted is tried again, as after a DEL."""
        self._undeleted.add(key)
        try:
            self._store.delete(key)
        except OSError as error:
            log.warning("the record of %s stays for now: %s", key, error)
        else:
            self._undeleted.discard(key)
