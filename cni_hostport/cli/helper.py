"""``cni-hostport helper``: be the node's helper process.

Parses options and prepares the run directory; everything else is ``helper/run.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from cni_hostport import shim
from cni_hostport.cli.options import parser
from cni_hostport.errors import HostPortError
from cni_hostport.host import light
from cni_hostport.host.startup import open_run_dir

EPILOG = """\
The first plugin call starts a helper by itself. Under systemd run it as a service
instead (`cni-hostport install` writes and enables one), so that it is restarted
when it dies and its sockets are kept meanwhile. Without --replace, and with a
helper running, it says so and ends well.

Started on demand it logs to helper.log in the run directory, else to stderr: one
line a call, key=value or JSON.

exit status: 0 ended as told, or another one runs; 1 it cannot run; 2 usage

examples:
  cni-hostport helper --replace --listen-metrics 127.0.0.1:9477
  CNI_HOSTPORT_RUN_DIR=/run/test cni-hostport helper --log-level debug
"""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it; 0 also when a helper runs already."""
    it = parser("helper", "Hold host ports, keep their rules, answer plugin calls.", EPILOG)
    it.add_argument(
        "--replace",
        action="store_true",
        help="take over from a running helper: its sockets are never free in between",
    )
    it.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of a line (default text)"
    )
    it.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the least that is logged (default info: every call; error: failing ones)",
    )
    it.add_argument(
        "--listen-metrics",
        default=os.environ.get("CNI_HOSTPORT_LISTEN_METRICS", ""),
        metavar="ADDR:PORT",
        type=_address,
        help="serve /metrics and /healthz there (also CNI_HOSTPORT_LISTEN_METRICS); "
        "an address that is taken is tried again, never fatal",
    )
    it.add_argument(
        "--linger",
        action="store_true",
        help="after a hand-over stay until told to end, for a container whose end would restart it",
    )
    arguments = it.parse_args(argv)
    run_dir = os.fsdecode(shim.run_dir())
    try:
        os.close(open_run_dir(run_dir))
    except HostPortError as error:
        it.exit(1, f"cni-hostport: {error}\n")
    light.load_asyncio()
    from cni_hostport.helper.run import serve

    return serve(
        Path(run_dir),
        arguments.log_format,
        arguments.log_level,
        replace=arguments.replace,
        metrics=arguments.listen_metrics,
        linger=arguments.linger,
    )


def _address(text: str) -> str:
    """An ADDR:PORT as it is given; empty for none."""
    from cni_hostport.helper.address import parse_address

    if text:
        try:
            parse_address(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text
