"""Links and routes on the path of every call: one small message each.

Decides how a route, a link, its hairpin flag and its route_localnet setting are
asked for and set over NETLINK_ROUTE (rtnetlink(7)). On the path of a call it must
never dump a table: each request names one object, so its cost does not grow. It
speaks to the net namespace in which it was made. Whole lists of links and
addresses are ``links.py``'s.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from dataclasses import dataclass

from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import IPAddress
from cni_hostport.netfilter import nlwire

_AF_BRIDGE = 7
_GETLINK, _SETLINK, _GETROUTE = 18, 19, 26
_IFF_UP = 1

# if_link.h
_IFNAME, _MASTER, _PROTINFO, _LINKINFO, _AF_SPEC, _EXT_MASK = 3, 10, 12, 18, 26, 29
_SKIP_STATS = nlwire.attr(_EXT_MASK, struct.pack("=I", 1 << 3))
_INFO_KIND, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA = 1, 4, 5
_BRPORT_MODE = 4
_INET_CONF = 1
_ROUTE_LOCALNET = 26  # counted from 1 when set; the array that is read starts at 0

# rtnetlink.h
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_VIA = 1, 4, 5, 18
_UNICAST, _LOCAL = 1, 2
_OF_ROUTE = (_RTA_OIF, _RTA_GATEWAY, _RTA_VIA)
_OF_LINK = (_IFNAME, _MASTER, _LINKINFO, _AF_SPEC)
_OF_PORT = (_IFNAME, _MASTER, _LINKINFO)
_OF_INFO = (_INFO_KIND, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA)
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)

_IFINFO = struct.Struct("=BxHiII")
_RTMSG = struct.Struct("=BBBBBBBBI")
_U32 = struct.Struct("=I")


@dataclass(frozen=True, slots=True)
class Link:
    """One link of this net namespace, as it was when asked.

    ``kind`` is the driver's word (``bridge``, ``veth``; empty for hardware and
    lo). ``master`` is the link number of the bridge (or other master) it is a
    port of. ``hairpin`` is None unless it is a bridge port. ``route_localnet``
    is None where the link has no IPv4.
    """

    index: int
    name: str
    kind: str
    master: int | None
    up: bool
    hairpin: bool | None
    route_localnet: bool | None


class Rtnl:
    """Single questions and changes over one socket; not for two threads at once."""

    def __init__(self) -> None:
        """Open it. Raises OSError."""
        self._netlink = NetlinkSocket(socket.NETLINK_ROUTE)

    def close(self) -> None:
        """Give the descriptor back."""
        self._netlink.close()

    def route_link(self, address: IPAddress) -> int | None:
        """Number of the link that ``address`` is directly on; None: no route, or a gateway's.

        Raises OSError when the kernel does not answer.
        """
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        body = _RTMSG.pack(family, address.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
        try:
            answer = self._netlink.get(_GETROUTE, body + nlwire.attr(_RTA_DST, address.packed))
        except OSError as error:
            if error.errno in _NO_ROUTE:
                return None
            raise
        # An unreachable IPv6 route answers like any other, by lo.
        if _RTMSG.unpack_from(answer.body)[7] not in (_UNICAST, _LOCAL):
            return None
        attributes = nlwire.pick(answer.body, _RTMSG.size, _OF_ROUTE)
        if _RTA_GATEWAY in attributes or _RTA_VIA in attributes:
            return None  # the pod is behind another node or a router: not our link
        found = attributes.get(_RTA_OIF)
        return None if found is None else int(_U32.unpack(found)[0])

    def port(self, name: str) -> Link | None:
        """The link of that name for what it is as a bridge port: without ``route_localnet``.

        Raises OSError. A third less to read than the whole.
        """
        return self._ask(name, _OF_PORT)

    def link(self, which: int | str) -> Link | None:
        """The link of that number or name; None: there is none. Raises OSError."""
        return self._ask(which, _OF_LINK)

    def _ask(self, which: int | str, attributes: tuple[int, ...]) -> Link | None:
        if isinstance(which, int):
            body = _ifinfo(which)
        else:
            body = _ifinfo(0) + nlwire.attr(_IFNAME, nlwire.string(which))
        try:
            answer = self._netlink.get(_GETLINK, body + _SKIP_STATS)
        except OSError as error:
            # ERANGE, EINVAL: no link can have a name like this (too long, empty).
            if error.errno in (errno.ENODEV, errno.ERANGE, errno.EINVAL):
                return None
            raise
        return parse_link(answer.body, attributes)

    def hairpins(self) -> dict[int, bool]:
        """The hairpin flag of every bridge port, by link number. Raises OSError.

        The one dump here: a fifth of what asking each of many ports costs.
        """
        found = {}
        for message in self._netlink.dump(_GETLINK, _ifinfo(0, _AF_BRIDGE)):
            index = _IFINFO.unpack_from(message.body)[2]
            port = nlwire.pick(message.body, _IFINFO.size, (_PROTINFO,)).get(_PROTINFO)
            if port is not None:
                found[index] = _first(port, _BRPORT_MODE) not in (b"", b"\0")
        return found

    def set_hairpin(self, index: int, on: bool) -> None:
        """Whether a bridge port may send a frame back where it came from.

        Raises OSError: ENODEV when the link is gone, another when it is no
        bridge port.
        """
        mode = nlwire.nest(_PROTINFO, nlwire.attr(_BRPORT_MODE, bytes((on,))))
        self._netlink.change(_SETLINK, _ifinfo(index, _AF_BRIDGE) + mode)

    def set_route_localnet(self, index: int, on: bool) -> None:
        """Whether 127.0.0.0/8 may be routed over that link (ip-sysctl, route_localnet).

        By number over netlink, so neither a rename nor the mount of /proc
        matters. Raises OSError: ENODEV when the link is gone.
        """
        value = nlwire.attr(_ROUTE_LOCALNET, _U32.pack(on))
        conf = nlwire.nest(_AF_SPEC, nlwire.nest(socket.AF_INET, nlwire.nest(_INET_CONF, value)))
        self._netlink.change(_SETLINK, _ifinfo(index) + conf)


def _ifinfo(index: int, family: int = 0) -> bytes:
    return _IFINFO.pack(family, 0, index, 0, 0)


def parse_link(body: bytes, attributes: tuple[int, ...] = _OF_LINK) -> Link:
    """Read these attributes of the body of an RTM_NEWLINK message."""
    _, _, index, flags, _ = _IFINFO.unpack_from(body)
    found = nlwire.pick(body, _IFINFO.size, attributes)
    info = nlwire.pick(found.get(_LINKINFO, b""), 0, _OF_INFO)
    master = found.get(_MASTER)
    name, kind = nlwire.text(found.get(_IFNAME, b"")), nlwire.text(info.get(_INFO_KIND, b""))
    return Link(
        index=index,
        name=sys.intern(name) if kind == "bridge" else name,  # that of every attachment on it
        kind=kind,
        master=None if master is None else int(_U32.unpack(master)[0]),
        up=bool(flags & _IFF_UP),
        hairpin=_hairpin(info),
        route_localnet=_route_localnet(found.get(_AF_SPEC, b"")),
    )


def _hairpin(info: dict[int, bytes]) -> bool | None:
    if nlwire.text(info.get(_INFO_SLAVE_KIND, b"")) != "bridge":
        return None
    mode = _first(info.get(_INFO_SLAVE_DATA, b""), _BRPORT_MODE)
    return mode != b"\0" if mode else None


def _route_localnet(af_spec: bytes) -> bool | None:
    conf = _first(_first(af_spec, socket.AF_INET), _INET_CONF)
    if len(conf) < _ROUTE_LOCALNET * _U32.size:
        return None
    return bool(_U32.unpack_from(conf, (_ROUTE_LOCALNET - 1) * _U32.size)[0])


def _first(data: bytes, kind: int) -> bytes:
    """One attribute of many (a port has forty); ours come early, so stop there."""
    return nlwire.pick(data, 0, (kind,)).get(kind, b"")
