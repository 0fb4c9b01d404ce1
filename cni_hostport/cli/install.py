"""``cni-hostport install``: program, plugin link, service and conflists in place; also the upgrade.

Looks at the node, has the steps planned (``installing/plan.py``), shows or does
them (``apply.py``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cni_hostport import __version__, shim
from cni_hostport.cli import client
from cni_hostport.cli.apply import Apply, StepFailed, version_of
from cni_hostport.cli.options import parser
from cni_hostport.host import confdirs, files, glibc, selinux, systemd
from cni_hostport.host.confdirs import inside
from cni_hostport.installing import plan, unit
from cni_hostport.installing.steps import Step

EPILOG = """\
What it does, each step whole or not at all:
  the bundle is copied to PREFIX/VERSION/, a link to its plugin renamed into the
  plugin folder, a systemd unit written and enabled where systemd runs, a running
  helper replaced without any port being free meanwhile, and portmap exchanged for
  cni-hostport in the conflists: one word, the rest of the file untouched, a copy
  kept beside it as FILE.before-cni-hostport.

The same command again changes nothing; with a newer bundle it is the upgrade.
Pods that run already keep portmap's rules until they are made anew.

exit status: 0 well, 1 nothing or not everything could be done, 2 usage

examples:
  cni-hostport install --replace-portmap --dry-run     what would change
  cni-hostport install --replace-portmap
  cni-hostport install --conflist /etc/cni/net.d/10-mynet.conflist
"""

PREFIX = "/opt/cni-hostport"
COMMAND = "/usr/local/bin/cni-hostport"


def main(argv: Sequence[str]) -> int:
    """Install or upgrade; or show what that would change."""
    arguments = _arguments(argv)
    try:
        steps = _plan(arguments)
    except (plan.CannotInstall, StepFailed) as error:
        return client.complain(error)
    for line in _conflicts(arguments):
        print(line)
    if arguments.dry_run:
        print(plan.summary(steps) if steps else "nothing to do")
        return 0
    if os.geteuid() != 0:
        return client.complain(PermissionError("only root can install; try sudo"))
    try:
        Apply(arguments.root, print).all(steps)
    except (StepFailed, client.NoHelper) as error:
        print(f"cni-hostport: {error}", file=sys.stderr)
        print("what was done before stands; the same command goes on from there", file=sys.stderr)
        return 1
    print("nothing to do" if not steps else "installed; 'cni-hostport doctor' looks the node over")
    return 0


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    it = parser("install", "Put plugin, service and configuration in place; also upgrades.", EPILOG)
    which = it.add_mutually_exclusive_group()
    which.add_argument(
        "--conflist", action="append", metavar="FILE", help="exchange portmap in this conflist"
    )
    which.add_argument(
        "--replace-portmap", action="store_true", help="exchange it wherever the node names it"
    )
    it.add_argument("--dry-run", action="store_true", help="show what would change, change nothing")
    it.add_argument("--prefix", default=PREFIX, metavar="DIR", help=f"bundles (default {PREFIX})")
    it.add_argument(
        "--bin-dir",
        action="append",
        metavar="DIR",
        help=f"plugin folder (default {confdirs.BIN_DIR}, and k3s' where k3s is)",
    )
    it.add_argument(
        "--command", default=COMMAND, metavar="PATH", help="link for people; '' for none"
    )
    it.add_argument("--bundle", metavar="DIR", help="another bundle than this program's own")
    it.add_argument("--no-service", action="store_true", help="no systemd unit")
    it.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="where the node's file system is mounted, to install from a container",
    )
    arguments = it.parse_args(argv)
    for path in (arguments.prefix, *(arguments.bin_dir or ()), *(arguments.conflist or ())):
        if not path.startswith("/"):
            it.error(f"{path!r} is no absolute path")
    if any(character in arguments.prefix for character in ":;$"):
        it.error(f"--prefix {arguments.prefix!r}: no bundle runs from a path with : or ; or $")
    return arguments


def _own_bundle() -> str:
    """The folder of the bundle that runs this, empty where pip installed it."""
    program = Path(shim.program()[0])
    return str(program.parent) if program.name == shim.HELPER else ""


def _own_script() -> str:
    """The command that pip installed for this Python. Raises CannotInstall."""
    script = Path(sys.executable).parent / plan.PLUGIN
    if not os.access(script, os.X_OK):
        raise plan.CannotInstall(f"no bundle and no {script}; name a bundle with --bundle")
    return str(script)


def _plan(arguments: argparse.Namespace) -> list[Step]:
    bundle = os.path.realpath(arguments.bundle) if arguments.bundle else _own_bundle()
    version = __version__
    if bundle:
        _check_glibc(Path(bundle), arguments.root)
        version = version_of(Path(bundle)) if arguments.bundle else __version__
    wanted = plan.Wanted(
        version=version,
        bundle=bundle,
        program="" if bundle else _own_script(),
        prefix=arguments.prefix.rstrip("/"),
        bin_dirs=_bin_dirs(arguments),
        command=arguments.command,
        service=not arguments.no_service and arguments.root == Path("/"),
        conflists=_conflists(arguments),
    )
    return plan.install(wanted, look(wanted, arguments.root))


def _check_glibc(bundle: Path, root: Path) -> None:
    """Say it before the node's loader does, in words that nobody would understand."""
    wanted, there = glibc.floor(bundle), glibc.of_node(root)
    if wanted and there is None:
        raise plan.CannotInstall(
            f"the bundle needs glibc {wanted[0]}.{wanted[1]} and this node has no glibc (musl?); "
            "install with pip, or build the bundle on such a node"
        )
    if wanted and there and wanted > there:
        raise plan.CannotInstall(
            f"the bundle needs glibc {wanted[0]}.{wanted[1]}, this node has {there[0]}.{there[1]}; "
            "build it on a system as old as the node (./build.sh), or install with pip"
        )


