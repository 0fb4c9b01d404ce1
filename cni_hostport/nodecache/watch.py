"""Whether the DNS server answers: turns probes into events of the state machine.

Decides how often it is asked, how long silence may last, and when a server that
has just started counts as ready. Reads the clock only through ``now``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from cni_hostport.host import nodecache_probe
from cni_hostport.host.nodecache_probe import Address, Prober
from cni_hostport.nodecache import dnsmsg
from cni_hostport.nodecache.machine import Event, Phase

log = logging.getLogger(__name__)
# All in seconds. A silence is noticed after SILENCE and at most one PERIOD more.
PERIOD = 0.1
FIRST_PERIOD = 0.02
SILENCE = 0.25
QUERY_SILENCE = 2.0
STATUS_TRY = 1.0
RELOAD = 2.0
RELOAD_SILENCE = 1.0
ELSEWHERE = 3.0
GATE_TIMEOUT = 8.0


class Gate:
    """The one real question before the rules: asked over TCP, in a thread of its own."""

    def __init__(self, addresses: Sequence[Address], port: int, zone: str) -> None:
        self.passed = False
        self.over = False
        self._addresses = tuple(addresses)
        self._port = port
        self._zone = zone
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            for address in self._addresses:
                question = dnsmsg.query(1, self._zone)
                answer = nodecache_probe.ask_once(address, self._port, question, GATE_TIMEOUT)
                if not dnsmsg.answers(answer, 1):
                    return
            self.passed = True
        except (OSError, ValueError) as error:
            log.debug("the server does not answer over TCP yet: %s", error)
        finally:
            self.over = True


class Watch:
    """Asks and judges.

    ``links`` gives the links on which own answers come in; ``accept`` opens the
    packet filter for a server that listens and seems not to answer.
    """

    def __init__(
        self,
        addresses: Sequence[Address],
        port: int,
        links: Callable[[], dict[str, set[int]]],
        accept: Callable[[], None],
    ) -> None:
        self.prober = Prober(addresses, port, dnsmsg.status, dnsmsg.answers)
        self.zone = "."
        self._port = port
        self._links = links
        self._accept = accept
        self._gate: Gate | None = None
        self._next = 0.0
        self._by_query = False
        self._bound_at = self._now = self._lenient_until = 0.0
        # Addresses that this node itself answers on while the rules are away.
        self._direct: set[str] = set()

    def begin(self) -> None:
        """A server starts anew: forget what was known."""
        self.prober.reset()
        self.prober.own_links = self._links()
        self._gate = None
        self._next = 0.0
        self._bound_at = float("inf")
        self._use_status()

    def link_changed(self) -> None:
        """The addresses may be on another link now, and the sockets' sources are gone."""
        self.prober.own_links = self._links()
        self.prober.forget_questions()

    def reloading(self, now: float) -> None:
        """The server was told to reload: it may take longer over an answer for a moment."""
        self._lenient_until = now + RELOAD

    def due(self, phase: Phase) -> float:
        """When ``poll`` wants to be called next."""
        if phase is not Phase.SERVING:
            return self._next
        asked = [t.asked + self._limit() for t in self.prober.targets if t.asked is not None]
        return min([self._next, *asked])

    def _limit(self) -> float:
        if self._by_query:
            return QUERY_SILENCE
        return RELOAD_SILENCE if self._now < self._lenient_until else SILENCE

    def poll(self, phase: Phase, since: float, now: float) -> Event | None:
        """Take in answers, ask again where it is time, and judge."""
        self._now = now
        self.prober.receive(now)
        event = self._judge(phase, since, now)
        if now >= self._next:
            self.prober.send(now)
            young = phase is Phase.STARTING and now - since < 5.0
            self._next = now + (FIRST_PERIOD if young else PERIOD)
        return event

    def _judge(self, phase: Phase, since: float, now: float) -> Event | None:
        if phase is Phase.STARTING:
            return self._starting(since, now)
        if phase is Phase.SERVING:
            silent = [t.address for t in self.prober.targets if t.waits(now) >= self._limit()]
            if silent:
                log.warning("the DNS server is silent on %s", ", ".join(map(str, silent)))
                return Event.SILENT
        if phase is Phase.DEAF and self._answers_again(since):
            return Event.ANSWERING
        return None

    def _answers_again(self, since: float) -> bool:
        answered = {
            str(t.address) for t in self.prober.targets if (t.answered or 0.0) > since + PERIOD
        }
        return bool(answered) and self._direct <= answered

    def _starting(self, since: float, now: float) -> Event | None:
        targets = self.prober.targets
        own = [t for t in targets if t.answered is not None]
        if self._gate is not None:
            if self._gate.passed:
                self._direct = {str(t.address) for t in own}
                return Event.READY
            if self._gate.over:
                self._gate = None
            return None
        others_bound = all(
            t.answered is not None or nodecache_probe.is_bound(t.address, self._port)
            for t in targets
        )
        self._bound_at = min(self._bound_at, now) if others_bound else float("inf")
        if own and others_bound:
            self._gate = Gate([t.address for t in own], self._port, self.zone)
        elif not own and not self._by_query and now - self._bound_at > STATUS_TRY:
            self._use_query()
            self._accept()
        elif (
            not own
            and now - since > ELSEWHERE
            and others_bound
            and all(t.elsewhere is not None for t in targets)
        ):
            log.warning("questions to every address go to another node's server: whether ours "
                        "answers shows only with the rules in place")  # fmt: skip
            self._direct = set()
            return Event.READY
        return None

    def _use_status(self) -> None:
        self._by_query = False
        self.prober.make = dnsmsg.status

    def _use_query(self) -> None:
        self._by_query = True
        self.prober.make = lambda number: dnsmsg.query(number, self.zone)
