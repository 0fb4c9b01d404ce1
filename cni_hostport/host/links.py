"""The node's own addresses, and how they change.

Decides which addresses count (every one of both families but IPv6 link-local;
tentative and deprecated ones too; those that are local only by a route,
``localroutes.py``) and which kernel events can touch them. It
must never do work for the events of a pod's links: each pod makes about ten,
and none of them concerns an address that counts. pyroute2 reads the full list
and decodes the events that matter, by its address message alone.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from cni_hostport.host import eventfilter, light, localroutes
from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import IPAddress
from cni_hostport.netfilter import nlwire

_NEWLINK, _DELLINK, _NEWADDR, _DELADDR, _GETADDR = 16, 17, 20, 21, 22
_GROUPS = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_SO_RCVBUFFORCE = 33
_RECEIVE_BYTES = 65536
# A burst of a hundred pods queues a thousand link events of some 4 KiB each.
_QUEUE_BYTES = 8 << 20

_AF_UNSPEC, _AF_INET6 = 0, 10
_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_SCOPE_LINK = 253
_IFF_UP = 1
_IFLA_IFNAME = 3


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    """One address of the node, the length of its network and the link it is on."""

    address: IPAddress
    prefixlen: int
    link: str


# What tells two entries of the kernel apart: link number, address, peer, prefix length.
_Key = tuple[int, str, str, int]
_BY_ROUTE = "route"  # in place of the peer


class NodeAddresses:
    """The addresses of this net namespace, as of ``refresh`` and the events since."""

    def __init__(self) -> None:
        """Start empty; ``refresh`` fills it."""
        self._entries: dict[_Key, IPAddress] = {}
        self._links: dict[int, str] = {}
        self._view: frozenset[NodeAddress] | None = frozenset()

    @property
    def addresses(self) -> frozenset[NodeAddress]:
        """Every address that counts, of both families."""
        if self._view is None:
            self._view = frozenset(
                NodeAddress(address, key[3], self._links[key[0]])
                for key, address in self._entries.items()
            )
        return self._view

    def on(self, links: Iterable[str]) -> frozenset[NodeAddress]:
        """The addresses on those links."""
        names = frozenset(links)
        return frozenset(a for a in self.addresses if a.link in names)

    def refresh(self) -> bool:
        """Read everything anew; whether anything had changed. Raises OSError.

        Cost grows with the links of the node: for the start and for lost events.
        """
        before = self.addresses
        listed = _dump()
        # After the addresses, so that each has its link. A thirtieth of pyroute2's get_links().
        names = dict(socket.if_nameindex())
        self._entries, self._links = {}, {}
        for key, address in listed:
            name = names.get(key[0])
            if name is not None:
                self._links[key[0]] = name
                self._entries[key] = address
        self._view = None
        return self.addresses != before

    def knows(self, index: int) -> str | None:
        """Name of that link if it has an address that counts."""
        return self._links.get(index)

    def add(self, key: _Key, address: IPAddress) -> bool:
        """Take in an entry the kernel made; whether it was news."""
        index = key[0]
        if key in self._entries:
            return False
        if index not in self._links:
            try:
                self._links[index] = socket.if_indextoname(index)
            except OSError:  # gone again; its end is in the queue
                return False
        self._entries[key] = address
        self._view = None
        return True

    def has_route_on(self, index: int) -> bool:
        """Whether a route made an address of that link local."""
        return any(key[0] == index and key[2] == _BY_ROUTE for key in self._entries)

    def remove(self, key: _Key) -> bool:
        """Take in an entry's end; whether it was news."""
        return self._forget([key])

    def remove_link(self, index: int) -> bool:
        """A link is gone and its addresses with it; whether it had any."""
        return self._forget([key for key in self._entries if key[0] == index])

    def rename_link(self, index: int, name: str) -> bool:
        """A link has that name now; whether that changes an address's link."""
        if self._links.get(index, name) == name:
            return False
        self._links[index] = name
        self._view = None
        return True

    def _forget(self, keys: Iterable[_Key]) -> bool:
        gone = [key for key in keys if self._entries.pop(key, None) is not None]
        for index in {key[0] for key in gone}:
            if not any(key[0] == index for key in self._entries):
                del self._links[index]
        if gone:
            self._view = None
        return bool(gone)


