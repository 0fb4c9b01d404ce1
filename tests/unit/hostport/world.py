"""A whole node in memory: sockets, tables, links, flows, records; with faults on order.

Every effect goes through ``World.effect``: the n-th can be made to fail with an
errno, or to be the last thing a killed process did. What survives a process is
kept apart from what dies with it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import ip_address, ip_interface
from typing import Any

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.hostport.networks import NETWORK
from cni_hostport.hostport.nftables import NODE, NftablesBackend
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.hostport.record import Record
from cni_hostport.model import (
    Attachment,
    AttachmentID,
    Family,
    HostPort,
    IPAddress,
    Options,
    PodRef,
    PortMapping,
    Protocol,
)
from cni_hostport.netfilter import nftrules
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nfreply import Chain, Rule

ADDRESSES = (
    ("127.0.0.1", "lo"),
    ("::1", "lo"),
    ("192.0.2.1", "eth0"),
    ("2001:db8::1", "eth0"),
    ("10.1.0.1", "cni0"),
)
BRIDGE = 7
PORT_OF_POD = 11


class Killed(BaseException):
    """The process died here: nothing after it happens, not even an undo."""


@dataclass
class Link:
    """What the kernel knows of one link."""

    name: str
    route_localnet: int = 0
    hairpin: bool | None = None


@dataclass(frozen=True)
class Somebody:
    """Who is in the way of a port."""

    name: str
    kind: str = "listener"

    def text(self) -> str:
        return f"process {self.name} (pid 42)"


class Socket:
    """An open fake socket; it knows its world, so that closing frees the port."""

    def __init__(self, world: World, port: HostPort) -> None:
        self.world, self.port = world, port
        world.sockets.append(self)

    def close(self) -> None:
        self.world.effect(f"close {self.port}", fallible=False)
        self.world.sockets.remove(self)

    def fileno(self) -> int:
        return 1000


@dataclass
class World:
    """The node. ``fail_at`` and ``kill_after`` count effects from 1."""

    addresses: list[tuple[str, str]] = field(default_factory=lambda: list(ADDRESSES))
    links: dict[int, Link] = field(
        default_factory=lambda: {
            BRIDGE: Link("cni0"),
            8: Link("cni1"),
            PORT_OF_POD: Link("veth1", hairpin=False),
        }
    )
    bridge_nf: bool = True
    link_of_pods: int = BRIDGE
    gone: set[str] = field(default_factory=set)
    sockets: list[Socket] = field(default_factory=list)
    strangers: dict[HostPort, Somebody | None] = field(default_factory=dict)
    elements: dict[tuple[Family, str, bytes], Element] = field(default_factory=dict)
    rules: dict[Family, list[Rule]] = field(default_factory=dict)
    chains: dict[Family, list[Chain]] = field(default_factory=dict)
    records: dict[str, bytes] = field(default_factory=dict)
    adding: dict[str, bytes] = field(default_factory=dict)
    flows_to: list[tuple[IPAddress, int]] = field(default_factory=list)
    flows_from: list[IPAddress] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    generation: int = 1
    last_content: int = 0
    count: int = 0
    fail_at: int = 0
    forever: bool = False
    error: int = errno.EIO
    kill_after: int = 0
    dead: bool = False

    def effect(self, what: str, *, fallible: bool = True) -> None:
        """Something is about to be done: fail, or note it; a dead process does nothing."""
        if self.dead or (self.kill_after and self.count >= self.kill_after):
            self.dead = True
            raise Killed(what)
        self.count += 1
        self.log.append(what)
        hit = self.count >= self.fail_at if self.forever else self.count == self.fail_at
        if self.fail_at and hit and fallible:
            raise OSError(self.error, os.strerror(self.error))

    def calm(self) -> None:
        """No faults from now on."""
        self.fail_at = self.kill_after = self.count = 0
        self.dead = False
        self.log.clear()

    def end_process(self) -> None:
        """What the kernel does when the helper dies."""
        self.sockets.clear()
        self.calm()

    def twin(self) -> World:
        """The same node once more, independent, with no process in it."""
        return World(
            addresses=list(self.addresses),
            links={i: replace(link) for i, link in self.links.items()},
            bridge_nf=self.bridge_nf,
            link_of_pods=self.link_of_pods,
            gone=set(self.gone),
            strangers=dict(self.strangers),
            elements=dict(self.elements),
            rules={f: list(r) for f, r in self.rules.items()},
            chains={f: list(c) for f, c in self.chains.items()},
            records=dict(self.records),
            adding=dict(self.adding),
        )

    def state(self) -> dict[str, Any]:
        """All that is left of calls, comparable; when a record was made does not count."""
        return {
            "sockets": sorted(str(s.port) for s in self.sockets),
            "elements": {k: (e.data, e.key_end) for k, e in self._pods().items()},
            "links": {i: (x.route_localnet, x.hairpin) for i, x in self.links.items()},
            "records": {k: _content(v) for k, v in self.records.items()},
            "adding": sorted(self.adding),
        }

    def content(self) -> int:
        """Another number for every other content of the tables."""
        return hash(repr((sorted(self.elements.items()), self.chains, self.rules)))

    def _pods(self) -> dict[tuple[Family, str, bytes], Element]:
        return {k: e for k, e in self.elements.items() if e.comment not in (NODE, NETWORK)}


def _content(record: bytes) -> Record:
    return Record.model_validate_json(record).model_copy(update={"created": 0.0})


class Opener:
    """Sockets of the fake node, with the kernel's rules of conflict."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _busy(self, port: HostPort, besides: Iterable[Socket] = ()) -> bool:
        mine = [s for s in self._world.sockets if s not in list(besides)]
        return any(s.port.overlaps(port) for s in mine) or any(
            p.overlaps(port) for p in self._world.strangers
        )

    def open(self, port: HostPort) -> Socket:
        self._world.effect(f"open {port}")
        if self._busy(port):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        return Socket(self._world, port)

    def _exchange(self, old: Sequence[Socket], new: Sequence[HostPort], word: str) -> list[Socket]:
        self._world.effect(f"{word} {', '.join(map(str, new))}")
        if any(self._busy(p, old) for p in new):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        for holder in old:
            self._world.sockets.remove(holder)
        return [Socket(self._world, p) for p in new]

    def narrow(self, wide: Any, ports: Sequence[HostPort]) -> list[Any]:
        return self._exchange([wide], ports, "narrow")

    def widen(self, narrow: Sequence[Any], port: HostPort) -> Any:
        return self._exchange(list(narrow), [port], "widen")[0]

    def blocker(self, port: HostPort) -> Somebody | None:
        for theirs, who in self._world.strangers.items():
            if theirs.overlaps(port):
                return who
        mine = any(s.port.overlaps(port) for s in self._world.sockets)
        return Somebody("cni-hostport", "bound") if mine else Somebody("gone", "unknown")

    def loopback_listener(self, port: HostPort) -> Somebody | None:
        self._world.effect(f"scan {port}", fallible=False)
        for theirs, who in self._world.strangers.items():
            if theirs.address is not None and theirs.address.is_loopback:
                if (theirs.port, theirs.protocol) == (port.port, port.protocol):
                    return who
        return None


