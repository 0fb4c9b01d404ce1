"""unbound's configuration from a Corefile.

Decides which of a Corefile's directives unbound can honour and writes its
configuration; everything else becomes a note with name and line, never
silence. Reads nothing: the content of resolv.conf-style files is passed in.
unbound has one cache policy for all zones, so the shortest limits win.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_network

from cni_hostport.nodecache import goflags
from cni_hostport.nodecache.coreparse import Block, Directive
from cni_hostport.nodecache.kubedns import split_server
from cni_hostport.nodecache.unboundconf import (
    DEFAULT_NEGATIVE_TTL,
    DEFAULT_TTL,
    Draft,
    Host,
    render,
)

# Directives whose work somebody else does: the agent, the supervisor, or unbound by itself.
_DONE_ELSEWHERE = frozenset(
    {"errors", "health", "prometheus", "reload", "loop", "loadbalance", "ready"}
)
_FORWARD_TUNING = frozenset(
    {"policy", "max_fails", "expire", "health_check", "max_concurrent", "next", "prefer_udp"}
    | {"max_connect_attempts", "failfast_all_unhealthy_upstreams", "max_idle_conns", "max_age"}
)
SUPPORTED = tuple(
    sorted(
        {*_DONE_ELSEWHERE, "bind", "bufsize", "cache", "debug", "dns64", "forward", "hosts", "log"}
    )
)


@dataclass(frozen=True)
class Endpoints:
    """Addresses that the agent serves in the engine's place, as the Corefile has them."""

    health: tuple[str, ...] = ()
    prometheus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Translation:
    """unbound's configuration, what it cannot honour, and what the agent serves."""

    text: str
    notes: tuple[str, ...]
    files: tuple[str, ...]


def endpoints(blocks: Iterable[Block]) -> Endpoints:
    """What ``health`` and ``prometheus`` lines ask to be served, without repetition."""
    health: dict[str, None] = {}
    metrics: dict[str, None] = {}
    for block in blocks:
        for directive in block.directives:
            if directive.name == "health":
                for arg in directive.args or (":8080",):
                    health[arg] = None
            elif directive.name == "prometheus":
                metrics[(directive.args or ("localhost:9153",))[0]] = None
    return Endpoints(tuple(health), tuple(metrics))


def forward_files(blocks: Iterable[Block]) -> tuple[str, ...]:
    """Files that a ``forward`` line names instead of servers."""
    found = (
        arg
        for block in blocks
        for directive in block.all("forward")
        for arg in directive.args[1:]
        if arg.startswith("/")
    )
    return tuple(dict.fromkeys(found))


def translate(blocks: Sequence[Block], host: Host) -> Translation:
    """Unbound's configuration for a Corefile's blocks. Never fails: what it cannot do it notes."""
    draft = Draft(host)
    binds = {tuple(d.args) for b in blocks for d in b.all("bind")}
    if len(binds) > 1:
        draft.notes.append(
            "the blocks bind different addresses: unbound answers all zones on all of them"
        )
    for block in blocks:
        zones = _zones(block, draft)
        for directive in block.directives:
            _directive(directive, zones, draft)
        if not block.all("forward") and not block.all("hosts"):
            draft.notes.append(f"line {block.line}: {' '.join(block.keys)} forwards nowhere")
    return Translation(render(draft), tuple(dict.fromkeys(draft.notes)), tuple(draft.files))


def _zones(block: Block, draft: Draft) -> tuple[str, ...]:
    ports: dict[int, None] = {}
    zones: list[str] = []
    for key in block.keys:
        bare = key.removeprefix("dns://")
        if "://" in bare or bare.startswith("("):
            draft.notes.append(f"line {block.line}: {key}: left out, unbound serves plain DNS here")
            continue
        zone, port = _zone_and_port(bare, draft.host.port)
        ports[port] = None
        zones.extend(_reverse(zone))
    for bind in block.all("bind"):
        for address in bind.args:
            for port in ports:
                draft.listen[(address, port)] = None
        for inner in bind.body:
            draft.note(inner, "unbound binds exactly the addresses named")
    if not block.all("bind"):
        for port in ports:
            draft.listen[("0.0.0.0", port)] = None
            draft.listen[("::0", port)] = None
    return tuple(zones)


def _zone_and_port(key: str, default: int) -> tuple[str, int]:
    zone, colon, port = key.rpartition(":")
    if colon and port.isdigit():
        return zone or ".", int(port)
    return key, default


def _reverse(zone: str) -> tuple[str, ...]:
    if "/" not in zone:
        return (zone.rstrip(".").lower() + ".",)
    try:
        network = ip_network(zone, strict=False)
    except ValueError:
        return (zone.lower(),)
    step = 8 if network.version == 4 else 4
    widened = network.prefixlen + -network.prefixlen % step
    labels = widened // step
    names = []
    for part in network.subnets(new_prefix=widened):
        pieces = part.network_address.reverse_pointer.split(".")
        names.append(".".join(pieces[-labels - 2 :]) + ".")
    return tuple(names)


