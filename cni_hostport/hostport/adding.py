"""The steps of an ADD, each with the step that takes it back.

Decides how sockets, record, link flags and rules are put in place and undone;
their order is ``manager.py``'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from cni_hostport.errors import HostPortError, IOFailure
from cni_hostport.hostport import answering
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.holds import PendingChange
from cni_hostport.hostport.managed import Managed
from cni_hostport.hostport.node import PodLink
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.record import Record, link_record
from cni_hostport.model import Attachment

log = logging.getLogger(__name__)


class Adding(Managed):
    """Steps of ``attach``. Each registers its undo before or with its effect."""

    def _hold(self, attachment: Attachment, undo: ExitStack) -> PendingChange:
        change = self.holds.change(
            attachment.key,
            answering.planned_holds(attachment, self._node),
            attachment.options.reserve_ports,
            answering.needs_loopback_scan(attachment, self._node),
        )
        undo.callback(change.undo)
        return change

    def _prepare(
        self,
        attachment: Attachment,
        backend: str,
        cookie: int | None,
        existing: Record | None,
        undo: ExitStack,
    ) -> tuple[Record, PodLink]:
        """The record of what is about to be done, before it is done; the link as it was seen."""
        try:
            link = self._machine.pod_link(attachment)
        except OSError as error:
            raise IOFailure("cannot find the pod's link", str(error)) from error
        record = Record(
            attachment=attachment,
            backend="iptables" if backend == "iptables" else "nftables",
            created=self._machine.now(),
            netns_cookie=cookie,
            link=link_record(link),
            **self._links.plan(attachment, existing, self._node, link),
        )
        undo.callback(self._discard, record.key)
        self._store_call(self._store.prepare, record.key, record.model_dump_json().encode())
        return record, link

    def _discard(self, key: str) -> None:
        try:
            self._store.discard(key)
        except OSError as error:  # never valid, and dropped at the next start
            log.warning("the unfinished record %s stays: %s", key, error)

    @staticmethod
    def _store_call(call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except OSError as error:
            raise IOFailure("cannot write the record", str(error.strerror)) from error

    def _program(
        self,
        record: Record,
        existing: Record | None,
        placed: Placed,
        before: Placed | None,
        seen: PodLink,
        undo: ExitStack,
    ) -> None:
        """Link flags and rules of the new record in place of the existing one's."""
        undo.callback(self._links.release, record, keep=existing)
        self._links.use(record, seen)
        backend = self._backend(record)
        old = self._backend(existing) if existing is not None else backend
        if old is not backend:
            undo.callback(self._rules_back, backend, record.key, None)
        undo.callback(self._rules_back, old, record.key, before)
        backend.place({record.key: placed}, self._node)
        if old is not backend:
            old.place({record.key: None}, self._node)
        if existing is not None:
            # before the commit: a crash in between finds the old record, and its flags come back
            undo.callback(self._flags_back, existing)
            self._links.release(existing, keep=record)

    def _registered(self, record: Record, change: PendingChange) -> None:
        """The end of an ADD that nothing takes back any more."""
        self.registry.put(record)
        self._undeleted.discard(record.key)
        change.keep()

    def _flags_back(self, record: Record) -> None:
        try:
            self._links.use(record)
        except HostPortError as error:  # refresh_links goes on trying
            log.error("%s", error)

    def _rules_back(self, backend: Backend, key: str, placed: Placed | None) -> None:
        """Undo of ``place``; where the kernel refuses, repair goes on trying."""
        try:
            backend.place({key: placed}, self._node)
        except (OSError, HostPortError) as error:
            log.error("rules of %s cannot be put back yet: %s", key, error)
            backend.assume({key: placed}, self._node)

    def _drop_stale_flows(self, record: Record, existing: Record | None) -> None:
        """UDP flows to what is mapped now, and to what the same attachment had before."""
        targets = dict.fromkeys(answering.flow_targets(record.attachment, self._node))
        if existing is not None:
            targets |= dict.fromkeys(answering.flow_targets(existing.attachment, self._node))
        if not targets or (existing is not None and _same_ways(existing, record)):
            return
        try:
            self._machine.drop_udp_to(targets)
            if existing is not None and existing.attachment.addresses != (
                record.attachment.addresses
            ):
                self._drop_flows_from(existing)
        except OSError as error:
            log.warning("stale UDP flows of %s stay: %s", record.attachment.describe(), error)


def _same_ways(one: Record, other: Record) -> bool:
    """Whether every host port leads where it led before: its flows are not stale."""
    before, after = one.attachment, other.attachment
    return (
        before.mappings == after.mappings
        and before.addresses == after.addresses
        and before.options.model_copy({"backend": after.options.backend}) == after.options
    )
