"""The packet filter's rules of the local DNS cache.

Decides which rules there must be (Kubernetes' node-cache's table, its order
and comments), which of those found in the kernel are ours, what is missing,
misplaced, doubled or left from an older configuration, and the changes that
mend it. Never runs a tool. Only rules that carry one of the two comments are
ever removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from typing import Literal, NamedTuple

from cni_hostport.model import Family
from cni_hostport.netfilter import restore, rulewords
from cni_hostport.netfilter.restore import Rule, Table
from cni_hostport.nodecache.flags import LocalIP

SKIP = "NodeLocal DNS Cache: skip conntrack"
ALLOW = "NodeLocal DNS Cache: allow DNS traffic"
COMMENTS = frozenset({SKIP, ALLOW})
MARK = b"NodeLocal DNS Cache: "
# Set-up writes filter first, so that nothing is untracked that would then be
# dropped; teardown goes the other way. iptables-restore is atomic per table only.
SETUP_ORDER = ("filter", "raw")
TEARDOWN_ORDER = ("raw", "filter")
CHAINS = (("raw", "PREROUTING"), ("raw", "OUTPUT"), ("filter", "INPUT"), ("filter", "OUTPUT"))
_FINAL = frozenset({"ACCEPT", "DROP", "REJECT", "QUEUE", "NFQUEUE", "RETURN", "TPROXY"})
_MAX_DEPTH = 8


class WantedRule(NamedTuple):
    """One rule as the command line would spell it, without its chain."""

    table: str
    chain: str
    args: tuple[str, ...]


@dataclass(frozen=True)
class RuleSet:
    """What the rules depend on. ``socket_match``: only while a server listens."""

    local_ips: tuple[LocalIP, ...]
    port: int
    health_port: int
    accept_health: bool = False
    socket_match: bool = True


def listed(wanted: RuleSet, family: Family) -> tuple[WantedRule, ...]:
    """The rules of a family in upstream's order: the last one ends on top of its chain."""
    found: list[WantedRule] = []
    for local in wanted.local_ips:
        if local.family is family:
            found.extend(_of_address(str(local.address), wanted))
    return tuple(found)


def _of_address(ip: str, wanted: RuleSet) -> Iterable[WantedRule]:
    port, health = str(wanted.port), str(wanted.health_port)
    for table, chain, end in (
        ("raw", "PREROUTING", "-d"),
        ("filter", "INPUT", "-d"),
        ("raw", "OUTPUT", "-s"),
        ("filter", "OUTPUT", "-s"),
        ("raw", "OUTPUT", "-d"),
    ):
        for protocol in ("tcp", "udp"):
            yield _rule(table, chain, protocol, end, ip, port, wanted.socket_match)
    for end in ("-d", "-s"):
        yield _rule("raw", "OUTPUT", "tcp", end, ip, health, False)
    if wanted.accept_health:
        yield from _own_traffic(ip, port, health)


def _own_traffic(ip: str, port: str, health: str) -> Iterable[WantedRule]:
    """What the node itself sends to the cache, and gets from it, over lo.

    Upstream accepts only the half that pods need. Where INPUT drops and lo is
    not accepted, the health check and the node's own questions get no answer.
    """
    for chain, end in (("INPUT", "-s"), ("OUTPUT", "-d")):
        for protocol in ("tcp", "udp"):
            yield _rule("filter", chain, protocol, end, ip, port, False)
    for chain in ("INPUT", "OUTPUT"):
        for end in ("-d", "-s"):
            yield _rule("filter", chain, "tcp", end, ip, health, False)


def _rule(
    table: str, chain: str, protocol: str, end: str, ip: str, port: str, socket_match: bool
) -> WantedRule:
    target, comment = ("NOTRACK", SKIP) if table == "raw" else ("ACCEPT", ALLOW)
    match = ("-p", protocol, end, ip, "--dport" if end == "-d" else "--sport", port)
    # xt_socket is valid in PREROUTING and INPUT only; there it makes pods fall
    # back to the cluster's DNS the moment nobody listens (facts f7).
    socket = ("-m", "socket", "--nowildcard") if socket_match and chain == "PREROUTING" else ()
    return WantedRule(
        table, chain, (*match, *socket, "-j", target, "-m", "comment", "--comment", comment)
    )


@dataclass(frozen=True)
class ChainRepair:
    """What one chain lacks and the changes that mend it, in one transaction of its table."""

    table: str
    chain: str
    why: Literal["missing", "misplaced", "doubled", "stale"]
    delete: tuple[tuple[str, ...], ...]
    insert: tuple[tuple[str, ...], ...]

    def changes(self) -> tuple[restore.Change, ...]:
        """Deletions first, then the whole list prepended in upstream's order."""
        return (
            *(restore.Delete(self.chain, args) for args in self.delete),
            *(restore.Insert(self.chain, args) for args in self.insert),
        )


