"""The node's service manager: is it there, and a few of its verbs.

Decides nothing about units. Every answer is a value; a node without systemd is
not an error.
"""

from __future__ import annotations

from pathlib import Path

from cni_hostport.host import commands

_RUNNING = Path("/run/systemd/system")


def present() -> bool:
    """Whether systemd runs this node and systemctl is there (sd_booted(3))."""
    return _RUNNING.is_dir() and commands.find("systemctl") is not None


def state(verb: str, unit: str) -> str:
    """What ``systemctl is-enabled`` or ``is-active`` prints; empty if it says nothing."""
    try:
        return commands.run(["systemctl", verb, unit], None, 10.0).stdout.strip()
    except commands.CommandError:
        return ""


def run(*words: str, timeout: float = 60.0) -> str:
    """Run systemctl; the reason it failed, empty if it did not."""
    try:
        commands.run(["systemctl", *words], None, timeout).check()
    except commands.CommandError as error:
        return str(error)
    return ""
