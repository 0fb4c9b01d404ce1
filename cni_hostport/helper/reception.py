"""Who may speak to the helper, and who accepts them.

The worker does while it has nothing else to do (``intake.py``); the event loop relieves it
while it is at something longer than a call. Knows nothing of what clients ask, and never
lets go of one that waits for its answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from cni_hostport.helper.connection import Connection, Request
from cni_hostport.helper.intake import Intake, Serve
from cni_hostport.helper.worker import Worker

log = logging.getLogger(__name__)

MAX_CLIENTS = 512
_BACKLOG = 1024
_AT_ONCE = 64
_ACCEPT_PAUSE = 0.1
_SO_PEERCRED = struct.Struct("=iII")

BUSY = 0.02
"""Seconds of work after which the loop accepts in the worker's place."""


def listen(path: Path) -> socket.socket:
    """Bind the helper's socket with mode 0600, in place of a stale one.

    The caller holds the helper's lock, so nobody serves the old file.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    temporary = path.with_suffix(".new")
    temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # through the descriptor: a long run directory does not fit into sun_path
        sock.bind(f"/proc/self/fd/{folder}/{temporary.name}")
    finally:
        os.close(folder)
    temporary.chmod(0o600)
    sock.listen(_BACKLOG)
    temporary.rename(path)
    return sock


class Reception:
    """The listening socket and its clients. Methods are the loop thread's unless they say so.

    ``received`` takes a whole request on the loop; ``jobs_of`` takes those of one moment on
    the worker, and makes them jobs or gives them to the loop.
    """

    def __init__(
        self,
        sock: socket.socket,
        worker: Worker,
        received: Callable[[Connection, Request], None],
        jobs_of: Serve,
    ) -> None:
        self._sock = sock
        self._worker = worker
        self._received = received
        self._clients: dict[Connection, None] = {}
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._accepting = False
        self._relieved = False
        self._intake = Intake(
            worker, self._taken_in, jobs_of, self._watch_soon, self._worker_is_back
        )
        worker.idle = self._intake.wait

    @property
    def clients(self) -> list[Connection]:
        """Everybody who is connected."""
        return list(self._clients)

    def start(self) -> None:
        """Begin to accept."""
        self._pause = None
        self._accepting = True
        self._sock.setblocking(False)
        self._intake.open(self._sock)

    def stop(self) -> None:
        """Accept no more; those connected are still answered."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self._accepting = False
        self._intake.close(self._sock)
        self._stand_back()

    def listen_on(self, sock: socket.socket) -> None:
        """Accept on another socket from now on; who waits at the old one is served first."""
        sock.setblocking(False)  # the worker may be about to accept
        old, accepting = self._sock, self._accepting or self._pause is not None
        self.stop()
        self._sock = sock
        while clients := self._accepted(old):
            for client in clients:
                self.serve(client)
        old.close()
        if accepting:
            self.start()

    def relieve(self) -> None:
        """Accept in the place of the worker, which is at something longer, until it is back.

        Whoever it waits for has to be waited for here as well.
        """
        for connection in self._intake.take(math.inf):
            self._wait_for(connection)
        if self._accepting and not self._relieved:
            self._relieved = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def relieve_soon(self) -> None:
        """The same from any thread; in order with the word that the worker is back."""
        self._loop.call_soon_threadsafe(self.relieve)

    def relieve_if_late(self) -> None:
        """The same where the worker has been at it for a while and did not say so before."""
        if self._worker.busy_for() > BUSY:
            self.relieve()

    def serve(self, client: socket.socket) -> None:
        """Serve one connected client."""
        connection = self._connect(client)
        request = connection.receive()
        if request is None:
            self._wait_for(connection)
        else:
            self._received(connection, request)

    def release(self) -> None:
        """Worker: whoever has not asked yet is the loop's from now on."""
        self._intake.release()

    def _stand_back(self) -> None:
        if self._relieved:
            self._relieved = False
            self._loop.remove_reader(self._sock.fileno())

    def _worker_is_back(self) -> None:
        """Worker."""
        if self._relieved:
            self._loop.call_soon_threadsafe(self._stand_back)

    def _accept(self) -> None:
        # all of them first: once a request is the worker's, this thread had better be asleep,
        # since the two hold each other up at every system call
        for client in self._accepted():
            self.serve(client)

    def _taken_in(self) -> list[Connection]:
        """Worker: its own new clients."""
        return [self._connect(client) for client in self._accepted()]

    def _watch_soon(self, connection: Connection) -> None:
        """Worker: the loop waits for one who is slow."""
        self._loop.call_soon_threadsafe(self._wait_for, connection)

    def _wait_for(self, connection: Connection) -> None:
        """Where there are too many, in the place of the oldest that has not even asked."""
        if len(self._clients) > MAX_CLIENTS:
            silent = next((c for c in self.clients if c.waiting and c.watched), None)
            if silent is not None:
                silent.close()
        connection.watch()

    def _accepted(self, sock: socket.socket | None = None) -> list[socket.socket]:
        """Any thread: those who wait to be accepted, some at a time, if they may speak."""
        clients: list[socket.socket] = []
        listening = sock or self._sock
        for _ in range(_AT_ONCE):
            try:
                client, _ = listening.accept()
            except BlockingIOError:
                break
            except OSError as error:
                if listening is not self._sock:  # closed: another has taken its place
                    break
                # no descriptor left: those who wait stay in the backlog for a moment
                log.warning("cannot accept: %s", error)
                self._intake.close(self._sock)
                self._loop.call_soon_threadsafe(self._rest)
                break
            if may_speak(client):
                clients.append(client)
            else:
                client.close()
        return clients

    def _rest(self) -> None:
        if self._accepting:
            self.stop()
            self._pause = self._loop.call_later(_ACCEPT_PAUSE, self.start)

    def _connect(self, client: socket.socket) -> Connection:
        connection = Connection(client, self._loop, self._received, self._forget)
        self._clients[connection] = None
        return connection

    def _forget(self, connection: Connection) -> None:
        """Any thread."""
        self._clients.pop(connection, None)


def may_speak(client: socket.socket) -> bool:
    """Whether it is root (SO_PEERCRED)."""
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _SO_PEERCRED.size)
    _, uid, _ = _SO_PEERCRED.unpack(raw)
    if uid != 0:
        log.warning("a process of uid %d is not served", uid)
    return bool(uid == 0)
