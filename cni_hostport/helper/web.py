"""``/metrics`` and ``/healthz`` over TCP, where the operator asked for them.

Decides nothing about the helper and can change nothing: two pages, read only.
A taken address is logged and tried again, never a reason not to serve pods. A
client that says nothing, or too much, costs a descriptor for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from cni_hostport.helper.address import parse_address

log = logging.getLogger(__name__)

RETRY = 5.0
"""Seconds between attempts at an address that is taken."""

PATIENCE = 5.0
"""Seconds for a whole request, and for its answer."""

MAX_CLIENTS = 32
_MAX_HEAD = 8192
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_REASONS = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}

Page = Callable[[], tuple[int, bytes]]


class Web:
    """Serves pages by path until the loop ends."""

    def __init__(self, address: str, pages: dict[str, Page]) -> None:
        self._host, self._port = parse_address(address)
        self._address = address
        self._pages = pages
        self._clients = 0

    async def run(self) -> None:
        """Listen, however long it takes to get the address, and serve."""
        complained = False
        while True:
            try:
                server = await asyncio.start_server(
                    self._client, self._host, self._port, limit=_MAX_HEAD
                )
            except OSError as error:
                if not complained:
                    log.warning("metrics: cannot listen on %s yet: %s", self._address, error)
                complained = True
                await asyncio.sleep(RETRY)
                continue
            log.info("metrics: listening on %s", self._address)
            async with server:
                await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._clients += 1
        try:
            if self._clients <= MAX_CLIENTS:
                async with asyncio.timeout(PATIENCE):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head))
                    await writer.drain()
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError):
            pass
        finally:
            self._clients -= 1
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        method, target = words[0], words[1] if len(words) == 3 else b""
        page = self._pages.get(target.split(b"?")[0].decode("latin-1"))
        if method not in (b"GET", b"HEAD"):
            status, body = 405, b"only GET\n"
        elif page is None:
            status, body = 404, b"/metrics and /healthz\n"
        else:
            status, body = page()
        lines = [
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {_TEXT}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        header = "\r\n".join([*lines, "", ""]).encode()
        return header if method == b"HEAD" else header + body
