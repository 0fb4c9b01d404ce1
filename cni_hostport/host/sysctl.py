"""Reads kernel settings from /proc/sys, and sets one: a link's route_localnet.

Decides how a missing setting reads: None. Files under /proc/sys/net show
the net namespace of the *reading task*, not of the mount and not of the process
that mounted it: a thread that has entered another namespace reads that one's
values. Must never set anything of a link but the one whose number was given.
"""

from __future__ import annotations

import os
import socket

from cni_hostport.model import Family

_ROOT = "/proc/sys"
_LONGEST = 64  # characters of a number and its newline, with room to spare


def read_int(*parts: str) -> int | None:
    """The setting at /proc/sys/<parts...> as a number; None where there is no such file.

    A part may hold a dot (a link's name may). Raises OSError for anything but
    a missing file, ValueError when the setting is no number.
    """
    try:
        # os, not Path: this is asked on the way of an ADD, and Path costs more than the kernel.
        fd = os.open("/".join((_ROOT, *parts)), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return int(os.read(fd, _LONGEST))
    finally:
        os.close(fd)


def bridge_nf_call(family: Family) -> bool | None:
    """Whether bridged packets pass the IP hooks; None: br_netfilter is not loaded.

    The namespace's setting; a bridge may turn it on for itself alone.
    """
    tool = "iptables" if family is Family.V4 else "ip6tables"
    value = read_int("net", "bridge", f"bridge-nf-call-{tool}")
    return None if value is None else value != 0


def ip_forward(family: Family) -> bool | None:
    """Whether the node forwards that family; None: the kernel lacks the family."""
    if family is Family.V4:
        value = read_int("net", "ipv4", "ip_forward")
    else:
        value = read_int("net", "ipv6", "conf", "all", "forwarding")
    return None if value is None else value != 0


def route_localnet(name: str) -> int | None:
    """That of the link of that name; None where it cannot be told."""
    try:
        return read_int("net", "ipv4", "conf", name, "route_localnet")
    except (OSError, ValueError):
        return None


def set_route_localnet(index: int, on: bool) -> bool:
    """Set it for the link of that number; False where that is not possible here.

    Setting it by netlink instead (``rtnl.py``) works without /proc, and is an event for
    everybody on the node who watches links: a tenth of a millisecond, and their work.
    """
    try:
        name = socket.if_indextoname(index)
        fd = os.open(f"{_ROOT}/net/ipv4/conf/{name}/route_localnet", os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # whatever is renamed from here on, the descriptor is that link's
        return socket.if_nametoindex(name) == index and os.write(fd, b"%d" % on) == 1
    except OSError:
        return False
    finally:
        os.close(fd)
