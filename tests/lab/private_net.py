"""A fresh net namespace for the calling thread, for tests that bind or make links."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def ip(*words: str) -> None:
    """Run ip(8) in the calling thread's namespace."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextlib.contextmanager
def private_net() -> Iterator[None]:
    """Put the calling thread into a new net namespace (lo up), and back afterwards.

    Children and threads that are started inside live in it too.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.unshare(CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            ip("link", "set", "lo", "up")
            yield
        finally:
            assert _libc.setns(home, CLONE_NEWNET) == 0
    finally:
        os.close(home)


@contextlib.contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python child that runs ``code``, says so, and lives until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", code + "\nprint('ready', flush=True)\ninput()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()
