"""A pod's ports in the words of Kubernetes' hostport manager.

Turns a ``PodPortMapping`` into an ``Attachment``; decides nothing else.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

from cni_hostport.errors import InvalidConfig
from cni_hostport.model import (
    Attachment,
    AttachmentID,
    Model,
    Options,
    PodAddress,
    PodRef,
    PortMapping,
    family_of,
    model,
)


@model
class PodPortMapping(Model):
    """Ports of one pod: the argument of ``HostPortManager.add``."""

    namespace: str = ""
    name: str = ""
    port_mappings: tuple[PortMapping, ...] = ()
    host_network: bool = False
    ip: IPv4Address | IPv6Address | None = None
    options: Options = Options()


def attachment_of_pod(id: str, pod: PodPortMapping, nat_interface: str) -> Attachment | None:
    """The attachment that a pod's ports amount to; None if nothing is to be done.

    Raises InvalidConfig when ports are wanted but the pod has no address.
    """
    if pod.host_network:
        return None
    who = PodRef(namespace=pod.namespace, name=pod.name)
    if pod.ip is None:
        if not pod.port_mappings:
            return None
        raise InvalidConfig(f"pod {who}: invalid or missing IP")
    family = family_of(pod.ip)
    mappings = tuple(m for m in pod.port_mappings if m.applies_to(family))
    if not mappings:
        return None
    return Attachment(
        identity=AttachmentID(network="", container_id=id, ifname=""),
        pod=who,
        addresses=(PodAddress(pod.ip, pod.ip.max_prefixlen),),
        mappings=mappings,
        options=pod.options,
        interfaces=(nat_interface,) if nat_interface else (),
    )
