"""The few DNS messages that the agent sends: questions whose answer proves a server lives.

Decides their bytes and what counts as an answer to one. No sockets, and no
parsing beyond the header: any answer with the question's number counts,
whatever its code.
"""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">HHHHHH")
_RESPONSE = 0x8000
_STATUS = 2 << 11
_RECURSE = 0x0100
SOA = 6
SERVFAIL, NOTIMP = 2, 4


def status(number: int) -> bytes:
    """A question with operation code STATUS (RFC 1035 4.1.1).

    Servers that do not implement it say so at once, without asking anybody:
    the shortest way through a server's own loop.
    """
    return _HEADER.pack(number, _STATUS, 0, 0, 0, 0)


def query(number: int, zone: str) -> bytes:
    """An ordinary question for a zone's SOA record; raises ValueError for no name."""
    labels = [part.encode("idna") for part in zone.rstrip(".").split(".") if part]
    if any(not 0 < len(label) < 64 for label in labels):
        raise ValueError(f"no DNS name: {zone!r}")
    name = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    return _HEADER.pack(number, _RECURSE, 1, 0, 0, 0) + name + struct.pack(">HH", SOA, 1)


def answers(data: bytes, number: int) -> bool:
    """Whether these bytes answer the question of that number."""
    if len(data) < _HEADER.size:
        return False
    found, flags = struct.unpack_from(">HH", data)
    return found == number and bool(flags & _RESPONSE)
