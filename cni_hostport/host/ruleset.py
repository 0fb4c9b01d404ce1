"""What netfilter holds on this node, and which tools manage it: for the doctor.

Decides nothing and changes nothing: legacy iptables is asked only where its
tables exist already, since the question alone would make them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cni_hostport.host import commands, nftcmd
from cni_hostport.model import Family
from cni_hostport.netfilter import nftrules

_FLAVOUR = re.compile(r"v(\d+(?:\.\d+)*) \((\w+)\)")


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain; ``hook`` and ``policy`` empty for one that no hook calls."""

    family: str
    table: str
    name: str
    hook: str = ""
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """An iptables command: version, and ``nf_tables`` or ``legacy``."""

    version: str
    flavour: str


@dataclass(frozen=True, slots=True)
class Ruleset:
    """Everything at once. ``nft_trial``: nft's words when our tables did not load, else empty."""

    nft: tuple[int, int, int] | None = None
    nft_trial: str = ""
    iptables: Tool | None = None
    ip6tables: Tool | None = None
    chains: tuple[Chain, ...] = ()
    legacy: tuple[Chain, ...] = field(default=())


def look() -> Ruleset:
    """Ask all tools. Never raises."""
    nft = nftcmd.version()
    return Ruleset(
        nft,
        trial() if nft else "",
        tool("iptables"),
        tool("ip6tables"),
        tuple(nft_chains()) if nft else (),
        tuple(c for f in Family for c in legacy_chains(f)),
    )


def trial() -> str:
    """Load our tables in a net namespace that nobody sees; nft's words if the kernel refuses."""
    if commands.find("unshare") is None:
        return ""
    try:
        argv = ["unshare", "--net", "--", "nft", "-f", "-"]
        done = commands.run(argv, nftrules.tables_text(), 20.0)
    except commands.CommandError as error:
        return str(error)
    return done.words if done.rc else ""


def tool(name: str) -> Tool | None:
    """Version and flavour of an iptables command, None where there is none."""
    try:
        done = commands.run([name, "--version"], None, 5.0)
    except commands.CommandError:
        return None
    found = _FLAVOUR.search(done.stdout)
    return Tool(found[1], found[2]) if found else Tool(done.stdout.strip() or "?", "legacy")


def nft_chains() -> list[Chain]:
    """Chains of the nf_tables ruleset, iptables-nft's among them."""
    try:
        done = commands.run(["nft", "-j", "list", "chains"], None, 20.0)
        entries = json.loads(done.stdout)["nftables"]
    except (commands.CommandError, ValueError, KeyError, TypeError):
        return []
    return [_chain(entry["chain"]) for entry in entries if "chain" in entry]


def _chain(entry: dict[str, Any]) -> Chain:
    return Chain(
        str(entry.get("family", "")),
        str(entry.get("table", "")),
        str(entry.get("name", "")),
        str(entry.get("hook", "")),
        str(entry.get("policy", "")).upper(),
    )


def legacy_chains(family: Family) -> list[Chain]:
    """Chains of the legacy tables that exist in this net namespace."""
    word = "ip" if family is Family.V4 else "ip6"
    try:
        tables = Path(f"/proc/net/{word}_tables_names").read_text().split()
    except OSError:
        return []
    found = []
    for table in sorted({"nat", "filter"} & set(tables)):
        try:
            argv = [f"{word}tables-legacy-save", "-t", table]
            text = commands.run(argv, None, 20.0).stdout
        except commands.CommandError:
            continue
        for line in text.splitlines():
            if line.startswith(":"):
                name, policy = line[1:].split()[:2]
                hook = name.lower() if policy != "-" else ""
                found.append(Chain(word, table, name, hook, policy.strip("-")))
    return found
