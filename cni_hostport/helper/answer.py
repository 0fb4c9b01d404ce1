"""What goes back to a caller: exit status, stdout, stderr. Pure."""

from __future__ import annotations

from collections.abc import Callable
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


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is to be answered, and what there is to do then.

    ``undo`` takes the call back if the caller is gone. ``note`` counts and logs it, in any
    case: nobody has to wait for that.
    """

    answer: Answer
    undo: Callable[[], None] | None
    note: Callable[[], None]


def failure(error: HostPortError, version: str, asked: str = "") -> Answer:
    """The CNI error object on stdout and exit status 1 (CNI specification, Error).

    ``asked`` is added to the details: for which ports and whom.
    """
    if asked:
        error = _Explained(error, asked)
    return Answer(1, cni.error_bytes(error, version))


class _Explained(HostPortError):
    """An error of another class with more to say; the code is that one's."""

    def __init__(self, error: HostPortError, more: str) -> None:
        super().__init__(error.msg, "; ".join(filter(None, (error.details, more))))
        self.code = error.code  # type: ignore[misc]
