"""The nftables backend: keeps the kernel's two tables equal to what is wanted.

Decides which elements go into which transaction; the bytes and the process
runs are ``host/``'s. One owner is an attachment's key, ``NODE`` for the node's own
address sets, or ``NETWORK`` (``networks.py``, whose elements leave with a look); an element
several owners want is in the kernel once, under the first owner's comment, and leaves with the
last.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport.backend import Repair
from cni_hostport.hostport.networks import NETWORK, still_needed, with_networks
from cni_hostport.hostport.nftplan import node_elements
from cni_hostport.hostport.nftstate import Snapshot, difference, is_whole, picture, planned, same
from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed
from cni_hostport.hostport.profiles import Profiles
from cni_hostport.hostport.wanted import Place, Wanted, first
from cni_hostport.model import Family
from cni_hostport.netfilter import nftprofiles, nftrules
from cni_hostport.netfilter.elements import Element, describe

log = logging.getLogger(__name__)

NODE = "node"


class Tables(Protocol):
    """What this backend needs of the kernel (``host/nfnetlink.py`` has it)."""

    def apply(self, add: Sequence[Element], delete: Sequence[Element]) -> None: ...
    def get(self, elements: Sequence[Element]) -> list[Element | None]: ...
    def dump(self, family: Family, set_name: str) -> list[Element]: ...
    def rules(self, family: Family) -> Sequence[Any]: ...
    def chains(self, family: Family) -> Sequence[Any]: ...
    def has_table(self, family: Family) -> bool: ...
    def generation(self) -> int: ...
    def delete_tables(self) -> None: ...


class NftablesBackend:
    """Wanted elements by owner, and the transactions that make them true.

    Not thread-safe: every method runs under the helper's one lock.
    """

    name = "nftables"

    def __init__(self, tables: Tables, load: Callable[[str], None]) -> None:
        self._tables = tables
        self._load = load
        self._wanted = Wanted()
        self._snapshot: Snapshot | None = None
        self._owed: Repair | None = None
        self._unproven = False
        """The tables are an earlier helper's: whole, and not yet made anew by this one."""
        self._profiles = Profiles()
        self._intact: int | None = None
        """Generation of the ruleset at which the kernel held all that is wanted, nothing else."""
        self._since = 0
        """Transactions of ours since then: each makes the generation one larger."""

    @property
    def installed(self) -> bool:
        """Whether our tables are believed to be in the kernel."""
        return self._snapshot is not None

    @property
    def in_use(self) -> bool:
        """Whether any attachment wants something."""
        return any(owner not in (NODE, NETWORK) for owner in self._wanted.owners())

    def elements_of(self, owner: str) -> tuple[Element, ...]:
        """What the owner wants at present."""
        return self._wanted.of_owner(owner)

    def assume(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Remember what attachments want without touching the kernel (start-up)."""
        self._profiles.ask(changes)
        wanted = with_networks(planned(changes, node), self._wanted)
        self._assume({NODE: node_elements(node, NODE), **wanted})

    def place(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Make each attachment's elements what it now wants, in one transaction.

        Raises NetfilterFailed (code 102) with nothing changed. Conditions that
        nobody had before, or has any more, are a transaction of their own.
        """
        before = self._profiles.ask(changes)
        try:
            if self.installed and self._profiles.missing:
                self._reload()
            self._apply(with_networks(planned(changes, node), self._wanted))
        except NetfilterFailed:
            self._profiles.put_back(before)
            self._drop_profiles()
            raise
        self._drop_profiles()

    def _drop_profiles(self) -> None:
        if self.installed and self._profiles.surplus:
            try:
                self._reload()
            except (OSError, NetfilterFailed) as error:
                log.error("conditions that nobody has any more stay: %s", error)

    def _reload(self) -> None:
        """Rules anew, with the profiles that are wanted now and without any other."""
        chains = {f: [c.name for c in self._tables.chains(f)] for f in Family}
        self._load(nftrules.tables_text() + self._profiles.text(chains))
        self._profiles.loaded()
        self._snapshot = self._look()

    def set_node(self, node: NodeView) -> None:
        """Follow the node's addresses: which are answered, which are excluded."""
        self._apply({NODE: node_elements(node, NODE)})

    def _assume(self, changes: Mapping[str, Iterable[Element]]) -> None:
        self._intact = None
        for owner, elements in changes.items():
            self._wanted.replace(owner, elements)

    def _apply(self, changes: Mapping[str, Iterable[Element]]) -> None:
        """Make each owner's elements exactly these, in one transaction.

        Raises NetfilterFailed (code 102) with nothing changed.
        """
        before = {owner: self._wanted.of_owner(owner) for owner in changes}
        try:
            try:
                self._transact(changes, before)
            except OSError as error:
                if not self.installed:
                    raise
                # our tables or elements are not as we left them: mend, then once more
                log.warning("transaction refused (%s), mending tables first", error)
                self._assume(before)
                # told by the next repair, which is made known and counted
                self._owed = self.repair()
                self._transact(changes, before)
        except OSError as error:
            self._assume(before)
            self._try_repair()
            raise self._failed(error) from error
        except NetfilterFailed:
            self._assume(before)
            raise

    def _transact(
        self, changes: Mapping[str, Iterable[Element]], before: Mapping[str, tuple[Element, ...]]
    ) -> None:
        old, intact = self._kernel_view(changes, before), self._intact
        self._assume(changes)
        new = self._kernel_view(changes, before)
        add, delete = difference(old, new)
        if not add and not delete:
            self._intact = intact
            return
        if self.installed:
            self._tables.apply(add, delete)
            self._intact, self._since = intact, self._since + 1
        elif self.in_use:
            self.repair()
        else:
            self.retire()  # an earlier helper's tables, which this one never could mend

    def _try_repair(self) -> None:
        try:
            self.repair()
        except (OSError, NetfilterFailed) as error:
            log.error("netfilter cannot be brought back: %s", error)

    def _failed(self, error: OSError) -> NetfilterFailed:
        return NetfilterFailed(
            "nftables refused the change",
            f"{error}; see 'nft list table ip {nftrules.TABLE}'",
        )

    def repair(self) -> Repair:
        """Compare kernel and wish, and make the kernel follow.

        Raises OSError or NetfilterFailed when the kernel refuses.
        """
        report, self._owed = self._owed or Repair(), None
        if not self.in_use:
            self.retire()
            return report
        generation = self._tables.generation()
        if self._intact is not None and self._intact + self._since == generation:
            self._intact, self._since = generation, 0  # nobody else has changed anything since
        else:
            self._mend(report)
            self._intact, self._since = None if report or self._unproven else generation, 0
        self._leave_networks()
        return report

    def _leave_networks(self) -> None:
        """Take away what networks share of which no attachment has need any more."""
        before, needed = self._wanted.of_owner(NETWORK), still_needed(self._wanted)
        if needed == before:
            return
        try:
            self._transact({NETWORK: needed}, {NETWORK: before})
        except OSError as error:  # the next look mends what is wrong, and tries again
            log.warning("elements that nobody needs stay for now: %s", error)
            self._assume({NETWORK: before})

    def _mend(self, report: Repair) -> None:
        self._intact = None
        current = self._look()
        if current is None or current != self._snapshot or self._unproven:
            fresh = self._snapshot is None or self._unproven
            if not fresh:
                report.tables = [f"{nftrules.nft_family(f)} {nftrules.TABLE}" for f in Family]
            self._install()
        try:
            self._repair_elements(report)
        except (OSError, ValueError) as error:
            # a set of our name that is not as we declare it (size, flags, key)
            log.warning("elements refused (%s): tables are made anew", error)
            self._load_fresh()
            self._repair_elements(report)

    def _load_fresh(self) -> None:
        self._load(nftrules.fresh_tables_text() + self._profiles.text({}))
        self._profiles.loaded()
        self._snapshot = self._look()

    def _install(self) -> None:
        try:
            self._reload()
            whole = is_whole(self._snapshot, self._profiles.wanted)
        except NetfilterFailed:
            whole = False
        if not whole:
            # somebody made a set or chain of our name with another type, or one of his own
            try:
                self._load_fresh()
            except NetfilterFailed as error:
                self._adopt(error)
                return
        self._unproven = False

    def _adopt(self, error: NetfilterFailed) -> None:
        """Where nft does not work after a restart: tables that are whole serve as they are."""
        current = self._look()
        first_look = self._snapshot is None or self._unproven
        if not first_look or not is_whole(current, self._profiles.wanted):
            raise error
        if not self._unproven:
            log.warning("the tables of an earlier helper are used unchanged: %s", error)
        self._snapshot, self._unproven = current, True
        self._profiles.loaded()

    def _look(self) -> Snapshot | None:
        """Chains and rules of both tables, comparable; None where one is absent."""
        if not all(self._tables.has_table(f) for f in Family):
            return None
        try:
            return tuple(picture(f, self._tables.rules(f), self._tables.chains(f)) for f in Family)
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
            return None

    def _repair_elements(self, report: Repair) -> None:
        add: list[Element] = []
        delete: list[Element] = []
        for family in Family:
            for name in nftprofiles.sets_of(family, self._profiles.wanted):
                mine = dict(self._wanted.of_set(family, name))
                for found in self._tables.dump(family, name):
                    have = mine.get(found.key)
                    if have is not None and same(found, have):
                        del mine[found.key]
                        self._wanted.put_first(found)
                    else:
                        delete.append(found)
                add.extend(map(first, mine.values()))
        if add or delete:
            self._tables.apply(add, delete)
        report.missing += len(add)
        report.foreign += len(delete)
        report.examples += [describe(e) for e in [*add[:1], *delete[:1]]]

    def check(self, owner: str) -> list[str]:
        """Names what the owner misses in the kernel; changes nothing."""
        elements = self._wanted.of_owner(owner)
        if not elements:
            return []
        current = self._look()
        if current is None:
            return [f"table {nftrules.TABLE}"]
        missing = []
        if self._snapshot is not None and current != self._snapshot:
            missing.append(f"rules of table {nftrules.TABLE} (changed by somebody)")
        try:
            found = self._tables.get(elements)
        except OSError as error:
            return [*missing, f"elements of table {nftrules.TABLE} ({error})"]
        for element, there in zip(elements, found, strict=True):
            if there is None:
                missing.append(f"element {describe(element)}")
            elif not same(there, self._wanted.at(element.place)):
                missing.append(f"element {describe(element)} (found {describe(there)})")
        return missing

    def retire(self) -> bool:
        """Remove our tables if no attachment needs them; True if something went."""
        if self.in_use:
            return False
        there = any(self._tables.has_table(f) for f in Family)
        if there:
            self._tables.delete_tables()
        self._wanted.replace(NETWORK, ())
        self._snapshot, self._unproven = None, False
        self._profiles.gone()
        return there

    def _kernel_view(
        self, changes: Mapping[str, Iterable[Element]], before: Mapping[str, tuple[Element, ...]]
    ) -> dict[Place, Element]:
        """What the kernel should hold now for every lookup the change touches."""
        view: dict[Place, Element] = {}
        for owner, elements in changes.items():
            for element in (*before[owner], *elements):
                place = element.place
                wanted = self._wanted.first_at(place)
                if wanted is not None:
                    view[place] = wanted
        return view
