"""Clears up after a node-cache agent that was killed together with its DNS server.

Decides only when that is worth a closer look: the agent's file says that rules
stand, and nobody has the agent's name. The look itself, which asks the DNS
server, is nodecache's, in a thread: it may take a third of a second, and neither
the event loop nor the worker may wait for it.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from cni_hostport.helper.nodecachestate import node_cache

log = logging.getLogger(__name__)


class NodeCacheWatch:
    """Call ``look`` about twice a second; it returns at once."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Clear up if it is needed and nobody is at it."""
        if self._thread is not None and self._thread.is_alive():
            return
        state = node_cache(self._run_dir)
        if state is None or not state["rules"] or state["agent"]:
            return
        self._thread = threading.Thread(target=self._clear, name="node-cache", daemon=True)
        self._thread.start()

    def _clear(self) -> None:
        # Imported here: a node without a dead agent never needs it.
        from cni_hostport.nodecache import orphan

        try:
            orphan.clear(str(self._run_dir))
        except Exception:
            log.exception("looking after a dead node-cache agent")
