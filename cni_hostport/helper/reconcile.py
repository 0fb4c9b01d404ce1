"""When to look and what to mend: events in, repairs out.

Runs on the worker (``look``); the event loop only says that something
happened. Repairs at once, then ever more slowly while the same damage comes
back: it never fights. Says what was mended, once, in words.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from cni_hostport.errors import HostPortError
from cni_hostport.helper.metrics import Metrics
from cni_hostport.hostport.manager import HostPortManager

log = logging.getLogger(__name__)

INTERVAL = 30.0
"""Seconds between looks when nothing happens."""

SETTLE = 0.02
"""Seconds an event waits for its neighbours: a flush is many events."""

CALM = 60.0
"""Seconds without a repair after which damage counts as new."""

TOLERANCE = 0.01
"""Seconds that a timer may fire early."""

PEEKS = 4
"""Links looked at every half second, in turn: 0.01 ms each."""

PEACE = 2.0
"""Seconds without damage, beyond the wait of the moment, that forgive one repair."""

MAX_BACKOFF = 30.0
RETIRE_AFTER = 5.0
"""Seconds without any attachment after which our empty tables go."""


@dataclass(slots=True)
class Backoff:
    """How long to wait before mending again: 0, 0, 0, then 0.5 s doubling to 30 s.

    Somebody who fights comes back at once; damage after ``PEACE`` is more likely
    another reload of a firewall, and one repair is forgiven.
    """

    repairs: int = 0
    last: float = 0.0
    forgiven: float = 0.0

    def delay(self, now: float) -> float:
        """Seconds until the next repair is due."""
        if now - self.last > CALM:
            self.repairs = 0
        elif now - max(self.last, self.forgiven) > PEACE + self._wait():
            self.repairs, self.forgiven = max(0, self.repairs - 1), now
        if self.repairs < 3:
            return 0.0
        return max(0.0, self.last + self._wait() - now)

    def _wait(self) -> float:
        return min(0.5 * 2.0 ** (self.repairs - 3), MAX_BACKOFF) if self.repairs >= 3 else 0.0

    def repaired(self, now: float) -> bool:
        """Count a repair; True when this is the one to warn about."""
        self.repairs = self.repairs + 1 if now - self.last <= CALM else 1
        self.last = now
        return self.repairs == 4


@dataclass(slots=True)
class LastRepair:
    """The most recent repair, for ``status``."""

    when: float = 0.0
    what: str = ""


class Reconciler:
    """Compares wish and kernel, and mends."""

    def __init__(self, manager: HostPortManager, metrics: Metrics) -> None:
        self._manager = manager
        self._metrics = metrics
        self._backoffs = {"rules": Backoff(), "links": Backoff()}
        self._empty_since: dict[str, float] = {}
        self._retired: set[str] = set()
        self.also: Sequence[Callable[[], None]] = ()
        """What else is looked at in each pass; none of them raises."""
        self._peeked = 0
        self.last = LastRepair()
        self.last_look = 0.0
        self.problem = ""
        self.broken: frozenset[str] = frozenset()
        """Backends that could not be mended in the last look; the problem is theirs alone."""
        self._failing = self.broken

    def delay(self) -> float:
        """Seconds to wait before the next look may mend."""
        return max(SETTLE, self._backoffs["rules"].delay(time.monotonic()))

    def look(self, why: str = "interval", culprit: str = "") -> bool:
        """One pass over everything; never raises. True: rules were left for later (``delay``)."""
        self.last_look = time.time()
        # asked again here: a repair may have ended since this look was ordered
        early = self._backoffs["rules"].delay(time.monotonic()) > TOLERANCE
        self._failing = frozenset()
        try:
            self._pass(why, culprit, rules=not early)
            self.problem, self.broken = "", frozenset()
        except Exception as error:
            self.broken = self._failing
            self._fails(f"cannot reconcile ({why})", error)
        return early

    def follow(self) -> None:
        """Take in a change of the node's addresses and links; never raises."""
        before = self._manager.node
        try:
            after = self._manager.follow_addresses()
            if names := {a.link for a in before.addresses ^ after.addresses}:
                self._links("an address change", names)
        except Exception as error:
            self._fails("cannot follow an address change", error)

    def glance(self) -> bool:
        """Whether there is reason to ``peek``. The event loop's, which is awake anyhow."""
        self._peeked += PEEKS
        return self._manager.links_seem_changed(self._peeked, PEEKS)

    def peek(self) -> None:
        """Look at the sysctl of a few links: no event tells of its change. Never raises."""
        try:
            if names := self._manager.changed_links(self._peeked, PEEKS):
                self._links("a changed sysctl", names)
        except Exception as error:
            self._fails("cannot look at links", error)

    def _fails(self, what: str, error: Exception) -> None:
        self.problem = f"{what}: {error}"
        expected = isinstance(error, OSError | HostPortError)
        log.error("%s: %s", what, error, exc_info=None if expected else error)

    def _pass(self, why: str, culprit: str, rules: bool) -> None:
        manager = self._manager
        manager.retry_unfinished()
        manager.follow_addresses()
        error, broken = self._rules(why, culprit) if rules else (None, frozenset[str]())
        self._links(why)
        self._take_free_ports()
        for look in self.also:
            look()
        if error is not None:
            self._failing = broken
            raise error

    def _rules(self, why: str, culprit: str) -> tuple[Exception | None, frozenset[str]]:
        """Repair each backend; one that cannot does not keep the other from it.

        The last error, and the backends that failed.
        """
        found, failed, broken = [], None, frozenset[str]()
        for name, backend in self._manager.backends.items():
            try:
                repair = backend.repair() if backend.in_use else None
            except (OSError, HostPortError) as error:
                failed, broken = error, broken | {name}
                continue
            if repair:
                found.append(f"{name}: {repair}")
        if found:
            self._manager.drop_gap_flows()
            self._mended("rules", found, why, culprit)
        return failed, broken

    def _links(self, why: str, names: Collection[str] | None = None) -> None:
        if self._backoffs["links"].delay(time.monotonic()) > 0:
            return
        if mended := self._manager.refresh_links(names):
            self._mended("links", mended, why, "")

    def _mended(self, kind: str, what: Sequence[str], why: str, culprit: str) -> None:
        """Count and tell: one repair a pass, however much was missing."""
        more = f" and {len(what) - 3} more" if len(what) > 3 else ""
        text = ", ".join(what[:3]) + more
        self._metrics.repair(kind)
        self.last = LastRepair(time.time(), text)
        by = f" (removed by {culprit})" if culprit else ""
        log.warning("repaired after %s%s: %s", why, by, text)
        if self._backoffs[kind].repaired(time.monotonic()):
            log.error(
                "somebody keeps removing what host ports need%s: repairs slow down, "
                "up to one in %d s, until it stops",
                by,
                MAX_BACKOFF,
            )

    def take_free_ports(self) -> None:
        """Hold what has become free since its ADD; never raises."""
        try:
            self._take_free_ports()
        except Exception as error:
            self._fails("cannot hold what has become free", error)

    def _take_free_ports(self) -> None:
        manager = self._manager
        for key, ports in manager.retry_waiting().items():
            record = manager.registry.get(key)
            owner = record.attachment.describe() if record else key
            log.info("now held for %s: %s", owner, ", ".join(sorted(map(str, ports))))

    def retire(self) -> None:
        """Empty tables go some seconds after the last pod, not with it: the next one is faster.

        Never raises; what cannot be removed is tried again as long after.
        """
        now = time.monotonic()
        for name, backend in self._manager.backends.items():
            if backend.in_use:
                self._empty_since.pop(name, None)
                self._retired.discard(name)
            elif name not in self._retired and (
                now - self._empty_since.setdefault(name, now) >= RETIRE_AFTER
            ):
                self._empty_since[name] = now
                try:
                    if backend.retire():
                        log.info("no attachments left: shared rules of %s removed", name)
                except Exception as error:
                    self._fails(f"cannot remove the empty rules of {name}", error)
                else:
                    self._retired.add(name)

    @property
    def wants_retire(self) -> bool:
        """Whether some rules are without an attachment, or were and are not any more."""
        return any(
            name in self._empty_since if backend.in_use else name not in self._retired
            for name, backend in self._manager.backends.items()
        )
