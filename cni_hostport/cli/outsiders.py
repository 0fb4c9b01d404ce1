"""What ``status`` adds to the helper's own knowledge: connections, and ports of others.

Asks the kernel from the command's own process, so that the helper never waits
for a walk of the connection table. Decides nothing about ports. Never counts in
another net namespace than the helper's: then there is no number, not a wrong one.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import Any

from cni_hostport.host import ownnetns
from cni_hostport.host.conntrack import Conntrack
from cni_hostport.host.owner import processes_of
from cni_hostport.host.sockdiag import DiagSocket, SockDiag
from cni_hostport.model import Protocol, canonical_ip
from cni_hostport.netfilter.ctmsg import Endpoint

Translations = Counter[tuple[Endpoint, Endpoint]]


def same_namespace(document: Mapping[str, Any]) -> bool:
    """Whether this command sees the kernel objects of the helper that answered."""
    theirs = document["helper"].get("netns")
    return theirs is not None and theirs == ownnetns.cookie()


def count_connections(document: dict[str, Any]) -> None:
    """Fill in ``connections`` of every mapping: one walk of the kernel's table for all."""
    if not document["mappings"] or not same_namespace(document):
        return
    conntrack = Conntrack()
    try:
        with contextlib.suppress(OSError):
            flows = _by_port(conntrack.translations())
            for mapping in document["mappings"]:
                mapping["connections"] = _of(mapping, flows)
    finally:
        conntrack.close()


def _by_port(flows: Translations) -> dict[int, Translations]:
    groups: dict[int, Translations] = {}
    for (destination, answerer), count in flows.items():
        groups.setdefault(destination.port, Counter())[(destination, answerer)] = count
    return groups


def _of(mapping: Mapping[str, Any], flows: Mapping[int, Translations]) -> int:
    number = Protocol(mapping["protocol"]).number
    targets = {_endpoint(number, target) for target in mapping["targets"]}
    host = canonical_ip(mapping["hostIP"]) if mapping["hostIP"] else None
    wanted = None if host is None or host.is_unspecified else host
    return sum(
        count
        for (destination, answerer), count in flows.get(mapping["hostPort"], Counter()).items()
        if answerer in targets and wanted in (None, destination.address)
    )


def _endpoint(number: int, target: str) -> Endpoint:
    address, _, port = target.rpartition(":")
    return Endpoint(number, ip_address(address.strip("[]")), int(port))


def others(port: int, mappings: Iterable[Mapping[str, Any]] = (), helper: int = 0) -> list[Any]:
    """Sockets on a port that are not the helper's: who has it besides pods.

    Empty where the kernel shows nobody. Raises OSError.
    """
    diag = SockDiag()
    try:
        found = [(Protocol.TCP, "listens", s) for s in diag.listeners(port, Protocol.TCP)]
        found += [(Protocol.UDP, "listens", s) for s in diag.listeners(port, Protocol.UDP)]
        found += [(Protocol.TCP, "bound", s) for s in diag.bound_inactive(port)]
    finally:
        diag.close()
    owners = processes_of({s.inode for _, _, s in found})
    held = {(m["protocol"], m["hostPort"]) for m in mappings if m["held"] == "yes"}
    rows = []
    for protocol, state, sock in found:
        pid, process = owners.get(sock.inode, (None, ""))
        # a helper in another pid namespace has no pid here: its sockets never listen
        hidden = pid is None and (str(protocol), port) in held
        if (pid is not None and pid == helper) or hidden:
            continue
        rows.append(_row(protocol, state, sock, pid, process))
    return rows


def _row(protocol: Protocol, state: str, sock: DiagSocket, pid: int | None, process: str) -> Any:
    if sock.address is not None:
        address = str(sock.address)
    else:
        address = "::" if sock.family == 6 else "0.0.0.0"
    return {
        "address": address,
        "port": sock.port,
        "protocol": str(protocol),
        "state": state,
        "pid": pid,
        "process": process,
    }
