"""The rules of the local DNS cache as an nftables table of their own.

Decides the table's text, replaced whole in one transaction, and whether a
listing still says the same. Never runs nft. In nftables an accept ends only
the chain it stands in: a drop in somebody else's table still drops, which the
manual says.
"""

from __future__ import annotations

from cni_hostport.model import Family
from cni_hostport.nodecache.rules import ALLOW, SKIP, RuleSet

FAMILY = "inet"
TABLE = "nodelocaldns-cache"


def setup(wanted: RuleSet) -> str:
    """Nft text that replaces the table by the wanted rules, whatever it held."""
    return f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n{body(wanted)}"


def teardown() -> str:
    """Nft text that removes the table, and succeeds where there is none."""
    return f"table {FAMILY} {TABLE}\ndelete table {FAMILY} {TABLE}\n"


def body(wanted: RuleSet) -> str:
    """The table in the words of ``nft list table``."""
    chains = (
        ("prerouting", "prerouting", "raw", _prerouting(wanted)),
        ("output", "output", "raw", _output(wanted)),
        ("accept-input", "input", "filter", _accept(wanted, "daddr")),
        ("accept-output", "output", "filter", _accept(wanted, "saddr")),
    )
    lines = [f"table {FAMILY} {TABLE} {{"]
    for name, hook, priority, rules in chains:
        lines.append(f"\tchain {name} {{")
        lines.append(f"\t\ttype filter hook {hook} priority {priority}; policy accept;")
        lines += [f"\t\t{rule}" for rule in rules]
        lines.append("\t}")
    lines.append("}")
    return "\n".join(lines) + "\n"


def _match(family: Family, address: str, side: str, protocol: str, port: int) -> str:
    word = "ip" if family is Family.V4 else "ip6"
    return f"{word} {side} {address} {protocol} {'d' if side == 'daddr' else 's'}port {port}"


def _prerouting(wanted: RuleSet) -> list[str]:
    # "transparent <= 1" holds for every socket found, and for none where nobody
    # listens; unlike "wildcard" it also sees a handshake that is under way.
    socket = " socket transparent <= 1" if wanted.socket_match else ""
    return [
        f"{_match(ip.family, str(ip.address), 'daddr', protocol, wanted.port)}{socket}"
        f' notrack comment "{SKIP}"'
        for ip in reversed(wanted.local_ips)
        for protocol in ("udp", "tcp")
    ]


def _output(wanted: RuleSet) -> list[str]:
    found = []
    for ip in reversed(wanted.local_ips):
        pairs = [("tcp", wanted.health_port), ("udp", wanted.port), ("tcp", wanted.port)]
        found += [
            f'{_match(ip.family, str(ip.address), side, protocol, port)} notrack comment "{SKIP}"'
            for protocol, port in pairs
            for side in ("saddr", "daddr")
        ]
    return found


def _accept(wanted: RuleSet, pods_side: str) -> list[str]:
    both = ("saddr", "daddr")
    sides = both if wanted.accept_health else (pods_side,)
    found = []
    for ip in reversed(wanted.local_ips):
        if wanted.accept_health:
            found += [
                f"{_match(ip.family, str(ip.address), side, 'tcp', wanted.health_port)}"
                f' accept comment "{ALLOW}"'
                for side in both
            ]
        found += [
            f"{_match(ip.family, str(ip.address), side, protocol, wanted.port)}"
            f' accept comment "{ALLOW}"'
            for protocol in ("udp", "tcp")
            for side in sides
        ]
    return found


def normal(listing: str) -> str:
    """A listing without counters of blanks, to be compared with another one's."""
    return "\n".join(" ".join(line.split()) for line in listing.splitlines() if line.strip())
