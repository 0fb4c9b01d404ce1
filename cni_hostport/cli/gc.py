"""``cni-hostport gc``: remove attachments whose network namespace is gone.

A client of the helper. A runtime that forgot a pod never sends its DEL; the
namespace tells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from cni_hostport.cli import client
from cni_hostport.cli.options import parser

EPILOG = """\
An attachment whose namespace cannot be judged (made by a caller with mounts of
its own) is listed and left alone.

exit status: 0 well, 1 something could not be removed, 2 usage, 3 no helper

example:
  cni-hostport gc --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """Collect, or show what would be collected."""
    it = parser("gc", "Remove attachments whose network namespace is gone.", EPILOG)
    it.add_argument("--dry-run", action="store_true", help="only show them")
    it.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = it.parse_args(argv)
    try:
        document = client.document("gc", 60.0, dryRun=arguments.dry_run)
    except (client.NoHelper, OSError) as error:
        return client.complain(error)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return 1 if document["failed"] else 0
    verb = "would remove" if arguments.dry_run else "removed"
    for entry in document["removed"]:
        print(f"{verb} {client.who(entry)}: {', '.join(entry['ports'])}")
    for entry in document["failed"]:
        print(f"cannot remove {client.who(entry)}: {entry['error']}")
    for entry in document["unknown"]:
        print(f"cannot judge {client.who(entry)} (namespace {entry['netns'] or 'not given'})")
    count = len(document["removed"])
    print(f"{verb} {count} attachment{'' if count == 1 else 's'}")
    return 1 if document["failed"] else 0
