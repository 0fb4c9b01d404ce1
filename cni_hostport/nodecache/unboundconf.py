"""unbound's configuration file: what is collected for it, and its text.

Decides the options that never change (in the foreground, no recursion beyond
the forwards, a control socket) and the order of the file. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cni_hostport.nodecache.coreparse import Directive

DEFAULT_TTL = 3600
DEFAULT_NEGATIVE_TTL = 1800
_LOOPBACK6 = ".".join(["1", *"0" * 31]) + ".ip6.arpa."
# Zones that unbound answers from built-in data unless told otherwise (RFC 6761, 6303).
_BUILT_IN = (
    *("localhost.", "127.in-addr.arpa.", "home.arpa.", "onion.", "test.", "invalid."),
    _LOOPBACK6,
)
_ALWAYS = {
    "chroot": '""',
    "username": '""',
    "pidfile": '""',
    "use-syslog": "no",
    "do-daemonize": "no",
    "verbosity": "0",
    "so-reuseport": "yes",
    "ip-freebind": "yes",
    "outgoing-num-tcp": "256",
    "incoming-num-tcp": "256",
    "module-config": '"iterator"',
    "edns-buffer-size": "1232",
    "cache-min-ttl": "0",
    "infra-host-ttl": "30",
    "infra-keep-probing": "yes",
    "unblock-lan-zones": "yes",
    "insecure-lan-zones": "yes",
    "minimal-responses": "no",
    "hide-identity": "yes",
    "hide-version": "yes",
}


@dataclass(frozen=True)
class Host:
    """What this node adds: paths, own addresses, threads.

    ``read_servers`` gives the name servers of a resolv.conf-style file, and
    raises OSError where it cannot.
    """

    control_socket: str
    directory: str
    own_addresses: frozenset[str]
    port: int
    threads: int
    read_servers: Callable[[str], Sequence[str]]
    tls_bundle: str = "/etc/ssl/certs/ca-certificates.crt"


@dataclass
class Draft:
    """What is collected while the blocks are walked."""

    host: Host
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    listen: dict[tuple[str, int], None] = field(default_factory=dict)
    forwards: dict[str, list[str]] = field(default_factory=dict)
    ttls: list[int] = field(default_factory=list)
    negative: list[int] = field(default_factory=list)
    server: dict[str, str] = field(default_factory=dict)
    local: list[str] = field(default_factory=list)
    loopback: bool = False

    def note(self, directive: Directive, why: str) -> None:
        """Tell what cannot be honoured, by line and name."""
        words = " ".join((directive.name, *directive.args))
        self.notes.append(f"line {directive.line}: {words}: {why}")


def render(draft: Draft) -> str:
    """The configuration of everything collected."""
    host = draft.host
    options = {
        "directory": f'"{host.directory}"',
        **_ALWAYS,
        "num-threads": str(host.threads),
        "cache-max-ttl": str(min(draft.ttls, default=DEFAULT_TTL)),
        "cache-max-negative-ttl": str(min(draft.negative, default=DEFAULT_NEGATIVE_TTL)),
        "do-not-query-localhost": "no" if draft.loopback else "yes",
        **draft.server,
    }
    lines = ["# Written by cni-hostport node-cache; changes are lost.", "server:"]
    lines += [f"    {name}: {value}" for name, value in options.items()]
    lines += [f"    interface: {address}@{port}" for address, port in draft.listen]
    lines += ["    access-control: 0.0.0.0/0 allow", "    access-control: ::0/0 allow"]
    lines += [f'    local-zone: "{zone}" nodefault' for zone in _BUILT_IN]
    if "." not in draft.forwards:
        lines.append('    local-zone: "." refuse')
        lines += [f'    local-zone: "{zone}" transparent' for zone in draft.forwards]
    lines += [f"    {entry}" for entry in dict.fromkeys(draft.local)]
    lines += ["remote-control:", "    control-enable: yes", "    control-use-cert: no"]
    lines.append(f"    control-interface: {host.control_socket}")
    for zone, servers in draft.forwards.items():
        lines += ["forward-zone:", f'    name: "{zone}"', *(f"    {line}" for line in servers)]
    return "\n".join(lines) + "\n"


def resolv_servers(text: str) -> tuple[str, ...]:
    """Name servers of a resolv.conf's text."""
    found: list[str] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver" and not line.startswith(("#", ";")):
            found.append(words[1])
    return tuple(found)


def statistics(text: str) -> Mapping[str, float]:
    """The answer to ``stats_noreset``: numbers by name; lines of another form are left out."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        try:
            if equals:
                found[name] = float(value)
        except ValueError:
            continue
    return found
