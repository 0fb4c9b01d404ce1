"""Puts the rules in, keeps them, takes them out: plans from ``rules.py``, effects from ``host``.

Decides which family, flavour and tool is concerned and when a process is worth
running: the kernel is first asked without one, and a fingerprint that has not
changed since it was found right needs nothing more. Never judges whether the
rules may stand; the state machine does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from cni_hostport.host import nodecache_kernel as kernel
from cni_hostport.host.nodecache_erase import erase
from cni_hostport.host.nodecache_kernel import Flavour
from cni_hostport.host.nodecache_tools import ToolError, Tools, default_flavour, has_nft
from cni_hostport.model import Family
from cni_hostport.netfilter import restore
from cni_hostport.nodecache import nftrules, rules
from cni_hostport.nodecache.rules import ChainRepair, RuleSet

log = logging.getLogger(__name__)
# What tells which flavour a node's own agents use (kubelet's and kube-proxy's chains).
_SIGNS = (b"KUBE-", rules.MARK)
# Seconds that a held lock is waited for.
PATIENCE = 5.0
FALLBACK_PATIENCE = 0.1
TEARDOWN_PATIENCE = 1.0


class NoBackend(Exception):
    """Neither iptables nor nft can be had for what is wanted."""


class Backend(Protocol):
    """What the agent needs of a packet filter."""

    def ensure(self) -> tuple[str, ...]:
        """Put in what is missing; what was wrong. Raises ToolError."""

    def accept(self) -> None:
        """Put in only what accepts, so that the server can be asked at all. Raises ToolError."""

    def remove(self, patience: float) -> None:
        """Take everything of ours out. Raises ToolError."""

    def present(self) -> int:
        """How many rules of ours stand, without running a process."""


@dataclass
class IptablesFamily:
    """The rules of one family through iptables of one flavour."""

    family: Family
    flavour: Flavour
    wanted: RuleSet
    tools: Tools
    socket_match: bool = True
    _right: bytes | None = None

    def ensure(self) -> tuple[str, ...]:
        """Mend what differs; why each chain was touched. Raises ToolError."""
        view = self._view()
        if view.known and view.fingerprint == self._right:
            return ()
        blind = view.known and view.ours == 0
        repairs = rules.blind_setup(self._listed()) if blind else self._plan()
        if not repairs:
            self._right = view.fingerprint if view.known else None
            return ()
        self._apply_setup(repairs)
        # The next check reads them once, and from then on the fingerprint tells.
        self._right = None
        return tuple(f"{r.table} {r.chain}: {r.why}" for r in repairs)

    def accept(self) -> None:
        """Only the accepting rules. Raises ToolError."""
        repairs = rules.plan(self._saved(), rules.accepting(self._listed()))
        self._restore(repairs, rules.SETUP_ORDER, PATIENCE, force=False)

    def remove(self, patience: float) -> None:
        """Take our rules out, raw first. Raises ToolError."""
        self._right = None
        view = self._view()
        if view.known and view.ours == 0:
            return
        if self._erased(view.ours):
            return
        listed = self._listed()
        if view.known and view.ours == len(listed):
            try:
                self._restore_teardown(rules.blind_teardown(listed), patience)
            except ToolError as error:
                if error.trouble not in ("other", "match"):
                    raise
            else:
                return
        self._restore_teardown(rules.clean(self._saved()), patience)

    def _erased(self, count: int) -> bool:
        """Whether so many were taken out without a process; iptables-nft's rules can be."""
        if self.flavour != "nft":
            return False
        try:
            return erase(self.family, rules.COMMENTS) == count
        except OSError as error:
            log.info("rules not removed over netlink, iptables is next: %s", error)
            return False

    def present(self) -> int:
        """Rules of ours in the kernel."""
        return self._view().ours

    def _view(self) -> kernel.View:
        return kernel.view(self.family, self.flavour, rules.MARK)

    def _listed(self) -> tuple[rules.WantedRule, ...]:
        return rules.listed(replace(self.wanted, socket_match=self.socket_match), self.family)

    def _saved(self) -> dict[str, restore.Table]:
        try:
            return restore.parse_save(self.tools.save(self.family, self.flavour))
        except restore.RestoreFormatError as error:
            raise ToolError("other", str(error)) from error

    def _plan(self) -> tuple[ChainRepair, ...]:
        return rules.plan(self._saved(), self._listed())

    def _apply_setup(self, repairs: Sequence[ChainRepair]) -> None:
        try:
            self._restore(repairs, rules.SETUP_ORDER, PATIENCE, force=False)
        except ToolError as error:
            if error.trouble in ("lock", "missing"):
                raise
            if self.socket_match and error.trouble == "match":
                log.warning(
                    "no socket match for %s: no fallback without an agent", self.family.name
                )
                self.socket_match = False
            # Or somebody changed the tables between the look and the change: look again.
            self._restore(self._plan(), rules.SETUP_ORDER, PATIENCE, force=False)

    def _restore_teardown(self, repairs: Sequence[ChainRepair], patience: float) -> None:
        self._restore(repairs, rules.TEARDOWN_ORDER, patience, force=True)

    def _restore(
        self, repairs: Sequence[ChainRepair], order: Sequence[str], patience: float, force: bool
    ) -> None:
        text = rules.render(repairs, order)
        if text:
            self.tools.restore(self.family, self.flavour, text, patience=patience, force=force)


