"""What of the kernel's news about links, addresses and routes is not even queued.

Decides by the first bytes of a message, before anybody is woken. Dropped are routes that
cannot count (``localroutes.py``) and whatever a bridge says of its ports in a family of its
own: a hairpin flag set for each pod is such an event, and must not cost a wake-up.
Must never drop an address, a link's own end or its new name.
"""

from __future__ import annotations

import socket

from cni_hostport.host import bpf, localroutes

_NEWLINK, _DELLINK = 16, 17
_AF_BRIDGE = 7

# in struct nlmsghdr, then in struct ifinfomsg and struct rtmsg behind it
_KIND_AT, _FAMILY_AT, _PROTOCOL_AT, _TYPE_AT = 4, 16, 16 + 5, 16 + 7

_PROGRAM = (
    (bpf.LOAD_HALF, 0, 0, _KIND_AT),
    (bpf.IF_EQUAL, 7, 0, bpf.as_loaded(_NEWLINK, 2)),
    (bpf.IF_EQUAL, 6, 0, bpf.as_loaded(_DELLINK, 2)),
    (bpf.IF_EQUAL, 1, 0, bpf.as_loaded(localroutes.NEWROUTE, 2)),
    (bpf.IF_EQUAL, 0, 6, bpf.as_loaded(localroutes.DELROUTE, 2)),
    (bpf.LOAD_BYTE, 0, 0, _TYPE_AT),
    (bpf.IF_EQUAL, 0, 5, localroutes.LOCAL),
    (bpf.LOAD_BYTE, 0, 0, _PROTOCOL_AT),
    (bpf.IF_EQUAL, 3, 2, localroutes.BY_KERNEL),
    (bpf.LOAD_BYTE, 0, 0, _FAMILY_AT),
    (bpf.IF_EQUAL, 1, 0, _AF_BRIDGE),
    bpf.KEEP,
    bpf.DROP,
)


def attach(events: socket.socket) -> None:
    """Filter what that socket receives; where the kernel will not, everything comes."""
    bpf.attach(events, _PROGRAM)
