"""The one thread that changes state: jobs in order of arrival.

This is the helper's lock. Whatever changes sockets, rules or records is a job
here; reads never wait for it. Decides nothing about a job, and never ends for
one that fails.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

Job = Callable[[], None]

OWED_AT_MOST = 0.25
"""Seconds for which calls that follow each other closely put off what is owed; it is done at
the end of the first call after that, and before a tool is run or anything but a call is done."""


class Worker:
    """A queue and its thread."""

    def __init__(self) -> None:
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable while something was submitted to a worker that had nothing to do."""
        self.idle: Callable[[], Iterable[Job]] = self._wait
        """What the thread does while the queue is empty: ends when the bell rings, returns jobs."""
        self._jobs: collections.deque[Job | None] = collections.deque()
        self._owed: list[Job] = []
        self._owed_since = 0.0
        self._idling = False
        self._busy_since = 0.0
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Do this after everything submitted before. Any thread."""
        self._put(job)

    def owe(self, job: Job) -> None:
        """Worker: do this once nobody waits, or after some more calls."""
        if not self._owed:
            self._owed_since = time.monotonic()
        self._owed.append(job)
        if time.monotonic() - self._owed_since > OWED_AT_MOST:
            self.settle()

    @property
    def owes(self) -> bool:
        """Worker: whether something is owed."""
        return bool(self._owed)

    def settle(self) -> None:
        """Worker: do what is owed."""
        if not self._owed:
            return
        owed, self._owed = self._owed, []
        since, self._busy_since = self._busy_since, self._busy_since or time.monotonic()
        for job in owed:
            attempt(job)
        self._busy_since = since

    def settle_here(self) -> None:
        """The same from any thread: nothing where that is not the worker's."""
        if threading.current_thread() is self._thread:
            self.settle()

    def stop(self, patience: float) -> bool:
        """Finish what is queued and end; False if that takes over ``patience`` seconds."""
        self._put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()

    def busy_for(self) -> float:
        """Seconds since it last had nothing to do. Any thread."""
        since = self._busy_since
        return time.monotonic() - since if since else 0.0

    def quiet(self) -> None:
        """Take what made the bell ring; whoever waits for it does."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.bell)

    def _put(self, job: Job | None) -> None:
        self._jobs.append(job)
        if self._idling:
            os.eventfd_write(self.bell, 1)

    def _wait(self) -> tuple[Job, ...]:
        self.settle()
        select.select([self.bell], [], [])
        self.quiet()
        return ()

    def _run(self) -> None:
        self._begin()
        while True:
            while self._jobs:
                job = self._jobs.popleft()
                self.settle()
                if job is None:
                    return
                attempt(job)
            self._idling, self._busy_since = True, 0.0
            if self._jobs:  # it came between the look and the word
                self._begin()
                continue
            try:
                found = self.idle()
            except Exception:
                log.exception("cannot wait for calls")
                time.sleep(0.1)  # no loop that fills the log
                found = ()
            self._begin()
            for job in self._submitted():
                self.settle()
                attempt(job)
            for job in found:
                attempt(job)

    def _submitted(self) -> list[Job]:
        """What came by the queue before anything was found, without the word to end."""
        jobs: list[Job] = []
        while self._jobs and (job := self._jobs[0]) is not None:
            jobs.append(job)
            self._jobs.popleft()
        return jobs

    def _begin(self) -> None:
        self._idling, self._busy_since = False, time.monotonic()


def attempt(job: Job) -> None:
    """Do it; whatever goes wrong is a line in the log."""
    try:
        job()
    except Exception:
        log.exception("job failed")
