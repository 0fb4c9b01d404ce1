"""openForward for either backend: a backend with FORWARD rules at its side.

Decides that connections are let through before they are translated, and that
nothing is done for attachments that did not ask. The rules go to every flavour
of iptables that has a FORWARD chain, since any of them can drop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from cni_hostport.errors import HostPortError
from cni_hostport.hostport.backend import Backend, Repair
from cni_hostport.hostport.iptables import IptablesBackend
from cni_hostport.hostport.iptforward import FORWARD_SCHEME, forward_rules
from cni_hostport.hostport.iptkernel import Runner
from cni_hostport.hostport.iptplan import Rules
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Family


class Filters(Protocol):
    """Which flavours filter forwarded packets on this node (``helper/iptools.py``)."""

    def filtering(self) -> Mapping[str, frozenset[Family]]:
        """Families in which each flavour has a FORWARD chain now; no process runs."""

    def fixed(self, flavour: str) -> Runner:
        """Tools of a flavour. Raises NetfilterFailed where they are missing."""


class _Fixed:
    """A toolbox with one flavour in it."""

    def __init__(self, filters: Filters, flavour: str) -> None:
        self._filters = filters
        self._flavour = flavour

    def choose(self) -> Runner:
        return self._filters.fixed(self._flavour)

    def left_behind(self, chosen: Runner | None) -> Iterable[Runner]:
        del chosen
        return ()


class ForwardRules:
    """FORWARD rules in each flavour that filters, whoever translates."""

    def __init__(self, filters: Filters) -> None:
        self._filters = filters
        self._active: dict[str, frozenset[Family]] = {}
        self._wanted: dict[str, Placed] = {}
        self._node = NodeView()
        self._sides = {name: self._side(name) for name in ("nft", "legacy")}

    def _side(self, flavour: str) -> IptablesBackend:
        def planned(placed: Placed, node: NodeView) -> dict[Family, Rules]:
            families = self._active.get(flavour, frozenset())
            return {f: r for f, r in forward_rules(placed, node).items() if f in families}

        scheme = replace(FORWARD_SCHEME, attachment=planned)
        return IptablesBackend(_Fixed(self._filters, flavour), scheme)

    @property
    def in_use(self) -> bool:
        """Whether any attachment asked for it."""
        return bool(self._wanted)

    def concerns(self, changes: Mapping[str, Placed | None]) -> bool:
        """Whether any of them asks for it, or might have asked before."""
        return self.in_use or any(
            p is not None and p.attachment.options.open_forward for p in changes.values()
        )

    def wanted(self, owner: str) -> Placed | None:
        """What was last asked for under that name."""
        return self._wanted.get(owner)

    def _note(self, changes: Mapping[str, Placed | None]) -> dict[str, Placed | None]:
        """The changes that concern us: one that asks, or asked before."""
        mine: dict[str, Placed | None] = {}
        for owner, placed in changes.items():
            if placed is not None and placed.attachment.options.open_forward:
                mine[owner] = self._wanted[owner] = placed
            elif self._wanted.pop(owner, None) is not None:
                mine[owner] = None
        return mine

    def assume(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Remember without touching the kernel."""
        self._node = node
        if mine := self._note(changes):
            self._active = dict(self._filters.filtering())
            for side in self._sides.values():
                side.assume(mine, node)

    def place(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Let through what these attachments translate. Raises NetfilterFailed, TryAgain."""
        before = {owner: self._wanted.get(owner) for owner in changes}
        mine = self._note(changes)
        if not mine:
            return
        try:
            self._follow_filters()
            for side in self._sides.values():
                side.place(mine, node)
        except HostPortError:
            self._note(before)
            raise
        if not self.in_use:
            self.retire()

    def _follow_filters(self) -> None:
        """A firewall may have come since: every attachment's rules go there as well."""
        now = dict(self._filters.filtering())
        if now == self._active:
            return
        self._active = now
        for side in self._sides.values():
            side.place(self._wanted, self._node)

    def set_node(self, node: NodeView) -> None:
        """Follow the node's addresses."""
        self._node = node
        for side in self._sides.values():
            side.set_node(node)

    def repair(self) -> list[Repair]:
        """Make the kernel what is wanted."""
        if self.in_use:
            self._follow_filters()
        return [side.repair() for side in self._sides.values() if side.in_use]

    def check(self, owner: str) -> list[str]:
        """Names what the attachment misses."""
        return [m for side in self._sides.values() for m in side.check(owner)]

    def retire(self) -> bool:
        """Remove our chains where nobody needs them."""
        gone = [side.retire() for side in self._sides.values()]
        return any(gone)


class WithForward:
    """A backend whose attachments may ask for openForward. One ``ForwardRules`` serves all."""

    def __init__(self, main: Backend, forward: ForwardRules) -> None:
        self.name = main.name
        self.main = main
        self._forward = forward

    @property
    def in_use(self) -> bool:
        """Whether any attachment wants something."""
        return self.main.in_use

    def _named(self, changes: Mapping[str, Placed | None]) -> dict[str, Placed | None]:
        # while an attachment moves from one backend to the other it is wanted by both
        return {f"{self.name}/{key}": placed for key, placed in changes.items()}

    def place(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Rules of both kinds. Raises NetfilterFailed or TryAgain with everything as before."""
        if not self._forward.concerns(changes):
            self.main.place(changes, node)
            return
        named = self._named(changes)
        before = {owner: self._forward.wanted(owner) for owner in named}
        self._forward.place(named, node)
        try:
            self.main.place(changes, node)
        except HostPortError:
            self._forward.place(before, node)
            raise

    def assume(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Remember the same without touching the kernel."""
        self._forward.assume(self._named(changes), node)
        self.main.assume(changes, node)

    def set_node(self, node: NodeView) -> None:
        """Follow a change of the node's addresses."""
        self._forward.set_node(node)
        self.main.set_node(node)

    def check(self, key: str) -> list[str]:
        """Names of what the attachment misses; changes nothing."""
        return self.main.check(key) + self._forward.check(f"{self.name}/{key}")

    def repair(self) -> Repair:
        """Make the kernel what is wanted; says what was not."""
        report = self.main.repair()
        for one in self._forward.repair():
            report.missing += one.missing
            report.foreign += one.foreign
            report.examples += one.examples
        return report

    def retire(self) -> bool:
        """Remove what is shared if no attachment needs it."""
        gone = self.main.retire()
        return self._forward.retire() or gone