def accepting(wanted: Sequence[WantedRule]) -> tuple[WantedRule, ...]:
    """The rules that only accept: they lead no packet anywhere, and may stand at any time."""
    return tuple(rule for rule in wanted if rule.table == "filter")


def is_ours(rule: Rule) -> bool:
    """Whether a rule carries one of our comments."""
    return rule.comment in COMMENTS


def plan(tables: Mapping[str, Table], wanted: Sequence[WantedRule]) -> tuple[ChainRepair, ...]:
    """What must change so that each chain begins, in effect, with the wanted rules.

    A chain is left alone when our rules stand in the wanted order, once, and
    nothing above them can decide about their packets.
    """
    found = []
    for table, chain in CHAINS:
        args = tuple(w.args for w in wanted if (w.table, w.chain) == (table, chain))
        repair = _plan_chain(tables.get(table, Table(table)), chain, args)
        if repair is not None:
            found.append(repair)
    return tuple(found)


def _plan_chain(
    table: Table, chain: str, wanted: tuple[tuple[str, ...], ...]
) -> ChainRepair | None:
    rules = table.rules(chain)
    ours = [rule for rule in rules if is_ours(rule)]
    top_down = [rulewords.meaning_of(args) for args in reversed(wanted)]
    present = [rule.meaning for rule in ours]
    why: Literal["missing", "misplaced", "doubled", "stale"]
    if any(meaning not in present for meaning in top_down):
        why = "missing"
    elif any(meaning not in top_down for meaning in present):
        why = "stale"
    elif len(present) > len(top_down):
        why = "doubled"
    elif present != top_down or _shadowed(table, chain):
        why = "misplaced"
    else:
        return None
    return ChainRepair(table.name, chain, why, tuple(rule.args for rule in ours), wanted)


def _shadowed(table: Table, chain: str) -> bool:
    """Whether a rule above one of ours can decide about the packets ours is for."""
    above: list[Rule] = []
    for rule in table.rules(chain):
        if is_ours(rule):
            if any(_takes(table, other, rule, 0) for other in above):
                return True
        else:
            above.append(rule)
    return False


def _takes(table: Table, other: Rule, ours: Rule, depth: int) -> bool:
    if not _may_match(other, ours):
        return False
    target = other.target
    if target is None:
        return False
    if target in _FINAL:
        accepting = table.name == "filter" and target == "ACCEPT"
        return not accepting and not (target == "RETURN" and depth > 0)
    inner = table.chains.get(target)
    if inner is None:
        return False
    if other.value("-g") is not None or depth >= _MAX_DEPTH:
        return True
    return any(_takes(table, rule, ours, depth + 1) for rule in inner.rules)


def _may_match(other: Rule, ours: Rule) -> bool:
    """False only where the two rules certainly never see the same packet."""
    for option in other.options:
        if option.inverted or not option.values:
            continue
        mine = ours.value(option.name)
        if mine is None:
            continue
        theirs = option.values[0]
        if option.name in ("-s", "-d"):
            if ip_address(mine.partition("/")[0]) not in ip_network(theirs, strict=False):
                return False
        elif option.name == "-p":
            if theirs.lower() not in (mine, "all", "0"):
                return False
        elif option.name in ("--dport", "--sport") and not _in_ports(mine, theirs):
            return False
    return True


def _in_ports(port: str, ports: str) -> bool:
    low, colon, high = ports.partition(":")
    if not colon:
        return not ports.isdigit() or port == ports
    return int(low or 0) <= int(port) <= int(high or 65535)


def clean(tables: Mapping[str, Table]) -> tuple[ChainRepair, ...]:
    """The removal of every rule of ours, in whichever chain it stands."""
    found = []
    for table in tables.values():
        for chain in table.chains.values():
            ours = tuple(rule.args for rule in chain.rules if is_ours(rule))
            if ours:
                found.append(ChainRepair(table.name, chain.name, "stale", ours, ()))
    return tuple(found)


def blind_setup(wanted: Sequence[WantedRule]) -> tuple[ChainRepair, ...]:
    """All rules prepended, for a kernel known to hold none of ours."""
    return plan({}, wanted)


def blind_teardown(wanted: Sequence[WantedRule]) -> tuple[ChainRepair, ...]:
    """Each rule removed once, for a kernel known to hold exactly these."""
    found = []
    for table, chain in CHAINS:
        args = tuple(w.args for w in wanted if (w.table, w.chain) == (table, chain))
        if args:
            found.append(ChainRepair(table, chain, "stale", args, ()))
    return tuple(found)


def render(repairs: Sequence[ChainRepair], order: Sequence[str]) -> str:
    """The restore text of repairs, tables in the order given, then any other."""
    names = list(dict.fromkeys((*order, *(r.table for r in repairs))))
    return restore.render(
        (table, [change for r in repairs if r.table == table for change in r.changes()])
        for table in names
    )
