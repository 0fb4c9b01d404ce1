"""The chains that attachments share, what leads to them, and the node's own rules: pure.

A ``Scheme`` is one set of chains with its planners. Decides which chain of the
kernel's leads where, and in which place; never which rule an attachment has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.answering import answered_addresses
from cni_hostport.hostport.iptplan import (
    Args,
    Member,
    Rules,
    attachment_rules,
    comment_words,
    original_to,
)
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import DEFAULT_EXCLUDED_LINKS, Family, Options


@dataclass(frozen=True, slots=True)
class Hook:
    """A rule in a chain of the kernel's own that leads to ours."""

    table: str
    chain: str
    args: Args
    first: bool = False
    """Inserted at the top; otherwise appended."""


@dataclass(frozen=True, slots=True)
class Shared:
    """A chain that attachments share, and the hooks that lead to it."""

    table: str
    chain: str
    hooks: tuple[Hook, ...] = ()


@dataclass(frozen=True)
class Scheme:
    """One set of chains with its planners; two schemes never touch each other's."""

    name: str
    attachment: Callable[[Placed, NodeView], Mapping[Family, Rules]]
    node: Callable[[NodeView], Mapping[Family, Rules]]
    shared: Callable[[Family], tuple[Shared, ...]]
    bare: Callable[[Family], tuple[Hook, ...]]
    """Hooks that lead to no chain of ours."""
    mappings: bool
    """Whether it owns ``KUBE-HOSTPORTS`` and the mappings' chains."""
    chains: frozenset[str] = field(default_factory=frozenset)
    comments: frozenset[str] = field(default_factory=frozenset)
    """Chains and comments of its hooks: what it may sweep."""


# what the node itself wants


def node_rules(node: NodeView) -> dict[Family, Rules]:
    """The node's share: which addresses are answered by us (so masqueraded), which never."""
    return {f: Rules(members=tuple(_node_members(f, node))) for f in Family}


def _node_members(family: Family, node: NodeView) -> Iterator[Member]:
    for address in dict.fromkeys(node.on_links(family, DEFAULT_EXCLUDED_LINKS)):
        # ACCEPT in nat: left untranslated, which is what kube-proxy does for these as well
        yield Member("nat", names.EXCLUDED, ("-d", str(address), "-j", "ACCEPT"))
    for prefix in answering_prefixes(family, node):
        yield Member("nat", names.MASQUERADE, original_to(prefix, names.SNAT))


def answering_prefixes(family: Family, node: NodeView) -> Iterator[str]:
    """Original destinations by which a connection is known to be ours."""
    if family is Family.V4:
        yield "127.0.0.0/8"
    for address in answered_addresses(family, Options(), node):
        if not address.is_loopback or family is Family.V6:
            yield str(address)


# chains that are shared, and what leads to them


def shared_chains(family: Family) -> tuple[Shared, ...]:
    """Chains of the host ports' scheme."""
    portals = (
        *comment_words(names.PORTALS_COMMENT),
        *("-m", "addrtype", "--dst-type", "LOCAL", "-j", names.HOSTPORTS),
    )
    translated = (
        *comment_words(names.MASQUERADE_COMMENT),
        *("-m", "conntrack", "--ctstate", "DNAT", "-j", names.MASQUERADE),
    )
    fresh = (
        *comment_words(names.HELD_COMMENT),
        *("-p", "udp", "-m", "conntrack", "--ctstate", "NEW", "-j", names.HELD),
    )
    del family  # the same in both
    return (
        # appended, not inserted: kube-proxy's own translation comes first
        Shared(
            "nat",
            names.HOSTPORTS,
            (Hook("nat", "PREROUTING", portals), Hook("nat", "OUTPUT", portals)),
        ),
        Shared("nat", names.EXCLUDED),
        Shared("nat", names.SNAT),
        # first: a bridge's own ipMasq rules end the chain for traffic between neighbours
        Shared("nat", names.MASQUERADE, (Hook("nat", "POSTROUTING", translated, first=True),)),
        Shared("filter", names.HELD, (Hook("filter", "INPUT", fresh, first=True),)),
    )


def guard_hooks(family: Family) -> tuple[Hook, ...]:
    """route_localnet is on: 127.0.0.0/8 must still not be reachable from outside."""
    if family is Family.V6:
        return ()
    drop = ("!", "-i", "lo", "-d", "127.0.0.0/8", "-j", "DROP")
    return (Hook("raw", "PREROUTING", (*comment_words(names.GUARD_COMMENT), *drop), first=True),)


PORTS_SCHEME = Scheme(
    name="iptables",
    attachment=attachment_rules,
    node=node_rules,
    shared=shared_chains,
    bare=guard_hooks,
    mappings=True,
    chains=frozenset((names.EXCLUDED, names.MASQUERADE, names.SNAT, names.HELD)),
    comments=frozenset((names.MASQUERADE_COMMENT, names.HELD_COMMENT, names.GUARD_COMMENT)),
)
