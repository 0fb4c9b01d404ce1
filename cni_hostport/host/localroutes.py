"""Addresses that are local by a route and sit on no link (``ip route add local``).

Load balancers of clouds hand a node its virtual address this way. Decides which
routes count: those of type local to a single address that somebody other than
the kernel made. Prefixes do not: nothing could be held on each of their
addresses. Must never cost anything for the routes of pods or of a routing daemon: the kernel is
asked for local ones alone and a filter keeps the events of the others away
(``eventfilter.py``).
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from dataclasses import dataclass
from ipaddress import ip_address

from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import IPAddress
from cni_hostport.netfilter import nlwire

NEWROUTE, DELROUTE = 24, 25
GROUPS = 0x40 | 0x400  # RTMGRP_IPV4_ROUTE, RTMGRP_IPV6_ROUTE

_GETROUTE = 26
_RTMSG = struct.Struct("=BBBBBBBBI")
LOCAL, _LOCAL_TABLE, BY_KERNEL = 2, 255, 2
_DST, _OIF = 1, 4
_NO_SUCH_FAMILY = (errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP)
_BITS = {socket.AF_INET: 32, socket.AF_INET6: 128}


@dataclass(frozen=True, slots=True)
class LocalRoute:
    """One address that a route makes local, and the number of the link it names."""

    address: IPAddress
    index: int


def parse(body: bytes) -> LocalRoute | None:
    """The route in an RTM_NEWROUTE or RTM_DELROUTE; None for one that does not count."""
    family, length, _, _, _, protocol, _, kind, _ = _RTMSG.unpack_from(body)
    if kind != LOCAL or protocol == BY_KERNEL or length != _BITS.get(family):
        return None
    found = nlwire.attribute_map(body, _RTMSG.size)
    if _DST not in found or _OIF not in found:
        return None
    address = ip_address(found[_DST])
    if address.is_loopback or (address.is_link_local and address.version == 6):
        return None
    return LocalRoute(address, int.from_bytes(found[_OIF], sys.byteorder))


def dump(netlink: NetlinkSocket) -> list[LocalRoute]:
    """Every local route that counts, read again when one changed meanwhile. Raises OSError.

    Asked for so that the kernel looks through its local tables only; kernels
    before 4.20 cannot and send every route.
    """
    netlink.check_strictly()
    listed = []
    for family in _BITS:
        body = _RTMSG.pack(family, 0, 0, 0, _LOCAL_TABLE, 0, 0, LOCAL, 0)
        try:
            listed += netlink.whole_dump(_GETROUTE, body)
        except OSError as error:
            if error.errno not in _NO_SUCH_FAMILY:
                raise
    return [route for message in listed if (route := parse(message.body)) is not None]
