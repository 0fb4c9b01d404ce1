"""The host-port manager: what ADD, DEL, CHECK and GC mean on this node.

Decides the order of effects and how each is undone. ADD is all or nothing:
sockets, then the record, then one netfilter transaction, then stale UDP flows.
DEL is by the record alone. Never touches the machine itself: sockets, rules,
records and links come in as objects, and every method runs under the caller's
one lock.

``add`` and ``remove`` are the interface of Kubernetes' hostport manager;
``attach`` and ``detach`` are the same with everything CNI knows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack

from cni_hostport.errors import (
    HostPortError,
    InvalidConfig,
    IOFailure,
    NetfilterFailed,
    PortInUse,
)
from cni_hostport.hostport import answering
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.holds import Holds, Opener, PendingChange
from cni_hostport.hostport.links import LinkKeeper
from cni_hostport.hostport.machine import Machine, Store
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.podports import PodPortMapping, attachment_of_pod
from cni_hostport.hostport.record import Record, link_record
from cni_hostport.hostport.registry import Registry
from cni_hostport.model import (
    DEFAULT_EXCLUDED_LINKS,
    Attachment,
    Family,
    HostPort,
    Protocol,
    ReservePorts,
    family_of,
)

log = logging.getLogger(__name__)


class HostPortManager:
    """Attachments of one node, with their sockets, rules and records."""

    def __init__(
        self,
        opener: Opener,
        backends: Mapping[str, Backend],
        machine: Machine,
        store: Store,
        families: Iterable[Family] = Family,
    ) -> None:
        self.registry = Registry()
        self.holds = Holds(opener)
        self.backends = dict(backends)
        self._machine = machine
        self._links = LinkKeeper(machine, self.registry)
        self._store = store
        self._families = frozenset(families)
        self._node = NodeView()
        self._undeleted: set[str] = set()

    # hostport_manager.go's interface

    def add(self, id: str, pod: PodPortMapping, nat_interface: str = "") -> None:
        """Map a pod's host ports; nothing is done for a pod on the host network.

        Raises InvalidConfig for a pod IP that is missing or of a family this
        manager does not serve, PortInUse when a port is taken.
        """
        attachment = attachment_of_pod(id, pod, nat_interface)
        if attachment is None:
            return
        wanted = {family_of(a) for a in attachment.addresses}
        if not wanted <= self._families:
            raise InvalidConfig(
                f"pod {attachment.pod}: address family mismatch",
                f"pod address {attachment.addresses[0].ip}, manager serves "
                + ", ".join(f"IPv{int(f)}" for f in sorted(self._families)),
            )
        self.attach(attachment)

    def remove(self, id: str, pod: PodPortMapping | None = None) -> None:
        """Take back what ``add`` did for that id; fine if there is nothing."""
        if pod is not None and pod.host_network:
            return
        for record in self.registry:
            if record.attachment.identity.container_id == id:
                self.detach(record.key)

    # CNI's verbs

    def attach(
        self,
        attachment: Attachment,
        *,
        backend: str = "nftables",
        netns_cookie: int | None = None,
        must_be_local: bool = False,
    ) -> bool:
        """Make the attachment's host ports work; all or nothing.

        Returns False if everything was so already. Raises PortInUse (101),
        InvalidConfig (7), NetfilterFailed (102), TryAgain (11), IOFailure (5).
        """
        existing = self.registry.get(attachment.key)
        if not attachment.claims():
            if existing is not None:
                self.detach(attachment.key)
            return existing is not None
        if existing is not None and _same_content(existing, attachment, backend, netns_cookie):
            return False
        node = self.follow_addresses()
        answering.check_host_ips(attachment, node, must_be_local=must_be_local)
        self._settle_conflicts(attachment)
        with ExitStack() as undo:
            held = self.holds.held(attachment.key)
            change = self._hold(attachment, undo)
            record = self._prepare(attachment, backend, netns_cookie, existing, undo)
            placed = Placed(attachment, record.pod_link(), change.held)
            before = None
            if existing is not None:
                before = Placed(existing.attachment, existing.pod_link(), held)
            self._program(record, existing, placed, before, undo)
            self._drop_stale_flows(record, existing)
            self._store_call(self._store.commit, record.key)
            undo.pop_all()
        self.registry.put(record)
        self._undeleted.discard(record.key)
        change.keep()
        return True

    def detach(self, key: str) -> bool:
        """Take an attachment away by its record; False if there is none.

        Raises NetfilterFailed or TryAgain when its rules cannot be removed; the
        record then stays, so that it can be tried again. IOFailure: all is gone
        but the record's file, which ``retry_deletes`` goes on trying.
        """
        record = self.registry.get(key)
        if record is None:
            if key in self._undeleted:
                self._delete_record(key)
            return False
        self._backend(record).place({key: None}, self._node)
        self._drop_flows_from(record)
        self._links.release(record)
        self.holds.release(key)
        self.registry.drop(key)
        self._delete_record(key)
        return True

    def _delete_record(self, key: str) -> None:
        self._undeleted.add(key)
        try:
            self._store.delete(key)
        except OSError as error:
            raise IOFailure("cannot delete the record", str(error.strerror)) from error
        self._undeleted.discard(key)

    def retry_deletes(self) -> None:
        """Delete the records of detached attachments that could not be deleted then."""
        for key in tuple(self._undeleted):
            with contextlib.suppress(IOFailure):
                self._delete_record(key)

    def check(self, attachment: Attachment) -> list[str]:
        """Names everything that is not as ADD left it; changes nothing."""
        record = self.registry.get(attachment.key)
        if record is None:
            return ["record of the attachment"] if attachment.claims() else []
        missing = self.check_record(record)
        if set(record.attachment.mappings) != set(attachment.mappings):
            missing.append("mappings of the record (they are not the configuration's)")
        for address in record.attachment.addresses:  # a later plugin may have added others
            now = attachment.address(family_of(address))
            if now != address:
                missing.append(f"pod address {address.ip} (prevResult has {now and now.ip})")
        return missing

    def check_record(self, record: Record) -> list[str]:
        """Sockets, rules and sysctl of one record, by name, where they miss."""
        missing = []
        if record.attachment.options.reserve_ports is ReservePorts.REQUIRE:
            wanted = answering.planned_holds(record.attachment, self._machine.node())
            missing = self.holds.missing(record.key, wanted)
        missing += self._backend(record).check(record.key)
        return missing + self._links.check(record)

    def gc(self, network: str, valid: Iterable[tuple[str, str]]) -> list[HostPortError]:
        """Remove attachments of the network that are not among the valid ones.

        ``valid``: (container ID, interface name). Errors are collected; one that
        fails keeps its record and the others still go.
        """
        alive = frozenset(valid)
        errors: list[HostPortError] = []
        for record in self.registry.of_network(network):
            identity = record.attachment.identity
            if (identity.container_id, identity.ifname) in alive:
                continue
            try:
                self.detach(record.key)
            except HostPortError as error:
                errors.append(error)
        return errors

    def dead(self) -> list[Record]:
        """Attachments whose network namespace is gone."""
        return [r for r in self.registry if self._is_gone(r)]

    # steps

    def _settle_conflicts(self, attachment: Attachment) -> None:
        for wanted, _, owner in self.registry.conflicts(attachment):
            if self.registry.get(owner.key) is None:
                continue
            if not self._is_gone(owner):
                raise PortInUse(
                    f"host port {wanted} is in use by {owner.attachment.describe()}",
                    "delete that pod, choose another hostPort or a hostIP of its own",
                    owner="attachment",
                )
            log.warning(
                "taking port %s from %s: its network namespace is gone",
                wanted,
                owner.attachment.describe(),
            )
            self.detach(owner.key)

    def _is_gone(self, record: Record) -> bool:
        state = self._machine.netns_state(record.attachment.netns, record.netns_cookie)
        return state == "gone"

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
    ) -> Record:
        """The record of what is about to be done, before it is done."""
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
        )
        record = self._links.plan(record, existing, self._node)
        undo.callback(self._discard, record.key)
        self._store_call(self._store.prepare, record.key, record.model_dump_json().encode())
        return record

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
        undo: ExitStack,
    ) -> None:
        """Link flags and rules of the new record in place of the existing one's."""
        undo.callback(self._links.release, record, keep=existing)
        self._links.use(record)
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

    def _backend(self, record: Record) -> Backend:
        backend = self.backends.get(record.backend)
        if backend is None:
            raise NetfilterFailed(
                f"the backend of {record.attachment.describe()} does not work on this node",
                f"its rules were made with {record.backend}",
            )
        return backend

    def placed(self, record: Record) -> Placed:
        """The record as backends plan from it."""
        return Placed(record.attachment, record.pod_link(), self.holds.held(record.key))

    def _drop_stale_flows(self, record: Record, existing: Record | None) -> None:
        targets = answering.flow_targets(record.attachment, self._node)
        if not targets or (existing is not None and _same_ways(existing, record)):
            return
        try:
            self._machine.drop_udp_to(targets)
            if existing is not None and existing.attachment.addresses != (
                record.attachment.addresses
            ):
                self._machine.drop_udp_from(a.ip for a in existing.attachment.addresses)
        except OSError as error:
            log.warning("stale UDP flows of %s stay: %s", record.attachment.describe(), error)

    def _drop_flows_from(self, record: Record) -> None:
        had_udp = any(c.protocol is Protocol.UDP for c in record.attachment.claims())
        if not had_udp or self.registry.shares_address(record):
            return
        try:
            self._machine.drop_udp_from(a.ip for a in record.attachment.addresses)
        except OSError as error:
            log.warning("UDP flows of %s stay: %s", record.attachment.describe(), error)

    # following the node

    def follow_addresses(self) -> NodeView:
        """Take in the node's present addresses and follow where they matter."""
        node = self._machine.node()
        if node == self._node:
            return node
        before, self._node = self._node, node
        try:
            self._follow_all(before, node)
        except BaseException:
            self._node = before  # so that the next call follows again
            raise
        return node

    def _follow_all(self, before: NodeView, node: NodeView) -> None:
        for backend in self.backends.values():
            backend.set_node(node)
        # a ptp network brings an address with every pod: only those concerned are looked at
        concerned = self.registry.bound_to_addresses()
        if _exclusion(before) != _exclusion(node):
            concerned = tuple(self.registry)
        for record in concerned:
            self._follow(record)

    def _follow(self, record: Record) -> None:
        self._hold_patiently(record)
        if record.backend in self.backends:
            self._backend(record).place({record.key: self.placed(record)}, self._node)

    def _hold_patiently(self, record: Record) -> None:
        """Hold what can be held: an answered ADD is never taken back."""
        wanted = answering.planned_holds(record.attachment, self._node)
        self.holds.resync(record.key, wanted, record.attachment.options.reserve_ports, patient=True)

    def retry_waiting(self) -> dict[str, frozenset[HostPort]]:
        """Try to hold what could not be held at ADD; returns what was gained."""
        gained = {}
        for key in self.holds.keys():  # noqa: SIM118
            if self.holds.waiting(key) and (ports := self.holds.retry(key)):
                gained[key] = ports
                record = self.registry.get(key)
                if record is not None and record.backend in self.backends:
                    self._backend(record).place({key: self.placed(record)}, self._node)
        return gained

    def restore(self, records: Iterable[Record]) -> None:
        """Take records over at start: sockets re-opened, rules only remembered.

        A socket inherited from an earlier helper is kept (``holds.adopt``
        before this). The caller then runs each backend's ``repair``.
        """
        self._node = self._machine.node()
        by_backend: dict[str, dict[str, Placed | None]] = {name: {} for name in self.backends}
        for record in records:
            self.registry.put(record)
            self._hold_patiently(record)
            if record.backend in by_backend:
                by_backend[record.backend][record.key] = self.placed(record)
            else:
                log.error("no rules for %s: no backend %s here", record.key, record.backend)
        for name, changes in by_backend.items():
            self.backends[name].assume(changes, self._node)

    def undo_unanswered(self, record: Record) -> None:
        """Put back what an ADD did that a crash cut off; its rules go by repair."""
        self._links.release(record, keep=self.registry.get(record.key))
        self._drop_flows_from(record)

    def refresh_links(self, names: Collection[str] | None = None) -> list[str]:
        """Sysctls and hairpin flags put right (of these links alone); says what was not.

        A link that was deleted and made again under its name is taken for the old one.
        """
        mended, strays = self._links.refresh(names)
        for record in strays:
            moved = self._links.moved(record, self._node)
            if moved is None:
                continue
            self.registry.put(moved)
            mended.append(f"link {moved.link.name}, made again")
            try:
                self._store.prepare(moved.key, moved.model_dump_json().encode())
                self._store.commit(moved.key)
            except OSError as error:
                log.warning("record %s stays as it was: %s", moved.key, error)
        return list(dict.fromkeys(mended))

    def changed_links(self, start: int, count: int) -> set[str]:
        """Of ``count`` links in use, from number ``start`` on, those with a changed sysctl."""
        return self._links.changed(start, count)

    def drop_gap_flows(self) -> None:
        """Drop UDP flows that began while rules were missing and so lead nowhere."""
        targets = {
            target
            for record in self.registry
            for target in answering.flow_targets(record.attachment, self._node)
        }
        if not targets:
            return
        try:
            self._machine.drop_udp_untranslated(targets)
        except OSError as error:
            log.warning("UDP flows of the gap stay: %s", error)

    @property
    def node(self) -> NodeView:
        """The node's addresses as last taken in."""
        return self._node


def _same_ways(existing: Record, record: Record) -> bool:
    """Whether every host port leads where it led before: its flows are not stale."""
    old, new = existing.attachment, record.attachment
    return old.addresses == new.addresses and old.mappings == new.mappings


def _same_content(
    existing: Record, attachment: Attachment, backend: str, cookie: int | None
) -> bool:
    return (
        existing.attachment == attachment
        and existing.backend == backend
        and existing.netns_cookie == cookie
    )


def _exclusion(node: NodeView) -> object:
    """What wildcard sockets depend on: where a link is excluded, on every address."""
    excluded = [node.on_links(f, DEFAULT_EXCLUDED_LINKS) for f in Family]
    return (excluded, node.unique()) if any(excluded) else excluded


__all__ = ["HostPortManager", "PodLink", "PodPortMapping"]
