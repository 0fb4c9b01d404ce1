"""``cni-hostport metrics``: the helper's metrics in Prometheus' text format.

A client of the helper; for node_exporter's textfile collector, and for a look.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cni_hostport.cli import client
from cni_hostport.cli.options import parser

EPILOG = """\
Over HTTP the helper serves the same where it is asked to
(cni-hostport helper --listen-metrics 127.0.0.1:9477): /metrics and /healthz.
docs/metrics.md lists every metric; deploy/ has a dashboard and alert rules.

exit status: 0 well, 2 usage, 3 no helper answers

example:
  cni-hostport metrics | grep '^cni_hostport_mappings'
"""


def main(argv: Sequence[str]) -> int:
    """Print them once."""
    parser("metrics", "Print the helper's metrics in Prometheus' text format.", EPILOG).parse_args(
        argv
    )
    try:
        text = client.ask("metrics")
    except (client.NoHelper, OSError) as error:
        return client.complain(error)
    sys.stdout.write(text.decode())
    return 0
