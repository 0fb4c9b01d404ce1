"""The run directory of a living helper: one helper a net namespace, and a way back.

Decides whether lock, socket and records are still where callers look for them,
and makes them anew where somebody removed them: the helper knows all of it. It
must never serve beside another helper of its net namespace: two would take each
other's rules for a stranger's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
from pathlib import Path

from cni_hostport.errors import HostPortError
from cni_hostport.helper.reception import listen
from cni_hostport.host.records import RecordStore
from cni_hostport.host.startup import open_run_dir
from cni_hostport.hostport.registry import Registry

log = logging.getLogger(__name__)


def take_guard() -> int | None:
    """The lock on this net namespace, held for life; None if another helper has it.

    The namespace itself is locked (flock(2) on /proc/self/ns/net): no file that
    could vanish, and nobody else's namespace.
    """
    descriptor = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def take_lock(run_dir: Path) -> int | None:
    """The lock on the run directory, held for life; None if another helper has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(run_dir / "helper.lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sign(lock: int) -> None:
    """Write our process id into the lock file, for whoever waits for it."""
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)


class RunDir:
    """Watches over what callers need of the run directory."""

    def __init__(self, folder: Path, lock: int, store: RecordStore, registry: Registry) -> None:
        self.lock = lock
        self._folder = folder
        self._store = store
        self._registry = registry
        self._socket = _identity(folder / "helper.sock")
        self._complaint = ""
        self._guard: int | None = None

    def keep_guard(self, guard: int | None) -> None:
        """Hold the namespace's lock; None: a predecessor still has it for a moment."""
        self._guard = guard

    def intact(self) -> bool:
        """Whether callers find us; two calls of stat."""
        if self._guard is None:
            self._guard = take_guard()
        lock = os.fstat(self.lock)
        return (
            self._socket is not None
            and _identity(self._folder / "helper.sock") == self._socket
            and _identity(self._folder / "helper.lock") == (lock.st_dev, lock.st_ino)
        )

    def mend(self) -> socket.socket | None:
        """Make lock, records and socket anew; the socket to listen on, None: not possible yet.

        Worker thread: it writes records.
        """
        try:
            sock = self._mend()
        except (OSError, HostPortError) as error:
            if self._complaint != str(error):
                log.error("the run directory cannot be made again: %s", error)
            self._complaint = str(error)
            return None
        self._complaint = ""
        log.warning("the run directory %s was removed or exchanged: made again", self._folder)
        return sock

    def _mend(self) -> socket.socket:
        os.close(open_run_dir(str(self._folder)))
        held = os.fstat(self.lock)
        if _identity(self._folder / "helper.lock") != (held.st_dev, held.st_ino):
            lock = take_lock(self._folder)
            if lock is None:
                raise OSError("another helper has taken it")
            os.close(self.lock)
            self.lock = lock
            sign(lock)
        self._store.ensure()
        for record in self._registry:
            if not self._store.has(record.key):
                self._store.prepare(record.key, record.model_dump_json().encode())
                self._store.commit(record.key)
        sock = listen(self._folder / "helper.sock")
        self._socket = _identity(self._folder / "helper.sock")
        return sock


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
