"""The node's iptables for the backends: which flavour, and where chains of ours are.

Asks ``host/`` for facts and ``hostport/iptflavour.py`` for the decision. Runs a
tool only where the kernel shows legacy tables, or to learn a version.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable

from cni_hostport.errors import HostPortError, NetfilterFailed, TryAgain
from cni_hostport.host import iptables
from cni_hostport.host.iptables import FLAVOURS, Iptables
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.hostport.iptflavour import choose_flavour, has_ours
from cni_hostport.hostport.iptkernel import Runner
from cni_hostport.model import Family

FRESH = 2.0
_CHAIN = re.compile(r"^:(\S+) ", re.MULTILINE)
_NFT_TABLES = ("nat", "filter", "mangle", "raw")


class IptablesTools:
    """Both flavours, looked for once and again whenever a choice is due."""

    def __init__(self) -> None:
        self._found: dict[str, Iptables] = {}
        self._looked: float | None = None
        self._plain: dict[Family, iptables.Flavour | None] = {}
        self._readers = {name: Nftables(name) for name in _NFT_TABLES}

    def refresh(self) -> None:
        """Look for the tools again: one may have been installed or removed.

        Not twice within ``FRESH`` seconds: each look runs two processes.
        """
        now = time.monotonic()
        if self._looked is not None and now - self._looked < FRESH:
            return
        self._looked = now
        self._plain = {family: iptables.flavour_of_path(family) for family in Family}
        for flavour in FLAVOURS:
            found = iptables.find(flavour, self._plain)
            old = self._found.pop(flavour, None)
            if found is not None and old is not None and found.tools == old.tools:
                self._found[flavour] = old
                found.close()
            elif found is not None:
                self._found[flavour] = found

    def get(self, flavour: str) -> Iptables | None:
        """Tools of a flavour, None where there are none."""
        return self._found.get(flavour)

    def choose(self) -> Runner:
        """The flavour for new rules. Raises NetfilterFailed where none is installed."""
        self.refresh()
        chains = {flavour: self.chains(flavour) for flavour in self._found}
        name = choose_flavour(chains, self._found, self._plain.get(Family.V4))
        if name is None:
            raise NetfilterFailed(
                "iptables is not installed on this node",
                "install the package iptables, or use the nftables backend",
            )
        return self._found[name]

    def probe(self) -> None:
        """Whether iptables works here. Raises NetfilterFailed with the tool's words."""
        runner = self.choose()
        families = [family for family in Family if runner.has(family)]
        try:
            runner.save(families[0])
        except TryAgain as error:
            raise NetfilterFailed(error.msg, error.details) from error

    def left_behind(self, chosen: Runner | None) -> Iterable[Runner]:
        """Other flavours that hold chains of ours."""
        if not self._found:
            self.refresh()
        for flavour, tools in tuple(self._found.items()):
            if tools is not chosen and has_ours(self.chains(flavour)):
                yield tools

    def fixed(self, flavour: str) -> Runner:
        """Tools of a flavour. Raises NetfilterFailed where they are missing."""
        if flavour not in self._found:
            self.refresh()
        tools = self._found.get(flavour)
        if tools is None:
            raise NetfilterFailed(f"iptables-{flavour} is not installed on this node")
        return tools

    def filtering(self) -> dict[str, frozenset[Family]]:
        """Families in which each flavour has a FORWARD chain now; no process runs."""
        nft = set()
        for family in Family:
            with contextlib.suppress(OSError):
                if any(c.name == "FORWARD" for c in self._readers["filter"].chains(family)):
                    nft.add(family)
        legacy = {f for f in Family if "filter" in iptables.legacy_tables(f)}
        return {"nft": frozenset(nft), "legacy": frozenset(legacy)}

    def chains(self, flavour: str) -> frozenset[str]:
        """Names of all chains of a flavour, both families."""
        names: set[str] = set()
        for family in Family:
            names |= self._nft(family) if flavour == "nft" else self._legacy(family)
        return frozenset(names)

    def _nft(self, family: Family) -> set[str]:
        names: set[str] = set()
        for reader in self._readers.values():
            with contextlib.suppress(OSError):
                names.update(chain.name for chain in reader.chains(family))
        return names

    def _legacy(self, family: Family) -> set[str]:
        tools = self._found.get("legacy")
        if tools is None or not tools.has(family) or not iptables.legacy_tables(family):
            return set()
        with contextlib.suppress(HostPortError):
            return set(_CHAIN.findall(tools.save(family)))
        return set()