def _bin_dirs(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.bin_dir:
        return tuple(d.rstrip("/") for d in arguments.bin_dir)
    k3s = [d for d in confdirs.K3S_BIN_DIRS if inside(arguments.root, d).is_dir()]
    return (confdirs.BIN_DIR, *k3s[:1])


def _conflists(arguments: argparse.Namespace) -> tuple[str, ...]:
    if arguments.conflist:
        return tuple(arguments.conflist)
    if not arguments.replace_portmap:
        return ()
    found = [f for f in confdirs.files(arguments.root) if f.conflist]
    named = [f.path for f in found if f.conflist and f.conflist.of_type(plan.PORTMAP, plan.PLUGIN)]
    if not named:
        raise plan.CannotInstall(
            f"no conflist names portmap; looked in {', '.join(confdirs.CONF_DIRS)}; "
            "name the file with --conflist, or begin with one of conflist-examples/"
        )
    return tuple(named)


def look(wanted: plan.Wanted, root: Path) -> plan.Present:
    """What the node has of what is wanted."""
    prefix = inside(root, wanted.prefix)
    folders = {}
    if prefix.is_dir():
        bundles = [p for p in prefix.iterdir() if p.is_dir() and not p.name.startswith(".")]
        folders = {p.name: files.digest(p) for p in bundles}
    paths = [f"{d}/{plan.PLUGIN}" for d in wanted.bin_dirs] + [wanted.command]
    manifest = f"{wanted.prefix}/{plan.MANIFEST}"
    texts = (*wanted.conflists, f"{unit.FOLDER}/{unit.NAME}", manifest)
    here = wanted.service and systemd.present()
    return plan.Present(
        bundle_digest=files.digest(Path(wanted.bundle)) if wanted.bundle else "",
        folders=folders,
        links={p: _link(inside(root, p)) for p in paths if os.path.lexists(inside(root, p))},
        files={p: text_of(inside(root, p)) for p in texts},
        systemd=here,
        enabled=here and systemd.state("is-enabled", unit.NAME) == "enabled",
        helper=root == Path("/") and _helper_runs(),
        selinux=root == Path("/") and selinux.enabled(),
    )


def _link(path: Path) -> str | None:
    """What a link points at, None for anything else."""
    return os.readlink(path) if path.is_symlink() else None


def text_of(path: Path) -> str | None:
    """A file's text with its line ends as they are, None where it cannot be had."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def _helper_runs() -> bool:
    try:
        client.ask("ping", 2.0)
    except (client.NoHelper, OSError):
        return False
    return True


def _conflicts(arguments: argparse.Namespace) -> list[str]:
    """Ports of running pods that a process of the host has too: reservation will refuse them."""
    if not (arguments.replace_portmap or arguments.conflist) or arguments.root != Path("/"):
        return []
    from cni_hostport.cli.conflicts import lines

    return lines()
