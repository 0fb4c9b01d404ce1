"""Signals as upstream's node-cache takes them.

TERM, INT and QUIT end the agent with its teardown, a second INT at once with
status 2; USR1 reads everything anew; HUP and USR2 change nothing. Handlers only
note what came: the agent's one thread acts.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
_IGNORED = (signal.SIGHUP, signal.SIGUSR2)


class Signals:
    """What has come so far: ``stop`` names the signal that ends the agent, "" for none."""

    def __init__(self) -> None:
        self.stop = ""
        self.reload = False
        self._wake, self._end = socket.socketpair()
        for sock in (self._wake, self._end):
            sock.setblocking(False)

    def install(self, selector: selectors.BaseSelector) -> None:
        """Take the signals; main thread only."""
        signal.set_wakeup_fd(self._end.fileno(), warn_on_full_buffer=False)
        for number in _ENDING:
            signal.signal(number, self._on_ending)
        for number in _IGNORED:
            signal.signal(number, _nothing)
        signal.signal(signal.SIGUSR1, self._on_reload)
        selector.register(self._wake, selectors.EVENT_READ)

    def drain(self, key: selectors.SelectorKey) -> None:
        """Empty the wake-up socket if that is what became readable."""
        if key.fileobj is self._wake:
            try:
                while self._wake.recv(512):
                    pass
            except BlockingIOError:
                pass

    def wait(self, selector: selectors.BaseSelector, seconds: float) -> str:
        """Wait, at most so long; the signal that ends the agent, "" for none."""
        for key, _ in selector.select(seconds):
            self.drain(key)
        return self.stop

    def _on_ending(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.stop == name == "SIGINT":
            os._exit(2)
        self.stop = self.stop or name

    def _on_reload(self, _number: int, _frame: FrameType | None) -> None:
        self.reload = True


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Take the signal and go on (SIG_IGN would be inherited by the server)."""
