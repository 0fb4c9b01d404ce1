"""What the kernel's iptables are believed to hold, and how they are brought to a wish.

Decides when a change can be written without reading first, and what is still
known after each restore. Holds no wish of its own: the backend hands one in
with every call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport import iptdiff
from cni_hostport.hostport import iptnames as names
from cni_hostport.hostport.iptdiff import Difference, Wish
from cni_hostport.model import Family
from cni_hostport.netfilter import restore

log = logging.getLogger(__name__)


class Runner(Protocol):
    """One flavour's tools (``host/iptables.py``)."""

    @property
    def flavour(self) -> str: ...
    def has(self, family: Family) -> bool: ...
    def save(self, family: Family) -> str: ...
    def restore(self, family: Family, text: str) -> None: ...
    def generation(self) -> int | None: ...


class Toolbox(Protocol):
    """Which tools there are, and which of them to use."""

    def choose(self) -> Runner:
        """The flavour for new rules. Raises NetfilterFailed where there is none."""

    def left_behind(self, chosen: Runner | None) -> Iterable[Runner]:
        """Other flavours that hold chains of ours."""


@dataclass(slots=True)
class Belief:
    """What is believed of one family's tables.

    ``trusted``: our shared chains are there, the short way may be taken.
    ``seen``: hash of the last save that was right; ``generation``: the
    ruleset's number at which it was right. ``kept``: KUBE-HOSTPORTS was there
    before us.
    """

    trusted: bool = False
    seen: int | None = None
    generation: int | None = None
    kept: bool = False


class KernelTables:
    """iptables of this node through the chosen flavour's tools."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._belief: dict[Family, Belief] = {}
        self.runner: Runner | None = None

    @property
    def families(self) -> tuple[Family, ...]:
        """Families in which something of ours may be."""
        return tuple(self._belief)

    def tools(self) -> Runner:
        """The tools in use; chosen anew whenever nothing of ours is there."""
        if self.runner is None or not self._belief:
            self.runner = self._toolbox.choose()
        return self.runner

    def belief(self, family: Family) -> Belief:
        """What is believed of that family; nothing where we never were."""
        return self._belief.get(family) or Belief()

    def distrust(self) -> None:
        """Something went wrong: read before the next change."""
        for belief in self._belief.values():
            belief.trusted, belief.seen, belief.generation = False, None, None

    def is_verified(self, family: Family) -> bool:
        """Whether nobody has changed any rule since all was right; no process runs."""
        known = self.belief(family).generation
        return known is not None and self.tools().generation() == known

    def change(self, steps: Mapping[Family, Difference], wishes: Mapping[Family, Wish]) -> None:
        """One change: the short way where the kernel is known, the long one otherwise.

        Raises NetfilterFailed or TryAgain; tables may then be changed in part.
        """
        known = {f: step for f, step in steps.items() if self.belief(f).trusted}
        failed: dict[Family, Exception] = {}
        if known:
            for family in known:
                self._belief[family].seen = None
            failed = self._write(self.tools(), known)
        for family in steps:
            error = failed.get(family)
            if error is not None:
                if type(error) is not NetfilterFailed:
                    raise error  # the lock stays busy, or the tool hangs: reading would, too
                log.warning("%s, reading the rules first", error)
            if error is not None or family not in known:
                self.mend(family, wishes[family], force=True)

    def mend(
        self, family: Family, wish: Wish, *, force: bool = False, was_ours: bool = False
    ) -> Difference:
        """Read one family and make it what is wanted; returns what was not.

        ``force``: even if nobody changed anything since it was last right.
        ``was_ours``: an earlier helper made KUBE-HOSTPORTS.
        """
        runner, belief = self.tools(), self._belief.get(family)
        if not force and self.is_verified(family):
            return Difference()
        generation = runner.generation()
        tables, seen = read(runner, family)
        if not force and belief is not None and belief.seen == seen:
            belief.generation = generation
            return Difference()
        if belief is None:
            there = names.HOSTPORTS in iptdiff.table_of(tables, "nat").chains
            belief = Belief(kept=there and not was_ours)
        self._belief[family] = belief
        belief.trusted = False
        difference = iptdiff.compare(tables, wish)
        if difference:
            belief.generation = generation
            self._write_one(runner, family, difference)
            belief.seen = None
        else:
            belief.seen, belief.generation = seen, generation
        belief.trusted = True
        if not wish.shared:
            del self._belief[family]
        return difference

    def _write_one(self, runner: Runner, family: Family, difference: Difference) -> None:
        for error in self._write(runner, {family: difference}).values():
            raise error

    def _write(self, runner: Runner, steps: Mapping[Family, Difference]) -> dict[Family, Exception]:
        """Restore both families side by side; what failed, by family.

        Carries the generation on if every change since was ours.
        """
        blocks = {family: step.blocks() for family, step in steps.items()}
        texts = {family: rendered(b) for family, b in blocks.items()}
        before = runner.generation()
        failed = _restore_all(runner, texts)
        after = runner.generation()
        commits = sum(bool(changes) for b in blocks.values() for _, changes in b)
        ours = before is not None and after == before + commits and not failed
        for belief in self._belief.values():
            if belief.generation is not None:
                belief.generation = after if ours and belief.generation == before else None
        return failed

    def clear(self, runner: Runner, family: Family, wish: Wish) -> bool:
        """Remove what is ours, by an empty wish; True if something was there."""
        tables, _ = read(runner, family)
        difference = iptdiff.compare(tables, wish)
        if difference:
            self._write_one(runner, family, difference)
        return bool(difference)

    def forget(self, family: Family) -> None:
        """Nothing of ours is there any more."""
        self._belief.pop(family, None)

    def left_behind(self, in_use: bool) -> Iterable[Runner]:
        """Flavours other than the one in use that hold chains of ours."""
        return self._toolbox.left_behind(self.tools() if in_use else None)


def _restore_all(runner: Runner, texts: Mapping[Family, str]) -> dict[Family, Exception]:
    """Each family's restore in a thread of its own but the last: they wait for processes."""
    failed: dict[Family, Exception] = {}

    def one(family: Family) -> None:
        try:
            runner.restore(family, texts[family])
        except Exception as error:
            failed[family] = error

    *others, last = texts
    threads = [threading.Thread(target=one, args=(family,)) for family in others]
    for thread in threads:
        thread.start()
    one(last)
    for thread in threads:
        thread.join()
    return failed


def read(
    runner: Runner, family: Family, keep: Callable[[str], bool] | None = None
) -> tuple[dict[str, restore.Table], int]:
    """Tables of a family, and a hash of them without counters.

    ``keep`` leaves out rules by their text, before they are parsed. Raises
    NetfilterFailed, TryAgain.
    """
    # what Python takes for line ends may stand in a comment of somebody else
    strange = {ord(c): "?" for c in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"}
    text = runner.save(family).translate(strange)
    lines = (line for line in text.split("\n") if not line.startswith("#"))
    plain = tuple(line.split(" [")[0] if line.startswith(":") else line for line in lines)
    if keep is not None:
        text = "\n".join(x for x in text.split("\n") if not x.startswith("-") or keep(x)) + "\n"
    try:
        return restore.parse_save(text), hash(plain)
    except restore.RestoreFormatError as error:
        raise NetfilterFailed("iptables-save cannot be understood", str(error)) from error


def rendered(blocks: Iterable[tuple[str, list[restore.Change]]]) -> str:
    """Changes as text. Raises NetfilterFailed for a rule that no line can carry."""
    try:
        return restore.render(blocks)
    except restore.RestoreFormatError as error:
        raise NetfilterFailed("a rule cannot be written", str(error)) from error
