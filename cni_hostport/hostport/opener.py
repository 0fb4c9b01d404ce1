"""What opens sockets for ``holds.py``, and what it says of whoever is in the way.

Interfaces only: ``helper/machine.py`` answers from the kernel, tests with faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cni_hostport.errors import PortInUse
from cni_hostport.model import HostPort


class Holder(Protocol):
    """An open socket that reserves a port."""

    def close(self) -> None: ...
    def fileno(self) -> int: ...


class Blocker(Protocol):
    """Somebody who has a port; ``text()`` names process and pid."""

    @property
    def kind(self) -> str:
        """``listener``, ``bound`` or ``unknown``."""

    def text(self) -> str: ...


class Opener(Protocol):
    """Opens, converts and explains; errors are OSError."""

    def open(self, port: HostPort) -> Holder: ...
    def narrow(self, wide: Holder, ports: Sequence[HostPort]) -> list[Holder]: ...
    def widen(self, narrow: Sequence[Holder], port: HostPort) -> Holder: ...
    def blocker(self, port: HostPort) -> Blocker | None: ...
    def loopback_listener(self, port: HostPort) -> Blocker | None: ...


def in_use(port: HostPort, owner: str) -> PortInUse:
    """The error of a port that somebody has (code 101)."""
    return PortInUse(
        f"host port {port} is in use by {owner}",
        "stop the owner, choose another hostPort, or set reservePorts to 'try' or 'no'",
    )
