"""The slow path of a plugin call: no helper answered, so have one, or answer without it.

Not for people: the plugin executable runs ``cni-hostport call --after=REASON``
with the call's environment and stdin. It must never send a request again that a
living helper may still be working on (REASON ``timeout``), and never fails a DEL:
a failing DEL keeps bridge and IPAM from cleaning up. Imports stay few, since a
runtime waits: no pydantic, no argparse.

Reasons: ``refused`` nobody listens; ``lost`` the helper died on the request, so
that a new one may be asked; ``timeout``; ``protocol`` the helper is of another age.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from cni_hostport import shim
from cni_hostport.errors import HostPortError, TryAgain

START_LIMIT = 10.0
LIMITS = {b"DEL": 4.0, b"STATUS": 1.7}
"""Seconds in all for a verb whose helper must be started first; others: ``START_LIMIT``
for the start, then the plugin's own limit for the answer."""

_UNANSWERED = {
    "timeout": "the helper did not answer in time",
    "protocol": "the helper speaks a protocol of another version",
}
_ADVICE = {
    "timeout": "it is busy or stopped; see `cni-hostport status` and its log",
    "protocol": "restart it with `cni-hostport helper --replace`",
}


def main(argv: Sequence[str]) -> NoReturn:
    """Answer the call on stdin and leave the process."""
    reason = "refused"
    for argument in argv:
        if argument.startswith("--after="):
            reason = argument.removeprefix("--after=")
    command = os.environb.get(b"CNI_COMMAND", b"")
    body = shim.read_stdin()
    start = time.monotonic()
    try:
        if reason in _UNANSWERED:
            raise TryAgain(_UNANSWERED[reason], _ADVICE[reason])
        answer = _without_a_helper(command, body, reason) or _ask_a_helper(command, body, start)
    except HostPortError as error:
        _answer_without(command, body, error)
    except Exception as error:
        _answer_without(command, body, TryAgain("no helper can be had", repr(error)))
    shim.finish(*answer)


def _without_a_helper(command: bytes, body: bytes, reason: str) -> tuple[int, bytes, bytes] | None:
    """The answer to a DEL or CHECK with nothing to do, before a helper is started for it."""
    if reason != "refused" or command not in (b"DEL", b"CHECK"):
        return None
    from cni_hostport.cli import quiet

    return quiet.answer(os.fsdecode(shim.run_dir()), os.environ, body)


def _ask_a_helper(command: bytes, body: bytes, start: float) -> tuple[int, bytes, bytes]:
    """Have a helper and send it the call. Raises TryAgain."""
    from cni_hostport.host import startup

    frame, descriptors = shim.call_request(body, start)
    limit = LIMITS.get(command, START_LIMIT)
    sock = startup.connect_or_start(os.fsdecode(shim.run_dir()), start + limit)
    deadline = start + limit if command in LIMITS else time.monotonic() + shim.DEFAULT_LIMIT - limit
    try:
        return shim.exchange(sock, frame, descriptors, deadline)
    except TimeoutError as error:
        raise TryAgain(_UNANSWERED["timeout"], _ADVICE["timeout"]) from error
    except shim.ForeignProtocol as error:
        raise TryAgain(_UNANSWERED["protocol"], _ADVICE["protocol"]) from error
    except OSError as error:
        raise TryAgain("the helper died on this call", "its log says why; try again") from error


def _answer_without(command: bytes, body: bytes, error: HostPortError) -> NoReturn:
    """What a runtime is told when no helper did the work."""
    if command == b"DEL":
        shim.finish(0, b"", _queue(body, error))
    code = 50 if command == b"STATUS" else error.code
    answer = {
        "cniVersion": _version_of(body),
        "code": code,
        "msg": f"cni-hostport: {error.msg}",
        "details": error.details,
    }
    shim.finish(1, json.dumps(answer).encode("ascii") + b"\n")


def _queue(body: bytes, error: HostPortError) -> bytes:
    """Leave a DEL for the next helper; returns the line for stderr."""
    try:
        from cni_hostport.host import queue, startup

        run_dir = os.fsdecode(shim.run_dir())
        os.close(startup.open_run_dir(run_dir))
        env = {key: value for key, value in os.environb.items() if key.startswith(b"CNI_")}
        queue.put(Path(run_dir), env, body)
    except Exception as failure:
        line = f"cni-hostport: DEL done without cleaning up: {error.msg}; not queued: {failure}"
    else:
        line = f"cni-hostport: DEL queued for the next helper: {error.msg}"
    # go-cni takes these words, wherever they stand, for a success without any cleaning up.
    line = line.replace(os.strerror(errno.ENOENT), "missing")
    return line.encode("utf-8", "backslashreplace") + b"\n"


def _version_of(body: bytes) -> str:
    """The configuration's cniVersion, so that the caller can read the error."""
    try:
        version = json.loads(body)["cniVersion"]
    except (ValueError, TypeError, KeyError, RecursionError):
        version = None
    return version if version in shim.SUPPORTED else shim.SUPPORTED[-1]
