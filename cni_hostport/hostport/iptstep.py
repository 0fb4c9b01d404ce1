"""Small questions about iptables rules: the step of one owner, and chains of others. Pure.

``step`` is the short way from what an owner had to what it wants, without
reading the kernel; ``iptdiff.compare`` is the long one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.iptdiff import Difference, owner_of_chain, remove_chain, table_of
from cni_hostport.hostport.iptplan import Args, Rules
from cni_hostport.netfilter import restore
from cni_hostport.netfilter.restore import Change, Table


def step(old: Rules, new: Rules) -> Difference:
    """Changes from one state of an owner to the next; right only if the first is in the kernel."""
    out = Difference()
    before, after = dict(old.chains), dict(new.chains)
    if old.jumps != new.jumps:
        out.drop += [("nat", restore.Delete(names.HOSTPORTS, j.args)) for j in old.jumps]
        out.add += [("nat", restore.Insert(names.HOSTPORTS, j.args)) for j in reversed(new.jumps)]
    for name in before:
        if name not in after:
            remove_chain("nat", name, out)
    filled: list[tuple[str, Change]] = []
    for name, rules in after.items():
        if before.get(name) != rules:
            out.new.append(("nat", restore.NewChain(name)))
            filled += [("nat", restore.Append(name, args)) for args in rules]
    out.add = [*filled, *out.add]
    had, has = dict.fromkeys(old.members), dict.fromkeys(new.members)
    out.drop += [(m.table, restore.Delete(m.chain, m.args)) for m in had if m not in has]
    out.add += [(m.table, restore.Append(m.chain, m.args)) for m in has if m not in had]
    return out


def about(key: str, rules: Rules) -> Callable[[str], bool]:
    """Whether a line of iptables-save has to do with this attachment, or with what all share.

    Cheaper by far than parsing the line: a node may have ten thousand of others.
    """
    mine = (names.owner_comment(key), *(name for name, _ in rules.chains))
    ports = tuple(f" --dport {jump.port} " for jump in rules.jumps)

    def is_about(line: str) -> bool:
        if any(word in line for word in mine):
            return True
        if line.startswith(f"-A {names.HOSTPORTS} "):
            return any(port in line for port in ports)
        return not line.startswith(f"-A {names.MAPPING_PREFIX}") and names.MARKER not in line

    return is_about


@dataclass(frozen=True, slots=True)
class ForeignJump:
    """A jump to a mapping that an earlier manager left, or another one keeps; in ``parent``."""

    protocol: str
    port: int
    chain: str
    comment: str
    args: Args
    target: str = ""
    parent: str = names.HOSTPORTS


def foreign_jumps(tables: Mapping[str, Table]) -> list[ForeignJump]:
    """Mappings of others with this naming, in the order in which they apply."""
    nat, out = table_of(tables, "nat"), []
    for rule in nat.rules(names.HOSTPORTS):
        chain, port = rule.target or "", rule.value("--dport") or ""
        if not chain.startswith(names.MAPPING_PREFIX) or not port.isdecimal():
            continue
        rules = nat.rules(chain)
        if owner_of_chain(rules) is not None:
            continue
        target = next((v for r in rules if (v := r.value("--to-destination"))), "")
        protocol, words = rule.value("-p") or "", rule.comment or ""
        out.append(ForeignJump(protocol, int(port), chain, words, rule.args, target))
    return out
