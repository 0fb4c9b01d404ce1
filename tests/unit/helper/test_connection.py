"""Requests in halves, too large, of another age, with descriptors nobody asked for."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable

import pytest

from cni_hostport import shim
from cni_hostport.helper import connection as module
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.connection import Connection, Request, close_descriptors

ENV = {b"CNI_COMMAND": b"ADD", b"CNI_ARGS": b"a=b;c=\xff"}
FRAME = shim.pack_request(shim.KIND_CALL, 3, ENV, b"{}")


class Talk:
    """One connection and its client's end."""

    def __init__(self) -> None:
        self.client, served = socket.socketpair()
        self.client.setblocking(False)
        self.requests: list[Request] = []
        self.closed = 0
        loop = asyncio.get_running_loop()
        self.connection = Connection(served, loop, self._ready, self._closed)
        self.connection.watch()

    def _ready(self, connection: Connection, request: Request) -> None:
        self.requests.append(request)

    def _closed(self, connection: Connection) -> None:
        self.closed += 1

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)


def talk(scene: Callable[[Talk], Awaitable[None]]) -> None:
    """Run a scene; no descriptor may be left of it."""

    async def main() -> None:
        it = Talk()
        await scene(it)
        for request in it.requests:
            close_descriptors(request)
        it.connection.close()
        it.client.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(main())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("cut", [1, 3, 15, 16, 17, 30, len(FRAME) - 1])
def test_halves_make_a_whole(cut: int) -> None:
    async def scene(it: Talk) -> None:
        it.client.send(FRAME[:cut])
        await it.settle()
        assert it.requests == []
        assert it.connection.waiting
        it.client.send(FRAME[cut:])
        await it.settle()
        (request,) = it.requests
        assert (request.kind, request.env, request.body) == (b"C", ENV, b"{}")
        assert (request.own_netns, request.pod_netns) == (-1, -1)

    talk(scene)


def test_byte_by_byte_and_an_answer() -> None:
    async def scene(it: Talk) -> None:
        for at in range(len(FRAME)):
            it.client.send(FRAME[at : at + 1])
            await asyncio.sleep(0)
        await it.settle()
        assert len(it.requests) == 1
        assert it.connection.answer(Answer(7, b"out", b"err"))
        await it.settle()
        data = it.client.recv(1000)
        assert shim.parse_response_header(data[:16]) == (1, 7, 3, 3)
        assert data[16:] == b"outerr"
        assert it.closed == 1

    talk(scene)


@pytest.mark.parametrize(
    "header",
    [
        b"GET / HTTP/1.1\r\n",
        b"CHP\x09C" + bytes(11),
        b"CHP\x01X" + bytes(11),
        b"CHP\x01C\0\0\0\xff\xff\xff\xff\0\0\0\0",
        b"CHP\x01C\0\0\0\0\0\0\0\xff\xff\xff\xff",
        b"CHP\x01C\0\0\0\0\0\0\0" + (shim.MAX_STDIN + 2).to_bytes(4, "big"),
        b"CHP\x01C\0\0\0" + (module.MAX_ENV + 1).to_bytes(4, "big") + bytes(4),
    ],
)
def test_what_is_no_request_of_ours_is_hung_up_on(header: bytes) -> None:
    async def scene(it: Talk) -> None:
        it.client.send(header)
        await it.settle()
        assert it.closed == 1
        assert it.requests == []
        assert it.client.recv(10) == b""

    talk(scene)


@pytest.mark.parametrize("protocol", [shim.PROTOCOL - 1, shim.PROTOCOL + 1])
def test_neighbours_of_our_protocol_are_answered_in_theirs(protocol: int) -> None:
    async def scene(it: Talk) -> None:
        it.client.send(FRAME[:3] + bytes((protocol,)) + FRAME[4:])
        await it.settle()
        it.connection.answer(Answer())
        await it.settle()
        assert it.client.recv(100)[3] == protocol

    talk(scene)


@pytest.mark.parametrize(
    ("flags", "count"), [(0, 0), (0, 3), (1, 1), (2, 1), (3, 2), (3, 4), (3, 9)]
)
def test_descriptors_are_taken_by_the_flags_and_the_rest_closed(flags: int, count: int) -> None:
    async def scene(it: Talk) -> None:
        fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
        frame = FRAME[:5] + bytes((flags,)) + FRAME[6:]
        socket.send_fds(it.client, [frame], fds)
        for fd in fds:
            os.close(fd)
        await it.settle()
        (request,) = it.requests
        named = [d for d in (request.own_netns, request.pod_netns) if d >= 0]
        assert len(named) == (0 if count > 4 else min(count, bin(flags).count("1"))) or count > 4

    talk(scene)


def test_descriptors_without_end_and_after_the_request_are_closed() -> None:
    async def scene(it: Talk) -> None:
        for data in (FRAME[:8], FRAME[8:20], FRAME[20:], b"more"):
            for _ in range(3):
                fd = os.open("/dev/null", os.O_RDONLY)
                socket.send_fds(it.client, [data[:1]], [fd])
                os.close(fd)
                data = data[1:]
            it.client.send(data)
            await it.settle()
        assert len(it.requests) == 1

    talk(scene)


def test_a_client_that_leaves_is_noticed() -> None:
    async def scene(it: Talk) -> None:
        it.client.send(FRAME)
        await it.settle()
        assert it.connection.alive()
        it.client.close()
        await it.settle()
        assert not it.connection.alive()
        assert not it.connection.answer(Answer(0, b"late"))
        await it.settle()
        assert it.closed == 1

    talk(scene)


def test_a_client_that_leaves_in_the_middle_is_forgotten() -> None:
    async def scene(it: Talk) -> None:
        it.client.send(FRAME[:20])
        it.client.close()
        await it.settle()
        assert (it.closed, it.requests) == (1, [])

    talk(scene)


def test_a_silent_and_a_slow_client_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)

    async def scene(it: Talk) -> None:
        it.client.send(FRAME[:20])
        await asyncio.sleep(0.1)
        assert it.closed == 1

    talk(scene)


def test_an_answer_that_nobody_takes_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)

    async def scene(it: Talk) -> None:
        it.client.send(FRAME)
        await it.settle()
        it.connection.answer(Answer(0, bytes(8 << 20)))
        await asyncio.sleep(0.2)
        assert it.closed == 1

    talk(scene)
