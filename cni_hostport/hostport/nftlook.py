"""Our nftables chains and rules at one glance, to be compared with what they were: pure.

Decides what makes two looks different and what makes one whole; reads through
the object handed in, and changes nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from cni_hostport.model import Family
from cni_hostport.netfilter import nftprofiles
from cni_hostport.netfilter.nftprofiles import Profile

Snapshot = tuple[Any, ...]


class Tables(Protocol):
    """What a look needs of the kernel."""

    def rules(self, family: Family) -> Sequence[Any]: ...
    def chains(self, family: Family) -> Sequence[Any]: ...
    def has_table(self, family: Family) -> bool: ...


def snapshot(tables: Tables) -> Snapshot | None:
    """Chains and rules of both tables, comparable; None where one is absent."""
    if not all(tables.has_table(f) for f in Family):
        return None
    try:
        return tuple(
            (
                f,
                tuple(sorted((r.chain, n, r.expressions) for n, r in _numbered(rules))),
                tuple(sorted((c.name, c.type, c.hook, c.priority, c.policy) for c in chains)),
            )
            for f in Family
            for rules, chains in [(tables.rules(f), tables.chains(f))]
        )
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        return None


def _numbered(rules: Sequence[Any]) -> list[tuple[int, Any]]:
    """Rules with their place inside their own chain: order is meaning."""
    seen: dict[str, int] = {}
    out = []
    for rule in rules:
        seen[rule.chain] = seen.get(rule.chain, -1) + 1
        out.append((seen[rule.chain], rule))
    return out


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
