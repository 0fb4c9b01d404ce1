"""The host-port manager: what ADD, DEL, CHECK and GC mean on this node.

ADD is all or nothing: sockets, then the record, then one netfilter transaction, then
stale UDP flows (``adding.py``; several of one moment: ``together.py``). DEL is by the
record alone. Never touches the machine itself: sockets, rules, records and links come in
as objects, and every method runs under the caller's one lock.

``add`` and ``remove`` are the interface of Kubernetes' hostport manager;
``attach`` and ``detach`` are the same with everything CNI knows.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable

from cni_hostport.errors import (
    HostPortError,
    InvalidConfig,
    IOFailure,
    PortInUse,
)
from cni_hostport.hostport import answering
from cni_hostport.hostport.adding import Wish
from cni_hostport.hostport.node import PodLink
from cni_hostport.hostport.podports import PodPortMapping, attachment_of_pod
from cni_hostport.hostport.record import Record
from cni_hostport.hostport.together import Together
from cni_hostport.model import (
    Attachment,
    ReservePorts,
    family_of,
)

log = logging.getLogger(__name__)


class HostPortManager(Together):
    """Attachments of one node, with their sockets, rules and records."""

    # hostport_manager.go's interface

    def add(self, id: str, pod: PodPortMapping, nat_interface: str = "") -> None:
        """Map a pod's host ports; nothing is done for a pod on the host network.

        Raises InvalidConfig for a pod IP that is missing or of a family this
        manager does not serve, PortInUse when a port is taken.
        """
        attachment = attachment_of_pod(id, pod, nat_interface)
        if attachment is None:
            return
        wanted = {family_of(a) for a in attachment.addresses}
        if not wanted <= self._families:
            raise InvalidConfig(
                f"pod {attachment.pod}: address family mismatch",
                f"pod address {attachment.addresses[0].ip}, manager serves "
                + ", ".join(f"IPv{int(f)}" for f in sorted(self._families)),
            )
        self.attach(attachment)

    def remove(self, id: str, pod: PodPortMapping | None = None) -> None:
        """Take back what ``add`` did for that id; fine if there is nothing."""
        if pod is not None and pod.host_network:
            return
        for record in self.registry:
            if record.attachment.identity.container_id == id:
                self.detach(record.key)

    # CNI's verbs

    def attach(
        self,
        attachment: Attachment,
        *,
        backend: str = "nftables",
        netns_cookie: int | None = None,
        must_be_local: bool = False,
    ) -> bool:
        """Make the attachment's host ports work; all or nothing.

        Returns False if everything was so already. Raises PortInUse (101),
        InvalidConfig (7), NetfilterFailed (102), TryAgain (11), IOFailure (5).
        """
        existing = self.registry.get(attachment.key)
        if not attachment.claims():
            if existing is not None:
                self.detach(attachment.key)
            return existing is not None
        if _is_so(existing, attachment, backend, netns_cookie):
            return False
        node = self.follow_addresses()
        answering.check_host_ips(attachment, node, must_be_local=must_be_local)
        attachment = self._settle_conflicts(attachment)
        if attachment.yielded:
            if _is_so(existing, attachment, backend, netns_cookie):
                return False
            log.info(
                "%s leaves %s to another network of its container",
                attachment.describe(),
                ", ".join(map(str, attachment.yielded)),
            )
        self._put([Wish(attachment, backend, netns_cookie)])
        if existing is not None:
            self._take_up(attachment.identity.container_id)
        return True

    def detach(self, key: str) -> bool:
        """Take an attachment away by its record; False if there is none.

        Raises NetfilterFailed or TryAgain when its rules cannot be removed; the
        record then stays, so that it can be tried again. IOFailure: all is gone
        but the record's file, which ``retry_unfinished`` goes on trying.
        """
        record = self.registry.get(key)
        if record is None:
            if key in self._undeleted:
                self._delete_record(key)
            return False
        self._backend(record).place({key: None}, self._node)
        self._drop_flows_from(record)
        self._links.release(record)
        self.holds.release(key)
        self.registry.drop(key)
        self._delete_record(key)
        self._take_up(record.attachment.identity.container_id)
        return True

    def _take_up(self, container_id: str = "") -> None:
        """Have attachments map what they had left to another of their container; never raises.

        Not while a record waits to be deleted: it would come back beside theirs.
        """
        if self._undeleted:
            return
        for record in self.registry.yielding(container_id):
            if self._is_gone(record):
                continue
            whole = record.attachment.model_copy({"yielded": ()})
            try:
                self.attach(whole, backend=record.backend, netns_cookie=record.netns_cookie)
            except HostPortError as error:
                log.warning("%s: %s", whole.describe(), error)

    def _delete_record(self, key: str) -> None:
        self._undeleted.add(key)
        try:
            self._store.delete(key)
        except OSError as error:
            raise IOFailure("cannot delete the record", str(error.strerror)) from error
        self._undeleted.discard(key)

    def retry_unfinished(self) -> None:
        """What a detach could not finish: records to delete, ports for the container's others."""
        for key in tuple(self._undeleted):
            with contextlib.suppress(IOFailure):
                self._delete_record(key)
        self._take_up()

    def check(self, attachment: Attachment) -> list[str]:
        """Names everything that is not as ADD left it; changes nothing."""
        record = self.registry.get(attachment.key)
        if record is None:
            return ["record of the attachment"] if attachment.claims() else []
        missing = self.check_record(record)
        if set(record.attachment.mappings) != set(attachment.mappings):
            missing.append("mappings of the record (they are not the configuration's)")
        for address in record.attachment.addresses:  # a later plugin may have added others
            now = attachment.address(family_of(address))
            if now != address:
                missing.append(f"pod address {address.ip} (prevResult has {now and now.ip})")
        return missing

    def check_record(self, record: Record) -> list[str]:
        """Sockets, rules and sysctl of one record, by name, where they miss."""
        missing = []
        if record.attachment.options.reserve_ports is ReservePorts.REQUIRE:
            wanted = answering.planned_holds(record.attachment, self._machine.node())
            missing = self.holds.missing(record.key, wanted)
        missing += self._backend(record).check(record.key)
        return missing + self._links.check(record)

    def gc(self, network: str, valid: Iterable[tuple[str, str]]) -> list[HostPortError]:
        """Remove attachments of the network that are not among the valid ones.

        ``valid``: (container ID, interface name). Errors are collected; one that
        fails keeps its record and the others still go.
        """
        alive = frozenset(valid)
        errors: list[HostPortError] = []
        for record in self.registry.of_network(network):
            identity = record.attachment.identity
            if (identity.container_id, identity.ifname) in alive:
                continue
            try:
                self.detach(record.key)
            except HostPortError as error:
                errors.append(error)
        return errors

    def dead(self) -> list[Record]:
        """Attachments whose network namespace is gone."""
        return [r for r in self.registry if self._is_gone(r)]

    # steps

    def _settle_conflicts(self, attachment: Attachment) -> Attachment:
        """The attachment without what others of its container have; who is dead is removed.

        Raises PortInUse for what a living one of another container has.
        """
        yielded = []
        for wanted, _, owner in self.registry.conflicts(attachment):
            if self.registry.get(owner.key) is None:
                continue
            if not self._is_gone(owner):
                if _same_container(attachment, owner.attachment):
                    yielded.append(wanted)
                    continue
                raise PortInUse(
                    f"host port {wanted} is in use by {owner.attachment.describe()}",
                    "delete that pod, choose another hostPort or a hostIP of its own",
                    owner="attachment",
                )
            log.warning(
                "taking port %s from %s: its network namespace is gone",
                wanted,
                owner.attachment.describe(),
            )
            self.detach(owner.key)
        if not yielded:
            return attachment
        return attachment.model_copy({"yielded": tuple(dict.fromkeys(yielded))})

    def _is_gone(self, record: Record) -> bool:
        state = self._machine.netns_state(record.attachment.netns, record.netns_cookie)
        return state == "gone"


def _same_container(one: Attachment, other: Attachment) -> bool:
    return one.identity.container_id == other.identity.container_id


def _is_so(
    existing: Record | None, attachment: Attachment, backend: str, cookie: int | None
) -> bool:
    """Whether what is there is already what is wanted."""
    return existing is not None and (
        existing.attachment == attachment
        and existing.backend == backend
        and existing.netns_cookie == cookie
    )


__all__ = ["HostPortManager", "PodLink", "PodPortMapping"]
