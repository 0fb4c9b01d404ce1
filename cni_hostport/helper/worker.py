"""The one thread that changes state: jobs in order of arrival.

This is the helper's lock. Whatever changes sockets, rules or records is a job
here; reads never wait for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Worker:
    """A queue and its thread."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        """Do this after everything submitted before. Any thread."""
        self._jobs.put(job)

    def stop(self, patience: float) -> bool:
        """Finish what is queued and end; False if that takes over ``patience`` seconds."""
        self._jobs.put(None)
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("job failed")
