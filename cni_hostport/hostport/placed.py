"""An attachment as it stands on this node: what backends plan from."""

from __future__ import annotations

from dataclasses import dataclass

from cni_hostport.hostport.node import PodLink
from cni_hostport.model import Attachment, HostPort


@dataclass(frozen=True, slots=True)
class Placed:
    """Attachment, the link that leads to its pod, and the ports really held for it."""

    attachment: Attachment
    link: PodLink
    held: frozenset[HostPort] = frozenset()

    @property
    def key(self) -> str:
        """The attachment's key."""
        return self.attachment.key
