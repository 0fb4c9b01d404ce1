"""``cni-hostport helper``: be the node's helper process.

Parses options and prepares the run directory; everything else is ``helper/run.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from cni_hostport import shim
from cni_hostport.errors import HostPortError
from cni_hostport.host import light
from cni_hostport.host.startup import open_run_dir

EPILOG = """\
The first plugin call starts a helper by itself. Under systemd run it as a
service instead (packaging/cni-hostport.service), so that it is restarted and
its sockets are kept over a restart.

example:
  CNI_HOSTPORT_RUN_DIR=/run/cni-hostport cni-hostport helper --log-level debug
"""


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it; 0 also when a helper runs already."""
    parser = argparse.ArgumentParser(
        prog="cni-hostport helper",
        description="Hold host ports, keep their rules, answer plugin calls.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take over from a running helper: its sockets are never free in between",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    arguments = parser.parse_args(argv)
    run_dir = os.fsdecode(shim.run_dir())
    try:
        os.close(open_run_dir(run_dir))
    except HostPortError as error:
        parser.exit(1, f"cni-hostport: {error}\n")
    light.load_asyncio()
    from cni_hostport.helper.run import serve

    return serve(
        Path(run_dir), arguments.log_format, arguments.log_level, replace=arguments.replace
    )
