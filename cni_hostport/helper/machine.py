"""The real node behind ``hostport.machine.Machine``: links, addresses, flows, namespaces.

Wires ``host/`` objects together; decides nothing. Used by the worker thread
alone, since its netlink sockets answer one question at a time.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from cni_hostport.host import netns, sysctl
from cni_hostport.host.conntrack import Conntrack
from cni_hostport.host.links import AddressEvents, NodeAddresses
from cni_hostport.host.owner import Blocker, find_blocker, loopback_listener
from cni_hostport.host.rtnl import Link, Rtnl
from cni_hostport.host.sockdiag import SockDiag
from cni_hostport.host.sockets import open_holder, replace_specific, replace_wildcard
from cni_hostport.hostport.holds import Holder
from cni_hostport.hostport.machine import Liveness
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.model import Attachment, Family, HostPort, IPAddress

RESERVED = 128
"""Descriptors that holders leave to callers and tools: who finds none left is told so."""


TOGETHER = 0.1
"""Seconds for which what calls of one moment were told of a bridge is good for the rest of them."""


class KernelMachine:
    """Answers from this net namespace, over sockets that stay open."""

    def __init__(self, dropped: Callable[[int], None] = lambda _count: None) -> None:
        """``dropped`` is told of each deletion of UDP flows, for the metrics."""
        self._dropped = dropped
        self.events = AddressEvents()
        self._addresses = NodeAddresses()
        self._addresses.refresh()
        self._view = self._look()
        self._rtnl = Rtnl()
        self._conntrack = Conntrack()
        self._together_until = 0.0
        self._bridges: dict[int, Link] = {}
        self._filtered: dict[Family, bool] = {}

    def together(self, several: bool) -> None:
        """Whether the calls that follow came at one moment.

        What they all ask of the same bridge is then asked once, as of that moment.
        """
        self._together_until = time.monotonic() + TOGETHER if several else 0.0
        self._bridges, self._filtered = {}, {}

    @property
    def _is_together(self) -> bool:
        return time.monotonic() < self._together_until

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def node(self) -> NodeView:
        """The node's addresses, every event up to now taken in."""
        if self.events.drain(self._addresses):
            self._view = self._look()
        return self._view

    def _look(self) -> NodeView:
        return NodeView.of((a.address, a.link) for a in self._addresses.addresses)

    def pod_link(self, attachment: Attachment) -> PodLink:
        """The directly connected link the pod's address is routed to."""
        for address in attachment.addresses:
            link = self._connected(address.ip)
            if link is not None:
                return self._described(link, attachment.interfaces)
        return PodLink()

    def _connected(self, address: IPAddress) -> Link | None:
        index = self._rtnl.route_link(address)
        if index is None or index == 1:  # lo: the address is the node's own; it needs no flag
            return None
        together = self._is_together
        if together and index in self._bridges:
            return self._bridges[index]
        link = self._rtnl.link(index)
        if together and link is not None and link.kind == "bridge":
            self._bridges[index] = link
        return link

    def _described(self, link: Link, names: Iterable[str]) -> PodLink:
        flag = None if link.route_localnet is None else int(link.route_localnet)
        if link.kind != "bridge":
            return PodLink(link.name, link.index, route_localnet=flag)
        links = [self._rtnl.port(name) for name in names if name != link.name]
        ports = [p for p in links if p is not None and p.master == link.index]
        return PodLink(
            link.name,
            link.index,
            True,
            tuple((p.index, p.name) for p in ports),
            flag,
            tuple(p.index for p in ports if p.hairpin),
        )

    def bridge_netfilter(self, family: Family) -> bool:
        """Whether bridged packets go through iptables' hooks."""
        if not self._is_together:
            return bool(sysctl.bridge_nf_call(family))
        if family not in self._filtered:
            self._filtered[family] = bool(sysctl.bridge_nf_call(family))
        return self._filtered[family]

    def route_localnet(self, index: int) -> int:
        """The link's own flag; OSError if the link is gone or has no IPv4."""
        link = self._rtnl.link(index)
        if link is None or link.route_localnet is None:
            raise OSError(f"no link {index} with IPv4")
        return int(link.route_localnet)

    def route_localnet_of(self, name: str) -> int | None:
        """The flag of the link of that name, as /proc/sys has it; any thread."""
        return sysctl.route_localnet(name)

    def set_route_localnet(self, index: int, value: int) -> None:
        """Set the link's own flag."""
        self._bridges.pop(index, None)
        if not sysctl.set_route_localnet(index, bool(value)):
            self._rtnl.set_route_localnet(index, bool(value))

    def hairpin(self, index: int) -> bool:
        """The bridge port's flag; OSError if it is gone or no port."""
        link = self._rtnl.link(index)
        if link is None or link.hairpin is None:
            raise OSError(f"no bridge port {index}")
        return link.hairpin

    def hairpins(self) -> Mapping[int, bool]:
        """That flag of every bridge port there is, in one dump."""
        return self._rtnl.hairpins()

    def set_hairpin(self, index: int, on: bool) -> None:
        """Set the bridge port's flag."""
        self._rtnl.set_hairpin(index, on)

    def netns_state(self, path: str, cookie: int | None) -> Liveness:
        """Whether the recorded namespace is still at that path."""
        return netns.state(path, cookie)

    def drop_udp_to(self, targets: Iterable[tuple[IPAddress, int]]) -> None:
        """Drop UDP flows by original destination."""
        self._dropped(self._conntrack.drop_udp_to(targets))

    def drop_udp_untranslated(self, targets: Collection[tuple[IPAddress, int]]) -> None:
        """Drop UDP flows by original destination, those alone that lead to no pod."""
        self._dropped(self._conntrack.drop_udp_untranslated(targets))

    def drop_udp_from(self, addresses: Iterable[IPAddress]) -> None:
        """Drop UDP flows by the source of their replies."""
        self._dropped(self._conntrack.drop_udp_from(addresses))


class KernelOpener:
    """Real sockets, and real names for whoever is in their way."""

    def __init__(self) -> None:
        self._diag = SockDiag()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._highest = limit - min(RESERVED, limit // 4)

    def open(self, port: HostPort) -> Holder:
        """Open one holder."""
        holder = open_holder(port)
        # the kernel gives the lowest free number
        if holder.fileno() > self._highest:
            holder.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return holder

    def narrow(self, wide: Holder, ports: Sequence[HostPort]) -> list[Holder]:
        """Wildcard to specific addresses, without a free instant."""
        return list(replace_wildcard(wide, ports))  # type: ignore[arg-type]

    def widen(self, narrow: Sequence[Holder], port: HostPort) -> Holder:
        """Specific addresses to the wildcard, without a free instant."""
        return replace_specific(narrow, port)  # type: ignore[arg-type]

    def blocker(self, port: HostPort) -> Blocker | None:
        """Who has the port, None if only connections do."""
        return find_blocker(port, diag=self._diag)

    def loopback_listener(self, port: HostPort) -> Blocker | None:
        """A listener on another address of 127.0.0.0/8."""
        return loopback_listener(port.port, port.protocol, diag=self._diag)
