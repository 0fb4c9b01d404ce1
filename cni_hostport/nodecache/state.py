"""What an agent leaves on disk for the next one, and for the helper that clears up.

Decides the file's fields. A damaged or foreign file reads as an empty one: the
agent then starts from nothing, which is always safe.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from cni_hostport.host import nodecache_files as files

log = logging.getLogger(__name__)


class Left(BaseModel):
    """The server's process, what it answers on, and whether rules send questions there."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    argv: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    port: int = 53
    rules: bool = False
    server_pid: int = 0
    server_start: int = 0
    fallbacks: int = 0


class StateFile:
    """The file of one agent (one link name)."""

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> Left:
        """What the last agent left."""
        try:
            return Left.model_validate(files.read_state(self.path))
        except ValidationError:
            return Left()

    def write(self, **fields: object) -> None:
        """Replace the content; a full disk is logged, never fatal."""
        try:
            files.write_state(self.path, Left.model_validate(fields).model_dump(mode="json"))
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error.strerror)

    def remove(self) -> None:
        """Forget it."""
        with suppress(OSError):
            Path(self.path).unlink(missing_ok=True)
