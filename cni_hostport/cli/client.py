"""Asking the helper, for every operator's command. Never starts one."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from cni_hostport import shim
from cni_hostport.cni_json import clean

NO_HELPER = 3
"""Exit status when no helper answers."""


class NoHelper(Exception):
    """Nobody listens in the run directory; the text says where and what to do."""


def ask(operation: str, limit: float = 10.0, **arguments: object) -> bytes:
    """One operation's answer. Raises NoHelper; OSError for a helper that breaks off."""
    folder = shim.run_dir()
    deadline = time.monotonic() + limit
    try:
        sock = shim.connect(folder, limit)
    except OSError as error:
        raise NoHelper(
            f"no helper answers in {folder.decode(errors='replace')} ({error.strerror}); "
            "it is started by the first plugin call, or by 'systemctl start cni-hostport'"
        ) from error
    body = json.dumps({"op": operation, **arguments}).encode()
    frame = shim.pack_request(shim.KIND_OPERATOR, 0, {}, body)
    try:
        status, out, err = shim.exchange(sock, frame, (), deadline)
    except TimeoutError as error:
        raise NoHelper(
            f"the helper does not answer within {limit:.0f} s; if it is stopped or stuck, "
            "'cni-hostport helper --replace' takes over from it"
        ) from error
    if status != 0:
        raise OSError(err.decode(errors="replace").strip() or f"the helper said {status}")
    return out


def document(operation: str, limit: float = 10.0, **arguments: object) -> Any:
    """The answer of an operation that speaks JSON."""
    return json.loads(ask(operation, limit, **arguments))


def complain(error: Exception) -> int:
    """Say why on stderr; the exit status that goes with it."""
    print(f"cni-hostport: {error}", file=sys.stderr)
    return NO_HELPER if isinstance(error, NoHelper) else 1


def who(entry: dict[str, Any]) -> str:
    """How a list names an attachment."""
    pod = "/".join(filter(None, (entry["namespace"], entry["pod"])))
    container = f"container {entry['containerID'][:12]} on {entry['network']}"
    return clean(f"{pod} ({container})" if pod else container)
