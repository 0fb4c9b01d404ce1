"""``cni-hostport ping``: does a helper answer, and is it the one that is meant?

For probes: of systemd, of a container, of a script that waits for a hand-over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from cni_hostport.cli import client
from cni_hostport.cli.options import parser

EPILOG = """\
During an upgrade two containers share the run directory and one of them serves.
With --instance NAME the answer is yes only if the helper was started with
CNI_HOSTPORT_INSTANCE=NAME in its environment; --mine takes the name from this one's.

exit status: 0 it answers, 1 it has a problem or is another instance, 2 usage,
3 no helper answers

example:
  cni-hostport ping --mine
"""


def main(argv: Sequence[str]) -> int:
    """Ask once."""
    it = parser("ping", "Tell whether the helper answers and can do its work.", EPILOG)
    which = it.add_mutually_exclusive_group()
    which.add_argument("--instance", metavar="NAME", help="only that instance counts")
    which.add_argument(
        "--mine",
        dest="instance",
        action="store_const",
        const=os.environ.get("CNI_HOSTPORT_INSTANCE", ""),
        help="only the instance of this environment's CNI_HOSTPORT_INSTANCE counts",
    )
    it.add_argument("--timeout", type=float, default=5.0, metavar="S", help="seconds (default 5)")
    arguments = it.parse_args(argv)
    try:
        helper = client.document("status", arguments.timeout)["helper"]
    except (client.NoHelper, OSError) as error:
        return client.complain(error)
    if arguments.instance is not None and helper["instance"] != arguments.instance:
        serving = helper["instance"] or "one without a name"
        return client.complain(OSError(f"the helper that serves is another instance: {serving}"))
    if helper["problem"]:
        return client.complain(OSError(helper["problem"]))
    print(f"helper pid {helper['pid']} answers")
    return 0
