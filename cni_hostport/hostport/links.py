"""The pod-side link: route_localnet and hairpin flags, and putting them back.

Decides when a link needs which flag, remembers in the record what was found,
and restores it with the last user. Never touches a link no attachment is on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol, TypedDict

from cni_hostport.errors import IOFailure
from cni_hostport.hostport.answering import answers_loopback
from cni_hostport.hostport.machine import Machine
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.hostport.record import LinkRecord, Record, link_record
from cni_hostport.hostport.registry import Registry
from cni_hostport.model import Attachment, Family

log = logging.getLogger(__name__)

ROUTE_LOCALNET, HAIRPIN = "route_localnet", "hairpin"
GONE = (None, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors that mean: no such link, or it is no bridge port any more."""

_Link = PodLink | LinkRecord


class Flags(TypedDict):
    """The fields of a record that say what was found, and is to be put back."""

    route_localnet_found: int | None
    hairpin_set: tuple[int, ...]


@contextlib.contextmanager
def _link_may_be_gone(link: _Link) -> Iterator[None]:
    """A vanished link is no error; anything else is IOFailure (code 5)."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise _no_flags(link, error) from error


def _no_flags(link: _Link, error: OSError) -> IOFailure:
    return IOFailure(f"cannot read or set the flags of link {link.name}", str(error))


class _Ports(Protocol):
    """Who answers questions about bridge ports."""

    def bridge_netfilter(self, family: Family) -> bool: ...
    def hairpin(self, index: int) -> bool: ...


def _is_off(link: _Link, index: int, ask: _Ports) -> bool:
    """Whether a bridge port lacks the hairpin flag; one that is gone lacks nothing."""
    try:
        return not ask.hairpin(index)
    except OSError as error:
        if error.errno not in GONE:
            raise _no_flags(link, error) from error
        return False


class _OneLook:
    """The machine's answers, all read at once: for a look at every record of a node."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._filtered: dict[Family, bool] = {}
        self._ports: Mapping[int, bool] | None = None

    def bridge_netfilter(self, family: Family) -> bool:
        if family not in self._filtered:
            self._filtered[family] = self._machine.bridge_netfilter(family)
        return self._filtered[family]

    def hairpin(self, index: int) -> bool:
        ports = self._all()
        if index not in ports:
            raise OSError(errno.ENODEV, "no bridge port")
        return ports[index]

    def off(self) -> list[int]:
        """Bridge ports without the flag."""
        return [index for index, on in self._all().items() if not on]

    def _all(self) -> Mapping[int, bool]:
        if self._ports is None:
            self._ports = self._machine.hairpins()
        return self._ports


