"""``cni-hostport uninstall``: portmap's conflists back, and nothing of ours left.

While pods still have host ports of ours only the conflists go back: removing the
rest would cut those pods off, and their DEL would leave rules behind.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cni_hostport import shim
from cni_hostport.cli import client
from cni_hostport.cli.apply import Apply, StepFailed
from cni_hostport.cli.install import PREFIX, text_of
from cni_hostport.cli.options import parser
from cni_hostport.host import systemd
from cni_hostport.host.confdirs import inside
from cni_hostport.installing import plan
from cni_hostport.installing.steps import Step

EPILOG = """\
Gives portmap's conflists back as they were (where somebody edited one since, the
one word is changed back), disables and removes the unit, ends the helper, and
removes the plugin link, the bundles and the run directory.

With pods that still have host ports of ours the conflists go back and the rest
stays, since those pods need it; they are listed. Delete them and give the
command again, or cut their ports with --force.

exit status: 0 all gone, 1 something remains, 2 usage

example:
  cni-hostport uninstall --dry-run
"""


def main(argv: Sequence[str]) -> int:
    """Undo ``install``."""
    arguments = _arguments(argv)
    manifest = plan.Manifest.of(text_of(inside(arguments.root, arguments.path)))
    if manifest == plan.Manifest():
        text = f"{arguments.path} lists no installation; was another --prefix given to install?"
        return client.complain(FileNotFoundError(text))
    pods = _pods(arguments)
    steps = _plan(arguments, manifest, give_back_only=bool(pods))
    if arguments.dry_run:
        print(plan.summary(steps) if steps else "nothing to do")
        return _remaining(pods)
    if os.geteuid() != 0:
        return client.complain(PermissionError("only root can uninstall; try sudo"))
    try:
        Apply(arguments.root, print).all(steps)
    except StepFailed as error:
        return client.complain(error)
    return _remaining(pods)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    it = parser(
        "uninstall", "Give portmap's conflists back and remove what install put in place.", EPILOG
    )
    it.add_argument("--dry-run", action="store_true", help="show what would change, change nothing")
    it.add_argument("--force", action="store_true", help="also cut the host ports of running pods")
    it.add_argument("--prefix", default=PREFIX, metavar="DIR", help=f"bundles (default {PREFIX})")
    it.add_argument(
        "--root", type=Path, default=Path("/"), metavar="DIR", help="where the node is mounted"
    )
    arguments = it.parse_args(argv)
    arguments.path = f"{arguments.prefix.rstrip('/')}/{plan.MANIFEST}"
    return arguments


def _pods(arguments: argparse.Namespace) -> list[Any]:
    """Attachments that still need us; with --force (and not --dry-run) they are cut off here."""
    if arguments.root != Path("/"):
        return []
    try:
        wish = arguments.force and not arguments.dry_run
        left: list[Any] = client.document("leave", 60.0, force=wish, dryRun=arguments.dry_run)[
            "left"
        ]
    except (client.NoHelper, OSError):
        return []
    return [] if arguments.force else left


def _plan(
    arguments: argparse.Namespace, manifest: plan.Manifest, give_back_only: bool
) -> list[Step]:
    paths = [p for c in manifest.conflists for p in (c, c + plan.BACKUP)]
    return plan.uninstall(
        manifest,
        {p: text_of(inside(arguments.root, p)) for p in paths},
        arguments.prefix.rstrip("/"),
        os.fsdecode(shim.run_dir()),
        systemd=arguments.root == Path("/") and systemd.present(),
        give_back_only=give_back_only,
    )


def _remaining(pods: list[Any]) -> int:
    for entry in pods:
        ports = ", ".join(entry["ports"])
        print(f"still has host ports: {client.who(entry)}: {ports}", file=sys.stderr)
    if pods:
        print(
            "program and helper stay until these are deleted; then give the command again, "
            "or --force cuts their ports now",
            file=sys.stderr,
        )
    return 1 if pods else 0