@dataclass
class IptablesBackend:
    """Both families through iptables; a family without addresses is never touched."""

    parts: tuple[IptablesFamily, ...]

    def ensure(self) -> tuple[str, ...]:
        """See Backend."""
        return tuple(f"{p.family.name} {why}" for p in self.parts for why in p.ensure())

    def accept(self) -> None:
        """See Backend."""
        for part in self.parts:
            part.accept()

    def remove(self, patience: float) -> None:
        """See Backend. Every family is tried before the first error is raised."""
        _each([lambda p=part: p.remove(patience) for part in self.parts])  # type: ignore[misc]

    def present(self) -> int:
        """See Backend."""
        return sum(part.present() for part in self.parts)


@dataclass
class NftBackend:
    """Both families in one nftables table of our own."""

    wanted: RuleSet
    tools: Tools
    socket_match: bool = True
    _right: bytes | None = None
    _listing: str = field(default="", repr=False)

    def ensure(self) -> tuple[str, ...]:
        """See Backend."""
        view = self._view()
        if view.known and view.ours and view.fingerprint == self._right:
            return ()
        why = "missing"
        if view.ours and self._listing:
            if nftrules.normal(self._list() or "") == self._listing:
                self._right = view.fingerprint
                return ()
            why = "changed"
        self._apply()
        self._listing = nftrules.normal(self._list() or "")
        self._right = self._view().fingerprint
        return (f"inet {nftrules.TABLE}: {why}",)

    def accept(self) -> None:
        """See Backend; in nftables an accept of ours overrules nobody's drop."""

    def remove(self, patience: float) -> None:  # noqa: ARG002  (nft has no lock)
        """See Backend."""
        self._right = None
        if kernel.has_nft_table(nftrules.TABLE):
            self.tools.nft(nftrules.teardown())

    def present(self) -> int:
        """See Backend."""
        return self._view().ours

    def _view(self) -> kernel.View:
        return kernel.inet_view(nftrules.TABLE, rules.MARK)

    def _list(self) -> str | None:
        return self.tools.nft_table(nftrules.FAMILY, nftrules.TABLE)

    def _apply(self) -> None:
        wanted = replace(self.wanted, socket_match=self.socket_match)
        try:
            self.tools.nft(nftrules.setup(wanted))
        except ToolError as error:
            if not self.socket_match or error.trouble == "missing":
                raise
            self.tools.nft(nftrules.setup(replace(wanted, socket_match=False)))
            self.socket_match = False
            log.warning("this kernel has no socket expression: pods do not fall back by themselves")


def choose(
    backend: Literal["auto", "iptables", "nftables"],
    families: Sequence[Family],
    wanted: RuleSet,
    tools: Tools,
) -> IptablesBackend | NftBackend:
    """The backend to use. Raises NoBackend naming what is missing."""
    flavours = {f: kernel.used_flavour(f, _SIGNS) or default_flavour(f) for f in families}
    missing = [f for f, flavour in flavours.items() if flavour is None]
    if backend == "iptables" or (backend == "auto" and not missing):
        if missing:
            names = ", ".join("iptables" if f is Family.V4 else "ip6tables" for f in missing)
            raise NoBackend(f"-backend {backend}: {names} is not installed")
        return IptablesBackend(
            tuple(IptablesFamily(f, v, wanted, tools) for f, v in flavours.items() if v)
        )
    if not has_nft():
        raise NoBackend(f"-backend {backend}: neither iptables nor nft is installed")
    return NftBackend(wanted, tools)


def sweep_others(chosen: IptablesBackend | NftBackend | None, tools: Tools) -> tuple[str, ...]:
    """Remove rules of ours that others than the chosen one hold; what was removed.

    Other backends, flavours and families of an earlier agent; everything where
    none is chosen. Raises ToolError after all have been tried.

    The kernel is asked without a process; where it shows nothing, nothing runs.
    """
    used = {(p.family, p.flavour) for p in getattr(chosen, "parts", ())}
    swept: list[str] = []
    flavours: tuple[Flavour, ...] = ("nft", "legacy")
    work: list[Callable[[], None]] = []
    for family in Family:
        for flavour in flavours:
            if (family, flavour) in used or not kernel.view(family, flavour, rules.MARK).ours:
                continue
            swept.append(f"iptables-{flavour} {family.name}")
            part = IptablesFamily(family, flavour, RuleSet((), 53, 8080), tools)
            work.append(lambda p=part: p.remove(PATIENCE))  # type: ignore[misc]
    if not isinstance(chosen, NftBackend) and kernel.has_nft_table(nftrules.TABLE):
        swept.append("nftables")
        work.append(lambda: tools.nft(nftrules.teardown()))
    _each(work)
    return tuple(swept)


def _each(work: Sequence[Callable[[], None]]) -> None:
    first: ToolError | None = None
    for call in work:
        try:
            call()
        except ToolError as error:
            first = first or error
    if first is not None:
        raise first