class Tables:
    """nf_tables of the fake node: all or nothing, EEXIST and ENOENT as the kernel has them."""

    def __init__(self, world: World) -> None:
        self._world = world

    def load(self, text: str) -> None:
        """``nft -f -``: knows only the two texts there are."""
        world = self._world
        try:
            world.effect("load fresh" if "delete table" in text else "load")
        except OSError as error:
            raise NetfilterFailed("nft refused the rules", str(error)) from None
        if "delete table" in text:
            world.elements.clear()
            world.chains.clear()
        for family in Family:
            counts = nftrules.rule_count(family)
            foreign = [c for c in world.chains.get(family, []) if c.name not in counts]
            world.chains[family] = foreign + [
                Chain(name, "nat", 0, -90, 1) if name in HOOKED else Chain(name) for name in counts
            ]
            theirs = [r for r in world.rules.get(family, []) if r.chain not in counts]
            world.rules[family] = (theirs if "delete table" not in text else []) + [
                Rule(name, n, f"{name} {n}".encode())
                for name, count in counts.items()
                for n in range(count)
            ]

    def apply(self, add: Sequence[Element], delete: Sequence[Element]) -> None:
        world = self._world
        world.effect(f"apply +{len(add)} -{len(delete)}")
        after = dict(world.elements)
        for element in delete:
            if element.family not in world.chains or element.place not in after:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            del after[element.place]
        for element in add:
            if element.family not in world.chains:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if element.place in after or _overlaps(element, after.values()):
                raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
            after[element.place] = element
        if world.content() == world.last_content:
            world.generation += 1
            world.elements = after
            world.last_content = world.content()
        else:
            world.elements = after

    def get(self, elements: Sequence[Element]) -> list[Element | None]:
        return [self._world.elements.get(e.place) for e in elements]

    def dump(self, family: Family, set_name: str) -> list[Element]:
        self._world.effect("dump")
        if family not in self._world.chains:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        items = self._world.elements.items()
        return [e for (f, name, _), e in items if (f, name) == (family, set_name)]

    def rules_of(self, family: Family) -> list[Rule]:
        return list(self._world.rules.get(family, []))

    rules = rules_of

    def chains(self, family: Family) -> list[Chain]:
        return list(self._world.chains.get(family, []))

    def has_table(self, family: Family) -> bool:
        self._world.effect("has table")
        return family in self._world.chains

    def generation(self) -> int:
        """One more for each transaction of ours, a leap for whatever else has changed."""
        self._world.effect("generation")
        world = self._world
        if world.content() != world.last_content:
            world.generation, world.last_content = world.generation + 1000, world.content()
        return world.generation

    def delete_tables(self) -> None:
        self._world.effect("delete tables")
        flush(self._world)