def _directive(directive: Directive, zones: tuple[str, ...], draft: Draft) -> None:
    name = directive.name
    if name in _DONE_ELSEWHERE or name == "bind":
        return
    if name == "forward":
        _forward(directive, zones, draft)
    elif name == "cache":
        _cache(directive, draft)
    elif name == "hosts":
        _hosts(directive, draft)
    elif name == "dns64":
        draft.server["module-config"] = '"dns64 iterator"'
        prefix = next((a for a in directive.args if "/" in a), "64:ff9b::/96")
        draft.server["dns64-prefix"] = next((d.args[0] for d in directive.inside("prefix")), prefix)
    elif name == "bufsize":
        draft.server["edns-buffer-size"] = (directive.args or ("1232",))[0]
    elif name in ("log", "debug"):
        draft.server["log-queries" if name == "log" else "verbosity"] = (
            "yes" if name == "log" else "2"
        )
    else:
        draft.note(directive, "unbound has no counterpart")


def _seconds(text: str) -> int | None:
    if text.isascii() and text.isdigit():
        return int(text)
    found = goflags.duration(text)
    return None if found is None else int(found)


def _cache(directive: Directive, draft: Draft) -> None:
    numbers = [int(a) for a in directive.args[:1] if a.isdigit()]
    ttl = numbers[0] if numbers else DEFAULT_TTL
    negative = min(ttl, DEFAULT_NEGATIVE_TTL)
    if directive.args[len(numbers) :]:
        draft.note(directive, "unbound's cache holds every zone")
    for inner in directive.body:
        values = [_seconds(a) for a in inner.args]
        if inner.name == "success" and len(values) > 1 and values[1] is not None:
            ttl = values[1]
        elif inner.name == "denial" and len(values) > 1 and values[1] is not None:
            negative = values[1]
        elif inner.name in ("success", "denial"):
            pass
        elif inner.name == "prefetch":
            draft.server["prefetch"] = "yes"
        elif inner.name == "serve_stale":
            draft.server["serve-expired"] = "yes"
            draft.server["serve-expired-ttl"] = str((values[0] if values else None) or 3600)
            if "verify" in inner.args:
                draft.server["serve-expired-client-timeout"] = "1800"
        else:
            draft.note(inner, "unbound's cache has no counterpart")
    draft.ttls.append(ttl)
    draft.negative.append(negative)


def _hosts(directive: Directive, draft: Draft) -> None:
    if any(arg.startswith("/") for arg in directive.args):
        draft.note(directive, "unbound reads no hosts file; entries in the block are honoured")
    for inner in directive.body:
        if goflags.address(inner.name) is None:
            if inner.name not in ("fallthrough", "reload", "no_reverse"):
                draft.note(inner, "unbound has no counterpart")
            continue
        kind = "AAAA" if ":" in inner.name else "A"
        for host_name in inner.args:
            draft.local.append(f'local-data: "{host_name.rstrip(".")}. {kind} {inner.name}"')
            draft.local.append(f'local-data-ptr: "{inner.name} {host_name}"')


def _forward(directive: Directive, zones: tuple[str, ...], draft: Draft) -> None:
    if not directive.args[1:]:
        draft.note(directive, "no server to forward to")
        return
    lines = _forward_options(directive, draft)
    servers: list[str] = []
    for to in directive.args[1:]:
        servers.extend(_from_file(directive, to, draft) if to.startswith("/") else (to,))
    tls = any(server.startswith("tls://") for server in servers)
    if tls:
        if not all(server.startswith("tls://") for server in servers):
            draft.note(directive, "unbound forwards a zone by TLS or in the clear: TLS is used")
        lines.append("forward-tls-upstream: yes")
        draft.server["tls-cert-bundle"] = f'"{draft.host.tls_bundle}"'
    found = [_forward_address(directive, server, tls, draft) for server in servers]
    lines += [f"forward-addr: {address}" for address in found if address]
    if not any(found):
        draft.note(directive, "no usable server: the zone is refused until there is one")
    origin = directive.args[0]
    for zone in zones if origin == "." else _reverse(origin):
        if not any(found):
            draft.local.append(f'local-zone: "{zone}" refuse')
            continue
        if zone in draft.forwards:
            draft.note(directive, f"{zone} is forwarded already")
        else:
            draft.forwards[zone] = lines


def _forward_options(directive: Directive, draft: Draft) -> list[str]:
    lines = []
    for inner in directive.body:
        if inner.name == "force_tcp":
            lines.append("forward-tcp-upstream: yes")
        elif inner.name in _FORWARD_TUNING:
            draft.note(inner, "unbound chooses and checks its upstreams by itself")
        elif inner.name not in ("tls", "tls_servername"):
            draft.note(inner, "unbound has no counterpart")
    return lines


def _from_file(directive: Directive, path: str, draft: Draft) -> Sequence[str]:
    draft.files.append(path)
    try:
        return draft.host.read_servers(path)
    except OSError as error:
        draft.note(directive, f"{path} cannot be read: {error.strerror}")
        return ()


def _forward_address(directive: Directive, server: str, tls: bool, draft: Draft) -> str | None:
    tls_name = next((d.args[0] for d in directive.inside("tls_servername") if d.args), "")
    bare, _, zone = server.removeprefix("dns://").removeprefix("tls://").partition("%")
    host, port = split_server(bare)
    address = goflags.address(host)
    if address is None:
        draft.note(directive, f"{server} is no address")
        return None
    number = int(port) if port and port.isdigit() else (853 if tls else 53)
    if str(address) in draft.host.own_addresses and number == draft.host.port:
        draft.note(directive, f"{server} is this cache itself: left out, it would loop")
        return None
    draft.loopback = draft.loopback or address.is_loopback
    link = f"%{zone}" if zone and not tls else ""
    return f"{address}{link}@{number}" + (
        f"#{tls_name or zone}" if tls and (tls_name or zone) else ""
    )
