"""Which backend serves an attachment: those that work here, and the choice among them.

``choose`` is pure. ``Working`` asks the node, once, and again only while
something does not work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cni_hostport.errors import InvalidConfig, NetfilterFailed, NotAvailable
from cni_hostport.model import Options

ASK_AGAIN = 5.0
"""Seconds after which a backend that did not work is asked again."""


def choose(options: Options, available: Mapping[str, Any]) -> str:
    """Name of the backend for these options.

    ``cni.py`` has already turned the syntax of the conditions into an explicit
    backend. Raises InvalidConfig (7) for one that does not work on this node,
    NotAvailable (50) if none does. ``available`` answers ``in`` for one name at a
    time, so that nobody is asked without need.
    """
    if options.backend == "auto":
        for name in ("nftables", "iptables"):
            if name in available:
                return name
    elif options.backend in available:
        return options.backend
    if not available:
        raise NotAvailable("no rule backend works on this node", "install nftables or iptables")
    raise InvalidConfig(
        f"backend: {options.backend} does not work on this node",
        f"available here: {', '.join(sorted(available))}",
    )


class Working(Mapping[str, str]):
    """Backends that work on this node, by name; each is asked when it is first wanted.

    A probe returns nothing, or raises NetfilterFailed with the reason.
    """

    def __init__(self, probes: Mapping[str, Callable[[], None]]) -> None:
        self._probes = dict(probes)
        self._reasons: dict[str, tuple[float, str]] = {}

    def reason(self, name: str) -> str:
        """Why the backend does not work; empty if it does."""
        when, reason = self._reasons.get(name, (0.0, "not asked yet"))
        if reason and (not when or time.monotonic() - when > ASK_AGAIN):
            reason = self._ask(name)
            self._reasons[name] = (time.monotonic(), reason)
        return reason

    def _ask(self, name: str) -> str:
        try:
            self._probes[name]()
        except NetfilterFailed as error:
            return str(error)
        return ""

    def doubt(self, name: str) -> None:
        """It failed at work: ask again before the next choice."""
        self._reasons.pop(name, None)

    def look(self) -> None:
        """Ask until one is found that works, so that STATUS knows without asking."""
        for name in self._probes:
            if not self.reason(name):
                return

    def problem(self) -> str:
        """Why no backend works, as far as is known; empty if one does. Asks nobody."""
        known = {name: self._reasons.get(name, (0.0, ""))[1] for name in self._probes}
        if not all(known.values()):
            return ""
        return "; ".join(f"{name}: {reason}" for name, reason in known.items())

    def known(self) -> tuple[str, ...]:
        """Backends found to work so far; all of them before any was asked."""
        found = tuple(n for n, (_, reason) in self._reasons.items() if not reason)
        return found or tuple(self._probes)

    def __getitem__(self, name: str) -> str:
        if name not in self._probes or self.reason(name):
            raise KeyError(name)
        return name

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._probes if not self.reason(name)])

    def __len__(self) -> int:
        return len(list(iter(self)))
