"""Why a DNS server that would not start may have failed: who has its port.

Decides the words. Looks at the kernel's sockets only after a failure, and never
changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from cni_hostport.host import owner
from cni_hostport.model import HostPort, IPAddress, Protocol, family_of


def port_users(addresses: Sequence[IPAddress], port: int) -> tuple[str, ...]:
    """One line for each protocol and address that somebody else has, without repetition."""
    found: dict[str, None] = {}
    for address in addresses:
        for protocol in (Protocol.UDP, Protocol.TCP):
            claim = HostPort(
                family=family_of(address), address=address, port=port, protocol=protocol
            )
            with suppress(OSError):
                blocker = owner.find_blocker(claim)
                if blocker is not None and blocker.kind != "unknown":
                    where = blocker.address or "every address"
                    found[f"port {port}/{protocol} on {where} is in use by {blocker.text()}"] = None
    return tuple(found)
