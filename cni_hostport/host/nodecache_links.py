"""The link that holds the cache's addresses.

Decides how the link is made, what of it is put right (addresses missing or left
from an older configuration) and when it is somebody else's: a link of that name
and another kind is never touched. Over pyroute2, no process. The link stays
down, as upstream leaves it: the kernel answers on its addresses all the same.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from cni_hostport.host import light

# Two of its modules are wanted; the bundle does not even hold all that the package imports.
light.unexecuted("pyroute2")

from pyroute2.iproute.linux import IPRoute  # noqa: E402
from pyroute2.netlink.exceptions import NetlinkError  # noqa: E402

_SCOPE_UNIVERSE = 0
_GROUPS = 0x1 | 0x10 | 0x100  # links, IPv4 and IPv6 addresses


class LinkError(Exception):
    """The link cannot be had; the text names it and says what to do."""


class ForeignLink(LinkError):
    """A link of that name exists and is of another kind."""


class KindMissing(LinkError):
    """The kernel cannot make links of that kind."""


@dataclass(frozen=True)
class LinkReport:
    """What was done: the link made, addresses added and removed."""

    created: bool = False
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True)
class CacheLink:
    """The link by name and kind, and the addresses it must hold."""

    name: str
    kind: str
    addresses: tuple[IPv4Address | IPv6Address, ...]

    def ensure(self) -> LinkReport:
        """Make it so. Raises LinkError; a repeated call changes nothing."""
        with IPRoute() as netlink:
            index = self._find(netlink)
            created = index is None
            if index is None:
                index = self._create(netlink)
            present = _addresses(netlink, index)
            missing = [a for a in self.addresses if (a, a.max_prefixlen) not in present]
            extra = [(a, n) for a, n in present if a not in self.addresses]
            extra += [(a, n) for a, n in present if a in self.addresses and n != a.max_prefixlen]
            for address in missing:
                self._change(netlink, "add", index, address, address.max_prefixlen)
            for address, length in extra:
                self._change(netlink, "del", index, address, length)
        return LinkReport(
            created, tuple(map(str, missing)), tuple(f"{a}/{length}" for a, length in extra)
        )

    def remove(self) -> bool:
        """Remove the link; whether there was one. Raises LinkError."""
        with IPRoute() as netlink:
            index = self._find(netlink)
            if index is None:
                return False
            try:
                netlink.link("del", index=index)
            except NetlinkError as error:
                if error.code == errno.ENODEV:
                    return False
                raise LinkError(f"link {self.name} cannot be removed: {error}") from error
            return True

    def _find(self, netlink: Any) -> int | None:
        try:
            (found,) = netlink.link("get", ifname=self.name)
        except NetlinkError as error:
            if error.code == errno.ENODEV:
                return None
            raise LinkError(f"link {self.name} cannot be looked up: {error}") from error
        info = found.get_attr("IFLA_LINKINFO")
        kind = info.get_attr("IFLA_INFO_KIND") if info is not None else None
        if kind != self.kind:
            raise ForeignLink(
                f"link {self.name} exists and is {kind or 'no virtual link'}, not {self.kind}: it "
                "is left alone; choose another name with -interfacename, or -interfacekind"
            )
        return int(found["index"])

    def _create(self, netlink: Any) -> int:
        try:
            netlink.link("add", ifname=self.name, kind=self.kind)
        except NetlinkError as error:
            if error.code in (errno.EOPNOTSUPP, errno.ENODEV):
                raise KindMissing(
                    f"this kernel cannot make links of kind {self.kind}: load the module "
                    f"{self.kind}, or choose another kind with -interfacekind"
                ) from error
            if error.code != errno.EEXIST:
                raise LinkError(f"link {self.name} cannot be made: {error}") from error
        index = self._find(netlink)
        if index is None:
            raise LinkError(f"link {self.name} went away while it was made")
        return index

    def _change(
        self, netlink: Any, verb: str, index: int, address: IPv4Address | IPv6Address, length: int
    ) -> None:
        try:
            netlink.addr(verb, index=index, address=str(address), prefixlen=length)
        except NetlinkError as error:
            if error.code in (errno.EEXIST, errno.EADDRNOTAVAIL):
                return
            raise LinkError(f"{verb} {address} on {self.name}: {error}") from error


def _addresses(netlink: Any, index: int) -> list[tuple[IPv4Address | IPv6Address, int]]:
    """Addresses on a link with their prefix lengths, IPv6 link-local ones apart."""
    found = []
    for message in netlink.get_addr(index=index):
        text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
        if text is not None and message["scope"] == _SCOPE_UNIVERSE:
            found.append((ip_address(text), int(message["prefixlen"])))
    return found


class ChangeEvents:
    """The kernel's news about links and addresses, as a descriptor to wait on. No content."""

    def __init__(self) -> None:
        """Subscribe in this net namespace. Raises OSError."""
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
        )
        self._socket.bind((0, _GROUPS))

    def fileno(self) -> int:
        """The descriptor."""
        return self._socket.fileno()

    def drain(self) -> None:
        """Throw away what has come. Raises OSError(ENOBUFS) where some were lost."""
        with suppress(BlockingIOError):
            while self._socket.recv(65536):
                pass


def links_with(addresses: Sequence[IPv4Address | IPv6Address]) -> dict[str, set[int]]:
    """Numbers of the links that hold each address; an address nobody has is left out."""
    wanted = {str(a) for a in addresses}
    found: dict[str, set[int]] = {}
    with suppress(NetlinkError, OSError), IPRoute() as netlink:
        for message in netlink.get_addr():
            text = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            if text in wanted:
                found.setdefault(text, set()).add(int(message["index"]))
    return found
