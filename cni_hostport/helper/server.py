"""Where each request goes.

Reads (STATUS, status, metrics) are answered on the event loop and never wait
for the worker; everything that changes state is the worker's, in order of arrival.
Who is accepted, and by whom, is ``reception.py``'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from cni_hostport import cni, shim
from cni_hostport.errors import HostPortError, NotAvailable
from cni_hostport.helper.answer import Answer, Outcome, failure
from cni_hostport.helper.asked import Asked, CallRequest, read
from cni_hostport.helper.connection import Connection, Request, close_descriptors
from cni_hostport.helper.core import Core
from cni_hostport.helper.reception import Reception
from cni_hostport.helper.worker import Job, Worker, attempt

log = logging.getLogger(__name__)

Operation = Callable[[Mapping[str, object]], Answer]
Handover = Callable[[socket.socket, list[socket.socket]], None]

_AS_NAMES = (sys.getfilesystemencoding(), sys.getfilesystemencodeerrors())

HANDOVER_PATIENCE = 2.0
"""Seconds that clients in the middle of a request have before a hand-over goes on."""


class Server:
    """Hands requests on."""

    def __init__(
        self,
        sock: socket.socket,
        core: Core,
        worker: Worker,
        operations: Mapping[str, Operation],
        problem: Callable[[str], str],
        jobs: Mapping[str, Operation] | None = None,
        handover: Handover | None = None,
        together: Callable[[bool], None] = lambda _several: None,
    ) -> None:
        self._handover = handover
        self._jobs = jobs or {}
        self._core = core
        self._worker = worker
        self._operations = operations
        self._problem = problem
        self._loop = asyncio.get_running_loop()
        self._together = together
        self.reception = Reception(sock, worker, self._received, self._jobs_of)

    def _jobs_of(self, found: Sequence[tuple[Connection, Request]]) -> list[Job]:
        """Worker: what it does itself of what came at one moment; the rest is the loop's."""
        calls: list[_Waiting] = []
        for connection, request in found:
            try:
                if _changes_state(request):
                    if request.env.get(b"CNI_COMMAND") == b"GC":  # of as many as a network has
                        self.reception.relieve_soon()
                    calls.append(_Waiting.read(connection, request, time.monotonic()))
                else:
                    self._loop.call_soon_threadsafe(self._received, connection, request)
            except Exception:
                log.exception("a client is let go")
                close_descriptors(request)
                connection.hang_up()
        return [partial(self._serve, calls)] if calls else []

    def _received(self, connection: Connection, request: Request) -> None:
        """Loop: whatever the worker did not take itself."""
        if _changes_state(request):
            arrived = time.monotonic()
            self._worker.submit(lambda: self._serve([_Waiting.read(connection, request, arrived)]))
        elif request.kind == shim.KIND_OPERATOR:
            close_descriptors(request)
            self._operate(connection, request)
        else:
            connection.answer(self._status(request))
            close_descriptors(request)

    def _serve(self, calls: list[_Waiting]) -> None:
        """Worker: calls of one moment, in their order."""
        several = len(calls) > 1
        if several:
            self._together(True)
        try:
            while calls:
                self._serve_first(calls)
        finally:
            if several:
                self._together(False)

    def _serve_first(self, calls: list[_Waiting]) -> None:
        """Those of the first that are served at once are answered, and gone from the list."""
        try:
            outcomes = self._core.serve([c.asked for c in calls])
        except Exception:
            log.exception("a call is let go")
            calls.pop(0).let_go(answered=False)
            return
        for call, outcome in zip(calls, outcomes, strict=False):
            self._finish(call, outcome)
        del calls[: len(outcomes)]

    def _finish(self, call: _Waiting, outcome: Outcome) -> None:
        """Answer one; an ADD nobody waits for any more is undone."""
        delivered = False
        try:
            wanted = outcome.undo is None or call.connection.alive()
            delivered = wanted and call.connection.answer(outcome.answer)
        except Exception:
            log.exception("an answer is lost")
        call.let_go(answered=delivered)
        if delivered or outcome.undo is None:
            self._worker.owe(outcome.note)
            return
        self._worker.settle()
        attempt(outcome.note)
        log.warning("the caller of an ADD is gone before the answer: undone")
        attempt(outcome.undo)

    def _status(self, request: Request) -> Answer:
        """CNI STATUS: never waits for the worker."""
        env = _as_text(request.env)
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
            self._core.adds.check_home(request.own_netns)
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
            self._worker.submit(lambda: self._do_long(name, wish, connection))
        else:
            connection.answer(Answer(2, b"", b"unknown operation\n"))

    def _do_long(self, name: str, wish: Mapping[str, object], connection: Connection) -> None:
        """Worker: said from here, so that it comes after the word that the worker was back."""
        self.reception.relieve_soon()
        _perform(self._jobs[name], wish, connection)

    def _begin_handover(self, connection: Connection) -> None:
        """Accept no more, let those in the middle finish, then hand everything over."""
        channel = connection.detach()
        channel.setblocking(True)
        self.reception.stop()

        def release() -> None:
            self.reception.release()
            deadline = self._loop.time() + HANDOVER_PATIENCE
            self._loop.call_soon_threadsafe(self._continue_handover, channel, deadline)

        self._worker.submit(release)

    def _continue_handover(self, channel: socket.socket, deadline: float) -> None:
        busy = any(not c.silent for c in self.reception.clients)
        if busy and self._loop.time() < deadline:
            self._loop.call_later(0.005, self._continue_handover, channel, deadline)
            return
        clients = [c.detach() for c in self.reception.clients if c.silent]
        handover = self._handover
        assert handover is not None
        self._worker.submit(lambda: handover(channel, clients))


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A call that was read, and who waits for its answer."""

    connection: Connection
    request: Request
    asked: Asked

    @classmethod
    def read(cls, connection: Connection, request: Request, arrived: float) -> _Waiting:
        """``arrived``: seconds of the monotonic clock."""
        call = CallRequest(
            env=_as_text(request.env),
            stdin=request.body,
            own_netns=request.own_netns,
            pod_netns=request.pod_netns,
            alive=connection.alive,
            arrived=arrived,
        )
        return cls(connection, request, read(call))

    def let_go(self, answered: bool) -> None:
        """The end of it."""
        close_descriptors(self.request)
        if not answered:
            self.connection.hang_up()


def _as_text(env: Mapping[bytes, bytes]) -> dict[str, str]:
    """The environment as Python shows one (os.fsdecode, at half of its cost)."""
    return {k.decode(*_AS_NAMES): v.decode(*_AS_NAMES) for k, v in env.items()}


def _changes_state(request: Request) -> bool:
    """Whether it is a CNI call of the worker's: all but STATUS."""
    return request.kind == shim.KIND_CALL and request.env.get(b"CNI_COMMAND") != b"STATUS"


def _perform(operation: Operation, wish: Mapping[str, object], connection: Connection) -> None:
    try:
        connection.answer(operation(wish))
    except Exception as error:
        log.exception("operation failed")
        connection.answer(Answer(1, b"", f"{type(error).__name__}: {error}\n".encode()))
