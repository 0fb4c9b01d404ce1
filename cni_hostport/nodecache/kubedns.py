"""The kube-dns ConfigMap: stub domains and upstream servers.

Decides which keys count, what their JSON may hold, and which servers a DNS
server can forward to. Never reads a folder (``host/nodecache_files.py`` does)
and never invents a default: no keys, an empty configuration.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from cni_hostport.nodecache import goflags

# DNS-1123 subdomain, as Kubernetes validates names (253 characters at most).
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_PORT = re.compile(r"[0-9]{1,5}")
KNOWN_KEYS = ("stubDomains", "upstreamNameservers", "federations")
MAX_UPSTREAMS = 3


class ConfigError(ValueError):
    """The ConfigMap cannot be used; the text names the key and the value."""


@dataclass(frozen=True)
class KubeDNSConfig:
    """Stub domains in alphabetical order, and upstream servers, as text."""

    stub_domains: tuple[tuple[str, tuple[str, ...]], ...] = ()
    upstreams: tuple[str, ...] = ()


def version_of(files: Mapping[str, str]) -> str:
    """Version of a folder's content: SHA-256 over name, NUL, content, NUL; "" for no files."""
    if not files:
        return ""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def parse(files: Mapping[str, str]) -> KubeDNSConfig:
    """The configuration in a ConfigMap's files. Raises ConfigError."""
    stubs = _stub_domains(_json("stubDomains", files.get("stubDomains", "")))
    upstreams = _strings(
        "upstreamNameservers", _json("upstreamNameservers", files.get("upstreamNameservers", ""))
    )
    _check_federations(files.get("federations", ""))
    return KubeDNSConfig(stubs, upstreams)


def unknown_keys(files: Mapping[str, str]) -> tuple[str, ...]:
    """Keys that nothing reads: a Corefile where stubDomains was meant, say."""
    return tuple(sorted(name for name in files if name not in KNOWN_KEYS))


def _json(key: str, text: str) -> object:
    def refuse(constant: str) -> NoReturn:
        raise ConfigError(f"{key}: {constant} is no JSON value")

    if not text.strip():
        return None
    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key} is no valid JSON: {error}") from error


def _strings(key: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{key} must be a JSON list of strings")
    return tuple(value)


def _stub_domains(value: object) -> tuple[tuple[str, tuple[str, ...]], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ConfigError("stubDomains must be a JSON object of domain and list of servers")
    found = {d: _strings(f"stubDomains of {d!r}", servers) for d, servers in value.items()}
    return tuple(sorted(found.items()))


def _check_federations(text: str) -> None:
    for pair in filter(None, text.split(",")):
        name, equals, domain = pair.partition("=")
        if not equals or not re.fullmatch(_LABEL, name.strip()) or not _is_name(domain.strip()):
            raise ConfigError(f"federations: invalid entry {pair!r}")


def _is_name(text: str) -> bool:
    return len(text) <= 253 and _SUBDOMAIN.fullmatch(text) is not None


def validate(config: KubeDNSConfig) -> None:
    """kube-dns's own rules for names and servers. Raises ConfigError naming the value."""
    for domain, servers in config.stub_domains:
        if not _is_name(domain):
            raise ConfigError(f"stubDomains: invalid domain name {domain!r}")
        for server in servers:
            _check_server(f"stubDomains of {domain}", server, _is_name)
    if len(config.upstreams) > MAX_UPSTREAMS:
        raise ConfigError(
            f"upstreamNameservers: {len(config.upstreams)} servers, {MAX_UPSTREAMS} at most"
        )
    for server in config.upstreams:
        _check_server("upstreamNameservers", server, lambda _: False)


def _check_server(where: str, server: str, is_name: Callable[[str], bool]) -> None:
    host, port = split_server(server)
    if port is not None and (_PORT.fullmatch(port) is None or int(port) > 65535):
        raise ConfigError(f"{where}: invalid nameserver {server!r}: bad port")
    if goflags.address(host) is None and not is_name(server):
        raise ConfigError(f"{where}: invalid nameserver {server!r}")


def split_server(server: str) -> tuple[str, str | None]:
    """``host``, ``host:port`` or ``[v6]:port`` as host and port (None: not given)."""
    if server.startswith("["):
        host, _, rest = server[1:].partition("]")
        return (host, rest[1:]) if rest.startswith(":") else (host, rest or None)
    if server.count(":") == 1:
        host, _, port = server.partition(":")
        return host, port
    return server, None


def validate_forwardable(config: KubeDNSConfig, is_file: Callable[[str], bool]) -> None:
    """Every server must be one that a DNS server can forward to.

    An address with or without port, ``dns://`` or ``tls://`` before it, or an
    existing file in the form of resolv.conf; a name is not. ``is_file`` answers
    the last. A domain without servers is refused here: it would make a Corefile
    that no server loads. Raises ConfigError.
    """
    for domain, servers in config.stub_domains:
        if not servers:
            raise ConfigError(f"stubDomains: {domain} has no servers")
    everyone = [s for _, servers in config.stub_domains for s in servers]
    for server in (*everyone, *config.upstreams):
        bare = server.removeprefix("dns://").removeprefix("tls://")
        host, port = split_server(bare)
        usable = goflags.address(host.partition("%")[0]) is not None and (
            port is None or (_PORT.fullmatch(port) is not None and 0 < int(port) <= 65535)
        )
        if not usable and not is_file(server):
            raise ConfigError(f"server {server!r} is neither an address nor a file")
