"""Which backend serves an attachment: pure choice among those that work here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cni_hostport.errors import InvalidConfig, NotAvailable
from cni_hostport.model import Options


def choose(options: Options, available: Mapping[str, Any]) -> str:
    """Name of the backend for these options.

    ``cni.py`` has already turned the syntax of the conditions into an explicit
    backend. Raises InvalidConfig (7) for one that does not work on this node,
    NotAvailable (50) if none does.
    """
    if not available:
        raise NotAvailable("no rule backend works on this node", "install nftables or iptables")
    if options.backend == "auto":
        return "nftables" if "nftables" in available else "iptables"
    if options.backend not in available:
        raise InvalidConfig(
            f"backend: {options.backend} does not work on this node",
            f"available here: {', '.join(sorted(available))}",
        )
    return options.backend
