"""Who is measured, and how a node gets ten thousand others without ten thousand calls.

portmap's others are written in one go, rule for rule what it writes itself: its own ADD of
the first and the last of them then has nothing to add, or the run ends. Ours are real ADDs.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from bench import calls

ROOT = Path(__file__).resolve().parents[1]
BUNDLE = ROOT / "dist/cni-hostport"
LAUNCHER = ROOT / "build/launcher"
_CACHES = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
CACHE = Path(os.environ.get("CNI_HOSTPORT_CACHE") or f"{_CACHES}/cni-hostport-lab")
DEBIAN_PORTMAP = Path("/usr/lib/cni/portmap")
NEWER_PORTMAP = CACHE / "new/containernetworking-plugins/usr/lib/cni/portmap"


@dataclass(frozen=True)
class Plugin:
    """One way to get a host port. ``node``: plugins with the same word share a node."""

    name: str
    title: str
    node: str
    type: str
    backend: str | None = None
    flavour: str = ""
    ours: bool = False
    most: int = 10000
    """Others that a node can be given in the time of a run: ours come by real calls."""

    def binary(self):
        """The executable as the node sees it."""
        if "launcher" in self.name:
            return "/run/launcher/cni-hostport"
        if self.ours:
            return str(BUNDLE / "cni-hostport")
        return str(NEWER_PORTMAP if self.name == "portmap-nft" else DEBIAN_PORTMAP)

    def call(self, verb, number, ports, **more):
        """(argv, environment, stdin) of one call."""
        env, stdin = calls.call(verb, number, ports, plugin=self.type, backend=self.backend, **more)
        if self.flavour:
            env["PATH"] = f"/run/{self.flavour}:{env['PATH']}"
        return [self.binary()], env, stdin


OURS = Plugin("ours", "cni-hostport", "ours", "cni-hostport", "nftables", ours=True)
FRONT = Plugin("launcher", "cni-hostport, launcher", "ours", "cni-hostport", "nftables", ours=True)
NFT = Plugin("portmap-nft", "portmap 1.9, nftables", "portmap-nft", "portmap", "nftables")
IPTABLES = Plugin(
    "portmap-iptables", "portmap 1.1, iptables-nft", "portmap-iptables", "portmap", None, "nft"
)
LEGACY = Plugin(
    "portmap-legacy", "portmap 1.1, iptables-legacy", "portmap-legacy", "portmap", None, "legacy"
)
OURS_IPTABLES = Plugin(
    "ours-iptables",
    "cni-hostport, iptables-nft",
    "ours-iptables",
    "cni-hostport",
    "iptables",
    "nft",
    True,
    100,
)
ALL = (OURS, FRONT, NFT, IPTABLES, LEGACY, OURS_IPTABLES)


def missing(plugin):
    """Why a plugin cannot be measured here; empty where it can."""
    if plugin is NFT and not NEWER_PORTMAP.exists():
        why = CACHE / "new/missing"
        reason = why.read_text().strip() if why.exists() else "tests/clients/setup.sh fetches it"
        return f"no portmap with an nftables backend: {reason}"
    if plugin is FRONT and not LAUNCHER.exists():
        return "build/launcher is not there: ./build.sh bench compiles it"
    if plugin in (IPTABLES, LEGACY) and not DEBIAN_PORTMAP.exists():
        return "Debian's containernetworking-plugins is not installed"
    return ""


def nft_text(numbers, first_port, targets):
    """What portmap's nftables backend leaves of that many pods, one TCP port each.

    The chains are there: a real call made them.
    """
    lines = []
    for number in numbers:
        address, port = target(number, targets), first_port + number
        comment = f'comment "{calls.container_id(number)}"'
        rule = f"add rule ip cni_hostport hostports tcp dport {port}"
        lines.append(f"{rule} dnat to {address}:80 {comment}")
        for source in (address, "127.0.0.1"):
            rule = f"add rule ip cni_hostport masquerading ip saddr {source} ip daddr {address}"
            lines.append(f"{rule} masquerade {comment}")
    return "\n".join(lines) + "\n"


def iptables_text(numbers, first_port, targets):
    """The same of portmap's iptables backend, for ``iptables-restore --noflush``."""
    chains, rules, jumps = [], [], []
    for number in numbers:
        identity = calls.container_id(number)
        digest = hashlib.sha512((calls.NETWORK + identity).encode()).hexdigest()
        chain, port = f"CNI-DN-{digest[:21]}", first_port + number
        chains.append(f":{chain} - [0:0]")
        match = f"-p tcp -m tcp --dport {port}"
        rules += [
            f"-A {chain} -s 10.1.0.0/16 {match} -j CNI-HOSTPORT-SETMARK",
            f"-A {chain} -s 127.0.0.1/32 {match} -j CNI-HOSTPORT-SETMARK",
            f"-A {chain} {match} -j DNAT --to-destination {target(number, targets)}:80",
        ]
        words = f'"dnat name: \\"{calls.NETWORK}\\" id: \\"{identity}\\""'
        jumps.append(
            f"-A CNI-HOSTPORT-DNAT -p tcp -m comment --comment {words} "
            f"-m multiport --dports {port} -j {chain}"
        )
    return "\n".join(["*nat", *chains, *rules, *jumps, "COMMIT\n"])


def target(number, targets):
    """Pod address of one of the others."""
    return targets.get(str(number)) or calls.other_address(number)[0]