class AddressEvents:
    """The kernel's news about addresses and links, as a descriptor to wait on.

    Make it before the first ``NodeAddresses.refresh``, so that nothing falls
    between the two.
    """

    def __init__(self) -> None:
        """Subscribe in the calling thread's net namespace. Raises OSError."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
        )
        with suppress(PermissionError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _QUEUE_BYTES)
        eventfilter.attach(self._socket)
        self._socket.bind((0, _GROUPS | localroutes.GROUPS))

    def fileno(self) -> int:
        """The descriptor; readable when ``drain`` has something to do."""
        return self._socket.fileno()

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def drain(self, addresses: NodeAddresses) -> bool:
        """Read all that is queued into ``addresses``; whether they changed.

        When the kernel dropped news, everything is read anew. Raises OSError
        only from that.
        """
        changed = lost = False
        while True:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                lost = True
                continue
            for message in () if lost else nlwire.messages(data):
                changed |= _apply(addresses, message)
        return (addresses.refresh() or changed) if lost else changed


def _dump() -> list[tuple[_Key, IPAddress]]:
    """Every address of the namespace that counts."""
    with NetlinkSocket(socket.NETLINK_ROUTE) as netlink:
        messages = [_decode(m) for m in netlink.whole_dump(_GETADDR, bytes(_IFADDR.size))]
        routes = localroutes.dump(netlink)
    listed = [(_key(m), _address(m)) for m in messages if _counts(m)]
    return listed + [(_route_key(route), route.address) for route in routes]


def _apply(addresses: NodeAddresses, message: nlwire.Message) -> bool:
    if message.kind in (_NEWADDR, _DELADDR):
        return _apply_address(addresses, message)
    if message.kind in (_NEWLINK, _DELLINK):
        return _apply_link(addresses, message.kind, message.body)
    if message.kind in (localroutes.NEWROUTE, localroutes.DELROUTE):
        return _apply_route(addresses, message)
    return False


def _apply_address(addresses: NodeAddresses, message: nlwire.Message) -> bool:
    family, _, _, scope, _ = _IFADDR.unpack_from(message.body)
    if family == _AF_INET6 and scope == _SCOPE_LINK:
        return False
    decoded = _decode(message)
    if message.kind == _DELADDR:
        changed = addresses.remove(_key(decoded))
        # with a link's last address its routes go, and the kernel says nothing of them
        stale = addresses.has_route_on(decoded["index"])
        return (addresses.refresh() or changed) if stale else changed
    return _counts(decoded) and addresses.add(_key(decoded), _address(decoded))


def _apply_route(addresses: NodeAddresses, message: nlwire.Message) -> bool:
    route = localroutes.parse(message.body)
    if route is None:
        return False
    if message.kind == localroutes.DELROUTE:
        return addresses.remove(_route_key(route))
    return addresses.add(_route_key(route), route.address)


def _apply_link(addresses: NodeAddresses, kind: int, body: bytes) -> bool:
    family, _, index, flags, _ = _IFINFO.unpack_from(body)
    # A bridge says RTM_DELLINK in its own family when a port leaves it.
    known = addresses.knows(index) if family == _AF_UNSPEC else None
    if known is None:
        return False
    if kind == _DELLINK:
        return addresses.remove_link(index)
    if not flags & _IFF_UP and addresses.has_route_on(index):
        return addresses.refresh()  # the routes of a link that is down may be gone unannounced
    if body.startswith(nlwire.attr(_IFLA_IFNAME, nlwire.string(known)), _IFINFO.size):
        return False
    name = nlwire.attribute_map(body, _IFINFO.size).get(_IFLA_IFNAME)
    return name is not None and addresses.rename_link(index, nlwire.text(name))


def _decode(message: nlwire.Message) -> Mapping[str, Any]:
    """An address message as pyroute2 reads it.

    Its class for it is all that is loaded: a whole IPRoute brings sockets for every
    protocol, an event loop and OpenSSL, 9 MB that a helper would keep for its life.
    """
    light.unexecuted("pyroute2")
    from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg

    raw = nlwire.message(message.kind, message.flags, message.sequence, message.body)
    decoded = ifaddrmsg(raw)
    decoded.decode()
    names = {"address": "IFA_ADDRESS", "local": "IFA_LOCAL"}
    fields = {key: decoded.get_attr(name) for key, name in names.items()}
    return {"index": decoded["index"], "prefixlen": decoded["prefixlen"], **fields}


def _local(message: Mapping[str, Any]) -> str:
    # On a point-to-point link "address" is the other end.
    return str(message.get("local") or message.get("address"))


def _address(message: Mapping[str, Any]) -> IPAddress:
    return ip_address(_local(message))


def _key(message: Mapping[str, Any]) -> _Key:
    peer = str(message.get("address") or "")
    return message["index"], _local(message), peer, message["prefixlen"]


def _route_key(route: localroutes.LocalRoute) -> _Key:
    return route.index, str(route.address), _BY_ROUTE, route.address.max_prefixlen


def _counts(message: Mapping[str, Any]) -> bool:
    address = _address(message)
    return address.version == 4 or not address.is_link_local
