"""Says whether a net namespace behind a path is still the one we knew.

Decides by the namespace's cookie: inode numbers of namespaces are used again at
once, cookies never within one boot. It must never leave the calling thread in
another namespace; where it cannot come back the process ends, because every
socket and child made afterwards would land in a pod.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
import socket
import sys
from contextlib import suppress
from typing import Literal

_CLONE_NEWNET = 0x40000000
_NS_GET_NSTYPE = 0xB703
_NS_GET_ID = 0x8008B70D  # Linux 6.18
_SO_NETNS_COOKIE = 71

# The calling thread's own; "self" would be the main thread's.
_OWN = "/proc/thread-self/ns/net"
# PyDLL keeps the interpreter's lock: setns(2) takes microseconds, getting the
# lock back from a busy thread takes milliseconds.
_libc = ctypes.PyDLL(None, use_errno=True)

State = Literal["alive", "gone", "unknown"]


def is_netns(fd: int) -> bool:
    """Whether the descriptor is a net namespace (ioctl_ns(2), NS_GET_NSTYPE)."""
    try:
        return fcntl.ioctl(fd, _NS_GET_NSTYPE) == _CLONE_NEWNET
    except OSError:
        return False


def same_namespace(fd_a: int, fd_b: int) -> bool:
    """Whether two open namespace descriptors are the same one. Raises OSError.

    Device and inode decide, which is sound only while both are open.
    """
    a, b = os.fstat(fd_a), os.fstat(fd_b)
    return (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)


def cookie(fd: int, home: int = -1) -> int | None:
    """The kernel's number of that net namespace, unique until the next boot.

    None: not a net namespace, not ours to enter, or a kernel before 5.14
    (socket(7), SO_NETNS_COOKIE). Before Linux 6.18 the thread enters the namespace,
    since only a socket made inside shows the number, and comes back: 25 microseconds.
    ``home``: a descriptor of the calling thread's own namespace, where there is one.
    """
    if not is_netns(fd):
        return None
    if _ids_are_cookies():
        with suppress(OSError):
            return _id(fd)
    if home >= 0:
        return _cookie_from(fd, home)
    try:
        home = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _cookie_from(fd, home)
    finally:
        os.close(home)


@functools.cache
def _ids_are_cookies() -> bool:
    """Whether a descriptor shows the number, shown by our own namespace's."""
    try:
        fd = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return _id(fd) == _cookie_here()
    except OSError:
        return False
    finally:
        os.close(fd)


def _id(fd: int) -> int:
    """By ioctl NS_GET_ID of linux/nsfs.h. Raises OSError (ENOTTY where the kernel has none)."""
    number = bytearray(8)
    fcntl.ioctl(fd, _NS_GET_ID, number)
    return int.from_bytes(number, sys.byteorder)


def _cookie_from(fd: int, home: int) -> int | None:
    return _cookie_here() if same_namespace(fd, home) else _cookie_there(fd, home)


def _cookie_there(fd: int, home: int) -> int | None:
    try:
        return _cookie_here() if _enter(fd) == 0 else None
    finally:
        _come_back(home)


def _cookie_here() -> int | None:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            raw = probe.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
    except OSError:
        return None
    return int.from_bytes(raw, sys.byteorder)


def _enter(fd: int) -> int:
    return int(_libc.setns(fd, _CLONE_NEWNET))


def _come_back(home: int) -> None:
    for _ in range(3):  # it can only fail for want of a few hundred bytes
        if _enter(home) == 0:
            return
    os.write(2, b"cni-hostport: cannot return from a pod's net namespace: ending\n")
    os.abort()


def state(path: str, recorded: int | None) -> State:
    """Whether the namespace that was recorded with a path and a cookie still exists there.

    The path is opened anew. ``gone``: nothing is there, or it is no net
    namespace, or another one. ``unknown``: no cookie was recorded, no path, or
    the kernel does not let us see.
    """
    if recorded is None or not path:
        return "unknown"
    try:
        # O_NONBLOCK: whatever took the name since, opening it must not wait.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO)
        return "gone" if missing else "unknown"
    try:
        if not is_netns(fd):
            return "gone"
        now = cookie(fd)
    finally:
        os.close(fd)
    if now is None:
        return "unknown"
    return "alive" if now == recorded else "gone"
