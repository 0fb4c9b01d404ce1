"""Rules that one attachment, and the node itself, want of iptables: pure.

Decides what stands in which chain and why; the same plan feeds ADD, DEL, CHECK
and repair. Holds no state and knows no tool.

A jump for each mapping stands in ``KUBE-HOSTPORTS``; what happens to the packet
is decided in the mapping's own chain. Everything in a shared chain carries its
owner's key as comment, so that no rule has two owners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.answering import answered_addresses, is_answered, is_listed
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import (
    Family,
    IPAddress,
    Options,
    PodAddress,
    PortMapping,
    Protocol,
)

Args = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Jump:
    """One rule of ``KUBE-HOSTPORTS``; ``conditions`` of its words are the user's own."""

    args: Args
    target: str
    protocol: str
    port: int
    conditions: Args = ()


@dataclass(frozen=True, slots=True)
class Member:
    """One rule of a chain that several owners share; order has no meaning there."""

    table: str
    chain: str
    args: Args


@dataclass(frozen=True, slots=True)
class Rules:
    """What one owner wants in one family.

    ``jumps`` from the top down; ``chains`` are the nat chains it alone owns,
    with all their rules in order.
    """

    jumps: tuple[Jump, ...] = ()
    chains: tuple[tuple[str, tuple[Args, ...]], ...] = ()
    members: tuple[Member, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.jumps or self.chains or self.members)


NOTHING = Rules()


def comment_words(text: str) -> Args:
    """The words of a comment."""
    return ("-m", "comment", "--comment", text)


# what an attachment wants


def attachment_rules(placed: Placed, node: NodeView) -> dict[Family, Rules]:
    """Everything the attachment owns, by family; a family without mappings is left out."""
    out = {}
    for family in placed.attachment.families():
        rules = _family_rules(family, placed, node)
        if rules:
            out[family] = rules
    return out


def _family_rules(family: Family, placed: Placed, node: NodeView) -> Rules:
    attachment = placed.attachment
    pod = attachment.address(family)
    jumps: list[tuple[bool, Jump]] = []
    chains: dict[str, tuple[Args, ...]] = {}
    members: dict[Member, None] = {}
    for mapping in attachment.mappings:
        if pod is None or not attachment.maps(mapping, family):
            continue
        where = destinations(family, mapping, attachment.options, node)
        members.update(dict.fromkeys(unusual(family, where, placed, node)))
        chain = names.mapping_chain(attachment, mapping)
        if where and chain not in chains:
            chains[chain] = tuple(_chain_rules(family, pod, mapping, where, placed))
            made = _jumps(family, chain, mapping, placed)
            jumps.extend((mapping.is_wildcard, jump) for jump in made)
    if pod is not None and chains:
        members.update(dict.fromkeys(_masquerade(family, pod, placed)))
    members.update(dict.fromkeys(_held(family, placed)))
    jumps.sort(key=lambda j: j[0])  # one address before all of them
    return Rules(tuple(j for _, j in jumps), tuple(chains.items()), tuple(members))


def destinations(
    family: Family, mapping: PortMapping, options: Options, node: NodeView
) -> tuple[IPAddress | None, ...]:
    """Addresses the mapping answers on; None: every one that is not excluded."""
    if mapping.specific is not None:
        return (mapping.specific,) if is_answered(mapping.specific, options, node) else ()
    if not is_listed(options, mapping.host_port, node):
        return (None,)
    return answered_addresses(family, options, node)


def _jumps(family: Family, chain: str, mapping: PortMapping, placed: Placed) -> Iterator[Jump]:
    options, protocol = placed.attachment.options, str(mapping.protocol)
    conditions = options.conditions_v4 if family is Family.V4 else options.conditions_v6
    comment = comment_words(names.mapping_comment(placed.attachment, mapping))
    match = ("-m", protocol, "-p", protocol, "--dport", str(mapping.host_port))
    for words in single_addresses(conditions):
        args = (*comment, *match, *words, "-j", chain)
        yield Jump(args, chain, protocol, mapping.host_port, words)


_SOURCE, _DESTINATION = ("-s", "--source", "--src"), ("-d", "--destination", "--dst")


def single_addresses(conditions: Args) -> list[Args]:
    """Conditions with a list of addresses as the rules that iptables makes of them: one each.

    An inverted list, or an option given twice, is left for the tool to refuse.
    """
    found = [conditions]
    for options in (_SOURCE, _DESTINATION):
        at = next((n for n, word in enumerate(conditions[:-1], 1) if word in options), 0)
        if at and conditions[at - 2 : at - 1] != ("!",):
            addresses = dict.fromkeys(conditions[at].split(","))
            found = [(*w[:at], a, *w[at + 1 :]) for w in found for a in addresses]
    return found