class LinkKeeper:
    """Flags on pod-side links, shared by the attachments on them."""

    def __init__(self, machine: Machine, registry: Registry) -> None:
        self._machine = machine
        self._registry = registry
        self._owed: dict[tuple[int, str], int] = {}

    def plan(
        self, attachment: Attachment, existing: Record | None, node: NodeView, seen: PodLink
    ) -> Flags:
        """What the attachment's record has to say of the flags as they are found now.

        ``seen``: the link as it was read an instant ago; what it does not say is asked for.
        """
        found: int | None = None
        if seen.index and answers_loopback(attachment, node):
            found = self._registry.route_localnet_found(seen.index)
            if found is None:
                found = seen.route_localnet
            if found is None:
                with _link_may_be_gone(seen):
                    found = self._machine.route_localnet(seen.index)
        kept = existing.hairpin_set if existing is not None else ()
        ports = dict.fromkeys([*kept, *self._hairpin_wanted(attachment, seen, seen.hairpin)])
        return {"route_localnet_found": found, "hairpin_set": tuple(ports)}

    def _hairpin_wanted(
        self,
        attachment: Attachment,
        link: _Link,
        on: tuple[int, ...] | None = None,
        ask: _Ports | None = None,
    ) -> list[int]:
        """Bridge ports that must send the pod's own frames back and do not yet.

        With br_netfilter the DNAT happens while the frame is still bridged: the
        bridge then drops it, since it would leave by the port it came in on.
        ``on``: ports that are known to do so; None: each is asked, of ``ask``.
        """
        ask = ask or self._machine
        if not link.ports or not attachment.options.snat:
            return []
        if on is not None:
            off = [index for index, _ in link.ports if index not in on]
        else:
            off = [index for index, _ in link.ports if _is_off(link, index, ask)]
        # claims last: a look at ten thousand attachments mostly ends before
        if not off or not any(
            ask.bridge_netfilter(f) for f in {c.family for c in attachment.claims()}
        ):
            return []
        return off

    def use(self, record: Record, seen: PodLink | None = None) -> None:
        """Switch on what the record says is needed; a vanished link is no error.

        What was ``seen`` to be on is left alone: setting it again would wake everybody
        who listens to link events. Raises IOFailure.
        """
        index = record.link.index
        if record.route_localnet_found == 0:
            self._owed.pop((index, ROUTE_LOCALNET), None)
            if seen is None or seen.route_localnet != 1:
                with _link_may_be_gone(record.link):
                    self._machine.set_route_localnet(index, 1)
        for port in record.hairpin_set:
            self._owed.pop((port, HAIRPIN), None)
            if seen is None or port not in (seen.hairpin or ()):
                with _link_may_be_gone(record.link):
                    self._machine.set_hairpin(port, True)

    def release(self, record: Record, keep: Record | None = None) -> None:
        """Put back what the record changed, unless somebody else needs it.

        ``keep``: the record that takes its place, whose flags stay.
        """
        index, found = record.link.index, record.route_localnet_found
        kept = keep is not None and keep.route_localnet_found is not None
        same_link = keep is not None and keep.link.index == index
        if (
            found is not None
            and not (kept and same_link)
            and not self._registry.shares_link(record)
        ):
            self._put_back(index, ROUTE_LOCALNET, found)
        still = keep.hairpin_set if keep is not None else ()
        for port in record.hairpin_set:
            if port not in still:
                self._put_back(port, HAIRPIN, 0)

    def _put_back(self, index: int, flag: str, value: int) -> None:
        """Set a flag to what was found; where that fails ``refresh`` tries again."""
        self._owed.pop((index, flag), None)
        try:
            if flag == HAIRPIN:
                self._machine.set_hairpin(index, bool(value))
            else:
                self._machine.set_route_localnet(index, value)
        except OSError as error:
            if error.errno not in GONE:
                log.warning("%s of link %d cannot be put back yet: %s", flag, index, error)
                self._owed[index, flag] = value

    def check(self, record: Record) -> list[str]:
        """Names the flags that are not as they must be."""
        missing = []
        name = record.link.name
        if record.route_localnet_found is not None:
            try:
                if self._machine.route_localnet(record.link.index) != 1:
                    missing.append(f"sysctl net.ipv4.conf.{name}.route_localnet = 1")
            except OSError:
                missing.append(f"link {name}")
        missing.extend(
            f"hairpin flag of bridge port {dict(record.link.ports).get(index, index)}"
            for index in self._hairpin_wanted(record.attachment, record.link)
        )
        return missing

    def refresh(self, names: Collection[str] | None = None) -> tuple[list[str], list[Record]]:
        """Put right flags somebody changed: what was mended, and records whose link is gone.

        ``names``: look at these links alone.
        """
        for (index, flag), value in tuple(self._owed.items()):
            self._put_back(index, flag, value)
        mended: list[str] = []
        strays: list[Record] = []
        for index in self._registry.links():
            if names is not None and self._registry.link_name(index) not in names:
                continue
            if not self._refresh_route_localnet(index, mended):
                strays.extend(self._registry.on_link(index))
        if self._registry.has_ports:
            self._refresh_hairpins(names, mended)
        return mended, strays

    def _refresh_hairpins(self, names: Collection[str] | None, mended: list[str]) -> None:
        """By the ports that lack the flag: there are few, and ten thousand attachments."""
        ask = _OneLook(self._machine)
        for port in ask.off():
            for record in self._registry.on_port(port):
                if names is not None and record.link.name not in names:
                    continue
                if port in self._hairpin_wanted(record.attachment, record.link, ask=ask):
                    with _link_may_be_gone(record.link):
                        self._machine.set_hairpin(port, True)
                        mended.append(f"hairpin of port {dict(record.link.ports)[port]}")
                    break

    def seem_changed(self, start: int, count: int) -> bool:
        """Whether ``changed`` may find something. Any thread: asks by name, and not netlink."""
        try:
            names = [self._registry.link_name(index) for index in self._few(start, count)]
        except (RuntimeError, KeyError):  # they change under our eyes
            return True
        return any(self._machine.route_localnet_of(name) != 1 for name in names)

    def _few(self, start: int, count: int) -> list[int]:
        links = self._registry.links()
        return [links[at % len(links)] for at in range(start, start + min(count, len(links)))]

    def changed(self, start: int, count: int) -> set[str]:
        """Names among ``count`` links from number ``start`` on whose sysctl somebody changed.

        Nothing tells of such a change, so a few links are looked at in turn.
        """
        found = set()
        for index in self._few(start, count):
            with contextlib.suppress(OSError):
                if self._machine.route_localnet(index) != 1:
                    found.add(self._registry.link_name(index))
        return found

    def _refresh_route_localnet(self, index: int, mended: list[str]) -> bool:
        """False where the link is gone."""
        try:
            if self._machine.route_localnet(index) != 1:
                self._machine.set_route_localnet(index, 1)
                mended.append(f"net.ipv4.conf.{self._registry.link_name(index)}.route_localnet")
        except OSError as error:
            return error.errno not in GONE
        return True

    def moved(self, record: Record, node: NodeView) -> Record | None:
        """The record on a link that was made again under the same name; None: there is none."""
        try:
            link = self._machine.pod_link(record.attachment)
        except OSError:
            return None
        if link.name != record.link.name or link.index in (0, record.link.index):
            return None
        flags = self.plan(record.attachment, None, node, link)
        moved = record.model_copy(update={"link": link_record(link), **flags})
        self.use(moved)
        return moved
