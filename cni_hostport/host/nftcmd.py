"""Tables, chains and rules as text through ``nft -f -``.

Decides nothing about the text; makes nft's refusals readable. Rare: at the first
mapping, at a repair, when conditions come. Elements go over netlink. Never runs
``nft --check``, which waits for the kernel without need.
"""

from __future__ import annotations

import os
import re

from cni_hostport.errors import NetfilterFailed, TryAgain
from cni_hostport.host import commands

_VERSION = re.compile(r"nftables v(\d+)\.(\d+)(?:\.(\d+))?")


def load(text: str, timeout: float = 10.0) -> None:
    """Apply a ruleset text in one transaction; ``timeout`` in seconds.

    Raises NetfilterFailed (code 102) with nft's own words and nothing changed,
    TryAgain (code 11) where no process can be started now.
    """
    try:
        result = commands.run(["nft", "-f", "-"], text, timeout)
    except commands.CommandMissing as error:
        raise NetfilterFailed(
            "cannot run nft", f"{error.words}; install the package nftables"
        ) from None
    except commands.CommandTimeout as error:
        raise NetfilterFailed("nft did not answer", error.words) from None
    except OSError as error:
        raise TryAgain("cannot start nft", str(error)) from None
    if result.rc:
        raise NetfilterFailed("nft refused the rules", result.words or f"exit status {result.rc}")


def listing(family: str, table: str, timeout: float = 10.0) -> str:
    """A table as nft's JSON with handles; empty where there is none or nft does not say.

    Slow with many rules: for tables of others, and never on the path of a call.
    """
    try:
        result = commands.run(["nft", "-j", "-a", "list", "table", family, table], None, timeout)
    except (commands.CommandError, OSError):
        return ""
    return "" if result.rc else result.stdout


_Version = tuple[int, int, int]
_seen: dict[tuple[str, int, int, int], _Version] = {}


def version(timeout: float = 1.0) -> _Version | None:
    """Version of the node's nft, None where there is none that says it in ``timeout`` seconds.

    STATUS asks every few seconds: an nft that answered runs again only when its file is
    another one.
    """
    program = commands.find("nft")
    if program is None:
        return None
    try:
        found = os.stat(program)
    except OSError:
        return None
    file = (program, found.st_dev, found.st_ino, found.st_mtime_ns)
    if file not in _seen:
        answer = _ask_version(timeout)
        if answer is None:
            return None
        _seen.clear()
        _seen[file] = answer
    return _seen[file]


def _ask_version(timeout: float) -> _Version | None:
    try:
        result = commands.run(["nft", "--version"], None, timeout)
    except (commands.CommandError, OSError):
        return None
    found = _VERSION.search(result.stdout)
    if found is None:
        return None
    major, minor, patch = found.groups()
    return int(major), int(minor), int(patch or 0)
