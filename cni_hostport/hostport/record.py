"""What is remembered of an attachment: the file's content, in clear text.

A record says what an answered ADD promised and what has to be put back when
the attachment goes. Its fields are a stable format: ``version`` grows when one
changes its meaning.
"""

from __future__ import annotations

from typing import Literal

from cni_hostport.hostport.node import PodLink
from cni_hostport.model import Attachment, Model, model


@model
class LinkRecord(Model):
    """The node-side link as found at ADD."""

    name: str = ""
    index: int = 0
    is_bridge: bool = False
    ports: tuple[tuple[int, str], ...] = ()


@model
class Record(Model):
    """One attachment and what was done for it on the node.

    ``route_localnet_found`` is the sysctl's value before our first use of the
    link (None: not touched); ``hairpin_set`` the bridge ports whose hairpin flag
    we switched on; ``netns_cookie`` the kernel's SO_NETNS_COOKIE of the pod's
    namespace, None where it could not be read or not be compared later.
    ``created`` is seconds since the epoch.
    """

    version: Literal[1] = 1
    attachment: Attachment
    backend: Literal["nftables", "iptables"] = "nftables"
    created: float = 0.0
    netns_cookie: int | None = None
    link: LinkRecord = LinkRecord()
    route_localnet_found: int | None = None
    hairpin_set: tuple[int, ...] = ()

    @property
    def key(self) -> str:
        """The attachment's key, which is the file's name."""
        return self.attachment.key

    def pod_link(self) -> PodLink:
        """The link in the form decisions take it."""
        link = self.link
        return PodLink(link.name, link.index, link.is_bridge, link.ports)


def link_record(link: PodLink) -> LinkRecord:
    """The form that is stored."""
    return LinkRecord(name=link.name, index=link.index, is_bridge=link.is_bridge, ports=link.ports)
