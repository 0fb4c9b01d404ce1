"""Backends whose tools hang, or whose lock stays held: what can wait does not wait for them.

A DEL that fails is queued and tried again. Where each try takes seconds, a few of
them would keep the worker from everybody else's calls. Decides when a backend is
left alone for a while; knows no tool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from cni_hostport.errors import IOFailure, NetfilterFailed, TryAgain

RETRIED = (NetfilterFailed, TryAgain, IOFailure)
"""Errors of a DEL that may pass: it is queued and tried again."""

LONG = 2.0
"""Seconds after which a failure counts as a slow one."""

REST = 2.0
"""A backend rests this many times as long as its failure took."""


class SlowBackends:
    """When each backend may be bothered again, by name. Worker thread only."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[float, str]] = {}

    @contextlib.contextmanager
    def patience(self, backend: str) -> Iterator[None]:
        """Around a removal; raises TryAgain at once while the backend rests."""
        started = time.monotonic()
        until, words = self._until.get(backend, (0.0, ""))
        if started < until:
            raise TryAgain(f"{backend} is left alone for {until - started:.0f} s", words)
        try:
            yield
        except RETRIED as error:
            took = time.monotonic() - started
            if took > LONG:
                self._until[backend] = (time.monotonic() + REST * took, str(error))
            raise

    def forget(self, backend: str) -> None:
        """It has just worked."""
        self._until.pop(backend, None)
