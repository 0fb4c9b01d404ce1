"""Imports without what they would drag along.

A helper lives for months on every node, so what its libraries load for uses it
never has is left out: ``import pyroute2`` brings its database, IPSet, WireGuard
and sqlite (5 MB, a tenth of a second), ``import asyncio`` brings OpenSSL
(4.5 MB), ``import prometheus_client`` HTTP servers and OpenSSL (4.5 MB). All of
it is still there for whoever asks for it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator


def unexecuted(package: str) -> None:
    """Put a package in place without running its ``__init__``.

    Its modules then load as they are asked for. Nothing happens to a package
    that is loaded already. Raises ModuleNotFoundError where it is not installed.
    """
    if package in sys.modules:
        return
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"{package} is not installed")
    sys.modules[package] = importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def without(module: str) -> Iterator[None]:
    """Within, ``import module`` fails, so that optional users of it do without."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def load_asyncio() -> None:
    """Import asyncio without its TLS part, which a unix socket has no use for."""
    with without("ssl"):
        import asyncio  # noqa: F401
