"""Calls on their way through the server: what is left of them, and what comes after an answer."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from cni_hostport import shim
from cni_hostport.helper.answer import Answer, Outcome
from cni_hostport.helper.asked import Asked
from cni_hostport.helper.core import Core
from cni_hostport.helper.reception import listen
from cni_hostport.helper.server import Server
from cni_hostport.helper.worker import Worker

CALL = shim.pack_request(shim.KIND_CALL, 0, {b"CNI_COMMAND": b"ADD"}, b"{}")
DONE: list[str] = []


class Verbs:
    """In the core's place: an ADD that was done, and whether its caller is waited for to leave."""

    def __init__(self, until_gone: bool, note: Callable[[], None]) -> None:
        self.until_gone, self.note, self.asked = until_gone, note, 0

    def serve(self, several: Sequence[Asked]) -> list[Outcome]:
        served = several[:2]  # as many as go together, whatever more there are
        self.asked += len(served)
        end = time.monotonic() + 10
        for asked in served:
            while self.until_gone and asked.request.alive() and time.monotonic() < end:
                time.sleep(0.001)
        undo = partial(DONE.append, "undone")
        return [Outcome(Answer(0, b"{}"), undo, self.note) for _ in served]


def calls(folder: Path, verbs: Verbs, count: int, leave: bool) -> list[bytes]:
    """What each of some callers got; nobody may be left."""
    DONE.clear()

    async def main() -> list[bytes]:
        worker = Worker()
        server = Server(listen(folder / "helper.sock"), cast(Core, verbs), worker, {}, lambda _: "")
        worker.start()
        server.reception.start()
        answers = []
        for _ in range(count):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(folder / "helper.sock"))
            client.send(CALL)
            if leave:
                client.close()
                continue
            client.setblocking(False)
            answers.append(await asyncio.get_running_loop().sock_recv(client, 4096))
            client.close()
        end = time.monotonic() + 10
        while verbs.asked < count or server.reception.clients:
            assert time.monotonic() < end
            await asyncio.sleep(0.002)
        server.reception.stop()
        assert worker.stop(10)
        assert server.reception.clients == []
        os.close(worker.bell)
        return answers

    found = asyncio.run(main())
    gc.collect()
    return found


def test_callers_that_leave_are_undone_and_leave_nothing(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    calls(tmp_path, Verbs(True, lambda: DONE.append("noted")), 5, leave=True)
    assert DONE == ["noted", "undone"] * 5
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_answered_is_noted_and_stays(tmp_path: Path) -> None:
    answers = calls(tmp_path, Verbs(False, lambda: DONE.append("noted")), 3, leave=False)
    assert [a[shim.HEADER_SIZE :] for a in answers] == [b"{}"] * 3
    assert DONE == ["noted"] * 3


def test_a_failing_note_neither_keeps_an_answer_nor_an_undo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("no room for a line")

    assert len(calls(tmp_path, Verbs(False, fail), 2, leave=False)) == 2
    assert DONE == []
    calls(tmp_path, Verbs(True, fail), 2, leave=True)
    assert DONE == ["undone"] * 2
    assert "no room for a line" in caplog.text
