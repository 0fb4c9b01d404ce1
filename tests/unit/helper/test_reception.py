"""Who accepts whom: the worker while it has nothing to do, the event loop in its place."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from cni_hostport import shim
from cni_hostport.helper import intake
from cni_hostport.helper import reception as module
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.connection import Connection, Request
from cni_hostport.helper.reception import Reception, listen
from cni_hostport.helper.worker import Job, Worker

CALL = shim.pack_request(shim.KIND_CALL, 0, {b"CNI_COMMAND": b"ADD"}, b"{}")
READ = shim.pack_request(shim.KIND_OPERATOR, 0, {}, b"{}")


class Desk:
    """A reception, its worker, and who answered what in which thread."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "helper.sock"
        self.loop = asyncio.get_running_loop()
        self.worker = Worker()
        self.served: list[tuple[str, bytes]] = []
        self.moments: list[int] = []
        self.reception = Reception(listen(self.path), self.worker, self._received, self._jobs_of)
        self.worker.start()
        self.reception.start()

    def _jobs_of(self, found: Sequence[tuple[Connection, Request]]) -> list[Job]:
        self.moments.append(len(found))
        jobs: list[Job] = []
        for connection, request in found:
            if request.kind == shim.KIND_CALL:
                jobs.append(partial(self._answer, connection, request))
            else:
                self.loop.call_soon_threadsafe(self._received, connection, request)
        return jobs

    def _received(self, connection: Connection, request: Request) -> None:
        if request.kind == shim.KIND_CALL:
            self.worker.submit(lambda: self._answer(connection, request))
        else:
            self._answer(connection, request)

    def _answer(self, connection: Connection, request: Request) -> None:
        self.served.append((threading.current_thread().name, request.kind))
        connection.answer(Answer(0, request.kind))

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.connect(str(self.path))
        client.setblocking(False)
        return client

    async def answer(self, client: socket.socket) -> bytes:
        """The whole answer; empty where the helper hung up."""
        data = b""
        while part := await asyncio.wait_for(self.loop.sock_recv(client, 4096), 10):
            data += part
        client.close()
        return data[shim.HEADER_SIZE :]

    async def ask(self, frame: bytes) -> bytes:
        client = self.connect()
        client.send(frame)
        return await self.answer(client)

    async def serves_only_once_started(self) -> None:
        client = self.connect()
        client.send(CALL)
        await asyncio.sleep(0.05)
        assert self.served == []
        self.reception.start()
        assert await self.answer(client) == b"C"

    async def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not true():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.002)

    def accepts(self) -> bool:
        """Whether the loop does."""
        return self.loop.remove_reader(self.reception._sock.fileno())

    def occupy(self) -> threading.Event:
        """The worker is at something until the event is set."""
        go, begun = threading.Event(), threading.Event()
        self.worker.submit(lambda: bool(begun.set() or go.wait(10)) and None)
        assert begun.wait(10)
        return go


def scene(folder: Path, play: Callable[[Desk], Awaitable[None]]) -> None:
    """Play it; no client may be left."""

    async def main() -> None:
        desk = Desk(folder)
        try:
            await asyncio.wait_for(play(desk), 30)
            await desk.until(lambda: not desk.reception.clients)
        finally:
            desk.reception.stop()
            assert desk.worker.stop(10)
            os.close(desk.worker.bell)

    asyncio.run(main())
    gc.collect()  # other tests count descriptors


