"""``cni-hostport status``: who has which host port.

A client of the helper; formats and filters, decides nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cni_hostport.cli import client
from cni_hostport.cli.table import render

EPILOG = """\
HELD: yes = a socket reserves the port; waiting = mapped, the port is still busy
and taken when free; no = not reserved by choice (reservePorts, SCTP); skipped =
the pod has no address of that family.

exit status: 0 well, 2 usage, 3 no helper

example:
  cni-hostport status --port 8080      who has 8080?
"""

COLUMNS = ("HOST", "PORT", "PROTO", "POD", "CONTAINER", "TARGET", "HELD", "CONNS", "NETWORK")


def main(argv: Sequence[str]) -> int:
    """Print the status once, or again and again."""
    parser = argparse.ArgumentParser(
        prog="cni-hostport status",
        description="Show the host ports of this node.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="the stable JSON document")
    parser.add_argument("--watch", action="store_true", help="again every two seconds")
    parser.add_argument("--port", type=int, metavar="N", help="only this host port")
    parser.add_argument("--pod", metavar="TEXT", help="only pods whose namespace/name has TEXT")
    parser.add_argument("--network", metavar="NAME", help="only this network")
    parser.add_argument("--wide", action="store_true", help="whole container IDs")
    arguments = parser.parse_args(argv)
    try:
        while True:
            print(show(client.document("status"), arguments))
            if not arguments.watch:
                return 0
            time.sleep(2)
            print()
    except (client.NoHelper, OSError) as error:
        return client.complain(error)


def show(document: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The document as it is printed."""
    chosen = [m for m in document["mappings"] if _wanted(m, arguments)]
    if arguments.json:
        return json.dumps({**document, "mappings": chosen}, indent=2)
    chosen.sort(key=lambda m: (m["hostPort"], m["protocol"], m["hostIP"]))
    rows = [_row(m, arguments.wide) for m in chosen]
    table = render(COLUMNS, rows) if rows else "no host ports"
    return "\n".join([header(document), "", table])


def header(document: Mapping[str, Any]) -> str:
    """The lines above the table."""
    helper, repairs = document["helper"], document["repairs"]
    backend = document["backend"]
    lines = [
        f"cni-hostport {document['version']}, helper pid {helper['pid']}, "
        f"up {_duration(helper['uptime'])}, IPv4 {backend['ip']}, IPv6 {backend['ip6']}"
    ]
    if repairs["count"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(repairs["lastTime"]))
        lines.append(f"repairs: {repairs['count']}, last {when}: {repairs['last']}")
    lines += [f"warning: {text}" for text in document.get("warnings", ())]
    if document["queue"]:
        lines.append(f"queued DELs: {document['queue']}")
    if helper["problem"]:
        lines.append(f"PROBLEM: {helper['problem']}")
    return "\n".join(lines)


def _wanted(mapping: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    pod = f"{mapping['namespace']}/{mapping['pod']}"
    return (
        (arguments.port is None or mapping["hostPort"] == arguments.port)
        and (arguments.pod is None or arguments.pod in pod)
        and (arguments.network is None or mapping["network"] == arguments.network)
    )


def _row(mapping: Mapping[str, Any], wide: bool) -> tuple[str, ...]:
    container = mapping["containerID"]
    pod = "/".join(filter(None, (mapping["namespace"], mapping["pod"])))
    return (
        mapping["hostIP"] or "*",
        str(mapping["hostPort"]),
        mapping["protocol"],
        pod or "-",
        container if wide else container[:12],
        ",".join(mapping["targets"]) or "-",
        mapping["held"],
        str(mapping["connections"]),
        mapping["network"],
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours}h"
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
