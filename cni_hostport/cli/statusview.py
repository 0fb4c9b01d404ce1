"""The status document as people read it: header, table, what needs attention.

Decides words and order. Asks nobody but the terminal (width, colours).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from ipaddress import ip_address
from typing import Any

from cni_hostport.cli import terminal
from cni_hostport.cli.table import render
from cni_hostport.cni_json import clean

COLUMNS = ("HOST", "PORT", "PROTO", "POD", "CONTAINER", "TARGET", "HELD", "CONNS", "NETWORK")
SHRINK = {"POD": 16, "CONTAINER": 8, "NETWORK": 8, "TARGET": 15, "HOST": 15}
DROP = ("NETWORK", "CONTAINER", "CONNS", "HOST", "TARGET", "HELD", "PROTO", "POD")

Row = Mapping[str, Any]


def _by_port(m: Row) -> tuple[Any, ...]:
    host = ip_address(m["hostIP"]) if m["hostIP"] else None
    return (m["hostPort"], m["protocol"], host is not None, str(host), m["containerID"])


SORTS: dict[str, Callable[[Row], Any]] = {
    "port": _by_port,
    "pod": lambda m: (m["namespace"], m["pod"], _by_port(m)),
    "network": lambda m: (m["network"], _by_port(m)),
    "held": lambda m: (m["held"] == "yes", m["held"], _by_port(m)),
    "connections": lambda m: (-(m["connections"] or 0), _by_port(m)),
}
"""Keys by name; ``held`` puts first what is not held, ``connections`` the busiest."""


def text(document: Row, wide: bool) -> str:
    """The whole page."""
    rows = [_row(m, wide) for m in document["mappings"]]
    parts = [header(document), ""]
    if rows:
        width = None if wide else terminal.width()
        lines = render(COLUMNS, rows, width, SHRINK, DROP).split("\n")
        parts.append(terminal.paint(lines[0], terminal.BOLD))
        parts += [_coloured(line, row) for line, row in zip(lines[1:], rows, strict=True)]
    else:
        parts.append("no host ports")
    parts += ["", *map(outsider, document["others"])] if document.get("others") else []
    return "\n".join(parts)


def _coloured(line: str, row: tuple[str, ...]) -> str:
    return terminal.paint(line, terminal.YELLOW) if row[6] == "waiting" else line


def header(document: Row) -> str:
    """The lines above the table."""
    helper, repairs = document["helper"], document["repairs"]
    backend = document["backend"]
    lines = [
        f"cni-hostport {document['version']}, helper pid {helper['pid']}, "
        f"up {duration(helper['uptime'])}, IPv4 {backend['ip']}, IPv6 {backend['ip6']}"
    ]
    if repairs["count"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(repairs["lastTime"]))
        lines.append(f"repairs: {repairs['count']}, last {when}: {repairs['last']}")
    lines += [f"warning: {clean(text)}" for text in document.get("warnings", ())]
    if document["queue"]:
        lines.append(f"queued DELs: {document['queue']}")
    if document["nodeCache"]:
        lines.append(node_cache(document["nodeCache"]))
    if helper["problem"]:
        problem = f"PROBLEM: {helper['problem']}; 'cni-hostport doctor' tells more"
        lines.append(terminal.paint(problem, terminal.RED))
    return "\n".join(lines)


def node_cache(state: Row) -> str:
    """The line about the node-local DNS cache."""
    addresses = ", ".join(state["addresses"]) or "no address"
    rules = "rules present" if state["rules"] else "no rules: clients use the cluster's DNS"
    agent = "" if state["agent"] else ", AGENT GONE"
    count = state["fallbacks"]
    fallbacks = "" if count is None else f", fallbacks {count}"
    return f"node-cache: {addresses}, engine {state['engine']}, {rules}{fallbacks}{agent}"


def outsider(row: Row) -> str:
    """A sentence about a socket that is no pod's."""
    host = f"[{row['address']}]" if ":" in row["address"] else row["address"]
    who = (
        f"process {clean(row['process'])} (pid {row['pid']})" if row["pid"] else "a hidden process"
    )
    does = "listens on" if row["state"] == "listens" else "has bound"
    return f"{who} {does} {host}:{row['port']}/{row['protocol']}"


def _row(mapping: Row, wide: bool) -> tuple[str, ...]:
    container = mapping["containerID"]
    pod = "/".join(filter(None, (mapping["namespace"], mapping["pod"])))
    connections = mapping["connections"]
    return (
        mapping["hostIP"] or "*",
        str(mapping["hostPort"]),
        mapping["protocol"],
        clean(pod) or "-",
        container if wide else container[:12],
        ",".join(mapping["targets"]) or "-",
        mapping["held"],
        "-" if connections is None else str(connections),
        clean(mapping["network"]),
    )


def duration(seconds: float) -> str:
    """A span of time in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
