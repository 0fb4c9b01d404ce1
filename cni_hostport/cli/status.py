"""``cni-hostport status``: who has which host port.

A client of the helper; filters, sorts and formats, decides nothing. Connections
and sockets of other processes it asks of the kernel itself (``outsiders.py``).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cni_hostport.cli import client, statusview, terminal
from cni_hostport.cli.options import parser, port

EPILOG = """\
HELD: yes = a socket reserves the port; waiting = mapped, the port is still busy
and taken when free; no = not reserved by choice (reservePorts, SCTP); skipped =
the pod has no address of that family. CONNS: connections that are open now.

In a narrow terminal long names are cut and then columns left out; a pipe gets
everything. COLUMNS=N sets the width, NO_COLOR=1 turns colours off.

exit status: 0 well, 1 the helper broke off, 2 usage, 3 no helper answers

examples:
  cni-hostport status --port 8080         who has 8080, pod or process?
  cni-hostport status --pod shop/ --sort connections
  cni-hostport status --json | jq '.mappings[] | select(.held == "waiting")'
"""


def main(argv: Sequence[str]) -> int:
    """Print the status once, or again and again."""
    arguments = _arguments(argv)
    try:
        if arguments.watch:
            _watch(arguments)
        print(show(_document(arguments), arguments))
    except client.NoHelper as error:
        if arguments.port is not None and not arguments.json:
            _print_outsiders(arguments.port)
        return client.complain(error)
    except BrokenPipeError:  # a reader that has seen enough: no trouble of the helper's
        raise
    except OSError as error:
        return client.complain(error)
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    it = parser("status", "Show the host ports of this node and who has them.", EPILOG)
    it.add_argument("--json", action="store_true", help="the stable JSON document, see docs")
    it.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    it.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between (default 2)"
    )
    it.add_argument("--port", type=port, metavar="N", help="only this host port, outsiders too")
    it.add_argument("--pod", metavar="TEXT", help="only pods whose namespace/name contains TEXT")
    it.add_argument("--network", metavar="NAME", help="only this network")
    it.add_argument("--protocol", choices=("tcp", "udp", "sctp"), help="only this protocol")
    it.add_argument("--sort", choices=tuple(statusview.SORTS), default="port", help="order of rows")
    it.add_argument("--wide", action="store_true", help="whole container IDs, nothing cut")
    arguments = it.parse_args(argv)
    if arguments.interval <= 0:
        it.error("--interval must be more than 0")
    return arguments


def _document(arguments: argparse.Namespace) -> dict[str, Any]:
    """The helper's document with connections and, for one port, outsiders; filtered."""
    document: dict[str, Any] = client.document("status")
    from cni_hostport.cli import outsiders

    outsiders.count_connections(document)
    if arguments.port is not None and outsiders.same_namespace(document):
        document["others"] = outsiders.others(
            arguments.port, document["mappings"], document["helper"]["pid"]
        )
    chosen = [m for m in document["mappings"] if _wanted(m, arguments)]
    document["mappings"] = sorted(chosen, key=statusview.SORTS[arguments.sort])
    return document


def _wanted(mapping: Mapping[str, Any], arguments: argparse.Namespace) -> bool:
    pod = f"{mapping['namespace']}/{mapping['pod']}"
    return (
        (arguments.port is None or mapping["hostPort"] == arguments.port)
        and (arguments.pod is None or arguments.pod in pod)
        and (arguments.network is None or mapping["network"] == arguments.network)
        and (arguments.protocol is None or mapping["protocol"] == arguments.protocol)
    )


def show(document: dict[str, Any], arguments: argparse.Namespace) -> str:
    """The document as it is printed."""
    if arguments.json:
        return json.dumps(document, indent=None if arguments.watch else 2)
    return statusview.text(document, arguments.wide)


def _watch(arguments: argparse.Namespace) -> None:
    """Print again and again; outlives an upgrade of the helper. Ends with Ctrl-C."""
    seen = False
    while True:
        try:
            text = show(_document(arguments), arguments)
            seen = True
        except (client.NoHelper, OSError) as error:
            if not seen:
                raise
            text = "" if arguments.json else str(error)
        if text:
            sys.stdout.write(terminal.CLEAR if terminal.interactive() else "")
            sys.stdout.write(text + ("\n" if arguments.json else "\n\n"))
            sys.stdout.flush()
        time.sleep(arguments.interval)


def _print_outsiders(number: int) -> None:
    """Who has a port, where no helper can say which pod."""
    from cni_hostport.cli import outsiders

    for row in outsiders.others(number):
        print(statusview.outsider(row))
