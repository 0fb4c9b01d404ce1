"""The number of the net namespace this process is in, to tell two processes' apart.

Decides nothing. Raises nothing: a kernel before 5.14 has no such number.
"""

from __future__ import annotations

import os

from cni_hostport.host import netns


def cookie() -> int | None:
    """SO_NETNS_COOKIE of the calling thread's namespace (socket(7)), None without one."""
    try:
        descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return netns.cookie(descriptor)
    finally:
        os.close(descriptor)
