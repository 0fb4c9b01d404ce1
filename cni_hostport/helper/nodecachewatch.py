"""Clears up after a node-cache agent that was killed together with its DNS server.

Decides only when that is worth a closer look: the agent's file says that rules
stand, and nobody has the agent's name. The look itself, which asks the DNS
server, is nodecache's, in a thread: it may take a third of a second, and neither
the event loop nor the worker may wait for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from cni_hostport.helper.nodecachestate import node_cache

log = logging.getLogger(__name__)
INTERVAL = 0.25
"""Seconds from one look to the next while an agent's file is there."""


class NodeCacheWatch:
    """Call ``look`` every ``INTERVAL`` seconds; half as often will do where there is no agent."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None
        self._ready = False

    def look(self) -> bool:
        """Clear up if it is needed and nobody is at it; whether there is an agent's file at all."""
        if self._thread is not None and self._thread.is_alive():
            return True
        state = node_cache(self._run_dir)
        if state is None:
            return False
        if state["rules"]:
            if state["agent"]:
                # Here already, so that nothing has to be read when it counts.
                self._ready = self._ready or self._in_thread(_orphan)
            else:
                self._in_thread(self._clear)
        return True

    def _in_thread(self, target: Callable[[], object]) -> bool:
        self._thread = threading.Thread(target=target, name="node-cache", daemon=True)
        self._thread.start()
        return True

    def _clear(self) -> None:
        try:
            _orphan().clear(str(self._run_dir))
        except Exception:
            log.exception("looking after a dead node-cache agent")


def _orphan() -> ModuleType:
    # A node without node-cache never needs it.
    from cni_hostport.nodecache import orphan

    return orphan
