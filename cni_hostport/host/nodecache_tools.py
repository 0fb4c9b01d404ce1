"""iptables and nft for the local DNS cache: texts in, texts out, one process each.

Decides which executable a family and flavour need, how long a busy lock is
waited for, and what a failure means (lock, missing match, anything else).
Knows no rule. A lock that stays held can be passed by: the kernel replaces a
table whole or refuses, so the lock only spares tools a retry.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cni_hostport.host import commands
from cni_hostport.host.nodecache_kernel import Flavour
from cni_hostport.model import Family

Trouble = Literal["lock", "match", "other", "missing"]
_LOCKED = "holding the xtables lock"
_LOCK_STATUS = 4


class ToolError(Exception):
    """A tool failed; ``trouble`` says in which way, the text is its own words."""

    def __init__(self, trouble: Trouble, words: str) -> None:
        super().__init__(words)
        self.trouble = trouble


Runner = Callable[[list[str], str | None, float], commands.CompletedCommand]


def _run(argv: list[str], stdin: str | None, timeout: float) -> commands.CompletedCommand:
    return commands.run(argv, stdin, timeout)


class Tools:
    """Runs the tools and counts the processes it took.

    ``private_lock`` names the file that stands for the tools' own lock when
    that one is passed by.
    """

    def __init__(self, private_lock: str, run: Runner = _run) -> None:
        self._run = run
        self._private_lock = private_lock
        self.processes = 0

    def save(self, family: Family, flavour: Flavour) -> str:
        """All tables of a family as iptables-save prints them. Raises ToolError."""
        return self._checked([executable(family, flavour, "save")], None, 15.0)

    def restore(
        self, family: Family, flavour: Flavour, text: str, *, patience: float, force: bool = False
    ) -> None:
        """Apply a restore text, nothing flushed. Raises ToolError.

        ``patience`` is how many seconds a held lock is waited for; ``force``
        passes it by after that.
        """
        tool = [executable(family, flavour, "restore"), "--noflush"]
        waits = ["-w", str(int(patience))] if patience >= 1 else []
        deadline = time.monotonic() + patience
        while True:
            try:
                self._checked([*tool, *waits], text, patience + 10.0)
            except ToolError as error:
                if error.trouble != "lock":
                    raise
                if time.monotonic() < deadline and not waits:
                    time.sleep(0.05)
                    continue
                if not force:
                    raise
            else:
                return
            lock = f"XTABLES_LOCKFILE={self._private_lock}"
            self._checked(["env", lock, *tool, "-w", "1"], text, 10.0)
            return

    def nft(self, text: str) -> None:
        """Apply an nft text in one transaction. Raises ToolError."""
        self._checked(["nft", "-f", "-"], text, 15.0)

    def nft_table(self, family: str, table: str) -> str | None:
        """A table as ``nft -s list table`` prints it; None where there is none."""
        try:
            return self._checked(["nft", "-s", "list", "table", family, table], None, 15.0)
        except ToolError as error:
            if "No such file" in str(error):
                return None
            raise

    def _checked(self, argv: list[str], stdin: str | None, timeout: float) -> str:
        self.processes += 1
        try:
            done = self._run(argv, stdin, timeout)
        except commands.CommandMissing as error:
            raise ToolError("missing", str(error)) from error
        except commands.CommandError as error:
            raise ToolError("other", str(error)) from error
        if done.rc == 0:
            return done.stdout
        words = f"{argv[0]}: exit status {done.rc}: {done.words}"
        if _LOCKED in done.words or (done.rc == _LOCK_STATUS and "lock" in done.words):
            raise ToolError("lock", words)
        if "socket" in done.words and "iptables" not in done.words.partition("socket")[2]:
            raise ToolError("match", words)
        raise ToolError("other", words)


def executable(family: Family, flavour: Flavour, verb: Literal["save", "restore"]) -> str:
    """The command for a family and flavour: the flavour's own name where it exists."""
    base = "iptables" if family is Family.V4 else "ip6tables"
    own = f"{base}-{flavour}-{verb}"
    return own if commands.find(own) else f"{base}-{verb}"


def default_flavour(family: Family) -> Flavour | None:
    """What ``iptables`` on the PATH is; None where the node has none."""
    found = commands.find("iptables-restore" if family is Family.V4 else "ip6tables-restore")
    if found is None:
        return None
    return "legacy" if "legacy" in str(Path(found).resolve()) else "nft"


def has_nft() -> bool:
    """Whether nft is installed."""
    return commands.find("nft") is not None
