"""What an iptables-save lacks, or has too much of, against what is wanted: pure.

``compare`` is the whole of repair, installation, retirement and CHECK: a
difference by parsed meaning, as changes that make it good. Never proposes to
touch a rule that is not ours: ours are the names of the scheme, mapping chains
whose first rule names an owner, and jumps to either.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.iptplan import NOTHING, Args, Jump, Rules
from cni_hostport.hostport.iptscheme import Hook, Scheme, Shared
from cni_hostport.model import Family
from cni_hostport.netfilter import restore, rulewords
from cni_hostport.netfilter.restore import Change, Rule, Table

TABLES = ("raw", "mangle", "filter", "nat")
"""Order of a restore: what protects comes before what translates."""

Place = tuple[str, str]
"""Table and chain."""


@dataclass(frozen=True)
class Wish:
    """Everything wanted in one family: rules by owner, and whether it is to be there at all.

    ``keep_portals``: KUBE-HOSTPORTS was there before us and stays.
    """

    scheme: Scheme
    family: Family
    attachments: Mapping[str, Rules] = field(default_factory=dict)
    node: Rules = NOTHING
    keep_portals: bool = False

    @functools.cached_property
    def shared(self) -> tuple[Shared, ...]:
        """Shared chains that must be there."""
        return self.scheme.shared(self.family) if self.attachments else ()

    def hooks(self) -> Iterator[Hook]:
        """Hooks that must be there."""
        if self.attachments:
            yield from self.scheme.bare(self.family)
        for shared in self.shared:
            yield from shared.hooks

    def rules(self) -> Iterator[Rules]:
        """Rules of every owner; the node's only while an attachment is there."""
        if self.attachments:
            yield self.node
            yield from self.attachments.values()


@dataclass
class Difference:
    """Changes that make the kernel what is wanted, and their number."""

    new: list[tuple[str, Change]] = field(default_factory=list)
    drop: list[tuple[str, Change]] = field(default_factory=list)
    add: list[tuple[str, Change]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.new or self.drop or self.add)

    def blocks(self) -> list[tuple[str, list[Change]]]:
        """The changes by table, in the order in which they are to be restored."""
        steps = (*self.new, *self.drop, *self.add)
        return [(t, [c for table, c in steps if table == t]) for t in TABLES]


@functools.lru_cache(maxsize=8192)
def meaning(args: Args) -> rulewords.Meaning:
    """What wanted words mean, parsed once."""
    return rulewords.meaning_of(args)


def is_jump(found: Rule, jump: Jump) -> bool:
    """Whether a rule found is that jump; the user's conditions may be spelled anew by the tool."""
    if not jump.conditions:
        return found.meaning == meaning(jump.args)
    count = len(jump.conditions)
    base = meaning((*jump.args[: -2 - count], *jump.args[-2:]))
    return found.meaning > base


def owner_of_chain(rules: Sequence[Rule]) -> str | None:
    """Key of the attachment a mapping's chain belongs to, None for a chain of somebody else."""
    return names.owner_of(rules[0].comment) if rules else None


def compare(tables: Mapping[str, Table], wish: Wish) -> Difference:
    """The whole difference in one family."""
    out = Difference()
    for shared in wish.shared:
        if shared.chain not in table_of(tables, shared.table).chains:
            out.new.append((shared.table, restore.NewChain(shared.chain)))
            out.missing.append(f"chain {shared.chain}")
    _hooks(tables, wish, out)
    _members(tables, wish, out)
    if wish.scheme.mappings:
        _chains(tables, wish, out)
        _jumps(tables, wish, out)
        _portals(tables, wish, out)
    _sweep(tables, wish, out)
    return out


def table_of(tables: Mapping[str, Table], name: str) -> Table:
    """A table of the save; an empty one where it is absent."""
    return tables.get(name) or Table(name)


def _rule(chain: str, rule: Rule | Args) -> str:
    args = rule.args if isinstance(rule, Rule) else rule
    return f"rule of {chain}: {' '.join(args)}"


