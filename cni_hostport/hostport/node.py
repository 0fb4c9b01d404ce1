"""What the node looks like to a decision: its addresses and links, frozen.

A view is made by ``host/`` and handed in; nothing here asks the kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from cni_hostport.model import Family, IPAddress, family_of


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """One local address and the link that carries it."""

    address: IPAddress
    link: str


@dataclass(frozen=True)
class NodeView:
    """Every local address of the node but IPv6 link-local ones.

    fe80::/10 is left out on purpose: each pod's veth brings one, nothing can be
    held on it without a zone, and the rules name the prefix itself.
    """

    addresses: frozenset[NodeAddress] = frozenset()

    @classmethod
    def of(cls, pairs: Iterable[tuple[IPAddress, str]]) -> NodeView:
        """Build a view from (address, link name) pairs."""
        return cls(frozenset(NodeAddress(a, link) for a, link in pairs))

    @cached_property
    def _by_family(self) -> dict[Family, tuple[NodeAddress, ...]]:
        ordered = sorted(self.addresses, key=lambda a: (a.address.version, int(a.address)))
        return {f: tuple(a for a in ordered if family_of(a.address) is f) for f in Family}

    def unique(self) -> frozenset[IPAddress]:
        """The addresses without their links."""
        return frozenset(a.address for a in self.addresses)

    def of_family(self, family: Family) -> tuple[NodeAddress, ...]:
        """Addresses of one family, in numeric order."""
        return self._by_family[family]

    def links_of(self, address: IPAddress) -> tuple[str, ...]:
        """Links that carry the address; empty if it is not local."""
        return tuple(a.link for a in self.of_family(family_of(address)) if a.address == address)

    @cached_property
    def _on_links(self) -> dict[tuple[Family, Collection[str]], tuple[IPAddress, ...]]:
        """What was asked: for each port of a pod the same, of the few networks there are."""
        return {}

    def on_links(self, family: Family, links: Iterable[str]) -> tuple[IPAddress, ...]:
        """Addresses of the family that sit on one of the named links."""
        names = links if isinstance(links, tuple) else frozenset(links)
        found = self._on_links.get((family, names))
        if found is None:
            found = tuple([a.address for a in self.of_family(family) if a.link in names])
            self._on_links[family, names] = found
        return found


@dataclass(frozen=True, slots=True)
class PodLink:
    """The node-side link that leads to the pod; ``name`` empty if none was found."""

    name: str = ""
    index: int = 0
    is_bridge: bool = False
    ports: tuple[tuple[int, str], ...] = field(default=())
    """(ifindex, name) of the pod's own ports on that bridge."""
    route_localnet: int | None = field(default=None, compare=False)
    """The link's flag as it was read with the rest; None: nobody looked."""
    hairpin: tuple[int, ...] | None = field(default=None, compare=False)
    """Ports that have the hairpin flag, read likewise."""
