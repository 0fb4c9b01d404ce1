"""Other managers of host ports on this node: portmap, CRI-O, dockershim.

Knows from the start and from nft's events whether any is there, so that no call
has to look. Reports mappings of theirs on our ports with the command that
removes them; removes only what portmap left for a container whose DEL came to us.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Iterable

from cni_hostport import cni
from cni_hostport.errors import HostPortError
from cni_hostport.helper.iptools import IptablesTools
from cni_hostport.host import iptables, nftcmd
from cni_hostport.host.nfevents import NftEvent
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport import portmap
from cni_hostport.hostport.iptkernel import Runner, read, rendered
from cni_hostport.hostport.iptstep import ForeignJump, foreign_jumps
from cni_hostport.hostport.machine import Machine
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.model import Family
from cni_hostport.netfilter.nftrules import nft_family

log = logging.getLogger(__name__)

APART = 20.0
"""Seconds at least between two looks."""

_TOOL = {Family.V4: "iptables", Family.V6: "ip6tables"}


class Others:
    """What is known of other managers; ``look`` and ``leftovers`` run on the worker."""

    def __init__(self, manager: HostPortManager, machine: Machine, tools: IptablesTools) -> None:
        self._manager = manager
        self._machine = machine
        self._tools = tools
        self._portmap = Nftables(portmap.TABLE)
        self._due = True
        self._looked: float | None = None
        self._portmap_flavours: frozenset[str] = frozenset()
        self._portmap_nft = False
        self._jumps: tuple[tuple[str, Family, ForeignJump], ...] = ()
        self._nft_mappings: tuple[tuple[Family, portmap.NftMapping], ...] = ()

    def note(self, event: NftEvent) -> None:
        """Take an event in; what it may have changed is known better after the next look."""
        if event.portmap or event.overflow:
            self._portmap_flavours |= {"nft"}
            self._portmap_nft = True
        self._due = self._due or event.overflow or event.portmap or event.iptables

    def look(self) -> None:
        """Look again if something happened, or could have (legacy has no events). Never raises.

        Not more often than every ``APART`` seconds: it may run iptables-save, and our own
        changes are among what happens.
        """
        now = time.monotonic()
        if self._looked is not None and now - self._looked < APART:
            return
        legacy = any(iptables.legacy_tables(f) for f in Family)
        if not self._due and not legacy:
            return
        self._due, self._looked = False, now
        try:
            self._look(("nft", "legacy") if legacy else ("nft",))
        except (OSError, HostPortError) as error:
            log.warning("cannot look for other host-port managers: %s", error)

    def _look(self, flavours: Iterable[str]) -> None:
        chains = {}
        for flavour in flavours:
            if flavour == "legacy" and self._tools.get(flavour) is None:
                self._tools.refresh()
            chains[flavour] = self._tools.chains(flavour)
        self._portmap_flavours = frozenset(f for f, c in chains.items() if portmap.is_portmaps(c))
        self._portmap_nft = any(name == portmap.TABLE for _, name in self._portmap.tables())
        self._nft_mappings = tuple(
            (family, mapping)
            for family in (Family if self._portmap_nft else ())
            for mapping in portmap.nft_mappings(nftcmd.listing(nft_family(family), portmap.TABLE))
        )
        jumps = []
        for flavour, present in chains.items():
            if names.HOSTPORTS in present or flavour in self._portmap_flavours:
                jumps += self._foreign(self._tools.fixed(flavour))
        self._jumps = tuple(jumps)

    def _foreign(self, runner: Runner) -> list[tuple[str, Family, ForeignJump]]:
        return [
            (runner.flavour, family, jump)
            for family in Family
            if runner.has(family)
            for tables in (read(runner, family)[0],)
            for jump in (*foreign_jumps(tables), *portmap.mappings(tables))
        ]

    # for ``status``

    def warnings(self) -> list[str]:
        """Mappings of others on our ports, each with the command that removes it."""
        ours: dict[tuple[Family, str, int], str] = {}
        for record in self._manager.registry:
            for claim in record.attachment.claims():
                ours[claim.family, str(claim.protocol), claim.port] = record.backend
        out = []
        for flavour, family, jump in self._jumps:
            backend = ours.get((family, jump.protocol, jump.port))
            if backend is not None:
                out.append(_warning(flavour, family, jump, backend))
        for family, mapping in self._nft_mappings:
            backend = ours.get((family, mapping.protocol, mapping.port))
            if backend is not None:
                out.append(_nft_warning(family, mapping, backend))
        return out

    # for a DEL without a record

    def leftovers(self, call: cni.Call) -> None:
        """Remove what portmap keeps for the call's container; nothing runs on most nodes.

        Raises NetfilterFailed or TryAgain.
        """
        identity = call.identity
        if identity is None:
            return
        if self._portmap_nft:
            self._remove_nft(identity.container_id)
        for flavour in self._portmap_flavours:
            if flavour == "nft" and not portmap.is_portmaps(self._tools.chains(flavour)):
                continue  # only an event spoke for it: this node may have no iptables at all
            runner = self._tools.fixed(flavour)
            for family in Family:
                if runner.has(family):
                    self._remove(runner, family, identity.network, identity.container_id)

    def _remove(self, runner: Runner, family: Family, network: str, container_id: str) -> None:
        tables, _ = read(runner, family)
        difference = portmap.removal(tables, network, container_id)
        if not difference:
            return
        runner.restore(family, rendered(difference.blocks()))
        self._due = True
        log.warning("portmap's rules for container %s removed (%s)", container_id, runner.flavour)
        with contextlib.suppress(OSError):
            self._machine.drop_udp_from(portmap.udp_targets(tables, network, container_id))

    def _remove_nft(self, container_id: str) -> None:
        found = {
            nft_family(f): [(r.chain, r.handle, r.comment) for r in self._portmap.rules(f)]
            for f in Family
        }
        text = portmap.nft_removal(found, container_id)
        if text:
            nftcmd.load(text)
            log.warning("portmap's rules for container %s removed (nftables)", container_id)


def _warning(flavour: str, family: Family, jump: ForeignJump, backend: str) -> str:
    tool = f"{_TOOL[family]}-{flavour}"
    command = f"{tool} -t nat -D {jump.parent} {shlex.join(jump.args)}"
    effect = "it wins over ours" if backend == "nftables" else "ours comes first"
    if backend != "nftables" and jump.parent != names.HOSTPORTS:
        effect = "the first of the two in PREROUTING wins"
    return (
        f"port {jump.port}/{jump.protocol} (IPv{int(family)}): chain {jump.chain} of another "
        f"manager ({jump.comment or 'no comment'}) leads to {jump.target or 'nowhere'}; {effect}. "
        f"If its pod is gone: {command}"
    )


def _nft_warning(family: Family, mapping: portmap.NftMapping, backend: str) -> str:
    where = f"{nft_family(family)} {portmap.TABLE} {mapping.chain}"
    # portmap's chains stand at dstnat: before ours, level with those of iptables, and of two
    # hooks with one priority the kernel asks the younger first
    effect = "it wins over ours" if backend == "nftables" else "the younger of the two tables wins"
    return (
        f"port {mapping.port}/{mapping.protocol} (IPv{int(family)}): a rule of portmap "
        f"({mapping.comment or 'no comment'}) in table {portmap.TABLE} leads to "
        f"{mapping.target}; {effect}. "
        f"If its pod is gone: nft delete rule {where} handle {mapping.handle}"
    )
