"""The node's own addresses, and how they change.

Decides which addresses count (every one of both families but IPv6 link-local;
tentative and deprecated ones too) and which kernel events can touch them. It
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

from cni_hostport.host import light
from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import IPAddress
from cni_hostport.netfilter import nlwire

_NEWLINK, _DELLINK, _NEWADDR, _DELADDR, _GETADDR = 16, 17, 20, 21, 22
_GROUPS = 0x1 | 0x10 | 0x100  # RTMGRP_LINK, RTMGRP_IPV4_IFADDR, RTMGRP_IPV6_IFADDR
_SO_RCVBUFFORCE = 33
_RECEIVE_BYTES = 65536
# A burst of a hundred pods queues a thousand link events of some 4 KiB each.
_QUEUE_BYTES = 8 << 20

# A storm that overtakes this many sends events, and those mend what is missing.
_DUMP_TRIES = 5

_AF_UNSPEC, _AF_INET6 = 0, 10
_IFINFO = struct.Struct("=BxHiII")
_IFADDR = struct.Struct("=BBBBI")
_SCOPE_LINK = 253
_IFLA_IFNAME = 3


@dataclass(frozen=True, slots=True, order=True)
class NodeAddress:
    """One address of the node, the length of its network and the link it is on."""

    address: IPAddress
    prefixlen: int
    link: str


# What tells two entries of the kernel apart: link number, address, peer, prefix length.
_Key = tuple[int, str, str, int]


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
        listed = [message for message in _dump() if _counts(message)]
        # After the addresses, so that each has its link. A thirtieth of pyroute2's get_links().
        names = dict(socket.if_nameindex())
        self._entries, self._links = {}, {}
        for message in listed:
            name = names.get(message["index"])
            if name is not None:
                self._links[message["index"]] = name
                self._entries[_key(message)] = _address(message)
        self._view = None
        return self.addresses != before

    def knows(self, index: int) -> str | None:
        """Name of that link if it has an address that counts."""
        return self._links.get(index)

    def add(self, message: Mapping[str, Any]) -> bool:
        """Take in a decoded RTM_NEWADDR; whether it was news."""
        key, index = _key(message), message["index"]
        if key in self._entries or not _counts(message):
            return False
        if index not in self._links:
            try:
                self._links[index] = socket.if_indextoname(index)
            except OSError:  # gone again; its end is in the queue
                return False
        self._entries[key] = _address(message)
        self._view = None
        return True

    def remove(self, message: Mapping[str, Any]) -> bool:
        """Take in a decoded RTM_DELADDR; whether it was news."""
        return self._forget([_key(message)])

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
        self._socket.bind((0, _GROUPS))

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


def _dump() -> list[Mapping[str, Any]]:
    """Every address of the namespace, decoded; read again when it changed meanwhile."""
    with NetlinkSocket(socket.NETLINK_ROUTE) as netlink:
        for _ in range(_DUMP_TRIES):
            listed = netlink.dump(_GETADDR, bytes(_IFADDR.size))
            # The kernel marks a dump that a change overtook; it may lack any entry.
            if not any(m.flags & nlwire.NLM_F_DUMP_INTR for m in listed):
                break
    return [_decode(message) for message in listed]


def _apply(addresses: NodeAddresses, message: nlwire.Message) -> bool:
    if message.kind in (_NEWADDR, _DELADDR):
        return _apply_address(addresses, message)
    if message.kind in (_NEWLINK, _DELLINK):
        return _apply_link(addresses, message.kind, message.body)
    return False


def _apply_address(addresses: NodeAddresses, message: nlwire.Message) -> bool:
    family, _, _, scope, _ = _IFADDR.unpack_from(message.body)
    if family == _AF_INET6 and scope == _SCOPE_LINK:
        return False
    take = addresses.add if message.kind == _NEWADDR else addresses.remove
    return take(_decode(message))


def _apply_link(addresses: NodeAddresses, kind: int, body: bytes) -> bool:
    family, _, index, _, _ = _IFINFO.unpack_from(body)
    # A bridge says RTM_DELLINK in its own family when a port leaves it.
    known = addresses.knows(index) if family == _AF_UNSPEC else None
    if known is None:
        return False
    if kind == _DELLINK:
        return addresses.remove_link(index)
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


def _counts(message: Mapping[str, Any]) -> bool:
    address = _address(message)
    return address.version == 4 or not address.is_link_local