def _hooks(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    wanted = list(wish.hooks())
    for hook in wanted:
        there = [
            r
            for r in table_of(tables, hook.table).rules(hook.chain)
            if r.meaning == meaning(hook.args)
        ]
        if not there:
            kind = restore.Insert if hook.first else restore.Append
            out.add.append((hook.table, kind(hook.chain, hook.args)))
            out.missing.append(_rule(hook.chain, hook.args))
        for double in there[1:]:
            out.drop.append((hook.table, restore.Delete(hook.chain, double.args)))
            out.surplus.append(_rule(hook.chain, double))
    places = {(h.table, h.chain, meaning(h.args)) for h in wanted}
    for table in tables.values():
        for chain in table.chains.values():
            for rule in chain.rules if chain.policy is not None else ():
                ours = rule.comment in wish.scheme.comments or rule.target in wish.scheme.chains
                if ours and (table.name, chain.name, rule.meaning) not in places:
                    out.drop.append((table.name, restore.Delete(chain.name, rule.args)))
                    out.surplus.append(_rule(chain.name, rule))


def _members(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    wanted: dict[Place, list[Args]] = {(s.table, s.chain): [] for s in wish.shared}
    for rules in wish.rules():
        for member in rules.members:
            if (member.table, member.chain) in wanted:
                wanted[member.table, member.chain].append(member.args)
    for (table, chain), members in wanted.items():
        if chain == names.HOSTPORTS:
            continue
        left = Counter(meaning(args) for args in members)
        for rule in table_of(tables, table).rules(chain):
            if left[rule.meaning] > 0:
                left[rule.meaning] -= 1
            else:
                out.drop.append((table, restore.Delete(chain, rule.args)))
                out.surplus.append(_rule(chain, rule))
        for args in members:
            if left[meaning(args)] > 0:
                left[meaning(args)] -= 1
                out.add.append((table, restore.Append(chain, args)))
                out.missing.append(_rule(chain, args))


def _chains(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    """Chains of mappings: each exactly as wanted, filled anew in one step otherwise."""
    nat = table_of(tables, "nat")
    for rules in wish.attachments.values():
        for name, wanted in rules.chains:
            found = [rule.meaning for rule in nat.rules(name)]
            if found == [meaning(args) for args in wanted]:
                continue
            out.new.append(("nat", restore.NewChain(name)))
            out.add.extend(("nat", restore.Append(name, args)) for args in wanted)
            word = "rules of chain" if name in nat.chains else "chain"
            out.missing.append(f"{word} {name}")


def _jumps(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    """For each port our jumps come first, in order, and once."""
    wanted: dict[tuple[str, str], list[Jump]] = {}
    for rules in wish.attachments.values():
        for jump in rules.jumps:
            wanted.setdefault((jump.protocol, str(jump.port)), []).append(jump)
    ours = {jump.target for jumps in wanted.values() for jump in jumps}
    found: dict[tuple[str, str], list[Rule]] = {}
    for rule in table_of(tables, "nat").rules(names.HOSTPORTS):
        slot = (rule.value("-p") or "", rule.value("--dport") or "")
        if slot in wanted:
            found.setdefault(slot, []).append(rule)
        elif rule.target in ours:
            out.drop.append(("nat", restore.Delete(names.HOSTPORTS, rule.args)))
            out.surplus.append(_rule(names.HOSTPORTS, rule))
    for slot, jumps in wanted.items():
        there = found.get(slot, [])
        mine = [rule for rule in there if rule.target in ours]
        in_place = mine == there[: len(mine)] and len(mine) == len(jumps)
        if in_place and all(is_jump(r, j) for r, j in zip(mine, jumps, strict=True)):
            continue
        for rule in mine:
            out.drop.append(("nat", restore.Delete(names.HOSTPORTS, rule.args)))
            if not any(is_jump(rule, j) for j in jumps):
                out.surplus.append(_rule(names.HOSTPORTS, rule))
        for jump in reversed(jumps):
            out.add.append(("nat", restore.Insert(names.HOSTPORTS, jump.args)))
            out.missing.append(_rule(names.HOSTPORTS, jump.args))


def _stale(tables: Mapping[str, Table], wish: Wish) -> list[str]:
    """Mapping chains with our mark that nobody wants."""
    wanted = {name for rules in wish.attachments.values() for name, _ in rules.chains}
    return [
        chain.name
        for chain in table_of(tables, "nat").chains.values()
        if chain.name.startswith(names.MAPPING_PREFIX)
        and chain.name not in wanted
        and owner_of_chain(chain.rules) is not None
    ]


def _portals(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    """Stale mappings go; KUBE-HOSTPORTS goes once it is empty and nobody needs it."""
    nat, stale = table_of(tables, "nat"), set(_stale(tables, wish))
    left = 0
    for rule in nat.rules(names.HOSTPORTS):
        if rule.target in stale:
            out.drop.append(("nat", restore.Delete(names.HOSTPORTS, rule.args)))
            out.surplus.append(_rule(names.HOSTPORTS, rule))
        else:
            left += 1
    for chain in sorted(stale):
        remove_chain("nat", chain, out)
    if wish.shared or left or wish.keep_portals or names.HOSTPORTS not in nat.chains:
        return
    leads = [
        (c.name, r) for c in nat.chains.values() for r in c.rules if r.target == names.HOSTPORTS
    ]
    usual = {meaning(h.args) for s in wish.scheme.shared(wish.family) for h in s.hooks}
    if all(rule.meaning in usual for _, rule in leads):
        for chain, rule in leads:
            out.drop.append(("nat", restore.Delete(chain, rule.args)))
            out.surplus.append(_rule(chain, rule))
        # every rule of it is deleted by now, and no flush may follow: iptables-nft 1.8.9
        # then forgets the deletes, and their targets are "busy"
        out.drop.append(("nat", restore.DeleteChain(names.HOSTPORTS)))
        out.surplus.append(f"chain {names.HOSTPORTS}")


def _sweep(tables: Mapping[str, Table], wish: Wish, out: Difference) -> None:
    """Shared chains of the scheme that are not wanted; what leads to them is gone by now."""
    needed = {s.chain for s in wish.shared}
    for table in tables.values():
        gone = [c for c in table.chains if c in wish.scheme.chains and c not in needed]
        for chain in gone:
            out.drop.append((table.name, restore.Flush(chain)))
        for chain in gone:
            out.drop.append((table.name, restore.DeleteChain(chain)))
            out.surplus.append(f"chain {chain}")


def remove_chain(table: str, chain: str, out: Difference) -> None:
    """Empty a chain that nobody jumps to any more, and drop it."""
    out.drop.append((table, restore.Flush(chain)))
    out.drop.append((table, restore.DeleteChain(chain)))
    out.surplus.append(f"chain {chain}")


def joined(differences: Iterable[Difference]) -> Difference:
    """Several differences as one."""
    out = Difference()
    for one in differences:
        out.new += one.new
        out.drop += one.drop
        out.add += one.add
        out.missing += one.missing
        out.surplus += one.surplus
    return out
