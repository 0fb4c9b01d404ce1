"""What the manager asks of the node besides sockets and netfilter: one interface.

``helper/machine.py`` answers from the real kernel; tests answer with faults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, Protocol

from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.model import Attachment, Family, IPAddress

Liveness = Literal["alive", "gone", "unknown"]


class Machine(Protocol):
    """Small questions and small changes; every one O(1) in the number of pods."""

    def now(self) -> float:
        """Seconds since the epoch."""

    def node(self) -> NodeView:
        """The node's addresses, as of this moment."""

    def pod_link(self, attachment: Attachment) -> PodLink:
        """The link that leads to the pod; an empty one where there is none."""

    def bridge_netfilter(self, family: Family) -> bool:
        """Whether bridged packets of the family go through iptables' hooks."""

    def route_localnet(self, index: int) -> int:
        """The link's own route_localnet; OSError if the link is gone."""

    def route_localnet_of(self, name: str) -> int | None:
        """The same of the link of that name, at less cost; None where it cannot be told.

        Any thread.
        """

    def set_route_localnet(self, index: int, value: int) -> None:
        """Set the link's own route_localnet."""

    def hairpin(self, index: int) -> bool:
        """Whether the bridge port sends a frame back where it came from."""

    def hairpins(self) -> Mapping[int, bool]:
        """That flag of every bridge port there is, by link number."""

    def set_hairpin(self, index: int, on: bool) -> None:
        """Set the port's hairpin flag."""

    def netns_state(self, path: str, cookie: int | None) -> Liveness:
        """Whether the recorded namespace is still at that path."""

    def drop_udp_to(self, targets: Iterable[tuple[IPAddress, int]]) -> None:
        """Drop UDP flows whose original destination is one of these."""

    def drop_udp_untranslated(self, targets: Collection[tuple[IPAddress, int]]) -> None:
        """Drop UDP flows to one of these that are not translated."""

    def drop_udp_from(self, addresses: Iterable[IPAddress]) -> None:
        """Drop UDP flows whose reply comes from one of these pod addresses."""


class Store(Protocol):
    """Where records are kept (``host/records.py``)."""

    def prepare(self, key: str, content: bytes) -> None: ...
    def commit(self, key: str) -> None: ...
    def discard(self, key: str) -> None: ...
    def delete(self, key: str) -> None: ...
