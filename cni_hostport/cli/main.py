"""The command line: finds the command and leaves everything else to its file.

Decides nothing beyond the name. A command is a module of this package with
``main(argv) -> exit status``; only the one that runs is imported. Exit status:
0 well, 1 differences or failure, 2 usage, 3 no helper.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

COMMANDS = {
    "status": "host ports of this node: who has them, held or not, connections",
    "check": "compare every attachment with the kernel's state",
    "gc": "remove attachments whose network namespace is gone",
    "doctor": "can this node do it, and what stands in the way",
    "install": "put plugin, unit and configuration in place",
    "uninstall": "undo install",
    "helper": "the node's helper process",
    "ping": "does the helper answer? for probes",
    "metrics": "the helper's metrics in Prometheus' text format",
    "node-cache": "the node-local DNS cache agent",
    "version": "version of this program and of what it speaks",
}
_INTERNAL = ("call", "linger")
_ALIASES = {"--version": "version", "-V": "version"}


def module_of(command: str) -> str:
    """Name of the module that holds a command."""
    return f"cni_hostport.cli.{command.replace('-', '_')}"


def usage() -> str:
    """The overview that ``--help`` prints."""
    lines = [f"  {name:<12} {text}" for name, text in COMMANDS.items() if _exists(name)]
    return "\n".join(
        [
            "usage: cni-hostport COMMAND [OPTION...]",
            "",
            "Gives pods their host ports. A container runtime calls it as a CNI plugin, without",
            "arguments; the commands are for the node's operator.",
            "",
            *lines,
            "",
            "exit status: 0 well, 1 differences or failure, 2 usage, 3 no helper answers",
            "",
            "examples:",
            "  cni-hostport install --replace-portmap    in portmap's place, on this node",
            "  cni-hostport status --port 8080           who has port 8080?",
            "  cni-hostport doctor                       what stands in the way, and what mends it",
            "",
            "cni-hostport COMMAND --help tells more, each with an example.",
        ]
    )


def _exists(command: str) -> bool:
    return importlib.util.find_spec(module_of(command)) is not None


def main(argv: Sequence[str]) -> int:
    """Run one command; ``argv`` without the program's name."""
    if argv and argv[0] in _INTERNAL:  # not for people: nothing more than it needs
        return int(importlib.import_module(module_of(argv[0])).main(argv[1:]))
    if not argv or argv[0] in {"-h", "--help", "help"}:
        print(usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    command = _ALIASES.get(argv[0], argv[0])
    if command not in COMMANDS or not _exists(command):
        print(f"cni-hostport: no command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        status = int(importlib.import_module(module_of(command)).main(argv[1:]))
        if sys.stdout is not None:  # closed by whoever started us
            sys.stdout.flush()
    except BrokenPipeError:  # `cni-hostport status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
