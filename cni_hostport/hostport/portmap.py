"""What the CNI plugin portmap left for one container: found by its own naming. Pure.

portmap's chain of a container is ``CNI-DN-`` and 21 hexadecimal digits of
sha512(network name + container ID); in its nft tables every rule carries the
container ID as comment. Never proposes to touch another container's rules, nor
the chains that its containers share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from cni_hostport.hostport.iptdiff import Difference, remove_chain, table_of
from cni_hostport.hostport.iptstep import ForeignJump
from cni_hostport.model import IPAddress
from cni_hostport.netfilter import restore
from cni_hostport.netfilter.restore import Rule, Table

TABLE = "cni_hostport"
TOP_CHAIN = "CNI-HOSTPORT-DNAT"
_PREFIXES = ("CNI-DN-", "CNI-SN-")
_DIGITS = 21


def container_chains(network: str, container_id: str) -> tuple[str, ...]:
    """Names of the chains portmap makes for a container (the second: very old versions)."""
    digest = hashlib.sha512((network + container_id).encode("utf-8", "surrogateescape"))
    return tuple(prefix + digest.hexdigest()[:_DIGITS] for prefix in _PREFIXES)


def is_portmaps(chains: Iterable[str]) -> bool:
    """Whether portmap has mappings among these chains."""
    return any(name.startswith(_PREFIXES) for name in chains)


def mappings(tables: Mapping[str, Table]) -> list[ForeignJump]:
    """What portmap maps, each with the jump that leads there; in the order in which they apply."""
    nat, out = table_of(tables, "nat"), []
    for jump in nat.rules(TOP_CHAIN):
        chain, protocol = jump.target or "", jump.value("-p") or ""
        for rule in nat.rules(chain) if chain.startswith(_PREFIXES) else ():
            port, target = rule.value("--dport") or "", rule.value("--to-destination")
            if target and port.isdecimal() and rule.value("-p") == protocol:
                words = jump.comment or ""
                found = ForeignJump(protocol, int(port), chain, words, jump.args, target, TOP_CHAIN)
                out.append(found)
    return out


def removal(tables: Mapping[str, Table], network: str, container_id: str) -> Difference:
    """Changes that take the container's chains away, and every jump to them."""
    out, nat = Difference(), table_of(tables, "nat")
    mine = [c for c in container_chains(network, container_id) if c in nat.chains]
    for chain in nat.chains.values():
        for rule in chain.rules if mine else ():
            if rule.target in mine:
                out.drop.append(("nat", restore.Delete(chain.name, rule.args)))
    for name in mine:
        remove_chain("nat", name, out)
    return out


def udp_targets(
    tables: Mapping[str, Table], network: str, container_id: str
) -> tuple[IPAddress, ...]:
    """Pod addresses to which the container's chains lead UDP."""
    found: dict[IPAddress, None] = {}
    nat = table_of(tables, "nat")
    for name in container_chains(network, container_id):
        found.update(dict.fromkeys(_addresses(nat.rules(name))))
    return tuple(found)


def _addresses(rules: Iterable[Rule]) -> Iterable[IPAddress]:
    for rule in rules:
        if rule.value("-p") != "udp":
            continue
        text = (rule.value("--to-destination") or "").rpartition(":")[0].strip("[]")
        if text:
            yield ip_address(text)


@dataclass(frozen=True, slots=True)
class NftMapping:
    """One mapping in portmap's nft table: the rule's place, and where it leads."""

    protocol: str
    port: int
    chain: str
    handle: int
    comment: str
    target: str


def nft_mappings(listing: str) -> list[NftMapping]:
    """Mappings in nft's JSON of portmap's table; anything else in it is passed over."""
    try:
        entries = json.loads(listing)["nftables"]
    except (ValueError, KeyError, TypeError):
        return []
    rules = (entry.get("rule") for entry in entries)
    return [found for rule in rules if rule and (found := _nft_mapping(rule)) is not None]


def _nft_mapping(rule: Mapping[str, Any]) -> NftMapping | None:
    protocol, port, target = "", 0, ""
    for expression in rule.get("expr", ()):
        if "dnat" in expression:
            target = _endpoint(expression["dnat"])
        elif "match" in expression:
            left, right = expression["match"]["left"], expression["match"]["right"]
            payload = left.get("payload", {}) if isinstance(left, dict) else {}
            if payload.get("field") == "dport" and isinstance(right, int):
                protocol, port = payload["protocol"], right
    if not port or not target:
        return None
    comment = rule.get("comment", "")
    return NftMapping(protocol, port, rule["chain"], rule["handle"], comment, target)


def _endpoint(dnat: Mapping[str, Any]) -> str:
    address, port = str(dnat.get("addr", "")), dnat.get("port", "")
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def nft_removal(rules: Mapping[str, Iterable[tuple[str, int, str]]], container_id: str) -> str:
    """Text for nft that deletes the container's rules.

    ``rules``: by family word (``ip``, ``ip6``), each rule's chain, handle and comment.
    """
    return "".join(
        f"delete rule {family} {TABLE} {chain} handle {handle}\n"
        for family, found in rules.items()
        for chain, handle, comment in found
        if comment == container_id
    )
