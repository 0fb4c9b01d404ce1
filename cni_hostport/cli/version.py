"""``cni-hostport version``: what this program is and what it speaks.

Prints constants; it asks no helper (``status`` shows the running one's).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from cni_hostport import __version__, shim


def main(argv: Sequence[str]) -> int:
    """Print the version and return the exit status."""
    parser = argparse.ArgumentParser(prog="cni-hostport version", description=__doc__)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = parser.parse_args(argv)
    if arguments.json:
        facts = {"version": __version__, "protocol": shim.PROTOCOL, "cni": list(shim.SUPPORTED)}
        print(json.dumps(facts))
    else:
        print(f"cni-hostport {__version__}")
        print(f"helper protocol {shim.PROTOCOL}, CNI {', '.join(shim.SUPPORTED)}")
    return 0
