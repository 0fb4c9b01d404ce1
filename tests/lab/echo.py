"""Echo servers in the namespaces of a lab node: each answer says who and to whom.

A server answers every message with its own name and the source address it saw.
All servers of a test share one thread; nothing runs in the pods.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any

from lab.node import Node
from lab.peers import Protocol, open_socket

Address = tuple[Any, ...]


class Server:
    """One or more listening sockets under one name; ``seen`` holds the sources, oldest first."""

    def __init__(self, owner: Servers, name: str) -> None:
        self.name = name
        self.seen: list[tuple[str, int]] = []
        self._owner = owner
        self._sockets: list[socket.socket] = []

    def adopt(self, sock: socket.socket) -> None:
        """Serve on this socket too."""
        sock.setblocking(False)
        self._sockets.append(sock)
        handler = self._accept if sock.type == socket.SOCK_STREAM else self._datagram
        self._owner.watch(sock, handler)

    def _reply(self, peer: Address) -> bytes:
        source = str(ip_address(peer[0]))
        self.seen.append((source, peer[1]))
        return json.dumps({"server": self.name, "source": source, "port": peer[1]}).encode()

    def _accept(self, sock: socket.socket) -> None:
        connection, _ = sock.accept()
        connection.setblocking(False)
        self._sockets.append(connection)
        self._owner.watch(connection, self._stream)

    def _stream(self, sock: socket.socket) -> None:
        if sock.recv(2048):
            sock.send(self._reply(sock.getpeername()))
        else:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._owner.forget(sock)
        if sock in self._sockets:
            self._sockets.remove(sock)

    def _datagram(self, sock: socket.socket) -> None:
        _, peer = sock.recvfrom(2048)
        sock.sendto(self._reply(peer), peer)

    def close(self) -> None:
        """Stop serving and give the ports back."""
        for sock in list(self._sockets):
            self._owner.forget(sock)
        self._sockets.clear()


class Servers:
    """The thread that all servers of a test share."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._running = True
        self._servers: list[Server] = []
        self._thread = threading.Thread(target=self._loop, name="echo servers", daemon=True)
        self._thread.start()

    def serve(
        self,
        name: str,
        ports: Iterable[tuple[Protocol, int]],
        *,
        netns: str | None = None,
        addresses: Sequence[str] = ("0.0.0.0", "::"),
    ) -> Server:
        """Serve these ports on these addresses of a namespace, under that name."""
        server = Server(self, name)
        self._servers.append(server)
        for protocol, port in ports:
            reuse = (socket.SO_REUSEADDR,) if protocol == "tcp" else ()
            for address in addresses:
                server.adopt(
                    open_socket(
                        self._node,
                        address,
                        port,
                        protocol,
                        netns=netns,
                        options=reuse,
                        listen=True,
                    )
                )
        return server

    def watch(self, sock: socket.socket, handler: object) -> None:
        """Call the handler whenever the socket can be read."""
        with self._lock:
            self._selector.register(sock, selectors.EVENT_READ, handler)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching a socket and close it."""
        with self._lock:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()

    def _loop(self) -> None:
        while self._running:
            events = self._selector.select()
            with self._lock:
                for key, _ in events:
                    sock = key.fileobj
                    if key.data is None or not isinstance(sock, socket.socket) or sock.fileno() < 0:
                        continue
                    try:
                        key.data(sock)
                    except BlockingIOError:
                        continue
                    except OSError:
                        if sock.type == socket.SOCK_STREAM:
                            self.forget(sock)

    def close(self) -> None:
        """Stop every server and the thread."""
        for server in self._servers:
            server.close()
        self._running = False
        self._wake.send(b"x")
        self._thread.join(timeout=5)
        self._selector.close()
        self._wake.close()
        self._woken.close()
