"""The DNS server's process: started, watched, told to reload, ended.

Decides how the process is started (a session of its own, no parent-death
signal: it outlives an agent that is killed), how one that an earlier agent
started is recognised, and how it is ended in bounded time. Knows no DNS server
by name.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_PRIVATE = ("LD_LIBRARY_PATH", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_PRIVATE_STARTS = ("PYTHON", "LISTEN_", "_PYI_")


class Server:
    """One running process; ``pidfd`` becomes readable when it ends."""

    def __init__(self, pid: int, pidfd: int, child: subprocess.Popen[bytes] | None) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self._child = child

    def send(self, number: int) -> None:
        """Send a signal; nothing where it has ended already."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.Signals(number))

    def has_ended(self, timeout: float = 0.0) -> bool:
        """Whether it has ended, or does within ``timeout`` seconds."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        return bool(poller.poll(int(timeout * 1000)))

    def reap(self) -> str:
        """Take an ended process's status and give the descriptor back; how it ended, in words."""
        status = self._child.wait() if self._child is not None else None
        with contextlib.suppress(OSError):
            os.close(self.pidfd)
        if status is None:
            return "ended"
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"

    def end(self, grace: float) -> bool:
        """TERM, and KILL after ``grace`` seconds; True where TERM was enough."""
        self.send(signal.SIGTERM)
        self.send(signal.SIGCONT)
        gentle = self.has_ended(grace)
        if not gentle:
            self.send(signal.SIGKILL)
            self.has_ended(2.0)
        self.reap()
        return gentle


def start(argv: Sequence[str], directory: str) -> Server:
    """Start a server; its output goes where ours does. Raises OSError."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _PRIVATE and not name.startswith(_PRIVATE_STARTS)
    }
    child = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=directory,
        start_new_session=True,
    )
    return Server(child.pid, os.pidfd_open(child.pid), child)


def started_at(pid: int) -> int | None:
    """A process's start time in clock ticks since boot; None where there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        rest = fields.rpartition(")")[2].split()
    except OSError:
        return None
    return None if rest[0] in ("Z", "X") else int(rest[19])


def adopt(pid: int, start_time: int) -> Server | None:
    """Take over a server by pid and start time; None where it is not there any more."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    if started_at(pid) != start_time:
        os.close(pidfd)
        return None
    return Server(pid, pidfd, None)


def control(path: str, command: str, timeout: float = 2.0) -> str:
    """One command to unbound's control socket, and the answer. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout)
        sock.connect(path)
        sock.sendall(f"UBCT1 {command}\n".encode())
        answer, deadline = b"", time.monotonic() + timeout
        while part := sock.recv(65536):
            answer += part
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path}: no end of the answer to {command}")
    return answer.decode("utf-8", "replace")
