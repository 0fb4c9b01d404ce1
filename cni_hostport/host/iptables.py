"""iptables-save and iptables-restore of one flavour: the effects of the iptables backend.

Decides which of the node's tools belong to a flavour, how long a busy lock is
waited for, and which failure can pass. Judges no rule.

Kernel facts: iptables-restore is atomic for each table. iptables-legacy takes
/run/xtables.lock for the whole run and exits 4 when it cannot have it;
iptables-nft needs no lock, and what it changes has a generation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cni_hostport.errors import NetfilterFailed, TryAgain
from cni_hostport.host import commands
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.model import Family

Flavour = Literal["nft", "legacy"]
FLAVOURS: tuple[Flavour, ...] = ("nft", "legacy")

LOCK_WAIT = 5
"""Seconds one iptables-restore waits for the lock (its option -w)."""

BOUND = 10.0
"""Seconds after which a busy lock becomes TryAgain (code 11)."""

_RESOURCE_PROBLEM = 4
_LEGACY_TABLES = {Family.V4: "ip_tables_names", Family.V6: "ip6_tables_names"}
_PREFIX = {Family.V4: "iptables", Family.V6: "ip6tables"}


class NotAnswered(NetfilterFailed):
    """A tool hung and was killed: what it did is unknown. Code 102."""


def flavour_of_path(family: Family = Family.V4) -> Flavour | None:
    """Flavour of the plain tool on PATH, None where there is none that says it."""
    try:
        result = commands.run([_PREFIX[family], "--version"], None, 5.0)
    except (commands.CommandError, OSError):
        return None
    if "iptables" not in result.stdout and "ip6tables" not in result.stdout:
        return None
    return "nft" if "nf_tables" in result.stdout else "legacy"


def legacy_tables(family: Family) -> frozenset[str]:
    """Tables that iptables-legacy has in this net namespace; reading them makes none."""
    with contextlib.suppress(OSError):
        # thread-self: the namespace of whoever asks
        file = Path("/proc/thread-self/net") / _LEGACY_TABLES[family]
        return frozenset(file.read_text("ascii").split())
    return frozenset()


@dataclass(frozen=True, slots=True)
class Names:
    """The tools of one family: absolute or plain names."""

    save: str
    restore: str


def _names(flavour: Flavour, family: Family, plain: Flavour | None) -> Names | None:
    """Plain names where they are of the flavour, so that a wrapper on PATH is used as well."""
    prefix = _PREFIX[family]
    stems = [prefix] if plain == flavour else []
    for stem in (*stems, f"{prefix}-{flavour}"):
        save, restore = f"{stem}-save", f"{stem}-restore"
        if commands.find(save) and commands.find(restore):
            return Names(save, restore)
    return None


class Iptables:
    """Tools of one flavour, for the families that have them."""

    def __init__(self, flavour: Flavour, tools: Mapping[Family, Names]) -> None:
        self.flavour = flavour
        self.tools = dict(tools)
        self._nat = Nftables("nat") if flavour == "nft" else None

    def __str__(self) -> str:
        return f"iptables-{self.flavour}"

    def has(self, family: Family) -> bool:
        """Whether the family's tools are installed."""
        return family in self.tools

    def close(self) -> None:
        """Give the netlink socket back."""
        if self._nat is not None:
            self._nat.close()

    def generation(self) -> int | None:
        """Number of the ruleset, None where there is none to ask (legacy)."""
        if self._nat is None:
            return None
        with contextlib.suppress(OSError):
            return self._nat.generation()
        return None

    def save(self, family: Family) -> str:
        """All tables of the family as text. Raises NetfilterFailed, TryAgain."""
        result = self._run([self._tool(family).save], None, BOUND)
        if result.rc:
            raise self._refused(result)
        return result.stdout

    def restore(self, family: Family, text: str) -> None:
        """Apply a restore text without touching anything it does not name.

        Raises TryAgain (11) when the lock stays busy, NotAnswered when the tool
        hangs, NetfilterFailed (102) with the tool's words otherwise.
        """
        tool = self._tool(family).restore
        end, pause = time.monotonic() + BOUND, 0.05
        while True:
            wait = max(1, min(LOCK_WAIT, int(end - time.monotonic())))
            argv = [tool, "-w", str(wait), "--noflush", "--counters"]
            result = self._run(argv, text, BOUND)
            if result.rc == 0:
                return
            if result.rc != _RESOURCE_PROBLEM or _is_final(result.words):
                raise self._refused(result)
            if time.monotonic() + pause >= end:
                raise TryAgain(
                    f"{tool} cannot have the xtables lock within {BOUND:g} s",
                    f"{result.words or 'no words'}; try again, or see who holds /run/xtables.lock",
                )
            time.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _tool(self, family: Family) -> Names:
        tool = self.tools.get(family)
        if tool is None:
            prefix = _PREFIX[family]
            raise NetfilterFailed(
                f"{prefix} ({self.flavour}) is not installed on this node",
                f"IPv{int(family)} host ports need it: install iptables",
            )
        return tool

    def _run(self, argv: list[str], text: str | None, timeout: float) -> commands.CompletedCommand:
        try:
            return commands.run(argv, text, timeout)
        except commands.CommandMissing as error:
            raise NetfilterFailed(
                f"cannot run {argv[0]}", f"{error.words}; install the package iptables"
            ) from None
        except commands.CommandTimeout as error:
            raise NotAnswered(f"{argv[0]} did not answer", error.words) from None
        except OSError as error:
            raise TryAgain(f"cannot start {argv[0]}", str(error)) from None

    def _refused(self, result: commands.CompletedCommand) -> NetfilterFailed:
        return NetfilterFailed(
            f"{result.argv[0]} refused the rules", result.words or f"exit status {result.rc}"
        )


def _is_final(words: str) -> bool:
    """iptables-nft exits 4 for every refusal of the kernel; waiting helps against few."""
    return "failed (" in words and "temporarily" not in words


def find(flavour: Flavour, plain: Mapping[Family, Flavour | None]) -> Iptables | None:
    """Tools of that flavour, None where no family has them.

    ``plain``: what the tools without a flavour in their name are (flavour_of_path).
    """
    tools = {}
    for family in Family:
        found = _names(flavour, family, plain.get(family))
        if found is not None:
            tools[family] = found
    return Iptables(flavour, tools) if tools else None
