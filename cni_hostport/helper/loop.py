"""The event loop's side of the helper: events, timers, signals, hand-over.

Never changes state itself: what an event calls for is a job for the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Iterable

from cni_hostport import shim
from cni_hostport.helper import handover, nodecachewatch, operations
from cni_hostport.helper.parts import Helper
from cni_hostport.helper.reconcile import INTERVAL, SETTLE
from cni_hostport.helper.rundir import RunDir
from cni_hostport.helper.server import Server
from cni_hostport.host import commands

log = logging.getLogger(__name__)

TICKS_A_LOOK = 2
"""Ticks from one look at the queue folder to the next: an entry is noticed within a second."""


MANY = 100
"""Attachments from which on a look at everything may take the worker a while."""


QUEUE_RETRY = 5.0
"""Seconds until queued DELs that failed are tried again."""


HOLD_RETRY = 1.0
"""Seconds until ports that were busy are tried again."""


class Loop:
    """The event loop's side: events, timers, signals."""

    def __init__(
        self, helper: Helper, sock: socket.socket, home: RunDir, *, linger: bool = False
    ) -> None:
        self._helper = helper
        self._linger = linger
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._look_due = False
        self._queue_stamp = 0
        self._iptables_due = False
        self._queue_again = 0.0
        self._holds_again = 0.0
        self._ticks = TICKS_A_LOOK
        self._sock = sock
        self._home = home
        self._node_cache = nodecachewatch.NodeCacheWatch(helper.run_dir)
        self._server = Server(
            sock,
            helper.core,
            helper.worker,
            operations.reads(helper),
            self._problem,
            operations.jobs(helper),
            self._give,
            helper.machine.together,
        )

    def _before_tool(self) -> None:
        """Any thread: a tool is about to be run, which may last."""
        self._server.reception.relieve_soon()
        self._helper.worker.settle_here()

    def _give(self, channel: socket.socket, clients: list[socket.socket]) -> None:
        """Worker: pass everything to a successor and end, or go on if it fails."""
        try:
            items = self._helper.manager.holds.items()
            handover.give(channel, self._home.lock, self._sock, clients, items)
        except handover.HandoverFailed as error:
            log.error("hand-over failed, serving on: %s", error)
            channel.close()
            self._loop.call_soon_threadsafe(self._resume, clients)
            return
        log.info("a successor serves: ending")
        if self._linger:
            # becoming another program closes every descriptor of ours; a signal meanwhile waits
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
            command = [*shim.program(), "linger"]
            os.execv(command[0], command)  # noqa: S606
        # no clean-up of any kind: every socket and rule is the successor's now
        os._exit(0)

    def _resume(self, clients: list[socket.socket]) -> None:
        self._server.reception.start()
        for client in clients:
            self._server.reception.serve(client)

    async def run(self, clients: Iterable[socket.socket] = ()) -> None:
        """Serve until a signal says to end."""
        loop, helper = self._loop, self._helper
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_reader(helper.events.fileno(), self._netfilter_event)
        loop.add_reader(helper.machine.events.fileno(), self._address_event)
        commands.before_run = self._before_tool
        helper.worker.start()
        self._server.reception.start()
        for client in clients:
            self._server.reception.serve(client)
        self._every_interval()
        self._tick()
        helper.store_of_fds.notify(f"READY=1\nMAINPID={os.getpid()}")
        await self._ended.wait()
        log.info("ending: rules stay, sockets close")
        self._server.reception.stop()
        helper.worker.stop(5.0)

    def _problem(self, backend: str) -> str:
        """Why ADD cannot be served; who polls for the end of it need not wait for a timer."""
        text = self._helper.problem(backend)
        if text:
            self._look("STATUS")
        return text

    def _netfilter_event(self) -> None:
        event = self._helper.events.read()
        own = {self._helper.nft.portid}
        if event.overflow or (event.ours and event.foreign(own)):
            self._look("a change of our tables", ", ".join(event.culprits(own)))
        elif event.iptables and self._helper.iptables.in_use and not self._iptables_due:
            self._iptables_due = True
            self._loop.call_later(SETTLE, self._helper.worker.submit, self._iptables_changed)
        self._helper.others.note(event)

    def _iptables_changed(self) -> None:
        """Worker: our own restores have events as well; the generation tells them apart."""
        self._iptables_due = False
        if not self._helper.iptables.is_verified():
            self._loop.call_soon_threadsafe(self._look, "a change of iptables")

    def _address_event(self) -> None:
        # The worker reads the events themselves; until it has, do not ask again. Every pod
        # brings some of no interest, so this is a look at addresses and at nothing else.
        self._loop.remove_reader(self._helper.machine.events.fileno())

        def job() -> None:
            self._helper.reconciler.follow()
            self._loop.call_soon_threadsafe(self._listen_again)

        self._helper.worker.submit(job)

    def _listen_again(self) -> None:
        self._loop.add_reader(self._helper.machine.events.fileno(), self._address_event)

    def _look(self, why: str, culprit: str = "") -> None:
        if self._look_due:
            return
        self._look_due = True
        delay = self._helper.reconciler.delay()
        self._loop.call_later(delay, self._submit_look, why, culprit)

    def _submit_look(self, why: str, culprit: str) -> None:
        self._look_due = False

        def job() -> None:
            if len(self._helper.manager.registry) > MANY:
                self._server.reception.relieve_soon()
            if self._helper.reconciler.look(why, culprit):
                self._loop.call_soon_threadsafe(self._look, why, culprit)

        self._helper.worker.submit(job)

    def _every_interval(self) -> None:
        self._look("interval")
        self._loop.call_later(INTERVAL, self._every_interval)

    def _tick(self) -> None:
        """One timer for all that is looked at often: each wake-up of an idle helper costs."""
        ticks = 1 if self._node_cache.look() else TICKS_A_LOOK
        self._loop.call_later(ticks * nodecachewatch.INTERVAL, self._tick)
        self._server.reception.relieve_if_late()
        self._ticks += ticks
        if self._ticks >= TICKS_A_LOOK:
            self._ticks = 0
            self._watch_queue()

    def _watch_queue(self) -> None:
        try:
            stamp = (self._helper.run_dir / "queue").stat().st_mtime_ns
        except OSError:
            stamp = 0
        again = self._helper.core.queue_kept and self._loop.time() >= self._queue_again
        if stamp != self._queue_stamp or again:
            self._queue_stamp = stamp
            self._queue_again = self._loop.time() + QUEUE_RETRY
            self._helper.worker.submit(lambda: _ignore(self._helper.core.drain_queue()))
        if not self._home.intact():
            self._helper.worker.submit(self._mend_home)
        if self._helper.reconciler.glance():
            self._helper.worker.submit(self._helper.reconciler.peek)
        if self._helper.manager.holds.keys_waiting() and self._loop.time() >= self._holds_again:
            self._holds_again = math.inf  # until that has been done
            self._helper.worker.submit(self._take_free_ports)
        if self._helper.reconciler.wants_retire:
            self._helper.worker.submit(self._helper.reconciler.retire)

    def _take_free_ports(self) -> None:
        """Worker: again soon, and where many wait at most a five-hundredth of the time."""
        begin = self._loop.time()
        self._helper.reconciler.take_free_ports()
        now = self._loop.time()
        self._holds_again = now + max(HOLD_RETRY, 500 * (now - begin))

    def _mend_home(self) -> None:
        """Worker: listen where callers look for us again."""
        if not self._home.intact() and (sock := self._home.mend()) is not None:
            self._sock = sock  # what a hand-over that comes next has to give
            self._loop.call_soon_threadsafe(self._server.reception.listen_on, sock)


def _ignore(_: object) -> None:
    return None
