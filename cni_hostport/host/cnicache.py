"""Host ports of the pods that run, as the CNI library remembers them for their DEL.

Decides nothing. Reads the files that libcni leaves per attachment; what cannot
be read is left out, since the format is not ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDERS = ("/var/lib/cni/results", "/var/lib/cni/cache/results")


@dataclass(frozen=True, slots=True)
class CachedPort:
    """One host port of one attachment. ``plugins`` are the types in its conflist."""

    network: str
    container_id: str
    host_ip: str
    port: int
    protocol: str
    plugins: tuple[str, ...] = ()


def ports(folders: tuple[str, ...] = FOLDERS) -> list[CachedPort]:
    """Every host port that the cache knows."""
    found = []
    for folder in map(Path, folders):
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            try:
                found += _of(json.loads(path.read_bytes()))
            except (OSError, ValueError, TypeError, AttributeError, KeyError):
                continue
    return found


def _of(entry: dict[str, Any]) -> list[CachedPort]:
    wanted = (entry.get("capabilityArgs") or {}).get("portMappings") or []
    plugins = _plugins(entry.get("config", ""))
    result = []
    for mapping in wanted:
        fields = {key.lower(): value for key, value in mapping.items()}
        number = int(fields.get("hostport") or 0)
        if number:
            result.append(
                CachedPort(
                    str(entry.get("networkName", "")),
                    str(entry.get("containerId", "")),
                    str(fields.get("hostip") or ""),
                    number,
                    str(fields.get("protocol") or "tcp").lower(),
                    plugins,
                )
            )
    return result


def _plugins(encoded: object) -> tuple[str, ...]:
    """Types of the conflist that the entry carries in base64 (JSON of a byte string)."""
    import base64

    try:
        config = json.loads(base64.b64decode(str(encoded)))
        return tuple(str(p["type"]) for p in config["plugins"])
    except (ValueError, TypeError, KeyError):
        return ()
