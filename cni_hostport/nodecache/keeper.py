"""Keeps link and rules as they must be while others change the node.

Decides when to look (kernel events, and now and then without any), how errors
are counted, and how repairs slow down when somebody undoes them again and
again. Whether the rules may stand is told to it.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import time
from collections.abc import Callable, Iterator

from cni_hostport.host import nodecache_links as links
from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.host.nodecache_tools import ToolError, Tools
from cni_hostport.nodecache import ruler
from cni_hostport.nodecache.flags import Params
from cni_hostport.nodecache.metrics import Metrics
from cni_hostport.nodecache.rules import RuleSet

log = logging.getLogger(__name__)
# All in seconds. Changes come in bursts: look this long after the first event.
SETTLE = 0.1
# Look without any event this often, at most (a look costs no process).
LOOK = 5.0
RETRY = 1.0
# Pause after a repair that followed another one; doubled up to the last.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 300.0
FORGIVE = 600.0
_NFNLGRP_NFTABLES = 7


def _nothing() -> None:
    return None


class Calm:
    """When the next repair of one kind may come."""

    def __init__(self) -> None:
        self.not_before = 0.0
        self._pause = 0.0
        self._last = float("-inf")

    def repaired(self, now: float) -> None:
        """A repair was made: the next one waits longer the closer they come."""
        close = now - self._last < max(FORGIVE, 2 * self._pause)
        self._pause = min(LONGEST_PAUSE, max(FIRST_PAUSE, self._pause * 2)) if close else 0.0
        self._last, self.not_before = now, now + self._pause
        if self._pause > FIRST_PAUSE:
            log.warning("repaired again and again: next look in %g s at the earliest", self._pause)


class Keeper:
    """Link and rules of one agent. ``on_link`` is called when the link was put right."""

    def __init__(
        self, params: Params, link: links.CacheLink, tools: Tools, metrics: Metrics
    ) -> None:
        self._params = params
        self._link = link
        self._tools = tools
        self._metrics = metrics
        self._backend: ruler.IptablesBackend | ruler.NftBackend | None = None
        self._period = min(LOOK, params.sync_interval)
        self._rules_at = self._link_at = 0.0
        self._left_behind = False
        self._calm_rules, self._calm_link = Calm(), Calm()
        self._sources: dict[int, str] = {}
        self.on_link: Callable[[], None] = _nothing
        self._sockets: list[NetfilterSocket | links.ChangeEvents] = []

    def choose_backend(self) -> None:
        """Find the packet filter to use. Raises ruler.NoBackend."""
        if not self._params.setup_iptables:
            return
        params = self._params
        wanted = RuleSet(
            params.local_ips, params.dns_port, params.health_port, params.accept_health
        )
        self._backend = ruler.choose(params.backend, params.families, wanted, self._tools)

    def sweep(self) -> None:
        """Remove what earlier agents left with other backends or families."""
        if self._backend is not None:
            with self._counted():
                for what in ruler.sweep_others(self._backend, self._tools):
                    log.info("removed rules that an earlier agent left: %s", what)

    def first_link(self) -> None:
        """Make the link. Raises links.LinkError where it can never be had."""
        if not self._params.setup_interface:
            return
        try:
            self._ensure_link(time.monotonic(), first=True)
        except (links.ForeignLink, links.KindMissing):
            self._metrics.error("interface_add")
            raise

    def listen(self, selector: selectors.BaseSelector) -> None:
        """Hear of changes that others make."""
        with contextlib.suppress(OSError):
            self._add(selector, links.ChangeEvents(), "link")
        with contextlib.suppress(OSError):
            self._add(selector, NetfilterSocket(group=_NFNLGRP_NFTABLES), "rules")

    def _add(
        self,
        selector: selectors.BaseSelector,
        sock: NetfilterSocket | links.ChangeEvents,
        what: str,
    ) -> None:
        selector.register(sock, selectors.EVENT_READ, what)
        self._sources[sock.fileno()] = what
        self._sockets.append(sock)

    def notice(self, key: selectors.SelectorKey) -> None:
        """Something became readable: a change of others, perhaps."""
        what = self._sources.get(key.fd)
        if what is None:
            return
        sock = key.fileobj
        with contextlib.suppress(OSError):  # ENOBUFS: some were lost; we look at everything anyway
            if isinstance(sock, NetfilterSocket | links.ChangeEvents):
                sock.drain()
        soon = time.monotonic() + SETTLE
        if what == "link":
            self._link_at = min(self._link_at, max(soon, self._calm_link.not_before))
        else:
            self._rules_at = min(self._rules_at, max(soon, self._calm_rules.not_before))

    def due(self, rules: bool) -> float:
        """When ``work`` wants to be called."""
        due = [self._link_at] if self._params.setup_interface else []
        if (rules and self._backend is not None) or self._left_behind:
            due.append(self._rules_at)
        return min(due, default=float("inf"))

    def work(self, rules: bool, now: float) -> None:
        """Look at what is due and put it right."""
        if self._params.setup_interface and now >= self._link_at:
            with contextlib.suppress(links.ForeignLink, links.KindMissing):
                self._ensure_link(now)
        if now < self._rules_at:
            return
        if rules and self._backend is not None:
            self._ensure_rules(now)
        elif self._left_behind:
            self._rules_at = now + RETRY
            self.remove(ruler.FALLBACK_PATIENCE)

    def install(self) -> None:
        """Put the rules in: the server answers."""
        self._left_behind = False
        if self._backend is not None:
            self._ensure_rules(time.monotonic(), first=True)

    def accept(self) -> None:
        """Put in the accepting rules alone: a server listens, and no question reaches it."""
        with self._counted():
            if self._backend is not None and self._params.accept_health:
                log.info("the server cannot be asked: accepting its packets first")
                self._backend.accept()

    def remove(self, patience: float) -> None:
        """Take the rules out; an error is counted, and tried again while the agent lives."""
        self._left_behind = self._backend is not None
        with self._counted():
            if self._backend is not None:
                self._backend.remove(patience)
                self._left_behind = False

    def remove_for_good(self) -> None:
        """Take the rules out. Raises ToolError where that fails twice."""
        if self._backend is None:
            return
        try:
            self._backend.remove(ruler.TEARDOWN_PATIENCE)
        except ToolError as error:
            self._count(error)
            self._backend.remove(ruler.TEARDOWN_PATIENCE)

    def present(self) -> int:
        """Rules of ours that stand."""
        return 0 if self._backend is None else self._backend.present()

    def _ensure_rules(self, now: float, first: bool = False) -> None:
        assert self._backend is not None
        self._rules_at = now + RETRY
        with self._counted():
            mended = self._backend.ensure()
            self._rules_at = now + self._period
            for what in mended:
                log.info("%s nodelocaldns rules - %s", "Added" if first else "Added back", what)
            if mended and not first:
                self._metrics.repairs.labels("rules").inc()
                self._calm_rules.repaired(now)
                self._rules_at = max(self._rules_at, self._calm_rules.not_before)

    def _ensure_link(self, now: float, first: bool = False) -> None:
        self._link_at = now + RETRY
        try:
            report = self._link.ensure()
        except links.LinkError as error:
            self._metrics.error("interface_check")
            log.error("%s", error)
            if isinstance(error, links.ForeignLink | links.KindMissing):
                raise
            return
        self._link_at = now + self._period
        if report.created:
            log.info("Added interface - %s", self._link.name)
        if report.added or report.removed:
            log.info("%s: added %s; removed %s", self._link.name, report.added, report.removed)
        if not first and report != links.LinkReport():
            self.on_link()
            self._metrics.repairs.labels("link").inc()
            self._calm_link.repaired(now)
            self._link_at = max(self._link_at, self._calm_link.not_before)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except ToolError as error:
            self._count(error)

    def _count(self, error: ToolError) -> None:
        self._metrics.error("iptables_lock" if error.trouble == "lock" else "iptables")
        log.error("packet filter: %s", error)
