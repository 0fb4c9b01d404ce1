"""The attachments of this node in memory, and who claims what: pure.

Answers "who has this port?" in constant time. Holds records only; changes
nothing on the machine.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from cni_hostport.hostport.answering import depends_on_addresses
from cni_hostport.hostport.record import Record
from cni_hostport.model import Attachment, Family, HostPort, IPAddress, Protocol

_Slot = tuple[Family, Protocol, int]


K = TypeVar("K", bound=Hashable)


class _Index(Generic[K]):
    """Keys of records by something; mostly one each, so mostly without a container."""

    def __init__(self) -> None:
        self._keys: dict[K, str | dict[str, None]] = {}

    def add(self, at: K, key: str) -> None:
        there = self._keys.get(at)
        if there is None:
            self._keys[at] = key
        elif isinstance(there, dict):
            there[key] = None
        elif there != key:
            self._keys[at] = {there: None, key: None}

    def remove(self, at: K, key: str) -> None:
        there = self._keys.get(at)
        if isinstance(there, dict):
            there.pop(key, None)
            if len(there) == 1:
                self._keys[at] = next(iter(there))
        elif there == key:
            del self._keys[at]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def at(self, at: K) -> tuple[str, ...]:
        there = self._keys.get(at, ())
        return (there,) if isinstance(there, str) else tuple(there)


class Registry:
    """Records by key, with an index of their claims and their links."""

    def __init__(self) -> None:
        self._records: dict[str, Record] = {}
        self._slots: _Index[_Slot] = _Index()
        self._addresses: _Index[IPAddress] = _Index()
        self._ports: _Index[int] = _Index()
        self._links: dict[int, set[str]] = {}
        self._bound: set[str] = set()
        self._yielding: set[str] = set()

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(tuple(self._records.values()))

    def get(self, key: str) -> Record | None:
        """The record of that key, None if there is none."""
        return self._records.get(key)

    def put(self, record: Record) -> None:
        """Add or replace a record."""
        key = record.key
        self.drop(key)
        self._records[key] = record
        if depends_on_addresses(record.attachment):
            self._bound.add(key)
        if record.attachment.yielded:
            self._yielding.add(key)
        for claim in record.attachment.claims():
            self._slots.add(_slot(claim), key)
        if record.route_localnet_found is not None:
            self._links.setdefault(record.link.index, set()).add(key)
        for port, _ in record.link.ports:
            self._ports.add(port, key)
        for address in record.attachment.addresses:
            self._addresses.add(address.ip, key)

    def drop(self, key: str) -> None:
        """Forget a record; fine if there is none."""
        record = self._records.pop(key, None)
        if record is None:
            return
        self._bound.discard(key)
        self._yielding.discard(key)
        for claim in record.attachment.claims():
            self._slots.remove(_slot(claim), key)
        users = self._links.get(record.link.index, set())
        users.discard(key)
        if not users:
            self._links.pop(record.link.index, None)
        for port, _ in record.link.ports:
            self._ports.remove(port, key)
        for address in record.attachment.addresses:
            self._addresses.remove(address.ip, key)

    def conflicts(self, attachment: Attachment) -> list[tuple[HostPort, HostPort, Record]]:
        """Claims of others that overlap: (wanted, theirs, their record)."""
        found = []
        for claim in attachment.claims():
            for key in self._slots.at(_slot(claim)):
                if key == attachment.key:
                    continue
                record = self._records[key]
                theirs = next((c for c in record.attachment.claims() if c.overlaps(claim)), None)
                if theirs is not None:
                    found.append((claim, theirs, record))
        return found

    def route_localnet_found(self, index: int) -> int | None:
        """Value found before our first use of the link, if some record has it."""
        key = next(iter(self._links.get(index, ())), None)
        return None if key is None else self._records[key].route_localnet_found

    def links(self) -> tuple[int, ...]:
        """Links that some record needs route_localnet on."""
        return tuple(self._links)

    def on_link(self, index: int) -> tuple[Record, ...]:
        """Records that need route_localnet on that link, in order of their keys."""
        return tuple(self._records[k] for k in sorted(self._links.get(index, ())))

    @property
    def has_ports(self) -> bool:
        """Whether some pod is behind a bridge port that is known."""
        return bool(self._ports)

    def on_port(self, index: int) -> tuple[Record, ...]:
        """Records of the pod behind that bridge port."""
        return tuple(self._records[k] for k in self._ports.at(index))

    def link_name(self, index: int) -> str:
        """Name of such a link, as it was at ADD."""
        return next((self._records[k].link.name for k in self._links.get(index, ())), "")

    def shares_link(self, record: Record) -> bool:
        """Whether another record needs route_localnet on the same link."""
        users = self._links.get(record.link.index, set())
        return len(users) > (record.key in users)

    def shares_address(self, record: Record) -> bool:
        """Whether another, later attachment has one of this one's pod addresses."""
        key = record.key
        return any(
            other != key
            for address in record.attachment.addresses
            for other in self._addresses.at(address.ip)
        )

    def bound_to_addresses(self) -> tuple[Record, ...]:
        """Records whose rules or sockets name addresses of the node."""
        return tuple(self._records[k] for k in sorted(self._bound))

    def yielding(self, container_id: str = "") -> tuple[Record, ...]:
        """Records that left ports to another of their container; of that one, or all."""
        found = (self._records[k] for k in sorted(self._yielding))
        return tuple(r for r in found if container_id in ("", r.attachment.identity.container_id))

    def of_network(self, network: str) -> tuple[Record, ...]:
        """Records of one network."""
        return tuple(r for r in self if r.attachment.identity.network == network)


def _slot(claim: HostPort) -> _Slot:
    return (claim.family, claim.protocol, claim.port)
