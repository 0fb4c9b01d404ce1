"""Profiles: mappings of attachments with conditions, apart from all others. Pure text.

Conditions narrow a rule, and a map has one rule for all it holds: attachments
with the same conditions share maps of their own, looked up under those
conditions alone. Decides names and rules of a profile; its elements are the
plan's, and whether nft likes the words is for nft to say.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from cni_hostport.model import Family, Options
from cni_hostport.netfilter import nftrules
from cni_hostport.netfilter.nftrules import EXCLUDED, HOSTIP_PORTS, PORTS, TABLE, nft_family

_CHAIN = re.compile(r"profile_([0-9a-f]{12})")
_RULES = 3


@dataclass(frozen=True, slots=True, order=True)
class Profile:
    """Conditions of one family, one word each."""

    family: Family
    conditions: tuple[str, ...]

    @property
    def tag(self) -> str:
        """12 hexadecimal characters that stand for the conditions."""
        return hashlib.sha256("\0".join(self.conditions).encode()).hexdigest()[:12]

    @property
    def chain(self) -> str:
        """The chain that looks its maps up."""
        return f"profile_{self.tag}"

    @property
    def ports(self) -> str:
        """Map of its wildcard mappings."""
        return f"{PORTS}_{self.tag}"

    @property
    def hostip_ports(self) -> str:
        """Map of its mappings with an address."""
        return f"{HOSTIP_PORTS}_{self.tag}"

    @property
    def maps(self) -> tuple[str, str]:
        """Both maps."""
        return (self.ports, self.hostip_ports)


def profile_of(options: Options, family: Family) -> Profile | None:
    """The profile these options ask for, None without conditions."""
    words = options.conditions_v4 if family is Family.V4 else options.conditions_v6
    return Profile(family, words) if words else None


def tag_of_chain(name: str) -> str | None:
    """The tag in the name of a profile's chain, None for any other chain."""
    found = _CHAIN.fullmatch(name)
    return found[1] if found else None


def profiles_text(profiles: Iterable[Profile]) -> str:
    """Text that adds or renews profiles; to stand after ``nftrules.tables_text``."""
    return "".join(_profile_text(p) for p in sorted(profiles))


def _profile_text(profile: Profile) -> str:
    ip, v4 = nft_family(profile.family), profile.family is Family.V4
    addr = "ipv4_addr" if v4 else "ipv6_addr"
    types = {
        profile.ports: "inet_proto . inet_service",
        profile.hostip_ports: f"{addr} . inet_proto . inet_service",
    }
    lines = [f"table {ip} {TABLE} {{"]
    for name, key in types.items():
        lines.append(f"  map {name} {{\n    type {key} : {addr} . inet_service\n  }}")
    lines.append(f"  chain {profile.chain} {{\n  }}\n}}")
    lines.append(f"flush chain {ip} {TABLE} {profile.chain}")
    rules = (
        f"dnat {ip} to {ip} daddr . meta l4proto . th dport map @{profile.hostip_ports}",
        f"{ip} daddr @{EXCLUDED} return",
        f"dnat {ip} to meta l4proto . th dport map @{profile.ports}",
    )
    lines += [f"add rule {ip} {TABLE} {profile.chain} {rule}" for rule in rules]
    words = " ".join(profile.conditions)
    lines.append(f"insert rule {ip} {TABLE} translate {words} jump {profile.chain}")
    return "\n".join(lines) + "\n"


def removal_text(family: Family, tags: Iterable[str]) -> str:
    """Text that removes profiles by their tags; no rule may lead to them any more."""
    out = ""
    for tag in sorted(tags):
        where = f"{nft_family(family)} {TABLE}"
        out += f"flush chain {where} profile_{tag}\ndelete chain {where} profile_{tag}\n"
        out += f"delete map {where} {PORTS}_{tag}\ndelete map {where} {HOSTIP_PORTS}_{tag}\n"
    return out


def rule_counts(family: Family, profiles: Iterable[Profile]) -> dict[str, int]:
    """How many rules each chain holds when it is whole, the profiles' included."""
    counts = nftrules.rule_count(family)
    for profile in profiles:
        if profile.family is family:
            counts["translate"] += 1
            counts[profile.chain] = _RULES
    return counts


def sets_of(family: Family, profiles: Iterable[Profile]) -> tuple[str, ...]:
    """Every set and map of a family's table, the profiles' included."""
    return (*nftrules.SETS, *(m for p in profiles if p.family is family for m in p.maps))
