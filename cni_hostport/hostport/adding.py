"""The steps of an ADD, each with the step that takes it back.

Decides in what order sockets, records, link flags and rules are put in place, and how each is
undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

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


@dataclass(frozen=True, slots=True)
class Wish:
    """What one ADD asks of the manager; see ``HostPortManager.attach``."""

    attachment: Attachment
    backend: str = "nftables"
    netns_cookie: int | None = None
    must_be_local: bool = False


@dataclass(slots=True)
class _Step:
    """An ADD under way. ``change`` is there once its ports are held, ``record`` and ``seen``
    (the link as it was read) once it is prepared.

    ``before``: how the existing record, which it takes the place of, was placed.
    """

    wish: Wish
    existing: Record | None
    before: Placed | None
    change: PendingChange = field(init=False)
    record: Record = field(init=False)
    seen: PodLink = field(init=False)


class Adding(Managed):
    """Steps of ``attach``. Each registers its undo before or with its effect."""

    def _put(self, wishes: Sequence[Wish]) -> None:
        """Sockets, records, rules and flows of attachments that nothing speaks against.

        All of them, or an error and nothing. Several have to be new, of one backend, and not
        concern each other (``together.py``).
        """
        steps = []
        for wish in wishes:
            existing = self.registry.get(wish.attachment.key)
            steps.append(_Step(wish, existing, self.placed(existing) if existing else None))
        with ExitStack() as undo:
            for step in steps:
                step.change = self._hold(step.wish.attachment, undo)
            for step in steps:
                self._prepare(step, undo)
            self._program(steps, undo)
            for step in steps:
                self._drop_stale_flows(step.record, step.existing)
            for step in steps:
                self._store_call(self._store.commit, step.record.key)
                undo.callback(self._forget_record, step.record.key)
            undo.pop_all()
        for step in steps:
            self.registry.put(step.record)
            self._undeleted.discard(step.record.key)
            step.change.keep()

    def _hold(self, attachment: Attachment, undo: ExitStack) -> PendingChange:
        change = self.holds.change(
            attachment.key,
            answering.planned_holds(attachment, self._node),
            attachment.options.reserve_ports,
            answering.needs_loopback_scan(attachment, self._node),
        )
        undo.callback(change.undo)
        return change

    def _prepare(self, step: _Step, undo: ExitStack) -> None:
        """The record of what is about to be done, before it is done; the link as it was seen."""
        wish = step.wish
        try:
            step.seen = self._machine.pod_link(wish.attachment)
        except OSError as error:
            raise IOFailure("cannot find the pod's link", str(error)) from error
        step.record = record = Record(
            attachment=wish.attachment,
            backend="iptables" if wish.backend == "iptables" else "nftables",
            created=self._machine.now(),
            netns_cookie=wish.netns_cookie,
            link=link_record(step.seen),
            **self._links.plan(wish.attachment, step.existing, self._node, step.seen),
        )
        undo.callback(self._discard, record.key)
        self._store_call(self._store.prepare, record.key, record.model_dump_json().encode())

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

    def _forget_record(self, key: str) -> None:
        """Undo of the commit of a new record; what cannot be deleted is tried again."""
        self._undeleted.add(key)
        try:
            self._store.delete(key)
        except OSError as error:
            log.warning("the record of %s stays for now: %s", key, error)
        else:
            self._undeleted.discard(key)

    def _program(self, steps: Sequence[_Step], undo: ExitStack) -> None:
        """Link flags and rules of the new records in place of the existing ones'."""
        for step in steps:
            undo.callback(self._links.release, step.record, keep=step.existing)
            self._links.use(step.record, step.seen)
        backend = self._backend(steps[0].record)
        placed: dict[str, Placed | None] = {}
        for step in steps:
            key, old = step.record.key, backend
            if step.existing is not None and (old := self._backend(step.existing)) is not backend:
                undo.callback(self._rules_back, backend, key, None)
            undo.callback(self._rules_back, old, key, step.before)
            placed[key] = Placed(step.wish.attachment, step.record.pod_link(), step.change.held)
        backend.place(placed, self._node)
        for step in steps:
            if step.existing is not None:
                self._replace(step.existing, step.record, backend, undo)

    def _replace(self, existing: Record, record: Record, backend: Backend, undo: ExitStack) -> None:
        """What the existing record had elsewhere goes."""
        old = self._backend(existing)
        if old is not backend:
            old.place({record.key: None}, self._node)
        # before the commit: a crash in between finds the old record, and its flags come back
        undo.callback(self._flags_back, existing)
        self._links.release(existing, keep=record)

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
