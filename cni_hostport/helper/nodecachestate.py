"""What ``status`` tells of the node-local DNS cache: its agent's file, read as it is.

Reads only. Decides nothing about the cache; the agent and its rules are its own.
"""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from cni_hostport.host import nodecache_files as files


def node_cache(run_dir: Path) -> dict[str, Any] | None:
    """State of the node's cache, the first by name where there are several; None without one."""
    folder = run_dir / "node-cache"
    names = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return _state(names[0]) if names else None


def _state(path: Path) -> dict[str, Any]:
    left = files.read_state(str(path))
    argv = left.get("argv")
    engine = Path(str(argv[0])).name if isinstance(argv, list) and argv else "none"
    addresses = left.get("addresses")
    return {
        "link": path.stem,
        "addresses": [str(a) for a in addresses] if isinstance(addresses, list) else [],
        "port": left.get("port") or 53,
        "engine": engine,
        "agent": _agent_lives(path.stem),
        "rules": left.get("rules") is True,
        "fallbacks": left.get("fallbacks"),
    }


def _agent_lives(link: str) -> bool:
    """Whether somebody has the agent's name; it dies with its process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(f"\0cni-hostport-node-cache-{link}")
        except OSError:
            return False
    return True
