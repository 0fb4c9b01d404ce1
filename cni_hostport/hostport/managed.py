"""What the parts of the manager share: its objects, and small steps of several verbs.

Decides nothing. See ``manager.py`` for the whole.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport import answering
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.holds import Holds, Opener
from cni_hostport.hostport.links import LinkKeeper
from cni_hostport.hostport.machine import Machine, Store
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.record import Record
from cni_hostport.hostport.registry import Registry
from cni_hostport.model import Family, Protocol

log = logging.getLogger(__name__)


class Managed:
    """The manager's objects; everything runs under the caller's one lock."""

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

    @property
    def node(self) -> NodeView:
        """The node's addresses as last taken in."""
        return self._node

    def _drop_flows_from(self, record: Record) -> None:
        had_udp = any(c.protocol is Protocol.UDP for c in record.attachment.claims())
        if not had_udp:
            return
        try:
            if self.registry.shares_address(record):
                # flows of the other attachment come from there too: by what was asked for
                self._machine.drop_udp_to(answering.flow_targets(record.attachment, self._node))
            else:
                self._machine.drop_udp_from(a.ip for a in record.attachment.addresses)
        except OSError as error:
            log.warning("UDP flows of %s stay: %s", record.attachment.describe(), error)
