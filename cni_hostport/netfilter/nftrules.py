"""The nftables tables of host ports as text for ``nft -f -``: pure.

Decides the shape of our two tables and why each rule stands where it does.
Holds no element (those go over netlink, ``elements.py``) and runs nothing.

The text only uses what nft 1.0.1 knows: no ``destroy``, braces closed on lines
of their own, sets declared before the chains that look them up.
"""

from __future__ import annotations

from cni_hostport.model import Family

TABLE = "hostport-manager"

# kube-proxy's and Docker's DNAT sit at -100 (dstnat): they must win whoever
# came first, so ours is later by number and not by time of installation.
DNAT_PRIORITY = -90

PORTS = "ports"
HOSTIP_PORTS = "hostip_ports"
EXCLUDED = "excluded"
ANSWERING = "answering"
HAIRPINS = "hairpins"
SNAT = "snat_pods"
MASQ_ALL = "masq_all_pods"
NEIGHBOURS = "neighbours"
HELD_UDP = "held_udp"
HELD_UDP_ADDRESSES = "held_udp_addresses"

SETS = (
    PORTS,
    HOSTIP_PORTS,
    EXCLUDED,
    ANSWERING,
    HAIRPINS,
    SNAT,
    MASQ_ALL,
    NEIGHBOURS,
    HELD_UDP,
    HELD_UDP_ADDRESSES,
)


def nft_family(family: Family) -> str:
    """Word nft uses for the family's tables."""
    return "ip" if family is Family.V4 else "ip6"


def _set_lines(family: Family) -> list[str]:
    addr = "ipv4_addr" if family is Family.V4 else "ipv6_addr"
    target = f"{addr} . inet_service"
    types = {
        PORTS: ("map", f"inet_proto . inet_service : {target}", ""),
        HOSTIP_PORTS: ("map", f"{addr} . inet_proto . inet_service : {target}", ""),
        EXCLUDED: ("set", addr, ""),
        ANSWERING: ("set", addr, ""),
        HAIRPINS: ("set", f"{addr} . {addr}", ""),
        SNAT: ("set", addr, ""),
        MASQ_ALL: ("set", addr, ""),
        # one element per network, never per pod: deleting from an interval
        # concatenation costs milliseconds at a thousand elements
        NEIGHBOURS: ("set", f"ifname . {addr}", "flags interval\n"),
        HELD_UDP: ("set", "inet_service", ""),
        HELD_UDP_ADDRESSES: ("set", f"{addr} . inet_service", ""),
    }
    return [
        f"  {kind} {name} {{\n    type {spec}\n    {flags}}}"
        for name, (kind, spec, flags) in types.items()
    ]


def _chains(family: Family) -> dict[str, tuple[str, list[str]]]:
    ip = nft_family(family)
    v4 = family is Family.V4
    unreachable = "icmp type port-unreachable" if v4 else "icmpv6 type port-unreachable"
    reject = f"meta l4proto udp ct state new {{}} reject with {unreachable}"
    # the kernel cannot route a packet from ::1 to a pod: leave it, it is refused at once
    # the same holds for link-local addresses: the kernel forwards nothing from or to them
    local = [] if v4 else ["ip6 saddr ::1 return", "ip6 daddr fe80::/10 return"]
    # answering holds single addresses; the one prefix is named here
    prefixes = ["ct status dnat ct original ip daddr 127.0.0.0/8 jump masquerading"] if v4 else []
    loopback = ["ip saddr 127.0.0.0/8 masquerade"] if v4 else []
    nat_in = f"type nat hook {{}} priority {DNAT_PRIORITY}; policy accept;"
    translate = [*local, "fib daddr type local jump translate"]
    chains = {
        "prerouting": (nat_in.format("prerouting"), translate),
        "output": (nat_in.format("output"), translate),
        "translate": (
            "",
            [
                f"dnat {ip} to {ip} daddr . meta l4proto . th dport map @{HOSTIP_PORTS}",
                f"{ip} daddr @{EXCLUDED} return",
                f"dnat {ip} to meta l4proto . th dport map @{PORTS}",
            ],
        ),
        "postrouting": (
            "type nat hook postrouting priority 100; policy accept;",
            [
                # ct status dnat alone is true for kube-proxy's translations as well
                f"ct status dnat ct original {ip} daddr @{ANSWERING} jump masquerading",
                *prefixes,
            ],
        ),
        "masquerading": (
            "",
            [
                f"{ip} daddr @{MASQ_ALL} masquerade",
                f"{ip} daddr != @{SNAT} return",
                *loopback,
                f"{ip} saddr . {ip} daddr @{HAIRPINS} masquerade",
                f"oifname . {ip} saddr @{NEIGHBOURS} masquerade",
            ],
        ),
        "input": (
            "type filter hook input priority 0; policy accept;",
            [
                reject.format(f"udp dport @{HELD_UDP}"),
                reject.format(f"{ip} daddr . udp dport @{HELD_UDP_ADDRESSES}"),
            ],
        ),
    }
    if v4:
        # must not be reachable from a link only because route_localnet is on
        guard = ['iif != "lo" ip daddr 127.0.0.0/8 drop']
        chains["guard"] = ("type filter hook prerouting priority -300; policy accept;", guard)
    return chains


def tables_text(families: tuple[Family, ...] = (Family.V4, Family.V6)) -> str:
    """Text that makes or restores tables, sets, chains and rules in one transaction.

    Applying it again is harmless: sets and their elements stay, chains are
    emptied and filled anew, and no packet ever sees the moment between.
    """
    out: list[str] = []
    for family in families:
        ip = nft_family(family)
        chains = _chains(family)
        out.append(f"table {ip} {TABLE} {{")
        out.extend(_set_lines(family))
        for name, (hook, _) in chains.items():
            out.append(f"  chain {name} {{\n    {hook}\n  }}")
        out.append("}")
        out.extend(f"flush chain {ip} {TABLE} {name}" for name in chains)
        for name, (_, rules) in chains.items():
            out.extend(f"add rule {ip} {TABLE} {name} {rule}" for rule in rules)
    return "\n".join(out) + "\n"


def fresh_tables_text() -> str:
    """Text that replaces both tables whole, for one that somebody damaged beyond adding.

    Elements are lost with it, so the caller loads them at once.
    """
    drop = "".join(
        f"add table {nft_family(f)} {TABLE}\ndelete table {nft_family(f)} {TABLE}\n" for f in Family
    )
    return drop + tables_text()


def probe_text() -> str:
    """Text that leaves nothing: the same tables under another name, made and removed at once.

    The kernel refuses it where it lacks a hook or an expression that we need.
    """
    probe = f"{TABLE}-probe"
    drop = "".join(f"delete table {nft_family(f)} {probe}\n" for f in Family)
    return tables_text().replace(TABLE, probe) + drop


def rule_count(family: Family) -> dict[str, int]:
    """How many rules each chain holds when it is whole."""
    return {name: len(rules) for name, (_, rules) in _chains(family).items()}