def _chain_rules(
    family: Family,
    pod: PodAddress,
    mapping: PortMapping,
    where: Iterable[IPAddress | None],
    placed: Placed,
) -> Iterator[Args]:
    """A mapping's own chain; the first rule matches all, does nothing, and names the owner."""
    comment = comment_words(names.mapping_comment(placed.attachment, mapping))
    protocol, port = str(mapping.protocol), mapping.container_port
    target = f"[{pod.ip}]:{port}" if family is Family.V6 else f"{pod.ip}:{port}"
    yield comment_words(names.owner_comment(placed.key))
    if family is Family.V6:
        # the kernel cannot route a packet from ::1 to a pod: left alone, it is refused at once
        yield (*comment, "-s", "::1/128", "-j", "RETURN")
        # nor from or to a link-local address
        yield (*comment, "-d", "fe80::/10", "-j", "RETURN")
    for address in where:
        there = ("-d", str(address)) if address is not None else ()
        if address is None:
            yield (*comment, "-j", names.EXCLUDED)
        for source in _external_sources(family, pod, placed):
            chain = placed.attachment.options.external_set_mark_chain
            yield (*comment, *source, *there, "-j", str(chain))
        match = ("-m", protocol, "-p", protocol, *there)
        yield (*comment, *match, "-j", "DNAT", "--to-destination", target)


def _external_sources(family: Family, pod: PodAddress, placed: Placed) -> list[Args]:
    """Sources that need masquerade, where a foreign chain is to see to it."""
    options = placed.attachment.options
    if options.external_set_mark_chain is None or not options.snat:
        return []
    if options.masq_all:
        return [()]
    loopback: list[Args] = [("-s", "127.0.0.0/8")] if family is Family.V4 else []
    near = pod.network if _has_neighbours(pod, placed) else pod.ip
    return [*loopback, ("-s", str(near))]


def _has_neighbours(pod: PodAddress, placed: Placed) -> bool:
    # only on a bridge do neighbours answer each other past the node
    return placed.link.is_bridge and pod.network.prefixlen < pod.max_prefixlen


def _masquerade(family: Family, pod: PodAddress, placed: Placed) -> Iterator[Member]:
    options, key = placed.attachment.options, comment_words(names.owner_comment(placed.key))
    if not options.snat or options.external_set_mark_chain is not None:
        return
    end = ("-d", str(pod.ip), "-j", "MASQUERADE")
    if options.masq_all:
        yield Member("nat", names.SNAT, (*key, *end))
        return
    if family is Family.V4:
        yield Member("nat", names.SNAT, (*key, "-s", "127.0.0.0/8", *end))
    yield Member("nat", names.SNAT, (*key, "-s", str(pod.ip), *end))
    if _has_neighbours(pod, placed):
        near = ("-s", str(pod.network), "-o", placed.link.name)
        yield Member("nat", names.SNAT, (*key, *near, *end))


def _held(family: Family, placed: Placed) -> Iterator[Member]:
    """A datagram that reaches a holder untranslated is refused: nobody would ever read it."""
    unreachable = "icmp-port-unreachable" if family is Family.V4 else "icmp6-port-unreachable"
    key = comment_words(names.owner_comment(placed.key))
    for held in sorted(placed.held, key=str):
        if held.family is family and held.protocol is Protocol.UDP:
            there = ("-d", str(held.address)) if held.address is not None else ()
            match = ("-p", "udp", *there, "--dport", str(held.port))
            end = ("-j", "REJECT", "--reject-with", unreachable)
            yield Member("filter", names.HELD, (*key, *match, *end))


def unusual(
    family: Family, where: Iterable[IPAddress | None], placed: Placed, node: NodeView
) -> Iterator[Member]:
    """Addresses answered by this attachment's own options only: masquerade must know them."""
    usual = frozenset(answered_addresses(family, Options(), node))
    key = comment_words(names.owner_comment(placed.key))
    for address in where:
        if address is not None and address not in usual and not address.is_loopback:
            yield Member("nat", names.MASQUERADE, (*key, *original_to(str(address), names.SNAT)))


def original_to(address: str, target: str) -> Args:
    """A jump for connections whose first destination was the address."""
    return ("-m", "conntrack", "--ctorigdst", address, "-j", target)
