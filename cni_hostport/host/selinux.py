"""SELinux labels of files: whether they matter here, which are wrong, and put right.

Decides nothing: the node's policy says what a label should be (restorecon(8)).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from cni_hostport.host import commands

_ENFORCE = Path("/sys/fs/selinux/enforce")
_WOULD = re.compile(r"^Would relabel (.+) from (\S+) to (\S+)$", re.MULTILINE)


def enabled() -> bool:
    """Whether the kernel has a policy and the node the tool."""
    return _ENFORCE.exists() and commands.find("restorecon") is not None


def restore(paths: Sequence[str]) -> str:
    """Give files and folders the labels of the policy; why not, empty if done."""
    try:
        commands.run(["restorecon", "-R", *paths], None, 60.0).check()
    except commands.CommandError as error:
        return str(error)
    return ""


def wrong(paths: Sequence[str]) -> list[tuple[str, str, str]]:
    """Files whose label is not the policy's: (path, label, what it should be)."""
    try:
        found = commands.run(["restorecon", "-nvR", *paths], None, 60.0)
    except commands.CommandError:
        return []
    return [(m[1], m[2], m[3]) for m in _WOULD.finditer(found.stdout)]
