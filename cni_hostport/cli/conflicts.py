"""Which running pods' host ports a process of the host has too.

portmap maps such a port and takes the process' traffic; with reservation the
next ADD of that pod is refused. Said before, with the ways out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cni_hostport.cli import client, outsiders, statusview
from cni_hostport.host import cnicache
from cni_hostport.host.cnicache import CachedPort
from cni_hostport.model import canonical_ip

WAYS_OUT = (
    "    stop that process, give the pod a hostIP of its own or another hostPort, "
    'set nodeAddresses in the conflist, or "reservePorts": "try"'
)
_LOOPBACK = ("127.", "::1")


def lines() -> list[str]:
    """What to tell, two lines a conflict; none where the kernel cannot be asked."""
    ports = cnicache.ports()
    try:
        helper = int(client.document("status", 2.0)["helper"]["pid"])
    except (client.NoHelper, OSError):
        helper = 0
    try:
        found = {p: outsiders.others(p, (), helper) for p in sorted({c.port for c in ports})}
    except OSError:
        return []
    return [
        line
        for port in ports
        for row in found[port.port]
        if meet(port, row)
        for line in (text(port, row), WAYS_OUT)
    ]


def text(port: CachedPort, row: dict[str, Any]) -> str:
    """One conflict in a sentence."""
    where = f"{port.host_ip or '*'}:{port.port}/{port.protocol}"
    return (
        f"conflict: container {port.container_id[:12]} on {port.network} has host port {where}, "
        f"and {statusview.outsider(row)}: reservation will refuse the next such pod"
    )


def meet(port: CachedPort, row: dict[str, Any]) -> bool:
    """Whether that socket and that host port cannot both be."""
    if row["protocol"] != port.protocol:
        return False
    theirs = canonical_ip(row["address"])
    try:
        ours = canonical_ip(port.host_ip) if port.host_ip else None
    except ValueError:
        return False
    if ours is None:
        return True
    # a listener on :: may take IPv4 as well
    wide = theirs.is_unspecified and theirs.version in {ours.version, 6}
    same_family_wide = ours.is_unspecified and ours.version == theirs.version
    return wide or same_family_wide or ours == theirs


def of_pods(ports: Iterable[CachedPort], plugin: str) -> list[CachedPort]:
    """Those that one plugin type made."""
    return [p for p in ports if plugin in p.plugins]