def _overlaps(new: Element, there: Iterable[Element]) -> bool:
    """Ranges of one set must not overlap (nft_set_pipapo)."""
    if new.key_end is None:
        return False
    size = 4 if new.family is Family.V4 else 16
    return any(
        (old.family, old.set, old.key[:-size]) == (new.family, new.set, new.key[:-size])
        and old.key_end is not None
        and old.key <= new.key_end
        and new.key <= old.key_end
        for old in there
    )


HOOKED = ("prerouting", "output", "postrouting", "input", "guard")


def flush(world: World) -> None:
    """``nft flush ruleset``."""
    world.elements.clear()
    world.rules.clear()
    world.chains.clear()


class Machine:
    """Links, flows and namespaces of the fake node."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return 1.0

    def node(self) -> NodeView:
        return NodeView.of((ip_address(a), link) for a, link in self._world.addresses)

    def pod_link(self, attachment: Attachment) -> PodLink:
        self._world.effect("pod link")
        index = self._world.link_of_pods
        link = self._world.links.get(index)
        if link is None:
            return PodLink()
        ports = ((PORT_OF_POD, "veth1"),) if "veth1" in attachment.interfaces else ()
        return PodLink(link.name, index, True, ports)

    def bridge_netfilter(self, family: Family) -> bool:
        return self._world.bridge_nf

    def _link(self, index: int) -> Link:
        if index not in self._world.links:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return self._world.links[index]

    def route_localnet(self, index: int) -> int:
        self._world.effect("read route_localnet")
        return self._link(index).route_localnet

    def route_localnet_of(self, name: str) -> int | None:
        return next((x.route_localnet for x in self._world.links.values() if x.name == name), None)

    def set_route_localnet(self, index: int, value: int) -> None:
        self._world.effect(f"route_localnet of {index} = {value}")
        self._link(index).route_localnet = value

    def hairpin(self, index: int) -> bool:
        self._world.effect("read hairpin")
        on = self._link(index).hairpin
        if on is None:
            raise OSError(errno.EOPNOTSUPP, "no port")
        return on

    def hairpins(self) -> dict[int, bool]:
        self._world.effect("read hairpins")
        links = self._world.links.items()
        return {index: link.hairpin for index, link in links if link.hairpin is not None}

    def set_hairpin(self, index: int, on: bool) -> None:
        self._world.effect(f"hairpin of {index} = {on}")
        self._link(index).hairpin = on

    def netns_state(self, path: str, cookie: int | None) -> Any:
        return "gone" if path in self._world.gone else "alive"

    def drop_udp_to(self, targets: Iterable[tuple[IPAddress, int]]) -> None:
        self._world.effect("drop flows to")
        self._world.flows_to += targets

    def drop_udp_untranslated(self, targets: Collection[tuple[IPAddress, int]]) -> None:
        self._world.effect("drop untranslated flows")
        self._world.flows_to += targets

    def drop_udp_from(self, addresses: Iterable[IPAddress]) -> None:
        self._world.effect("drop flows from")
        self._world.flows_from += addresses


class Store:
    """Records on the fake disk."""

    def __init__(self, world: World) -> None:
        self._world = world

    def prepare(self, key: str, content: bytes) -> None:
        self._world.effect("prepare record")
        self._world.adding[key] = content

    def commit(self, key: str) -> None:
        self._world.effect("commit record")
        self._world.records[key] = self._world.adding.pop(key)

    def discard(self, key: str) -> None:
        self._world.effect("discard record")
        self._world.adding.pop(key, None)

    def delete(self, key: str) -> None:
        self._world.effect("delete record")
        self._world.records.pop(key, None)


class Helper:
    """One life of the helper: comes up from what the world has kept."""

    def __init__(self, world: World, families: Iterable[Family] = Family) -> None:
        self.world = world
        tables = Tables(world)
        self.backend = NftablesBackend(tables, tables.load)
        backends: Mapping[str, NftablesBackend] = {"nftables": self.backend}
        self.manager = HostPortManager(
            Opener(world), backends, Machine(world), Store(world), families
        )
        self.restore()

    def restore(self) -> None:
        """As ``helper/parts.py`` brings a helper up."""
        manager, world = self.manager, self.world
        manager.restore([Record.model_validate_json(c) for c in world.records.values()])
        for key, content in list(world.adding.items()):
            manager.undo_unanswered(Record.model_validate_json(content))
            world.adding.pop(key)
        self.backend.repair()
        manager.refresh_links()

    def again(self) -> Helper:
        """Killed, and started anew."""
        self.world.end_process()
        return Helper(self.world)

    def consistent(self) -> list[str]:
        """What is not as the records say; empty when all is well."""
        found = []
        for record in self.manager.registry:
            found += self.manager.check_record(record)
        known = {r.key for r in self.manager.registry}
        found += [
            f"rule without record: {e}"
            for e in self.world._pods().values()
            if e.comment not in known
        ]
        found += [
            f"sockets without record: {k}"
            for k in self.manager.holds.keys()  # noqa: SIM118
            if k not in known
        ]
        if known != set(self.world.records):
            found.append(f"records {known} in memory, {set(self.world.records)} on disk")
        found += [f"unfinished record {k}" for k in self.world.adding]
        held = sum(len(self.manager.holds.held(k)) for k in known)
        if held != len(self.world.sockets):
            found.append(f"{len(self.world.sockets)} sockets, {held} on the books")
        return found


def port(text: str, protocol: str = "tcp") -> HostPort:
    """``0.0.0.0:80`` or ``[::]:80`` as a HostPort."""
    host, _, number = text.rpartition(":")
    address = ip_address(host.strip("[]"))
    return HostPort(
        family=Family(address.version),
        address=None if address.is_unspecified else address,
        port=int(number),
        protocol=Protocol(protocol),
    )


def pod(
    name: str,
    *mappings: str,
    ips: Sequence[str] = ("10.1.0.2/16", "fd00::2/64"),
    interfaces: Sequence[str] = ("cni0", "veth1"),
    network: str = "net",
    **options: Any,
) -> Attachment:
    """An attachment; a mapping is ``8080:80/tcp`` or ``192.0.2.1:8080:80/udp``."""
    return Attachment(
        identity=AttachmentID(network=network, container_id=name, ifname="eth0"),
        pod=PodRef(namespace="shop", name=name),
        netns=f"/run/netns/{name}",
        addresses=tuple(ip_interface(ip) for ip in ips),
        mappings=tuple(map(_mapping, mappings)),
        options=Options(**options),
        interfaces=tuple(interfaces),
    )


def _mapping(text: str) -> PortMapping:
    rest, _, protocol = text.partition("/")
    rest, _, container = rest.rpartition(":")
    host, _, number = rest.rpartition(":")
    return PortMapping(
        host_port=int(number),
        container_port=int(container),
        protocol=Protocol(protocol or "tcp"),
        host_ip=ip_address(host.strip("[]")) if host else None,
    )


def effects(world: World, action: Callable[[], object]) -> Iterator[str]:
    """What an action does, in order, where nothing goes wrong."""
    world.calm()
    action()
    yield from list(world.log)
    world.calm()
