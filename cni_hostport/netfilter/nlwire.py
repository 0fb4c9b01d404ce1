"""Netlink's frame and attributes: bytes in, bytes out.

Decides how a message header, an attribute and an acknowledgement look on the
wire (linux/netlink.h). Knows no subsystem and never opens a socket. Headers and
attribute headers are in the host's byte order; what an attribute carries is its
owner's business.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

NLM_F_REQUEST = 0x1
NLM_F_ACK = 0x4
NLM_F_DUMP_INTR = 0x10
NLM_F_EXCL = 0x200
NLM_F_DUMP = 0x300
NLM_F_CREATE = 0x400
NLM_F_CAPPED = 0x100
NLM_F_ACK_TLVS = 0x200

NLMSG_ERROR = 2
NLMSG_DONE = 3
NESTED = 0x8000
TYPE_MASK = 0x3FFF

HEADER = struct.Struct("=IHHII")
HEADER_SIZE = HEADER.size
GENMSG_SIZE = 4
_ATTR = struct.Struct("=HH")
_GENMSG = struct.Struct("=BB")
_INT = struct.Struct("=i")
_PAD = (b"", b"\0\0\0", b"\0\0", b"\0")
_ERR_MSG, _ERR_OFFSET = 1, 2


class Message(NamedTuple):
    """One message of a datagram; ``body`` is what follows the 16-byte header."""

    kind: int
    flags: int
    sequence: int
    portid: int
    body: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """The kernel's verdict on one request.

    ``errno`` 0 is success. ``offset`` is where in the request the attribute
    stands that was refused (0: the kernel did not say), ``text`` its own words.
    """

    sequence: int
    errno: int
    offset: int = 0
    text: str = ""


def attr(kind: int, payload: bytes) -> bytes:
    """One attribute, padded to four bytes. Raises struct.error above 65,531 bytes."""
    size = len(payload) + 4
    return _ATTR.pack(size, kind) + payload + _PAD[size & 3]


def nest(kind: int, *parts: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attr(kind | NESTED, b"".join(parts))


def string(text: str) -> bytes:
    """A NUL-terminated string as the payload of an attribute."""
    return text.encode("utf-8", "surrogateescape") + b"\0"


def text(payload: bytes) -> str:
    """The string in an attribute's payload, up to its first NUL."""
    return payload.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def genmsg(family: int, resource: int = 0) -> bytes:
    """The nfgenmsg header: address family number, version 0, resource id (big endian)."""
    return _GENMSG.pack(family, 0) + resource.to_bytes(2, "big")


def message(kind: int, flags: int, sequence: int, body: bytes) -> bytes:
    """One whole message; the kernel fills in our port id."""
    return HEADER.pack(HEADER_SIZE + len(body), kind, flags, sequence, 0) + body


def messages(data: bytes) -> Iterator[Message]:
    """Messages of one datagram, in order; a truncated tail is dropped."""
    at, end = 0, len(data)
    while at + HEADER_SIZE <= end:
        size, kind, flags, sequence, portid = HEADER.unpack_from(data, at)
        if size < HEADER_SIZE or at + size > end:
            return
        yield Message(kind, flags, sequence, portid, data[at + HEADER_SIZE : at + size])
        at += (size + 3) & ~3


def attributes(data: bytes, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """(type without flag bits, payload) of each attribute from offset ``at``."""
    end = len(data)
    while at + 4 <= end:
        size, kind = _ATTR.unpack_from(data, at)
        if size < 4:
            return
        yield kind & TYPE_MASK, data[at + 4 : at + size]
        at += (size + 3) & ~3


def attribute_map(data: bytes, at: int = 0) -> dict[int, bytes]:
    """Attributes by type; of a repeated one the last."""
    return dict(attributes(data, at))


def pick(data: bytes, at: int, kinds: Collection[int]) -> dict[int, bytes]:
    """Payloads of the attributes of these types, and no work for the others."""
    found: dict[int, bytes] = {}
    unpack, end, left = _ATTR.unpack_from, len(data) - 4, len(kinds)
    while at <= end:
        size, kind = unpack(data, at)
        if size < 4:
            break
        if kind & TYPE_MASK in kinds:
            found[kind & TYPE_MASK] = data[at + 4 : at + size]
            left -= 1
            if not left:
                break
        at += (size + 3) & ~3
    return found


def is_success(data: bytes, sequence: int) -> bool:
    """Whether a datagram begins with the acknowledgement of that request, errno 0."""
    if len(data) < HEADER_SIZE + 4:
        return False
    _, kind, _, number, _ = HEADER.unpack_from(data)
    return kind == NLMSG_ERROR and number == sequence and data[16:20] == b"\0\0\0\0"


def ack(msg: Message) -> Ack:
    """Read an NLMSG_ERROR or NLMSG_DONE message (both may carry extended acks)."""
    body = msg.body
    code = -_INT.unpack_from(body)[0] if len(body) >= 4 else 0
    if not msg.flags & NLM_F_ACK_TLVS:
        return Ack(msg.sequence, code)
    start = 4
    if msg.kind == NLMSG_ERROR:
        start = 4 + HEADER_SIZE
        if code and not msg.flags & NLM_F_CAPPED:
            start = 4 + ((HEADER.unpack_from(body, 4)[0] + 3) & ~3)
    found = attribute_map(body, start)
    where = found.get(_ERR_OFFSET, b"")
    return Ack(
        msg.sequence,
        code,
        struct.unpack("=I", where)[0] if len(where) == 4 else 0,
        text(found.get(_ERR_MSG, b"")),
    )
