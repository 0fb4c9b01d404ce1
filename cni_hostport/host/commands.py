"""The only place that starts the host's tools.

Decides with which environment, descriptors and time limit a tool runs. Knows no
tool by name, and never judges what one printed.

A tool gets PATH and LANG and nothing else: LD_LIBRARY_PATH (set by containerd
and by the bundle), PYTHON*, NOTIFY_SOCKET and LISTEN_* must not reach it. It runs
in a session of its own, so that a timeout ends its children too.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import stat
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

STANDARD_PATH = (
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
)
_LAST_WORDS = 1.0
_SHOWN = 2000


def _nobody_waits() -> None:
    return None


before_run = _nobody_waits
"""Called before a tool is run, by the thread that then waits for it."""


@dataclass(frozen=True, slots=True)
class CompletedCommand:
    """A tool that ended: ``rc`` as a shell shows it (128 + signal when killed)."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    def check(self) -> CompletedCommand:
        """Itself where rc is 0. Raises CommandFailed otherwise."""
        if self.rc:
            raise CommandFailed(self)
        return self

    @property
    def words(self) -> str:
        """The tool's own words about a failure, at most 2,000 characters."""
        return (self.stderr.strip() or self.stdout.strip())[:_SHOWN]


class CommandError(Exception):
    """Base: a tool did not do what it was started for; ``argv`` says which."""

    def __init__(self, argv: Sequence[str], words: str) -> None:
        super().__init__(f"{shlex.join(argv)}: {words}")
        self.argv = tuple(argv)
        self.words = words


class CommandMissing(CommandError):
    """No such tool in any directory of PATH, or it cannot be executed."""


class CommandTimeout(CommandError):
    """The tool and its children were killed at the time limit."""


class CommandFailed(CommandError):
    """The tool ended with a status other than 0."""

    def __init__(self, result: CompletedCommand) -> None:
        super().__init__(result.argv, f"exit status {result.rc}: {result.words or 'no output'}")
        self.result = result


def safe_path(path: str) -> str:
    """PATH from a caller's: its directories that only root may write, then the standard six.

    Links are resolved, so that nobody can turn one round afterwards.
    """
    given = [_only_roots(d) for d in path.split(":") if d.startswith("/")]
    return ":".join(dict.fromkeys([*filter(None, given), *STANDARD_PATH]))


def _only_roots(directory: str) -> str | None:
    """The real directory, if nobody else can put a program there or exchange a parent of it."""
    try:
        real = Path(directory).resolve(strict=True)
        if not real.is_dir() or _others_write(real, sticky_is_safe=False):
            return None
        if any(_others_write(parent, sticky_is_safe=True) for parent in real.parents):
            return None
    except (OSError, RuntimeError, ValueError):
        return None
    return str(real)


def _others_write(folder: Path, sticky_is_safe: bool) -> bool:
    found = folder.stat()
    if found.st_uid != 0:
        return True
    # in a sticky folder only the owner can rename what is his
    safe = sticky_is_safe and bool(found.st_mode & stat.S_ISVTX)
    return not safe and bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def environment() -> dict[str, str]:
    """What a tool gets as its environment, all of it."""
    return {"PATH": safe_path(os.environ.get("PATH", "")), "LANG": "C.UTF-8"}


def find(name: str) -> str | None:
    """Absolute path of a tool, None where the node has none."""
    return shutil.which(name, path=environment()["PATH"])


def run(
    argv: Sequence[str], stdin: str | bytes | None = None, timeout: float = 10.0
) -> CompletedCommand:
    """Run a tool to its end; ``timeout`` in seconds covers all of it.

    A status other than 0 is a value, not an error (``.check()`` makes it one).
    Output that is no UTF-8 survives as surrogates. Raises CommandMissing,
    CommandTimeout, and OSError where the machine has no descriptors or processes left.
    """
    program = argv[0] if argv[0].startswith("/") else find(argv[0])
    if program is None:
        raise CommandMissing(argv, f"{argv[0]} is not installed on this node")
    data = stdin.encode("utf-8", "surrogateescape") if isinstance(stdin, str) else stdin
    before_run()
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL if data is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
            cwd="/",
            start_new_session=True,
        )
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise CommandMissing(argv, f"cannot be executed: {error.strerror}") from None
    out, err = _finish(process, argv, data, timeout)
    rc = process.returncode
    return CompletedCommand(tuple(argv), rc if rc >= 0 else 128 - rc, _text(out), _text(err))


def _finish(
    process: subprocess.Popen[bytes], argv: Sequence[str], data: bytes | None, timeout: float
) -> tuple[bytes, bytes]:
    try:
        return process.communicate(data, timeout)
    except subprocess.TimeoutExpired:
        raise CommandTimeout(argv, f"killed after {timeout:g} s") from None
    finally:
        if process.returncode is None:
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the tool with its whole group; a child that left the group cannot hold us up."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=_LAST_WORDS)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
