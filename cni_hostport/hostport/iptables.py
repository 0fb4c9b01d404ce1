"""The iptables backend: which rules each attachment wants, kept true in the kernel.

Remembers the wish and turns each change into one restore a family
(``iptkernel.py``). Never rewrites a rule that did not change, and never
touches one that is not ours.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from cni_hostport.errors import HostPortError, NetfilterFailed, TryAgain
from cni_hostport.hostport import iptdiff, iptstep
from cni_hostport.hostport.backend import Repair
from cni_hostport.hostport.iptdiff import Wish
from cni_hostport.hostport.iptkernel import KernelTables, Runner, Toolbox, read
from cni_hostport.hostport.iptplan import NOTHING, Rules
from cni_hostport.hostport.iptscheme import PORTS_SCHEME, Scheme
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Family

log = logging.getLogger(__name__)

ByFamily = Mapping[Family, Rules]


class IptablesBackend:
    """Wanted rules by owner. Not thread-safe: runs under the helper's one lock."""

    def __init__(self, toolbox: Toolbox, scheme: Scheme = PORTS_SCHEME) -> None:
        self.name = scheme.name
        self._scheme = scheme
        self._kernel = KernelTables(toolbox)
        self._owners: dict[Family, dict[str, Rules]] = {f: {} for f in Family}
        self._view = NodeView()
        self._node: ByFamily = {}
        self._node_of: NodeView | None = None
        self._assumed = False
        self._swept = False

    @property
    def in_use(self) -> bool:
        """Whether any attachment wants something."""
        return any(self._owners.values())

    @property
    def runner(self) -> Runner | None:
        """The tools in use, None before the first mapping."""
        return self._kernel.runner

    def rules_of(self, key: str) -> dict[Family, Rules]:
        """What the attachment wants at present."""
        return {f: owners[key] for f, owners in self._owners.items() if key in owners}

    def assume(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Remember what attachments want without touching the kernel (start-up)."""
        self._view = node
        self._remember(self._planned(changes, node))
        self._assumed = self._assumed or self.in_use

    def place(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Make each attachment's rules what it now wants, one restore a family.

        Raises NetfilterFailed (102) or TryAgain (11) with everything as before.
        """
        planned = self._planned(changes, node)
        before = {key: self.rules_of(key) for key in planned}
        self._remember(planned)
        steps = {
            family: iptdiff.joined(
                iptstep.step(before[k].get(family, NOTHING), new.get(family, NOTHING))
                for k, new in planned.items()
            )
            for family in Family
        }
        try:
            self._change({f: step for f, step in steps.items() if step})
        except (NetfilterFailed, TryAgain) as error:
            self._remember(before)
            self._kernel.distrust()
            if type(error) is NetfilterFailed:
                self._put_back()
            raise

    def set_node(self, node: NodeView) -> None:
        """Follow the node's addresses: which are answered, which are excluded.

        Where that fails now the next change or repair does it: a busy lock must
        not fail a call that has nothing to do with these rules.
        """
        if not self.in_use:
            self._view = node
            return
        before, self._view = self._node_rules(), node
        after = self._node_rules()
        steps = {f: iptstep.step(before[f], after[f]) for f in Family}
        try:
            self._change({f: step for f, step in steps.items() if step and self._owners[f]})
        except (NetfilterFailed, TryAgain) as error:
            log.error("cannot follow the node's addresses now: %s", error)
            self._kernel.distrust()

    def _node_rules(self) -> ByFamily:
        """The node's own share, planned only when somebody needs it."""
        if self._node_of is not self._view:
            self._node, self._node_of = self._scheme.node(self._view), self._view
        return self._node

    def _change(self, steps: Mapping[Family, iptdiff.Difference]) -> None:
        if steps:
            self._kernel.change(steps, {f: self._wish(f) for f in steps})

    def _planned(self, changes: Mapping[str, Placed | None], node: NodeView) -> dict[str, ByFamily]:
        return {k: self._scheme.attachment(p, node) if p else {} for k, p in changes.items()}

    def _remember(self, changes: Mapping[str, ByFamily]) -> None:
        for key, rules in changes.items():
            for family, owners in self._owners.items():
                if rules.get(family):
                    owners[key] = rules[family]
                else:
                    owners.pop(key, None)

    def _wish(self, family: Family) -> Wish:
        belief = self._kernel.belief(family)
        return Wish(
            scheme=self._scheme,
            family=family,
            attachments=self._owners[family],
            node=self._node_rules()[family],
            keep_portals=belief.kept,
        )

    def _put_back(self) -> None:
        """After a refused change: whatever part of it was made goes."""
        for family in self._kernel.families:
            try:
                self._mend(family)
            except HostPortError as error:
                log.error("iptables cannot be brought back: %s", error)

    def _mend(self, family: Family) -> iptdiff.Difference:
        return self._kernel.mend(family, self._wish(family), was_ours=self._assumed)

    def repair(self) -> Repair:
        """Compare kernel and wish, and make the kernel follow.

        Raises NetfilterFailed or TryAgain when it cannot.
        """
        report = Repair()
        if not self.in_use:
            self.retire()
            return report
        for family in Family:
            if self._owners[family] or family in self._kernel.families:
                difference = self._mend(family)
                report.missing += len(difference.missing)
                report.foreign += len(difference.surplus)
                report.examples += [*difference.missing[:1], *difference.surplus[:1]]
        self._sweep()
        return report

    def is_verified(self) -> bool:
        """Whether nobody but us changed any rule since all was right; no process runs."""
        return all(self._kernel.is_verified(family) for family in self._kernel.families)

    def _sweep(self) -> None:
        """Once: rules an earlier helper left where this one has none, or in the other flavour."""
        if self._swept:
            return
        for runner in self._kernel.left_behind(self.in_use):
            for family in Family:
                empty = Wish(self._scheme, family)
                if runner.has(family) and self._kernel.clear(runner, family, empty):
                    log.warning("rules of an earlier helper in iptables-%s removed", runner.flavour)
        self._swept = True

    def check(self, key: str) -> list[str]:
        """Names what the attachment misses in the kernel; changes nothing."""
        missing: list[str] = []
        for family, rules in self.rules_of(key).items():
            if not self._kernel.is_verified(family):
                tables, seen = read(self._kernel.tools(), family, iptstep.about(key, rules))
                if seen == self._kernel.belief(family).seen:
                    continue
                wish = self._wish(family)
                alone = Wish(self._scheme, family, {key: rules}, wish.node)
                missing += iptdiff.compare(tables, alone).missing
        return missing

    def retire(self) -> bool:
        """Remove shared chains if no attachment needs them; True if something went."""
        if self.in_use:
            return False
        gone = False
        for family in self._kernel.families:
            kept = self._kernel.belief(family).kept
            empty = Wish(self._scheme, family, keep_portals=kept)
            gone = self._kernel.clear(self._kernel.tools(), family, empty) or gone
            self._kernel.forget(family)
        self._assumed = False
        self._sweep()
        return gone
