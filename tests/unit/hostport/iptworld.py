"""iptables in memory: save prints as the tool does, restore is all or nothing a table.

Refuses what iptables-restore refuses: a jump to a chain that is not there, a
rule to delete that is not there, a chain to remove that is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from cni_hostport.errors import NetfilterFailed
from cni_hostport.model import Family
from cni_hostport.netfilter import restore, rulewords

HOOKS = {
    "raw": ("PREROUTING", "OUTPUT"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
}
TARGETS = {"ACCEPT", "DROP", "RETURN", "DNAT", "MASQUERADE", "REJECT", "MARK"}
FIRST = ("-s", "-d", "-i", "-o", "-p")

Chains = dict[str, list[tuple[str, ...]]]


def spelled(args: tuple[str, ...]) -> tuple[str, ...]:
    """A rule as iptables-save writes it: addresses and protocol first, masks added."""
    front: list[str] = []
    back: list[str] = []
    for option in rulewords.parse_options(args):
        values = list(option.values)
        if option.name in ("-s", "-d") and "/" not in values[0]:
            values[0] += "/128" if ":" in values[0] else "/32"
        words = [*(["!"] if option.inverted else []), option.name, *values]
        (front if option.name in FIRST else back).extend(words)
    return (*front, *back)


@dataclass
class Kernel:
    """Tables of one net namespace; ``generation`` grows with every commit."""

    tables: dict[Family, dict[str, Chains]] = field(
        default_factory=lambda: {
            f: {t: {c: [] for c in chains} for t, chains in HOOKS.items()} for f in Family
        }
    )
    generation: int = 1

    def rules(self, family: Family, table: str, chain: str) -> list[str]:
        """Rules of a chain as text."""
        return [restore.join(r) for r in self.tables[family][table].get(chain, [])]

    def chains(self, family: Family, table: str) -> set[str]:
        """Chains that somebody made."""
        return set(self.tables[family][table]) - set(HOOKS[table])

    def every_rule(self) -> Iterator[tuple[Family, str, str, int]]:
        """Place of every rule there is."""
        for family, tables in self.tables.items():
            for table, chains in tables.items():
                for chain, rules in chains.items():
                    for number in range(len(rules)):
                        yield family, table, chain, number


class Runner:
    """Tools of a flavour on that kernel; counts runs, fails on order."""

    def __init__(self, kernel: Kernel, flavour: str = "nft") -> None:
        self.kernel = kernel
        self.flavour = flavour
        self.saves = 0
        self.restores: list[str] = []
        self.failures: list[Exception] = []
        self.missing: set[Family] = set()

    def has(self, family: Family) -> bool:
        return family not in self.missing

    def generation(self) -> int | None:
        return self.kernel.generation if self.flavour == "nft" else None

    def _may_fail(self, family: Family) -> None:
        if family in self.missing:
            raise NetfilterFailed("ip6tables is not installed on this node")

    def save(self, family: Family) -> str:
        self._may_fail(family)
        self.saves += 1
        lines = ["# by hand"]
        for name, chains in self.kernel.tables[family].items():
            lines.append(f"*{name}")
            lines += [f":{c} {'ACCEPT' if c in HOOKS[name] else '-'} [7:42]" for c in chains]
            for chain, rules in chains.items():
                lines += [restore.join(("-A", chain, *spelled(r))) for r in rules]
            lines.append("COMMIT")
        return "\n".join(lines) + "\n"

    def restore(self, family: Family, text: str) -> None:
        self._may_fail(family)
        self.restores.append(text)
        if self.failures:
            failure = self.failures.pop(0)
            if failure.args[0]:
                raise failure
        tables = self.kernel.tables[family]
        name, work = "", {}
        self._no_flush_after_delete(text)
        for line in text.splitlines():
            if line.startswith("*"):
                name, work = line[1:], {c: list(r) for c, r in tables[line[1:]].items()}
            elif line == "COMMIT":
                self._check(work)
                if work != tables[name]:
                    self.kernel.generation += 1
                tables[name] = work
            else:
                self._line(line, work)

    def _no_flush_after_delete(self, text: str) -> None:
        """iptables-nft 1.8.9 loses the deletes of a chain that is flushed later on."""
        deleted: set[str] = set()
        for line in text.splitlines():
            verb, _, rest = line.partition(" ")
            chain = rest.split()[0] if rest else ""
            deleted = deleted | {chain} if verb == "-D" else deleted
            assert not (verb == "-F" and chain in deleted), text

    def _line(self, line: str, work: Chains) -> None:
        if line.startswith(":"):
            work[restore.split(line[1:])[0]] = []
            return
        verb, chain, *words = restore.split(line)
        args = tuple(words)
        if chain not in work:
            raise NetfilterFailed("iptables refused the rules", f"no chain {chain}: {line}")
        if verb == "-A":
            work[chain].append(args)
        elif verb == "-I":
            place = int(args[0]) - 1 if args[0].isdecimal() else 0
            work[chain].insert(place, args[1:] if args[0].isdecimal() else args)
        elif verb == "-D":
            meaning = rulewords.meaning_of(args)
            for number, rule in enumerate(work[chain]):
                if rulewords.meaning_of(rule) == meaning:
                    del work[chain][number]
                    return
            raise NetfilterFailed("iptables refused the rules", f"no such rule: {line}")
        elif verb == "-F":
            work[chain] = []
        elif verb == "-X":
            if work[chain] or any(_target(r) == chain for rules in work.values() for r in rules):
                raise NetfilterFailed("iptables refused the rules", f"chain in use: {line}")
            del work[chain]
        else:
            raise AssertionError(line)

    def _check(self, work: Chains) -> None:
        for rules in work.values():
            for rule in rules:
                target = _target(rule)
                if target is not None and target not in TARGETS and target not in work:
                    raise NetfilterFailed(
                        "iptables refused the rules", f"Chain '{target}' does not exist"
                    )


def _target(args: tuple[str, ...]) -> str | None:
    return restore.Rule(args).target


class Toolbox:
    """One flavour in use, others that may hold something of ours."""

    def __init__(self, runner: Runner, *others: Runner) -> None:
        self.runner = runner
        self.others = others
        self.choices = 0

    def choose(self) -> Runner:
        self.choices += 1
        return self.runner

    def left_behind(self, chosen: object) -> list[Runner]:
        everybody = (self.runner, *self.others)
        return [
            r
            for r in everybody
            if r is not chosen
            and any(
                c.startswith("HOSTPORT-MANAGER-")
                for tables in r.kernel.tables.values()
                for chains in tables.values()
                for c in chains
            )
        ]
