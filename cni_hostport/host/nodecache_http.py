"""The agent's HTTP listeners: metrics, health, readiness.

Decides sockets (shared with a second agent's by SO_REUSEPORT, so that an update
finds no address in use), TLS, and which path gets which of the answers that it
was given as functions. Each listener is a daemon thread.
"""

from __future__ import annotations

import http.server
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Answer = Callable[[], tuple[int, str, bytes]]
_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_OPTIONAL = frozenset({"RequestClientCert", "VerifyClientCertIfGiven"})
_REQUIRED = frozenset({"RequireAnyClientCert", "RequireAndVerifyClientCert"})
_REQUEST_SECONDS = 10.0


@dataclass(frozen=True)
class TLSFiles:
    """Certificate, key and what is asked of clients, in Go's words."""

    cert: str
    key: str
    client_ca: str
    client_auth: str
    min_version: str


def tls_context(files: TLSFiles) -> ssl.SSLContext:
    """A server's context. Raises OSError (ssl.SSLError among them) for an unusable file.

    Python verifies a client certificate wherever it asks for one: the two types
    of Go that ask without verifying are as strict here as those that verify.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[files.min_version]
    context.load_cert_chain(files.cert, files.key)
    if files.client_ca:
        context.load_verify_locations(files.client_ca)
    if files.client_auth in _REQUIRED:
        context.verify_mode = ssl.CERT_REQUIRED
    elif files.client_auth in _OPTIONAL:
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


class Listener:
    """One address that answers GET requests by path."""

    def __init__(
        self, host: str, port: int, answers: Mapping[str, Answer], tls: ssl.SSLContext | None = None
    ) -> None:
        """Bind and begin to answer. Raises OSError where the address cannot be had."""
        self._server = _Server(host, port, answers, tls)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port in use."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self, host: str, port: int, answers: Mapping[str, Answer], tls: ssl.SSLContext | None
    ) -> None:
        self.answers = answers
        self.tls = tls
        dual = not host and socket.has_dualstack_ipv6()
        self.address_family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler, bind_and_activate=False)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if dual:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.server_bind()
            self.server_activate()
        except OSError:
            self.server_close()
            raise

    def server_bind(self) -> None:
        """Bind without looking up the host's name (the parent does, and may wait for DNS)."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's own thread: a slow handshake holds nobody up."""
        request.settimeout(_REQUEST_SECONDS)
        if self.tls is not None:
            request = self.tls.wrap_socket(request, server_side=True)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away or fails the handshake is not worth a traceback."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer by path; 404 for any other."""
        answer = self.server.answers.get(self.path.partition("?")[0])
        status, kind, body = answer() if answer else (404, "text/plain", b"404 page not found\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""
