"""The short way of a call: accepted, read and served on the worker's own thread.

While the worker has nothing else to do it waits here, so that a call wakes one thread
once and is handed to nobody: two threads of Python hold each other up at every system
call. Calls of one moment are handed on together. What is owed for calls that were answered
is done when nobody waits any more. Decides what the worker may take itself (CNI calls that
change or compare state); everything else, and whoever is slow to ask, is the event loop's.
Must never keep the worker waiting for a client.
"""

from __future__ import annotations

import contextlib
import logging
import math
import select
import socket
import time
from collections.abc import Callable, Iterable, Sequence

from cni_hostport.helper.connection import Connection, Request
from cni_hostport.helper.worker import Job, Worker

log = logging.getLogger(__name__)

PATIENCE = 0.02
"""Seconds a client has to send its request before the event loop waits for it instead."""

_ONCE = select.EPOLLIN | select.EPOLLONESHOT

Accept = Callable[[], Iterable[Connection]]
Serve = Callable[[Sequence[tuple[Connection, Request]]], list[Job]]


class Intake:
    """What the worker waits for. ``wait`` and ``release`` are the worker's; the rest any thread's.

    Whoever is waited for here when the worker turns to something longer is taken by the loop.

    ``accept`` gives the clients that wait; ``serve`` makes jobs of the whole requests that
    came at one moment, or gives them to the loop; ``slow`` takes whoever has not asked yet;
    ``ready`` is called whenever the worker has nothing to do.
    """

    def __init__(
        self,
        worker: Worker,
        accept: Accept,
        serve: Serve,
        slow: Callable[[Connection], None],
        ready: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._accept, self._serve, self._slow, self._ready = accept, serve, slow, ready
        self._coming: dict[int, tuple[Connection, float]] = {}
        self._poll = select.epoll()
        self._poll.register(worker.bell, select.EPOLLIN)

    def open(self, sock: socket.socket) -> None:
        """Clients of that listening socket are the worker's from now on."""
        with contextlib.suppress(FileExistsError):
            self._poll.register(sock, select.EPOLLIN)

    def close(self, sock: socket.socket) -> None:
        """They are no longer."""
        with contextlib.suppress(OSError, ValueError):
            self._poll.unregister(sock)

    def release(self) -> None:
        """Give everybody who has not asked yet to the loop."""
        self._give_up_on(math.inf)

    def wait(self) -> list[Job]:
        """Wait for calls or for the bell; what is to be done now."""
        self._ready()
        found: list[tuple[Connection, Request]] = []
        newcomers = False
        events = self._poll.poll(0) if self._worker.owes else []
        if not events:
            self._worker.settle()
            events = self._poll.poll(PATIENCE if self._coming else None)
        for descriptor, _ in events:
            if descriptor == self._worker.bell:
                self._worker.quiet()
            elif (entry := self._coming.pop(descriptor, None)) is not None:
                self._read(*entry, found, self._poll.modify)
            else:
                newcomers = True
        if newcomers:  # after those who were here before
            until = time.monotonic() + PATIENCE
            for connection in self._accept():
                self._read(connection, until, found, self._poll.register)
        if self._coming:
            self._give_up_on(time.monotonic())
        return self._serve(found) if found else []

    def _read(
        self,
        connection: Connection,
        until: float,
        found: list[tuple[Connection, Request]],
        watch: Callable[[int, int], None],
    ) -> None:
        try:
            request = connection.receive()
            if request is not None:
                found.append((connection, request))
            elif connection.open:
                # once: from then on it is answered, and must not wake us when its client leaves
                watch(connection.fileno(), _ONCE)
                self._coming[connection.fileno()] = connection, until
        except Exception:
            log.exception("a client is let go")
            connection.hang_up()

    def _give_up_on(self, now: float) -> None:
        for connection in self.take(now):
            self._slow(connection)

    def take(self, now: float) -> list[Connection]:
        """Those whose time is over by then, watched here no more. Any thread: who pops has it."""
        taken = []
        for descriptor, (_, until) in list(self._coming.items()):
            if until <= now and (entry := self._coming.pop(descriptor, None)) is not None:
                with contextlib.suppress(OSError):
                    self._poll.unregister(descriptor)
                taken.append(entry[0])
        return taken
