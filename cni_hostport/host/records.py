"""Records on disk: one JSON file an attachment, written whole or not at all.

An ADD under way writes ``<key>.adding``; the rename to ``<key>.json`` just before
the answer is what makes the attachment exist. After a crash a file still called
``.adding`` was never answered and is dropped. Never interprets a record: bytes
in, bytes out. A file that cannot be used is set aside, never deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LONGEST = 64 << 20
_KEY = re.compile(r"[a-z2-7]{16}")


class RecordStore:
    """The folder of records, mode 0700. OSError passes through."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prefix = f"{folder}/"
        self.ensure()

    def ensure(self) -> None:
        """Make the folder if it is not there."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def has(self, key: str) -> bool:
        """Whether there is a valid record of that key."""
        return os.path.exists(self._path(key, "json"))

    def prepare(self, key: str, content: bytes) -> None:
        """Write the record of an ADD under way; not yet valid.

        One cut off in the middle is no harm: nothing else was done yet.
        """
        path = self._path(key, "adding")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            written = os.write(descriptor, content)
            while written < len(content):
                written += os.write(descriptor, content[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def commit(self, key: str) -> None:
        """Make the prepared record the valid one, in one step."""
        os.rename(self._path(key, "adding"), self._path(key, "json"))

    def discard(self, key: str) -> None:
        """Drop a prepared record; fine if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, "adding"))

    def delete(self, key: str) -> None:
        """Drop a valid record; fine if there is none."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path(key, "json"))

    def load(self) -> Iterator[tuple[str, bytes]]:
        """Every valid record (key, content); what is not one of ours is skipped.

        Raises OSError where it is this process that lacks something (descriptors).
        """
        for name in sorted(os.listdir(self._folder)):
            stem, dot, kind = name.partition(".")
            if kind == "json" and dot and _KEY.fullmatch(stem):
                try:
                    yield stem, self._read(stem)
                except OSError as error:
                    if error.errno in _SHORTAGE:
                        raise
                    self.set_aside(stem)

    def unanswered(self) -> Iterator[tuple[str, bytes]]:
        """ADDs that were under way when a helper died: (key, content)."""
        for name in sorted(os.listdir(self._folder)):
            stem, _, kind = name.partition(".")
            if kind == "adding" and _KEY.fullmatch(stem):
                with contextlib.suppress(OSError):
                    yield stem, self._read(stem, kind)

    def set_aside(self, key: str) -> str:
        """Keep an unusable record out of the way; returns its path, ``<key>.damaged``."""
        kept = self._path(key, "damaged")
        with contextlib.suppress(OSError):  # a read-only file system: it is left out all the same
            os.rename(self._path(key, "json"), kept)
        return kept

    def _read(self, key: str, kind: str = "json") -> bytes:
        # O_NONBLOCK: it may be a FIFO that nobody writes to
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._path(key, kind), flags)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "no regular file")
            return file.read(_LONGEST)

    def _path(self, key: str, kind: str) -> str:
        return f"{self._prefix}{key}.{kind}"
