"""The attachments of this node in memory, and who claims what: pure.

Answers "who has this port?" in constant time. Holds records only; changes
nothing on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from cni_hostport.hostport.record import Record
from cni_hostport.model import Attachment, Family, HostPort, Protocol

_Slot = tuple[Family, Protocol, int]


class Registry:
    """Records by key, with an index of their claims and their links."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._slots: dict[_Slot, dict[str, tuple[HostPort, ...]]] = {}
        self._links: dict[int, set[str]] = {}
        self._addresses: dict[str, set[str]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records.values()))

    def get(self, key: str) -> Record | None:
        """The record of that key, None if there is none."""
        return self._records.get(key)

    def put(self, record: Record) -> None:
        """Add or replace a record."""
        self.drop(record.key)
        self._records[record.key] = record
        for claim in record.attachment.claims():
            slot = self._slots.setdefault(_slot(claim), {})
            slot[record.key] = (*slot.get(record.key, ()), claim)
        if record.route_localnet_found is not None:
            self._links.setdefault(record.link.index, set()).add(record.key)
        for address in record.attachment.addresses:
            self._addresses.setdefault(str(address.ip), set()).add(record.key)

    def drop(self, key: str) -> None:
        """Forget a record; fine if there is none."""
        record = self._records.pop(key, None)
        if record is None:
            return
        for claim in record.attachment.claims():
            slot = self._slots.get(_slot(claim), {})
            slot.pop(key, None)
            if not slot:
                self._slots.pop(_slot(claim), None)
        for users in (self._links.get(record.link.index),):
            if users is not None:
                users.discard(key)
        for address in record.attachment.addresses:
            users = self._addresses.get(str(address.ip), set())
            users.discard(key)
            if not users:
                self._addresses.pop(str(address.ip), None)

    def conflicts(self, attachment: Attachment) -> list[tuple[HostPort, HostPort, Record]]:
        """Claims of others that overlap: (wanted, theirs, their record)."""
        found = []
        for claim in attachment.claims():
            for key, theirs in self._slots.get(_slot(claim), {}).items():
                if key == attachment.key:
                    continue
                for other in theirs:
                    if claim.overlaps(other):
                        found.append((claim, other, self._records[key]))
                        break
        return found

    def route_localnet_found(self, index: int) -> int | None:
        """Value found before our first use of the link, if some record has it."""
        for key in self._links.get(index, ()):
            return self._records[key].route_localnet_found
        return None

    def shares_link(self, record: Record) -> bool:
        """Whether another record needs route_localnet on the same link."""
        return bool(self._links.get(record.link.index, set()) - {record.key})

    def shares_address(self, record: Record) -> bool:
        """Whether another, later attachment has one of this one's pod addresses."""
        return any(
            self._addresses.get(str(a.ip), set()) - {record.key}
            for a in record.attachment.addresses
        )

    def of_network(self, network: str) -> tuple[Record, ...]:
        """Records of one network."""
        return tuple(r for r in self if r.attachment.identity.network == network)


def _slot(claim: HostPort) -> _Slot:
    return (claim.family, claim.protocol, claim.port)
