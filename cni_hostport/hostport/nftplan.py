"""Elements of the nftables maps and sets that one attachment wants: pure.

``plan(existing, wanted)`` is a set difference: the same function feeds ADD, DEL,
CHECK, repair and the follow-up of an address change.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from cni_hostport.hostport.answering import (
    answered_addresses,
    is_answered,
    is_whole,
    lists_all,
)
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import (
    DEFAULT_EXCLUDED_LINKS,
    Family,
    HostPort,
    Options,
    PodAddress,
    Protocol,
    family_of,
)
from cni_hostport.netfilter import elements as nft
from cni_hostport.netfilter import nftrules as rules
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nftprofiles import Profile, profile_of


def attachment_elements(placed: Placed, node: NodeView) -> tuple[Element, ...]:
    """Everything the attachment owns or shares in the two tables."""
    attachment = placed.attachment
    pods = [(family_of(a), a) for a in sorted(attachment.addresses, key=family_of)]
    out: list[Element] = []
    used: set[Family] = set()
    key, listed = placed.key, lists_all(attachment.options, node)
    maps = {family: _maps(attachment.options, family) for family, _ in pods}
    for mapping in attachment.mappings:
        for family, pod in pods:
            if not attachment.maps(mapping, family):
                continue
            claim = mapping.host_port_of(family)
            data = nft.target(pod.ip, mapping.container_port)
            if is_whole(claim, listed):
                lookup = nft.port_key(claim.protocol, claim.port)
                out.append(Element(family, maps[family][0], lookup, data, key))
            else:
                out.extend(_listed_elements(claim, data, maps[family][1], placed, node))
            used.add(family)
    for family, pod in pods:
        if family in used:
            out.extend(_masquerade_elements(family, pod, placed))
    out.extend(_held_elements(placed))
    return tuple(dict.fromkeys(out))


def attachment_profiles(placed: Placed) -> frozenset[Profile]:
    """Profiles whose maps hold the attachment's mappings."""
    attachment = placed.attachment
    families = {c.family for c in attachment.claims()}
    found = (profile_of(attachment.options, f) for f in families)
    return frozenset(p for p in found if p is not None)


def _maps(options: Options, family: Family) -> tuple[str, str]:
    """Where mappings with these options stand: wildcards, and single addresses."""
    profile = profile_of(options, family)
    return profile.maps if profile else (rules.PORTS, rules.HOSTIP_PORTS)


def _listed_elements(
    claim: HostPort, data: bytes, hostip_ports: str, placed: Placed, node: NodeView
) -> Iterator[Element]:
    """A claim address by address."""
    options, key, family = placed.attachment.options, placed.key, claim.family
    if claim.address is None:
        addresses = answered_addresses(family, options, node)
    else:
        addresses = (claim.address,) if is_answered(claim.address, options, node) else ()
    usual = _usually_answered(family, node)
    for address in addresses:
        lookup = nft.addr_port_key(address, claim.protocol, claim.port)
        yield Element(family, hostip_ports, lookup, data, key)
        if address not in usual and not address.is_loopback:
            # answered by this attachment's own options only: masquerade must know it too
            yield Element(family, rules.ANSWERING, nft.addr_key(address), None, key)


def _masquerade_elements(family: Family, pod: PodAddress, placed: Placed) -> Iterator[Element]:
    options, key = placed.attachment.options, placed.key
    if not options.snat:
        return
    address = nft.addr_key(pod.ip)
    if options.masq_all:
        yield Element(family, rules.MASQ_ALL, address, None, key)
        return
    yield Element(family, rules.SNAT, address, None, key)
    yield Element(family, rules.HAIRPINS, address + address, None, key)
    # only on a bridge do neighbours answer each other past the node
    if placed.link.is_bridge and pod.prefixlen < pod.ip.max_prefixlen:
        low, high = nft.link_net_key(placed.link.name, pod.network)
        yield Element(family, rules.NEIGHBOURS, low, None, key, high)


def _held_elements(placed: Placed) -> Iterator[Element]:
    for held in sorted((h for h in placed.held if h.protocol is Protocol.UDP), key=str):
        if held.address is None:
            lookup = nft.service_key(held.port)
            yield Element(held.family, rules.HELD_UDP, lookup, None, placed.key)
        else:
            lookup = nft.addr_service_key(held.address, held.port)
            yield Element(held.family, rules.HELD_UDP_ADDRESSES, lookup, None, placed.key)


@lru_cache(maxsize=4)
def _usually_answered(family: Family, node: NodeView) -> frozenset[object]:
    return frozenset(answered_addresses(family, Options(), node))


def node_elements(node: NodeView, comment: str) -> tuple[Element, ...]:
    """The node's own share: which addresses host ports answer on, which never."""
    out: list[Element] = []
    for family in Family:
        for address in answered_addresses(family, Options(), node):
            if not address.is_loopback or family is Family.V6:
                out.append(Element(family, rules.ANSWERING, nft.addr_key(address), None, comment))
        excluded = dict.fromkeys(node.on_links(family, DEFAULT_EXCLUDED_LINKS))
        out.extend(
            Element(family, rules.EXCLUDED, nft.addr_key(address), None, comment)
            for address in excluded
        )
    return tuple(out)
