"""Sockets kept by systemd while no helper runs (sd_notify(3), FDSTORE).

The name of a stored descriptor is the attachment's key. A bound TCP socket that
does not listen polls as hung up, so FDPOLL=0: systemd would drop it at once.
Nothing here does anything where NOTIFY_SOCKET is not set.
"""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from collections.abc import Sequence

_BATCH = 250
"""Descriptors a message; the kernel takes 253 (SCM_MAX_FD)."""

_FIRST = 3
"""sd_listen_fds(3): passed descriptors start here."""


class FdStore:
    """The service manager's store of descriptors."""

    def __init__(self) -> None:
        self._address = os.environ.pop("NOTIFY_SOCKET", "")
        self._sock: socket.socket | None = None
        if self._address:
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)

    @property
    def active(self) -> bool:
        """Whether a service manager listens."""
        return self._sock is not None

    def notify(self, state: str, fds: Sequence[int] = ()) -> None:
        """One message; a manager that does not take it is no reason to fail a call."""
        if self._sock is None:
            return
        name = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with contextlib.suppress(OSError):
            # socket.send_fds takes an address and does not use it (CPython 3.11)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            self._sock.sendmsg([state.encode()], rights, 0, name)

    def keep(self, key: str, fds: Sequence[int]) -> None:
        """Make the store hold exactly these for the attachment."""
        if self._sock is None:
            return
        self.notify(f"FDSTOREREMOVE=1\nFDNAME={key}")
        for start in range(0, len(fds), _BATCH):
            batch = fds[start : start + _BATCH]
            self.notify(f"FDSTORE=1\nFDNAME={key}\nFDPOLL=0", batch)


def inherited() -> list[tuple[str, socket.socket]]:
    """Descriptors systemd passed at start, by name; the environment is cleaned."""
    pid = os.environ.pop("LISTEN_PID", "")
    count = os.environ.pop("LISTEN_FDS", "")
    names = os.environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    found = []
    for number in range(int(count)):
        descriptor = _FIRST + number
        os.set_inheritable(descriptor, False)
        name = names[number] if number < len(names) else ""
        try:
            found.append((name, socket.socket(fileno=descriptor)))
        except OSError:
            os.close(descriptor)
    return found
