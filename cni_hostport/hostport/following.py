"""Following the node: addresses, links, ports that become free, and a start.

Decides what of the attachments changes when the node does. An answered ADD is
never taken back here: what cannot be held is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from cni_hostport.hostport import answering
from cni_hostport.hostport.managed import Managed
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.record import Record
from cni_hostport.model import DEFAULT_EXCLUDED_LINKS, Family, HostPort, IPAddress, Protocol

log = logging.getLogger(__name__)


class Following(Managed):
    """What happens to attachments without a call."""

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
        if before.unique() != node.unique() or _exclusion(before) != _exclusion(node):
            self._drop_moved_flows(before, node)

    def _drop_moved_flows(self, before: NodeView, node: NodeView) -> None:
        """Drop UDP flows to addresses that have become answered, or are no longer."""
        moved: set[tuple[IPAddress, int]] = set()
        for record in self.registry:
            attachment = record.attachment
            if any(c.protocol is Protocol.UDP for c in attachment.claims()):
                moved |= answering.answered_flows(attachment, before) ^ (
                    answering.answered_flows(attachment, node)
                )
        if not moved:
            return
        try:
            self._machine.drop_udp_to(moved)
        except OSError as error:
            log.warning("UDP flows to addresses that changed stay: %s", error)

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
        for key in self.holds.keys_waiting():
            if ports := self.holds.retry(key):
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

    def links_seem_changed(self, start: int, count: int) -> bool:
        """Whether ``changed_links`` may find something; any thread."""
        return self._links.seem_changed(start, count)

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


def _exclusion(node: NodeView) -> object:
    """What wildcard sockets depend on: where a link is excluded, on every address."""
    excluded = [node.on_links(f, DEFAULT_EXCLUDED_LINKS) for f in Family]
    return (excluded, node.unique()) if any(excluded) else excluded
