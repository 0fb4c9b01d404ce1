"""``cni-hostport check``: is everything as the answered ADDs promised?

A client of the helper; changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cni_hostport.cli import client
from cni_hostport.cli.options import parser

EPILOG = """\
The helper mends by itself what it notices; this tells what is different now.

exit status: 0 nothing differs, 1 something does, 2 usage, 3 no helper

example:
  cni-hostport check || journalctl -u cni-hostport -n 20
"""


def main(argv: Sequence[str]) -> int:
    """Check every attachment and list the differences."""
    it = parser("check", "Compare sockets, rules and settings of every attachment.", EPILOG)
    it.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = it.parse_args(argv)
    try:
        document = client.document("check", 60.0)
    except (client.NoHelper, OSError) as error:
        return client.complain(error)
    differences = document["differences"]
    if arguments.json:
        print(json.dumps(document, indent=2))
    else:
        for entry in differences:
            print(f"{client.who(entry)}: {'; '.join(entry['missing'])}")
        count = document["checked"]
        noun = "attachment" if count == 1 else "attachments"
        print(f"{count} {noun} checked, {len(differences)} with differences")
    return 1 if differences else 0
