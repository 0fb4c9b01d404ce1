"""The Corefile from its template: placeholders, upstreams, stub domains.

Decides the text byte for byte as upstream's node-cache renders it, with three
differences that the facts ask for: stub domains are sorted, a cluster IP that
is missing is an error instead of ``<nil>``, and a stub domain that the
template serves already is left out with a note. Never reads or writes a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cni_hostport.nodecache.kubedns import KubeDNSConfig

CLUSTER_DNS = "__PILLAR__CLUSTER__DNS__"
LOCAL_DNS = "__PILLAR__LOCAL__DNS__"
DNS_SERVER = "__PILLAR__DNS__SERVER__"
UPSTREAM = "__PILLAR__UPSTREAM__SERVERS__"
PROMETHEUS = ("__PILLAR__PROMETHEUS__ENDPOINT__", "__PROMETHEUS__ENDPOINT__")
RESOLV_CONF = "/etc/resolv.conf"
# The one block that upstream turns from TCP into UDP, blanks and all.
_TCP_BLOCK = f"\n    forward . {UPSTREAM} {{\n            force_tcp\n    }}\n"
_ZONE_LINE = re.compile(r"^\s*([^#{}\n]+?)\s*\{\s*(?:#.*)?$", re.MULTILINE)


class ServiceUnknown(ValueError):
    """The template needs the cluster DNS's address and the environment lacks it."""


@dataclass(frozen=True)
class Settings:
    """What rendering needs besides template and ConfigMap."""

    local_ips: tuple[str, ...]
    port: int
    cluster_ip: str | None
    service: str
    prometheus: str


@dataclass(frozen=True)
class Rendered:
    """The Corefile and what an operator should know about it."""

    text: str
    notes: tuple[str, ...] = ()


def service_variable(service: str) -> str:
    """Environment variable with a Service's cluster IP (Kubernetes: service environment)."""
    return service.replace("-", "_").upper() + "_SERVICE_HOST"


def render(template: str, config: KubeDNSConfig, settings: Settings) -> Rendered:
    """The Corefile.

    Raises ServiceUnknown where the template needs the cluster IP and there is none.
    """
    notes: list[str] = []
    text = template
    if config.upstreams:
        servers = " ".join(config.upstreams)
        text = text.replace(_TCP_BLOCK, f"\n    forward . {servers}\n")
        if UPSTREAM in text:
            notes.append("no forward block with force_tcp in the usual indentation: TCP is kept")
    else:
        servers = RESOLV_CONF
    text = text.replace(UPSTREAM, servers)
    if CLUSTER_DNS in text:
        if settings.cluster_ip is None:
            raise ServiceUnknown(
                f"the template uses {CLUSTER_DNS}, but {service_variable(settings.service)} is "
                f"unset or no address: is there a Service {settings.service!r} (-upstreamsvc)?"
            )
        text = text.replace(CLUSTER_DNS, settings.cluster_ip)
    text = text.replace(LOCAL_DNS, " ".join(settings.local_ips)).replace(DNS_SERVER, "")
    for placeholder in PROMETHEUS:
        text = text.replace(placeholder, settings.prometheus)
    served = _zones(text, settings.port)
    for domain, stub_servers in config.stub_domains:
        if (domain, settings.port) in served:
            notes.append(f"stub domain {domain} is left out: the template serves that zone")
            continue
        text += stub_block(domain, stub_servers, settings)
    return Rendered(text, tuple(notes))


def stub_block(domain: str, servers: tuple[str, ...], settings: Settings) -> str:
    """The server block of one stub domain."""
    return (
        f"\n{domain}:{settings.port} {{\n"
        "    errors\n"
        "    cache 30\n"
        f"    bind {' '.join(settings.local_ips)}\n"
        f"    forward . {' '.join(servers)}\n"
        "}\n"
    )


def _zones(text: str, default_port: int) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for line in _ZONE_LINE.finditer(text):
        if line.group(0).startswith((" ", "\t")):
            continue
        for key in re.split(r"[\s,]+", line.group(1)):
            zone, colon, port = key.removeprefix("dns://").rpartition(":")
            if not colon:
                zone, port = port, str(default_port)
            if port.isdigit():
                found.add((zone.rstrip(".").lower(), int(port)))
    return found
