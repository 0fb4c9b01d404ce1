"""What goes back to a caller: exit status, stdout, stderr. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from cni_hostport import cni
from cni_hostport.errors import HostPortError


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer to one request."""

    status: int = 0
    out: bytes = b""
    err: bytes = b""
    idle: bool = False  # there was nothing to do: no line in the log


def failure(error: HostPortError, version: str) -> Answer:
    """The CNI error object on stdout and exit status 1 (CNI specification, Error)."""
    return Answer(1, cni.error_bytes(error, version))
