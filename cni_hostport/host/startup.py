"""Get a connection to the node's helper, starting it where none runs.

Decides who may start one (whoever holds ``start.lock``: two calls at once start
one), how it is started, and when waiting is over. It must never hand the caller's
stdout, stderr or any other descriptor on (a runtime waits for everybody who holds
its pipes), and never trusts a run directory that others than root may write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import stat
import time
from typing import TYPE_CHECKING

from cni_hostport import shim
from cni_hostport.errors import TryAgain
from cni_hostport.host.environment import clean_environment

if TYPE_CHECKING:
    import _socket

LOG_NAME = "helper.log"
LOCK_NAME = "start.lock"
_BOOT_LOADER = "[PYI-"  # under a traceback the bundle's boot loader says only that there is one
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.05
_AGAIN = 0.5
"""Seconds until another is started after one that met a living helper and left."""
_SYSTEMD = "/run/systemd/system"
_SYSTEMD_RUN = ("/usr/bin/systemd-run", "/bin/systemd-run")
_ADVICE = "set CNI_HOSTPORT_RUN_DIR to a directory that only root may write, or mend this one"


def connect_or_start(run_dir: str, deadline: float) -> _socket.socket:
    """A connection to the running helper, or to one that this call started.

    ``deadline`` is a time of the monotonic clock. Changes the process' working
    directory and umask where it starts one. Raises TryAgain (CNI code 11) whose
    text says why there is none and where its log is.
    """
    folder = open_run_dir(run_dir)
    start = _Start(run_dir, folder)
    pause = _FIRST_PAUSE
    try:
        while True:
            with contextlib.suppress(ConnectionError, FileNotFoundError, BlockingIOError):
                return shim.connect(os.fsencode(run_dir), max(deadline - time.monotonic(), 0.01))
            if time.monotonic() >= deadline:
                raise TryAgain("the helper did not come up in time", f"its log: {start.log}")
            start.step()
            time.sleep(pause)
            pause = min(pause * 1.3, _LONGEST_PAUSE)
    except OSError as error:
        raise TryAgain(
            "the helper cannot be started", f"{error}; run directory {run_dir}"
        ) from error
    finally:
        start.close()
        os.close(folder)


def open_run_dir(run_dir: str) -> int:
    """Descriptor of the run directory, made 0700 where it is missing.

    Raises TryAgain when it is no directory of root's, a link, or writable by others.
    """
    if not run_dir.startswith("/"):
        raise TryAgain(f"the run directory {run_dir!r} is no absolute path", _ADVICE)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    run_dir = run_dir.rstrip("/") or "/"
    try:
        with contextlib.suppress(FileExistsError):
            os.makedirs(os.path.dirname(run_dir), 0o755, exist_ok=True)
            os.mkdir(run_dir, 0o700)
        descriptor = os.open(run_dir, flags)
    except OSError as error:
        reason = "it is a link or no directory" if os.path.lexists(run_dir) else error.strerror
        raise TryAgain(f"the run directory {run_dir} cannot be used: {reason}", _ADVICE) from error
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        os.close(descriptor)
        owner = f"owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}"
        raise TryAgain(f"the run directory {run_dir} is not safe: {owner}", _ADVICE)
    if status.st_mode & 0o077:  # made by somebody else's mkdir: readable, and safe otherwise
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, 0o700)
    return descriptor


def helper_command() -> list[str]:
    """The command line of a helper."""
    return [*shim.program(), "helper"]


def ways_to_start() -> list[list[str]]:
    """Command lines that start a helper, the preferred one first.

    A scope of its own where systemd runs: a child of CRI-O or podman would die with
    the caller's cgroup; a service would get pid 1's net namespace.
    """
    plain = helper_command()
    runner = next((path for path in _SYSTEMD_RUN if os.access(path, os.X_OK)), "")
    if runner and os.path.isdir(_SYSTEMD):
        return [[runner, "--scope", "--quiet", "--collect", "--", *plain], plain]
    return [plain]


def spawn(command: list[str], log: str) -> int:
    """Start a process that shares nothing with the caller and return its pid.

    Own session, /dev/null and the log in place of the standard descriptors, default
    signals, cwd /, umask 077, the environment of the allowlist. Raises OSError.
    """
    os.chdir("/")  # posix_spawn knows neither a cwd nor a umask
    os.umask(0o077)
    _close_on_exec()
    to_log = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    fixed = {signal.SIGKILL, signal.SIGSTOP}
    return os.posix_spawn(
        command[0],
        command,
        clean_environment(os.environb),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_OPEN, 2, log, to_log, 0o600),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=signal.valid_signals() - fixed,
    )


def _close_on_exec() -> None:
    """Let no descriptor but the standard ones reach a child, whoever opened it."""
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        numbers = list(range(1024))
    for number in numbers:
        if number > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(number, False)


class _Start:
    """One call's part in bringing a helper up: it starts one, or waits for who does."""

    def __init__(self, run_dir: str, folder: int) -> None:
        self.log = f"{run_dir.rstrip('/')}/{LOG_NAME}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._lock = os.open(LOCK_NAME, flags, 0o600, dir_fd=folder)
        self._locked = False
        self._ways = ways_to_start()
        self._child = 0
        self._child_ended = -_AGAIN
        self._log_start = 0

    def close(self) -> None:
        """Let the next one start helpers."""
        os.close(self._lock)

    def step(self) -> None:
        """Do the next thing; the caller tries to connect after each.

        Raises TryAgain when the started helper died, OSError when none can be started.
        """
        if not self._locked:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._locked = True  # who held it may have brought one up: connect before starting
        elif self._child:
            self._watch()
        elif time.monotonic() >= self._child_ended + _AGAIN:
            with contextlib.suppress(FileNotFoundError):
                self._log_start = os.stat(self.log).st_size
            self._child = spawn(self._ways[0], self.log)

    def _watch(self) -> None:
        pid, status = os.waitpid(self._child, os.WNOHANG)
        if not pid:
            return
        self._child = 0
        code = os.waitstatus_to_exitcode(status)
        if code == 0:  # it met another helper, one that is coming up or going down
            self._child_ended = time.monotonic()
            return
        if len(self._ways) > 1:
            del self._ways[0]
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        last = self._last_line() or "it wrote nothing"
        raise TryAgain(f"the helper {how}: {last}", f"its log: {self.log}")

    def _last_line(self) -> str:
        """The last line that the dead helper wrote, at most 500 characters."""
        try:
            descriptor = os.open(self.log, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start if self._log_start < end else 0, end - 4096))
                lines = file.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return ""
        said = (line.strip()[-500:] for line in reversed(lines))
        return next((line for line in said if line and not line.startswith(_BOOT_LOADER)), "")


def is_helper(pid: int) -> bool:
    """Whether that process is a helper: the number in a lock file may be anybody's by now."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return b"helper" in words[1:]
