"""Comparing what nftables holds with what is wanted: pure.

Decides when tables are whole, when an element is the wanted one, and whose it
is. The kernel is asked by ``nftables.py``'s objects, never here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cni_hostport.hostport.nftplan import attachment_elements
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.wanted import Owners, Place, first, is_owner
from cni_hostport.model import Family
from cni_hostport.netfilter import nftprofiles
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nftprofiles import Profile

Snapshot = tuple[Any, ...]


def planned(changes: Mapping[str, Placed | None], node: NodeView) -> dict[str, tuple[Element, ...]]:
    """Elements of each attachment as it shall be placed."""
    return {k: attachment_elements(p, node) if p else () for k, p in changes.items()}


def picture(family: Family, rules: Sequence[Any], chains: Sequence[Any]) -> tuple[Any, ...]:
    """One table's rules and chains in a form that can be compared."""
    return (
        family,
        tuple(sorted((r.chain, n, r.expressions) for n, r in _numbered(rules))),
        tuple(sorted((c.name, c.type, c.hook, c.priority, c.policy) for c in chains)),
    )


def _numbered(rules: Sequence[Any]) -> list[tuple[int, Any]]:
    """Rules with their place inside their own chain: order is meaning."""
    seen: dict[str, int] = {}
    out = []
    for rule in rules:
        seen[rule.chain] = seen.get(rule.chain, -1) + 1
        out.append((seen[rule.chain], rule))
    return out


def difference(
    old: Mapping[Place, Element], new: Mapping[Place, Element]
) -> tuple[list[Element], list[Element]]:
    """(to add, to delete), given what the kernel has and shall have for each place."""
    delete = [e for k, e in old.items() if new.get(k) != e]
    add = [e for k, e in new.items() if old.get(k) != e]
    return add, delete


def is_whole(snapshot: Snapshot | None, profiles: Collection[Profile]) -> bool:
    """Whether our chains hold our number of rules, and no hook leads to another chain."""
    if snapshot is None:
        return False
    for family, rules, chains in snapshot:
        wanted = nftprofiles.rule_counts(family, profiles)
        counts = {name: 0 for name, _, hook, *_ in chains if hook is not None or name in wanted}
        for chain, _, _ in rules:
            if chain in counts:
                counts[chain] += 1
        if counts != wanted:
            return False
    return True


def same(found: Element, owners: Owners | None) -> bool:
    """Whether the kernel's element is what one of the owners wants."""
    if owners is None:
        return False
    wanted = first(owners)
    return (
        found.data == wanted.data
        and found.key_end == wanted.key_end
        and is_owner(owners, found.comment)
    )
