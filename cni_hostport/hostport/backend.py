"""What a rule backend must do; ``nftables.py`` and ``iptables.py`` are the two.

A backend remembers what is wanted of it, so that it can check and repair
without being told again. It runs under the helper's one lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from cni_hostport.hostport.node import NodeView
from cni_hostport.hostport.placed import Placed


@dataclass(slots=True)
class Repair:
    """What a repair found missing or wrong, in words and in numbers."""

    tables: list[str] = field(default_factory=list)
    missing: int = 0
    foreign: int = 0
    examples: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tables or self.missing or self.foreign)

    def __str__(self) -> str:
        parts = [f"rules of {' and '.join(self.tables)}"] if self.tables else []
        if self.missing:
            parts.append(f"{self.missing} missing")
        if self.foreign:
            parts.append(f"{self.foreign} too many or wrong")
        return ", ".join(parts) + (f" (such as {self.examples[0]})" if self.examples else "")


class Backend(Protocol):
    """Rules for placed attachments; all or nothing per call."""

    name: str

    @property
    def in_use(self) -> bool:
        """Whether any attachment wants something."""

    def place(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Make each attachment's rules so (None: none at all), in one transaction.

        Raises NetfilterFailed (102) or TryAgain (11) with nothing changed.
        """

    def assume(self, changes: Mapping[str, Placed | None], node: NodeView) -> None:
        """Remember the same without touching the kernel (start-up)."""

    def set_node(self, node: NodeView) -> None:
        """Follow a change of the node's addresses."""

    def check(self, key: str) -> list[str]:
        """Names of what the attachment misses; changes nothing."""

    def repair(self) -> Repair:
        """Make the kernel what is wanted; says what was not."""

    def retire(self) -> bool:
        """Remove shared tables and chains if no attachment needs them."""
