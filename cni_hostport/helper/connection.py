"""One client of the helper's socket: collects a request, sends an answer.

Decides when a request is whole, too large or too slow. Knows nothing of CNI.
A client that says nothing costs a descriptor for some seconds and no more.

Until its request is whole a connection is whoever's reads it: the worker's while it comes
at once, the event loop's where it is watched. From then on it belongs to whoever answers,
in whatever thread, and the loop is not woken for it again.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from cni_hostport import shim
from cni_hostport.helper.answer import Answer

MAX_ENV = 1 << 20
PATIENCE = 10.0
"""Seconds a client may take to send its whole request, and to take its answer."""

_MAX_FDS = 4
_RECV = 1 << 16


@dataclass(frozen=True, slots=True)
class Request:
    """One whole request. ``descriptors`` are the receiver's to close."""

    kind: bytes
    env: dict[bytes, bytes]
    body: bytes
    own_netns: int
    pod_netns: int


class Connection:
    """A connected client, driven by the event loop; answered from any thread, once."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        ready: Callable[[Connection, Request], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._ready = ready
        self._closed = closed
        self._data = bytearray()
        self._fds: list[int] = []
        self._whole = False
        self._open = True
        self._protocol = shim.PROTOCOL
        self._unsent = b""
        self._timer: asyncio.TimerHandle | None = None
        sock.setblocking(False)

    def fileno(self) -> int:
        """Descriptor of the socket, -1 once it is closed."""
        return self._sock.fileno()

    def receive(self) -> Request | None:
        """Read what is there; the request if that makes it whole. Never waits."""
        try:
            data = self._receive()
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self.hang_up()
            return None
        self._data += data
        try:
            return self._parse()
        except shim.ForeignProtocol:
            self.hang_up()
            return None

    def watch(self) -> None:
        """Wait for the rest of the request, for a time. Loop thread only."""
        if self._open and not self._whole and self._timer is None:
            self._loop.add_reader(self._sock.fileno(), self._readable)
            self._timer = self._loop.call_later(PATIENCE, self.close)

    @property
    def open(self) -> bool:
        """Whether its socket is."""
        return self._open

    @property
    def watched(self) -> bool:
        """Whether it is the loop's, which waits for it."""
        return self._timer is not None

    @property
    def waiting(self) -> bool:
        """Whether its request is not whole yet."""
        return not self._whole

    def alive(self) -> bool:
        """Whether the client still waits for its answer. Any thread."""
        if not self._open:
            return False
        try:
            return self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def answer(self, answer: Answer) -> bool:
        """Send an answer and close; False if the client is gone. Any thread."""
        frame = shim.pack_response(answer.status, answer.out, answer.err, self._protocol)
        try:
            sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._let_go()
            return False
        if sent == len(frame):
            self._let_go()
        else:
            self._unsent = frame[sent:]
            self._loop.call_soon_threadsafe(self._flush)
        return True

    @property
    def silent(self) -> bool:
        """Whether it is connected and has sent nothing yet."""
        return self._open and not self._whole and not self._data and not self._fds

    def detach(self) -> socket.socket:
        """Give the socket away; this object is done. Loop thread only."""
        kept = self._sock.dup()
        self.close()
        return kept

    def close(self) -> None:
        """Let go of the socket and of descriptors nobody took. Loop thread only."""
        if not self._open:
            return
        self._stop_reading()
        self._loop.remove_writer(self._sock.fileno())
        self._let_go()

    def _stop_reading(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._loop.remove_reader(self._sock.fileno())

    def _let_go(self) -> None:
        """The end of a connection that the loop does not watch; any thread."""
        self._open = False
        self._sock.close()
        self._close_descriptors()
        self._closed(self)

    def _close_descriptors(self) -> None:
        for descriptor in self._fds:
            os.close(descriptor)
        self._fds.clear()

    def _flush(self) -> None:
        if not self._open:
            return
        if self._unsent:
            try:
                self._unsent = self._unsent[self._sock.send(self._unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = self._loop.call_later(PATIENCE, self.close)
                self._loop.add_writer(self._sock.fileno(), self._flush)
                return
            except OSError:
                self._unsent = b""
        if not self._unsent:
            self.close()

    def hang_up(self) -> None:
        """Let go of it; whoever has it at the time."""
        if self.watched:
            self.close()
        else:
            self._let_go()

    def _readable(self) -> None:
        request = self.receive()
        if request is not None:
            self._stop_reading()
            self._ready(self, request)

    def _receive(self) -> bytes:
        room = socket.CMSG_SPACE(_MAX_FDS * 4)
        data, ancillary, _, _ = self._sock.recvmsg(_RECV, room, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
                self._fds.extend(fds)
        if len(self._fds) > _MAX_FDS:
            self._close_descriptors()
        return data

    def _parse(self) -> Request | None:
        if len(self._data) < shim.HEADER_SIZE:
            return None
        header = bytes(self._data[: shim.HEADER_SIZE])
        protocol, kind, flags, env_size, body_size = shim.parse_request_header(header)
        if env_size > MAX_ENV or body_size > shim.MAX_STDIN + 1:
            raise shim.ForeignProtocol("request too large")
        end = shim.HEADER_SIZE + env_size + body_size
        if len(self._data) < end:
            return None
        self._protocol, self._whole = protocol, True
        middle = shim.HEADER_SIZE + env_size
        env = shim.parse_env(bytes(self._data[shim.HEADER_SIZE : middle]))
        body = bytes(self._data[middle:end])
        self._data.clear()
        own, pod = self._take_descriptors(flags)
        return Request(kind, env, body, own, pod)

    def _take_descriptors(self, flags: int) -> tuple[int, int]:
        fds, self._fds = self._fds, []
        own = fds.pop(0) if flags & shim.FLAG_OWN_NETNS and fds else -1
        pod = fds.pop(0) if flags & shim.FLAG_POD_NETNS and fds else -1
        for extra in fds:
            os.close(extra)
        return own, pod


def close_descriptors(request: Request) -> None:
    """Close what came with a request."""
    for descriptor in (request.own_netns, request.pod_netns):
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)
