"""Reads kernel settings from /proc/sys; writes none.

Decides only how a missing setting reads: None. Files under /proc/sys/net show
the net namespace of the *reading task*, not of the mount and not of the process
that mounted it: a thread that has entered another namespace reads that one's
values. ``route_localnet`` is not here: ``rtnl.py`` sets it by link number.
"""

from __future__ import annotations

import os

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
