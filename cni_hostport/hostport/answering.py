"""Which addresses a mapping answers on, and which sockets reserve them.

Pure. The one place that turns options (snat, nodeAddresses, excludeInterfaces)
and the node's addresses into an answer, so that reservation, rules, conntrack
and status can never disagree.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Network

from cni_hostport.errors import InvalidConfig
from cni_hostport.hostport.node import NodeView
from cni_hostport.model import (
    DEFAULT_EXCLUDED_LINKS,
    Attachment,
    Family,
    HostPort,
    IPAddress,
    Options,
    Protocol,
    ReservePorts,
)

LOOPBACK4 = IPv4Network("127.0.0.0/8")
DNS_PORT = 53


def is_listed(options: Options, port: int, node: NodeView) -> bool:
    """Whether a wildcard mapping is spelled out address by address.

    Port 53 always is: a stub resolver on 127.0.0.53 or a node-local cache must
    keep the addresses that nobody asked us to answer on. Links excluded otherwise
    than by default count only while they make a difference on this node.
    """
    return port == DNS_PORT or lists_all(options, node)


def is_whole(claim: HostPort, listed: bool) -> bool:
    """Whether it is a wildcard that is not spelled out; ``listed`` is what ``lists_all`` says."""
    return claim.address is None and not listed and claim.port != DNS_PORT


def lists_all(options: Options, node: NodeView) -> bool:
    """Whether that is so for every port: asked once for a pod's many."""
    return not options.snat or bool(options.node_addresses) or not _excludes_as_usual(options, node)


def _excludes_as_usual(options: Options, node: NodeView) -> bool:
    excluded = options.exclude_interfaces
    if excluded == DEFAULT_EXCLUDED_LINKS:
        return True
    other = set(excluded) ^ set(DEFAULT_EXCLUDED_LINKS)
    return not any(node.on_links(f, other) for f in Family)


def is_answered(address: IPAddress, options: Options, node: NodeView) -> bool:
    """Whether the options let a host port answer on this address at all."""
    if any(link in options.exclude_interfaces for link in node.links_of(address)):
        return False
    if options.node_addresses and not any(
        address.version == n.version and address in n for n in options.node_addresses
    ):
        return False
    return options.snat or address.version == 6 or address not in LOOPBACK4


def answered_addresses(family: Family, options: Options, node: NodeView) -> tuple[IPAddress, ...]:
    """Local addresses of the family that a wildcard mapping answers on."""
    unique = dict.fromkeys(a.address for a in node.of_family(family))
    return tuple(a for a in unique if is_answered(a, options, node))


def check_host_ips(attachment: Attachment, node: NodeView, *, must_be_local: bool = False) -> None:
    """Refuse a hostIP that the options keep free; InvalidConfig names it.

    ``must_be_local``: mappings that whoever writes the pod chose (annotation)
    may only name an address the node has now.
    """
    for number, mapping in enumerate(attachment.mappings):
        address = mapping.specific
        if address is None:
            continue
        field = f"portMappings[{number}].hostIP"
        loopback = address.version == 4 and address in LOOPBACK4
        if must_be_local and not loopback and not node.links_of(address):
            raise InvalidConfig(f"{field}: {address} is not an address of this node")
        if not is_answered(address, attachment.options, node):
            raise InvalidConfig(
                f"{field}: {address} is an address host ports never answer on",
                "see excludeInterfaces, nodeAddresses and snat in the plugin's configuration",
            )


def planned_holds(attachment: Attachment, node: NodeView) -> tuple[HostPort, ...]:
    """Sockets that reserve what the attachment answers on, in a stable order.

    Empty for ``reservePorts: no``; SCTP never has a socket, since opening one
    would load the kernel's SCTP module.
    """
    if attachment.options.reserve_ports is ReservePorts.NO:
        return ()
    options = attachment.options
    listed = lists_all(options, node)
    partly = [f for f in attachment.families() if excluded_present(f, options, node)]
    holds: dict[HostPort, None] = {}
    for claim in attachment.claims():
        if claim.protocol is Protocol.SCTP:
            continue
        if is_whole(claim, listed) and claim.family not in partly:
            holds[claim] = None
        else:
            holds.update(dict.fromkeys(_one_by_one(claim, options, node)))
    return tuple(h for h in holds if h.address is None or not _covered(h, holds))


def _covered(hold: HostPort, holds: Collection[HostPort]) -> bool:
    """Whether the wildcard of the same attachment reserves the address already."""
    return hold._replace(address=None) in holds


def _one_by_one(claim: HostPort, options: Options, node: NodeView) -> tuple[HostPort, ...]:
    if claim.address is not None:
        return (claim,) if is_answered(claim.address, options, node) else ()
    return tuple(claim._replace(address=a) for a in answered_addresses(claim.family, options, node))


def excluded_present(family: Family, options: Options, node: NodeView) -> bool:
    """Whether an excluded link carries an address of the family right now."""
    return bool(node.on_links(family, options.exclude_interfaces))


def needs_loopback_scan(attachment: Attachment, node: NodeView) -> tuple[HostPort, ...]:
    """Wildcard IPv4 claims that answer on all of 127/8 but hold only 127.0.0.1 of it.

    For these a listener on another loopback address has to be looked for by
    sock_diag, since no socket of ours collides with it.
    """
    options = attachment.options
    if options.reserve_ports is ReservePorts.NO or not excluded_present(Family.V4, options, node):
        return ()
    return tuple(
        c
        for c in attachment.claims()
        if c.family is Family.V4
        and c.address is None
        and c.protocol is not Protocol.SCTP
        and not is_listed(options, c.port, node)
    )


def flow_targets(attachment: Attachment, node: NodeView) -> tuple[tuple[IPAddress, int], ...]:
    """(address, UDP host port) pairs whose stale flows ADD must drop."""
    targets: dict[tuple[IPAddress, int], None] = {}
    for claim in attachment.claims():
        if claim.protocol is not Protocol.UDP:
            continue
        if claim.address is not None:
            targets[(claim.address, claim.port)] = None
        else:
            for address in answered_addresses(claim.family, attachment.options, node):
                targets[(address, claim.port)] = None
    return tuple(targets)


def answered_flows(attachment: Attachment, node: NodeView) -> frozenset[tuple[IPAddress, int]]:
    """(address, UDP host port) pairs that lead to the pod as the node is now.

    A pair that comes or goes with an address leaves flows behind that still go
    where they went before.
    """
    options = attachment.options
    return frozenset(
        (address, port)
        for address, port in flow_targets(attachment, node)
        if node.links_of(address) and is_answered(address, options, node)
    )


def answers_loopback(attachment: Attachment, node: NodeView) -> bool:
    """Whether 127.0.0.0/8 leads to the pod, so that route_localnet is needed."""
    options = attachment.options
    home = LOOPBACK4[1]
    return any(
        c.address in LOOPBACK4 if c.address is not None else is_answered(home, options, node)
        for c in attachment.claims()
        if c.family is Family.V4 and options.snat
    )


def depends_on_addresses(attachment: Attachment) -> bool:
    """Whether a change of the node's addresses changes what it wants."""
    options = attachment.options
    other = set(options.exclude_interfaces) != set(DEFAULT_EXCLUDED_LINKS)
    return any(
        other or c.address is not None or is_listed(options, c.port, _ANY)
        for c in attachment.claims()
    )


_ANY = NodeView()
