"""The pod-side link: route_localnet and hairpin flags, and putting them back.

Decides when a link needs which flag, remembers in the record what was found,
and restores it with the last user. Never touches a link no attachment is on.
"""

from __future__ import annotations

import contextlib
import logging

from cni_hostport.hostport.answering import answers_loopback
from cni_hostport.hostport.machine import Machine
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.record import Record
from cni_hostport.hostport.registry import Registry
from cni_hostport.model import Family

log = logging.getLogger(__name__)


class LinkKeeper:
    """Flags on pod-side links, shared by the attachments on them."""

    def __init__(self, machine: Machine, registry: Registry) -> None:
        self._machine = machine
        self._registry = registry

    def plan(self, record: Record, existing: Record | None, node: NodeView) -> Record:
        """Complete the record with what is found on the link now."""
        found: int | None = None
        index = record.link.index
        if index and answers_loopback(record.attachment, node):
            found = self._registry.route_localnet_found(index)
            if found is None:
                with contextlib.suppress(OSError):
                    found = self._machine.route_localnet(index)
        kept = existing.hairpin_set if existing is not None else ()
        ports = dict.fromkeys([*kept, *self._hairpin_wanted(record)])
        return record.model_copy(
            update={"route_localnet_found": found, "hairpin_set": tuple(ports)}
        )

    def _hairpin_wanted(self, record: Record) -> list[int]:
        """Bridge ports that must send the pod's own frames back and do not yet.

        With br_netfilter the DNAT happens while the frame is still bridged: the
        bridge then drops it, since it would leave by the port it came in on.
        """
        attachment = record.attachment
        if not record.link.ports or not attachment.options.snat:
            return []
        families = {c.family for c in attachment.claims()}
        if not any(self._machine.bridge_netfilter(f) for f in families):
            return []
        wanted = []
        for index, _ in record.link.ports:
            with contextlib.suppress(OSError):
                if not self._machine.hairpin(index):
                    wanted.append(index)
        return wanted

    def use(self, record: Record) -> None:
        """Switch on what the record says is needed; a vanished link is no error."""
        index = record.link.index
        with contextlib.suppress(OSError):
            if record.route_localnet_found == 0:
                self._machine.set_route_localnet(index, 1)
        for port in record.hairpin_set:
            with contextlib.suppress(OSError):
                self._machine.set_hairpin(port, True)

    def release(self, record: Record, keep: Record | None = None) -> None:
        """Put back what the record changed, unless somebody else needs it.

        ``keep``: the record that takes its place, whose flags stay.
        """
        index, found = record.link.index, record.route_localnet_found
        kept = keep is not None and keep.route_localnet_found is not None
        same_link = keep is not None and keep.link.index == index
        if found is not None and not (kept and same_link):
            with contextlib.suppress(OSError):
                if not self._registry.shares_link(record):
                    self._machine.set_route_localnet(index, found)
        still = keep.hairpin_set if keep is not None else ()
        for port in record.hairpin_set:
            if port not in still:
                with contextlib.suppress(OSError):
                    self._machine.set_hairpin(port, False)

    def check(self, record: Record) -> list[str]:
        """Names the flags that are not as they must be."""
        missing = []
        name = record.link.name
        if record.route_localnet_found is not None:
            try:
                if self._machine.route_localnet(record.link.index) != 1:
                    missing.append(f"sysctl net.ipv4.conf.{name}.route_localnet = 1")
            except OSError:
                missing.append(f"link {name}")
        missing.extend(
            f"hairpin flag of bridge port {dict(record.link.ports).get(index, index)}"
            for index in self._hairpin_wanted(record)
        )
        return missing

    def refresh(self) -> list[str]:
        """Put right flags somebody changed; returns what was mended, by name."""
        mended: list[str] = []
        seen: set[int] = set()
        for record in self._registry:
            index = record.link.index
            if record.route_localnet_found is not None and index not in seen:
                seen.add(index)
                with contextlib.suppress(OSError):
                    if self._machine.route_localnet(index) != 1:
                        self._machine.set_route_localnet(index, 1)
                        mended.append(f"net.ipv4.conf.{record.link.name}.route_localnet")
            for port in self._hairpin_wanted(record) if record.link.ports else ():
                with contextlib.suppress(OSError):
                    self._machine.set_hairpin(port, True)
                    mended.append(f"hairpin of port {dict(record.link.ports)[port]}")
        return mended


def families_of(record: Record) -> tuple[Family, ...]:
    """Families the record's attachment claims ports in."""
    return tuple(sorted({c.family for c in record.attachment.claims()}))
