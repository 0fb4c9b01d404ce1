"""The helper's socket: who may speak, and where each request goes.

Reads (STATUS, status, metrics) are answered on the event loop and never wait
for the worker; everything that changes state goes to the worker in order of
arrival. The worker accepts clients itself (``intake.py``); the loop relieves it
while it is busy with something that takes longer than a call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cni_hostport import cni, shim
from cni_hostport.errors import HostPortError, NotAvailable
from cni_hostport.helper.answer import Answer, failure
from cni_hostport.helper.connection import Connection, Request, close_descriptors
from cni_hostport.helper.core import CallRequest, Core
from cni_hostport.helper.intake import Intake
from cni_hostport.helper.worker import Job, Worker

log = logging.getLogger(__name__)

MAX_CLIENTS = 512
_BACKLOG = 1024
_ACCEPT_PAUSE = 0.1
_SO_PEERCRED = struct.Struct("=iII")

Operation = Callable[[Mapping[str, object]], Answer]
Handover = Callable[[socket.socket, list[socket.socket]], None]

BUSY = 0.02
"""Seconds of one piece of work after which the loop accepts in the worker's place."""

HANDOVER_PATIENCE = 2.0
"""Seconds that clients in the middle of a request have before a hand-over goes on."""


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


class Server:
    """Accepts clients and hands their requests on."""

    def __init__(
        self,
        sock: socket.socket,
        core: Core,
        worker: Worker,
        operations: Mapping[str, Operation],
        problem: Callable[[str], str],
        jobs: Mapping[str, Operation] | None = None,
        handover: Handover | None = None,
    ) -> None:
        self._sock = sock
        self._handover = handover
        self._jobs = jobs or {}
        self._core = core
        self._worker = worker
        self._operations = operations
        self._problem = problem
        self._clients: dict[Connection, None] = {}
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._accepting = False
        self._relieved = False
        self._intake = Intake(
            worker, self._taken_in, self._job, self._watch_soon, self._stand_back_soon
        )
        worker.idle = self._intake.wait

    def start(self) -> None:
        """Begin to accept. Loop thread only, as are stop, relieve and listen_on."""
        self._pause = None
        self._accepting = True
        self._sock.setblocking(False)
        self._intake.open(self._sock)

    def stop(self) -> None:
        """Accept no more; those connected are still answered."""
        if self._pause is not None:
            self._pause.cancel()
        self._accepting = False
        self._intake.close(self._sock)
        self._stand_back()

    def relieve(self) -> None:
        """Accept in the place of the worker, which is at something longer, until it is back."""
        if self._accepting and not self._relieved:
            self._relieved = True
            self._loop.add_reader(self._sock.fileno(), self._accept)

    def relieve_soon(self) -> None:
        """The same from any thread."""
        if not self._relieved:
            self._loop.call_soon_threadsafe(self.relieve)

    def relieve_if_late(self) -> None:
        """The same where the worker has been at it for a while and did not say so before."""
        if self._worker.busy_for() > BUSY:
            self.relieve()

    def _stand_back(self) -> None:
        if self._relieved:
            self._relieved = False
            self._loop.remove_reader(self._sock.fileno())

    def _stand_back_soon(self) -> None:
        """Worker: it has nothing to do."""
        if self._relieved:
            self._loop.call_soon_threadsafe(self._stand_back)

    def _accept(self) -> None:
        # all of them first: once a request is the worker's, this thread had better be asleep,
        # since the two hold each other up at every system call
        for client in self._accepted():
            self._make_room()
            self.serve(client)

    def _taken_in(self) -> list[Connection]:
        """Worker: its own new clients."""
        return [self._connect(client) for client in self._accepted()]

    def _watch_soon(self, connection: Connection) -> None:
        """Worker: the loop waits for somebody who is slow, in the place of the oldest such."""

        def watch() -> None:
            self._make_room()
            connection.watch()

        self._loop.call_soon_threadsafe(watch)

    def _job(self, connection: Connection, request: Request) -> Job | None:
        """Worker: what it does itself; everything else is the loop's."""
        if request.kind == shim.KIND_CALL and request.env.get(b"CNI_COMMAND") != b"STATUS":
            arrived = time.monotonic()
            return lambda: self._call(connection, request, arrived)
        self._loop.call_soon_threadsafe(self._received, connection, request)
        return None

    def _accepted(self) -> list[socket.socket]:
        """Who waits to be accepted, at most 64 of them, without those who may not speak."""
        clients: list[socket.socket] = []
        for _ in range(64):
            try:
                client, _ = self._sock.accept()
            except BlockingIOError:
                break
            except OSError as error:
                # no descriptor left: those who wait stay in the backlog for a moment
                log.warning("cannot accept: %s", error)
                self._intake.close(self._sock)
                self._loop.call_soon_threadsafe(self._rest)
                break
            if self._may_speak(client):
                clients.append(client)
            else:
                client.close()
        return clients

    def _rest(self) -> None:
        if self._accepting:
            self.stop()
            self._pause = self._loop.call_later(_ACCEPT_PAUSE, self.start)

    def listen_on(self, sock: socket.socket) -> None:
        """Accept on another socket from now on; the old one is closed."""
        self.stop()
        self._sock.close()
        self._sock = sock
        self.start()

    def serve(self, client: socket.socket) -> None:
        """Serve one connected client. Loop thread only."""
        connection = self._connect(client)
        request = connection.receive()
        if request is None:
            connection.watch()
        else:
            self._received(connection, request)

    def _connect(self, client: socket.socket) -> Connection:
        connection = Connection(client, self._loop, self._received, self._forget)
        self._clients[connection] = None
        return connection

    def _may_speak(self, client: socket.socket) -> bool:
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _SO_PEERCRED.size)
        _, uid, _ = _SO_PEERCRED.unpack(raw)
        if uid != 0:
            log.warning("a process of uid %d is not served", uid)
        return bool(uid == 0)

    def _make_room(self) -> None:
        """Let go of the oldest client that has not even asked, never of one that waits."""
        if len(self._clients) >= MAX_CLIENTS:
            silent = next((c for c in list(self._clients) if c.waiting and c.watched), None)
            if silent is not None:
                silent.close()

    def _forget(self, connection: Connection) -> None:
        """Any thread; whoever walks through the clients takes a copy."""
        self._clients.pop(connection, None)

    def _received(self, connection: Connection, request: Request) -> None:
        if request.kind == shim.KIND_OPERATOR:
            close_descriptors(request)
            self._operate(connection, request)
        elif request.env.get(b"CNI_COMMAND") == b"STATUS":
            connection.answer(self._status(request))
            close_descriptors(request)
        else:
            arrived = time.monotonic()
            self._worker.submit(lambda: self._call(connection, request, arrived))

    def _call(self, connection: Connection, request: Request, arrived: float) -> None:
        """Serve one call on the worker; an ADD nobody waits for any more is undone."""
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in request.env.items()}
        try:
            answer, undo = self._core.handle(
                CallRequest(
                    env=env,
                    stdin=request.body,
                    own_netns=request.own_netns,
                    pod_netns=request.pod_netns,
                    alive=connection.alive,
                    arrived=arrived,
                )
            )
        finally:
            close_descriptors(request)
        delivered = (undo is None or connection.alive()) and connection.answer(answer)
        if undo is not None and not delivered:
            log.warning("the caller of an ADD is gone before the answer: undone")
            undo()

    def _status(self, request: Request) -> Answer:
        """CNI STATUS: never waits for the worker."""
        env = {os.fsdecode(k): os.fsdecode(v) for k, v in request.env.items()}
        version = cni.cni_version_of(request.body)
        try:
            call = cni.parse_call(env, request.body)
            if text := self._foreign(request) or self._problem(cni.backend_of(call)):
                raise NotAvailable("cni-hostport cannot serve ADD", text)
        except HostPortError as error:
            return failure(error, version)
        return Answer()

    def _foreign(self, request: Request) -> str:
        """Why this helper serves no caller of that net namespace; empty if it does."""
        try:
            self._core.check_home(request.own_netns)
        except HostPortError as error:
            return str(error)
        return ""

    def _operate(self, connection: Connection, request: Request) -> None:
        try:
            wish = json.loads(request.body)
            name = wish["op"]
            known = isinstance(name, str)
        except (ValueError, KeyError, TypeError, RecursionError):
            known = False
        if not known:
            connection.answer(Answer(2, b"", b"no operation\n"))
            return
        if name == "handover" and self._handover is not None:
            self._begin_handover(connection)
        elif name in self._operations:
            _perform(self._operations[name], wish, connection)
        elif name in self._jobs:
            self._worker.submit(lambda: _perform(self._jobs[name], wish, connection))
        else:
            connection.answer(Answer(2, b"", b"unknown operation\n"))

    def _begin_handover(self, connection: Connection) -> None:
        """Accept no more, let those in the middle finish, then hand everything over."""
        channel = connection.detach()
        channel.setblocking(True)
        self.stop()

        def release() -> None:
            self._intake.release()
            deadline = self._loop.time() + HANDOVER_PATIENCE
            self._loop.call_soon_threadsafe(self._continue_handover, channel, deadline)

        self._worker.submit(release)

    def _continue_handover(self, channel: socket.socket, deadline: float) -> None:
        busy = any(not c.silent for c in list(self._clients))
        if busy and self._loop.time() < deadline:
            self._loop.call_later(0.005, self._continue_handover, channel, deadline)
            return
        clients = [c.detach() for c in list(self._clients) if c.silent]
        handover = self._handover
        assert handover is not None
        self._worker.submit(lambda: handover(channel, clients))


def _perform(operation: Operation, wish: Mapping[str, object], connection: Connection) -> None:
    try:
        connection.answer(operation(wish))
    except Exception as error:
        log.exception("operation failed")
        connection.answer(Answer(1, b"", f"{type(error).__name__}: {error}\n".encode()))
