"""``cni-hostport version``: what this program is and what it speaks.

Prints constants; it asks no helper (``status`` shows the running one's).
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cni_hostport import __version__, shim
from cni_hostport.cli.options import parser

EPILOG = """\
It asks no helper; the version of the one that runs is in `cni-hostport status`.
Programs and helpers of neighbouring protocol versions work together.

exit status: 0 well, 2 usage

example:
  cni-hostport version --json | jq -r .version
"""


def main(argv: Sequence[str]) -> int:
    """Print the version and return the exit status."""
    it = parser("version", "Tell this program's version and what it speaks.", EPILOG)
    it.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = it.parse_args(argv)
    if arguments.json:
        facts = {"version": __version__, "protocol": shim.PROTOCOL, "cni": list(shim.SUPPORTED)}
        print(json.dumps(facts))
    else:
        print(f"cni-hostport {__version__}")
        print(f"helper protocol {shim.PROTOCOL}, CNI {', '.join(shim.SUPPORTED)}")
    return 0
