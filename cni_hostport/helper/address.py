"""How an address to listen on is written on the command line. Pure."""

from __future__ import annotations


def parse_address(text: str) -> tuple[str | None, int]:
    """(host, port) of ``ADDR:PORT``; no ADDR: every address. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or (":" in host and not bracketed) or not (port.isascii() and port.isdigit()):
        raise ValueError(f"{text!r} is no ADDR:PORT (127.0.0.1:9477, [::1]:9477, :9477)")
    if not 1 <= int(port) <= 65535:
        raise ValueError(f"{port} is no port number")
    return host.strip("[]") or None, int(port)
