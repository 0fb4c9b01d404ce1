"""Log lines: key=value on stderr, which journald takes as it is.

Where stderr is the helper's own file in the run directory (started on demand)
the file is kept small: at ``MAX_BYTES`` it becomes ``helper.1.log``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import time
from pathlib import Path

MAX_BYTES = 1 << 20
_PLAIN = re.compile(r"[A-Za-z0-9_.:/@%+,=\[\]-]+")


def quoted(value: str) -> str:
    """A value as logfmt has it: bare, or a JSON string where it holds anything else."""
    return value if _PLAIN.fullmatch(value) and "=" not in value else json.dumps(value)


class LineFormatter(logging.Formatter):
    """``time level msg key=value …``; the time is left out under journald."""

    def __init__(self, with_time: bool) -> None:
        super().__init__()
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        fields: dict[str, str] = getattr(record, "fields", {})
        parts = [f"level={record.levelname.lower()}", f"msg={quoted(record.getMessage())}"]
        if self._with_time:
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            parts.insert(0, f"time={stamp}.{int(record.msecs):03d}Z")
        parts += [f"{key}={quoted(value)}" for key, value in fields.items() if value]
        if record.exc_info:
            parts.append(f"trace={quoted(self.formatException(record.exc_info))}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """All fields at the top level."""
        line = {"time": record.created, "level": record.levelname.lower()}
        line |= {"msg": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


class BoundedStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Stderr that starts a new file when its own log file grows too large."""

    def __init__(self, own_log: Path) -> None:
        super().__init__()
        self._path = own_log
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line; look at the size now and then."""
        super().emit(record)
        self._count += 1
        if self._count % 64 == 0:
            with contextlib.suppress(OSError):
                self._rotate()

    def _rotate(self) -> None:
        mine = os.fstat(2)
        if mine.st_size < MAX_BYTES or mine.st_ino != self._path.stat().st_ino:
            return
        self._path.rename(self._path.with_name("helper.1.log"))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fresh = os.open(self._path, flags, 0o600)
        os.dup2(fresh, 2)
        os.close(fresh)


def set_up(run_dir: Path, style: str = "text", level: str = "info") -> None:
    """Send the log to stderr. ``style``: text or json."""
    handler = BoundedStderr(run_dir / "helper.log")
    journald = "JOURNAL_STREAM" in os.environ
    handler.setFormatter(JsonFormatter() if style == "json" else LineFormatter(not journald))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # What no line of ours shows need not be found out for each (Logging HOWTO, Optimization).
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging.getLogger("asyncio").setLevel("WARNING")
    logging.getLogger("pyroute2").setLevel("ERROR")
