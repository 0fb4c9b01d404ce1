"""Findings about rules, tools and kernel settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from cni_hostport.doctor.facts import Facts, Finding
from cni_hostport.doctor.plugins import ours
from cni_hostport.host.ruleset import Chain, Ruleset

OLDEST_NFT = (1, 0, 1)
COOKIE_KERNEL, OWNER_KERNEL = (5, 14), (6, 8)
_MARKS = ("KUBE-", "CNI-")


def findings(facts: Facts) -> Iterator[Finding]:
    """Everything about netfilter."""
    yield from _tools(facts.rules)
    yield from _kernel(facts)
    yield from _forward(facts)
    yield from _foreign(facts)


def _tools(rules: Ruleset) -> Iterator[Finding]:
    if rules.nft is None and rules.iptables is None:
        yield Finding(
            "no-rule-tool",
            "error",
            "neither nft nor iptables is installed: no host port can be mapped",
            "apt-get install nftables   (dnf install nftables)",
        )
    elif rules.nft is None:
        yield Finding(
            "no-nft",
            "warning",
            "nft is not installed: only the iptables backend is left, whose cost grows with "
            "the number of rules",
            "apt-get install nftables   (dnf install nftables)",
        )
    elif rules.nft < OLDEST_NFT:
        text = ".".join(map(str, rules.nft))
        yield Finding(
            "old-nft",
            "warning",
            f"nft {text} is older than 1.0.1, the oldest that is meant to work",
            'upgrade nftables, or "backend": "iptables" in the conflist',
        )
    if rules.nft_trial:
        yield Finding(
            "kernel-nftables",
            "error",
            f"the kernel refuses our nftables tables: {rules.nft_trial}",
            "modprobe nf_tables nft_chain_nat nft_fib_ipv4 nft_fib_ipv6   (or a kernel with them)",
        )
    yield from _flavour(rules)


def _flavour(rules: Ruleset) -> Iterator[Finding]:
    """The iptables that PATH finds is not the one that the node's rules were made with."""
    modern = any(c.name.startswith(_MARKS) for c in rules.chains if c.family in ("ip", "ip6"))
    legacy = any(c.name.startswith(_MARKS) for c in rules.legacy)
    if modern and legacy:
        yield Finding(
            "two-flavours",
            "warning",
            "iptables rules of Kubernetes or CNI are in both flavours, nf_tables and legacy: "
            "which of them sees a packet first depends on the kernel, not on you",
            "restart the node once every program uses one flavour "
            "(update-alternatives --config iptables)",
        )
    elif rules.iptables and (modern or legacy):
        wanted = "nf_tables" if modern else "legacy"
        if rules.iptables.flavour != wanted:
            name = "iptables-nft" if modern else "iptables-legacy"
            yield Finding(
                "wrong-flavour",
                "warning",
                f"the node's rules are in iptables' {wanted} flavour, but `iptables` is "
                f"{rules.iptables.flavour}",
                f"update-alternatives --set iptables /usr/sbin/{name}",
            )


def _kernel(facts: Facts) -> Iterator[Finding]:
    kernel = facts.kernel
    for family, value, key in (
        ("IPv4", kernel.forward4, "net.ipv4.ip_forward"),
        ("IPv6", kernel.forward6, "net.ipv6.conf.all.forwarding"),
    ):
        if value is False:
            only6 = family == "IPv6"
            yield Finding(
                f"forwarding-{family.lower()}",
                "info" if only6 else "error",
                f"the node does not forward {family}: {family} host ports answer nobody outside",
                f"sysctl -w {key}=1; echo {key}=1 >> /etc/sysctl.d/90-cni-hostport.conf",
            )
    if kernel.bridge4 is None:
        yield Finding(
            "br-netfilter",
            "info",
            "br_netfilter is not loaded: host ports work, but Kubernetes' Service addresses "
            "fail between pods on one bridge",
            "modprobe br_netfilter; echo br_netfilter > /etc/modules-load.d/br_netfilter.conf",
        )
    for line in kernel.localnet_off:
        yield Finding(
            "route-localnet",
            "warning",
            f"{line} sets route_localnet to 0: each time it is applied, 127.0.0.1 stops "
            "reaching host ports until the next repair",
            f"sed -i {line.number}d {line.path}",
        )
    if (0, 0) < kernel.release < COOKIE_KERNEL:
        yield Finding(
            "old-kernel",
            "info",
            f"Linux {kernel.release[0]}.{kernel.release[1]} numbers no net namespaces (5.14 does): "
            "an attachment whose pod vanished is not recognised as dead",
        )
    elif (0, 0) < kernel.release < OWNER_KERNEL:
        yield Finding(
            "hidden-holders",
            "info",
            f"Linux {kernel.release[0]}.{kernel.release[1]} hides sockets that are bound and do "
            "not listen (6.8 shows them): such an owner of a port cannot be named",
        )


def _forward(facts: Facts) -> Iterator[Finding]:
    chains = (*facts.rules.chains, *facts.rules.legacy)
    drops = [c for c in chains if c.hook == "forward" and c.policy == "DROP"]
    opened = any(plugin.options.get("openForward") is True for _, plugin in ours(facts))
    for chain in drops:
        if opened and chain.table == "filter" and chain.family in ("ip", "ip6"):
            continue
        where = f"{chain.family} {chain.table} {chain.name}"
        yield Finding(
            "forward-drop",
            "warning",
            f"the policy of {where} is DROP (Docker, ufw and firewalld set it): connections from "
            "outside to pods are dropped unless a rule there accepts them",
            '"openForward": true in the conflist'
            if chain.table == "filter"
            else f"nft add rule {where} ct status dnat accept",
        )


def _foreign(facts: Facts) -> Iterator[Finding]:
    chains = (*facts.rules.chains, *facts.rules.legacy)
    if any(map(_portmaps, chains)):
        yield Finding(
            "portmap-rules",
            "info",
            "rules of portmap are on this node: pods that it served keep them until they are "
            "deleted, and while they live their ports are not reserved",
            "cni-hostport install --replace-portmap, then make those pods anew",
        )
    if any(c.table == "crio-hostports" for c in chains):
        yield Finding(
            "crio-rules",
            "warning",
            "CRI-O's own host-port manager has rules on this node (table crio-hostports): "
            "both would map the same ports",
            "disable_hostport_mapping = true under [crio.runtime] in crio.conf; restart crio",
        )


def _portmaps(chain: Chain) -> bool:
    return chain.table == "cni_hostport" or chain.name.startswith(("CNI-HOSTPORT-", "CNI-DN-"))