def test_a_call_wakes_the_worker_alone(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        assert await desk.ask(CALL) == b"C"
        assert desk.served == [("worker", b"C")]
        assert not desk.accepts()

    scene(tmp_path, play)


def test_what_is_no_call_is_the_loops(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        assert await desk.ask(READ) == b"O"
        assert desk.served == [("MainThread", b"O")]

    scene(tmp_path, play)


@pytest.mark.parametrize("pause", [0.0, 0.005, 0.08])
@pytest.mark.parametrize("cut", [0, 5, len(CALL) - 1])
def test_a_request_in_halves_is_waited_for(cut: int, pause: float, tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        client = desk.connect()
        if cut:
            client.send(CALL[:cut])
        await asyncio.sleep(pause)
        client.send(CALL[cut:])
        assert await desk.answer(client) == b"C"
        assert desk.served == [("worker", b"C")]

    scene(tmp_path, play)


def test_a_slow_client_holds_up_nobody(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        slow = [desk.connect() for _ in range(5)]
        for client in slow[1:]:
            client.send(CALL[:20])
        begin = time.monotonic()
        for _ in range(5):
            assert await desk.ask(CALL) == b"C"
        assert time.monotonic() - begin < 5
        await desk.until(lambda: all(c.watched for c in desk.reception.clients))
        assert len(desk.reception.clients) == 5
        for client in slow:
            client.close()

    scene(tmp_path, play)


def test_calls_of_one_moment_are_handed_on_together(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        go = desk.occupy()
        clients = [desk.connect() for _ in range(3)]
        for client in clients:
            client.send(CALL)
        go.set()
        assert [await desk.answer(c) for c in clients] == [b"C"] * 3
        assert await desk.ask(CALL) == b"C"
        assert desk.moments == [3, 1]
        assert {thread for thread, _ in desk.served} == {"worker"}

    scene(tmp_path, play)


def test_hundreds_at_once_are_all_answered(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        clients = [desk.connect() for _ in range(300)]
        for client in clients:
            client.send(CALL)
        assert [await desk.answer(c) for c in clients] == [b"C"] * 300

    scene(tmp_path, play)


def test_a_client_that_leaves_is_forgotten(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        for wait in (0.0, 0.05):
            client = desk.connect()
            client.send(CALL[:7])
            await asyncio.sleep(wait)
            client.close()
        await desk.until(lambda: not desk.reception.clients)
        assert desk.served == []

    scene(tmp_path, play)


@pytest.mark.parametrize("how", ["soon", "late"])
def test_the_loop_answers_while_the_worker_is_busy(how: str, tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        go = desk.occupy()
        if how == "soon":
            desk.worker.submit(lambda: None)
            threading.Thread(target=desk.reception.relieve_soon).start()
        else:
            desk.reception.relieve_if_late()
            assert not desk.accepts()  # not yet
            await asyncio.sleep(module.BUSY)
            desk.reception.relieve_if_late()
        assert await desk.ask(READ) == b"O"
        call = desk.connect()
        call.send(CALL)
        await desk.until(lambda: len(desk.reception.clients) == 1)
        assert desk.served == [("MainThread", b"O")]
        go.set()
        assert await desk.answer(call) == b"C"
        assert desk.served[1:] == [("worker", b"C")]
        await desk.until(lambda: not desk.reception._relieved)
        assert not desk.accepts()
        assert await desk.ask(CALL) == b"C"

    scene(tmp_path, play)


@pytest.mark.parametrize("sent", [0, 9])
@pytest.mark.parametrize("how", ["soon", "late"])
def test_who_had_not_asked_when_the_worker_turned_away_is_answered(
    how: str, sent: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intake, "PATIENCE", 1.0)

    async def play(desk: Desk) -> None:
        client = desk.connect()
        client.send(READ[:sent])
        await desk.until(lambda: desk.reception._intake._coming)
        go = desk.occupy()
        if how == "soon":
            desk.reception.relieve_soon()
        else:
            await asyncio.sleep(module.BUSY)
            desk.reception.relieve_if_late()
        client.send(READ[sent:])
        assert await desk.answer(client) == b"O"
        go.set()

    scene(tmp_path, play)


def test_a_word_that_more_is_to_come_is_not_lost(tmp_path: Path) -> None:
    """The worker was back for an instant: the loop stands back and then comes again."""

    async def play(desk: Desk) -> None:
        for _ in range(20):
            go = desk.occupy()
            desk.reception.relieve()
            begun, again = threading.Event(), threading.Event()

            def tool(begun: threading.Event = begun, again: threading.Event = again) -> None:
                desk.reception.relieve_soon()
                begun.set()
                again.wait(10)

            plain = desk.worker.idle

            def idle(plain: Callable[[], object] = plain) -> object:
                desk.worker.idle = plain  # type: ignore[assignment]
                desk.reception._worker_is_back()
                return [tool]

            desk.worker.idle = idle  # type: ignore[assignment]
            go.set()
            assert begun.wait(10)
            assert await desk.ask(READ) == b"O"
            again.set()

    scene(tmp_path, play)


def test_a_client_that_cannot_be_watched_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(desk: Desk) -> None:
        go = desk.occupy()
        clients = [desk.connect() for _ in range(3)]
        for client in (clients[0], clients[2]):
            client.send(CALL)
        plain = Connection.receive

        def receive(connection: Connection) -> Request | None:
            request = plain(connection)
            if request is None:
                raise OSError(12, "no memory")
            return request

        monkeypatch.setattr(Connection, "receive", receive)
        go.set()
        assert [await desk.answer(c) for c in clients] == [b"C", b"", b"C"]
        assert "a client is let go" in caplog.text

    scene(tmp_path, play)


def test_who_waits_at_the_old_socket_is_served(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        go = desk.occupy()
        clients = [desk.connect() for _ in range(100)]
        for client in clients:
            client.send(READ)
        desk.path.unlink()
        desk.reception.listen_on(listen(desk.path))
        go.set()
        assert [await desk.answer(c) for c in clients] == [b"O"] * 100
        assert await desk.ask(CALL) == b"C"

    scene(tmp_path, play)


def test_another_socket_begins_nothing_that_was_stopped(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        desk.reception.stop()
        desk.path.unlink()
        desk.reception.listen_on(listen(desk.path))
        await desk.serves_only_once_started()

    scene(tmp_path, play)


def test_sockets_may_change_while_clients_come(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(desk: Desk) -> None:
        async def ask() -> None:
            for _ in range(100):
                assert await desk.ask(CALL) == b"C"
                await asyncio.sleep(0)

        asking = [asyncio.create_task(ask()) for _ in range(4)]
        while not all(task.done() for task in asking):
            desk.reception.listen_on(listen(desk.path))
            await asyncio.sleep(0.002)
        await asyncio.gather(*asking)
        assert "cannot accept" not in caplog.text

    scene(tmp_path, play)


def test_after_the_end_of_accepting_nobody_does(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        go = desk.occupy()
        desk.reception.stop()
        desk.reception.relieve()
        assert not desk.accepts()
        go.set()
        await desk.serves_only_once_started()

    scene(tmp_path, play)


def test_those_who_have_not_asked_can_be_given_to_the_loop(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        client = desk.connect()
        await desk.until(lambda: desk.reception.clients)
        desk.worker.submit(desk.reception.release)
        await desk.until(lambda: desk.reception.clients[0].watched)
        client.send(CALL)
        assert await desk.answer(client) == b"C"

    scene(tmp_path, play)


def test_another_socket_takes_the_place_of_the_first(tmp_path: Path) -> None:
    async def play(desk: Desk) -> None:
        desk.path.unlink()
        desk.reception.listen_on(listen(desk.path))
        assert await desk.ask(CALL) == b"C"

    scene(tmp_path, play)


def test_without_descriptors_clients_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(desk: Desk) -> None:
        plain, times = socket.socket.accept, iter(range(2))

        def accept(sock: socket.socket) -> object:
            if next(times, None) is not None:
                raise OSError(24, "Too many open files")
            return plain(sock)

        monkeypatch.setattr(socket.socket, "accept", accept)
        assert await desk.ask(CALL) == b"C"
        assert next(times, None) is None

    scene(tmp_path, play)


def test_the_oldest_silent_client_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CLIENTS", 3)

    async def play(desk: Desk) -> None:
        clients = []
        for number in range(4):
            clients.append(desk.connect())
            await desk.until(
                lambda number=number: (
                    sum(c.watched for c in desk.reception.clients) == min(number + 1, 3)
                )
            )
        assert await desk.answer(clients[0]) == b""
        for client in clients[1:]:
            client.send(CALL)
            assert await desk.answer(client) == b"C"

    scene(tmp_path, play)


def test_whoever_is_not_root_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if os.geteuid() != 0:
        pytest.fail("run as root")

    async def play(desk: Desk) -> None:
        desk.path.chmod(0o666)
        tmp_path.chmod(0o755)
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            client = socket.socket(socket.AF_UNIX)
            client.settimeout(10)
            try:
                os.chdir(f"/proc/self/fd/{folder}")
                client.connect("helper.sock")
                os._exit(len(client.recv(1)))
            except OSError:
                os._exit(99)
        status = await asyncio.to_thread(lambda: os.waitpid(pid, 0)[1])
        assert os.waitstatus_to_exitcode(status) == 0
        assert "a process of uid 65534 is not served" in caplog.text

    folder = os.open(tmp_path, os.O_RDONLY)
    scene(tmp_path, play)
    os.close(folder)
