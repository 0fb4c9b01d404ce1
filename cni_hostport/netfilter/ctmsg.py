"""ctnetlink messages: which flows are meant, and how the answers read.

Decides the bytes of a filtered delete, a filtered dump and a delete of one flow
(linux/netfilter/nfnetlink_conntrack.h). Never builds a delete without a tuple:
the kernel takes that for "flush everything".
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

from cni_hostport.model import Family, IPAddress, Protocol, family_of
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.nfmsg import AF_NUMBER

CT_NEW, CT_GET, CT_DELETE = 0x0100, 0x0101, 0x0102
_TUPLE_ORIG, _TUPLE_REPLY, _STATUS, _ID, _ZONE, _FILTER, _STATUS_MASK = 1, 2, 3, 12, 18, 25, 26
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _PROTO_SRC, _PROTO_DST = 1, 2, 3
_IP_SRC = {Family.V4: 1, Family.V6: 3}
_IP_DST = {Family.V4: 2, Family.V6: 4}
_ORIG_FLAGS, _REPLY_FLAGS = 1, 2
_F_IP_SRC, _F_IP_DST, _F_PROTO, _F_SRC_PORT, _F_DST_PORT = 1, 2, 8, 16, 32
_DST_NAT = 1 << 5
_HOST_U32 = struct.Struct("=I")

Side = Literal["original", "reply"]


@dataclass(frozen=True, slots=True)
class Match:
    """Which flows: those whose original destination, or whose reply source, this is.

    ``port`` None means any port (reply side only).
    """

    side: Side
    protocol: Protocol
    address: IPAddress
    port: int | None = None

    def __post_init__(self) -> None:
        if self.side == "original" and self.port is None:
            raise ValueError("a match by original destination needs a port")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Protocol number, address and port of one end of a flow."""

    protocol: int
    address: IPAddress
    port: int


@dataclass(frozen=True, slots=True)
class Flow:
    """One conntrack entry; ``tuple_`` and ``ident`` name exactly it to the kernel."""

    family: Family
    tuple_: bytes
    ident: bytes
    zone: bytes | None
    destination: Endpoint
    answerer: Endpoint
    translated: bool

    def matches(self, match: Match) -> bool:
        """Whether the flow is meant; an old kernel does not filter."""
        end = self.destination if match.side == "original" else self.answerer
        return (
            end.protocol == match.protocol.number
            and end.address == match.address
            and match.port in (None, end.port)
        )


def _selection(match: Match) -> bytes:
    family = family_of(match.address)
    original = match.side == "original"
    port = b""
    if match.port is not None:
        kind = _PROTO_DST if original else _PROTO_SRC
        port = nl.attr(kind, match.port.to_bytes(2, "big"))
    ip = (_IP_DST if original else _IP_SRC)[family]
    flags = (_F_IP_DST if original else _F_IP_SRC) | _F_PROTO
    if port:
        flags |= _F_DST_PORT if original else _F_SRC_PORT
    number = nl.attr(_PROTO_NUM, bytes((match.protocol.number,)))
    return (
        nl.genmsg(AF_NUMBER[family])
        + nl.nest(
            _TUPLE_ORIG if original else _TUPLE_REPLY,
            nl.nest(_TUPLE_IP, nl.attr(ip, match.address.packed)),
            nl.nest(_TUPLE_PROTO, number, port),
        )
        # the kernel wants both flag words, in its own byte order
        + nl.nest(
            _FILTER,
            nl.attr(_ORIG_FLAGS, _HOST_U32.pack(flags if original else 0)),
            nl.attr(_REPLY_FLAGS, _HOST_U32.pack(0 if original else flags)),
        )
    )


def delete_matching(match: Match, sequence: int) -> bytes:
    """Delete all flows that match; the kernel walks its table once.

    A kernel that does not know the filter takes the partial tuple for an exact
    key, answers EINVAL and deletes nothing.
    """
    return nl.message(CT_DELETE, nl.NLM_F_REQUEST | nl.NLM_F_ACK, sequence, _selection(match))


def dump_matching(match: Match, sequence: int) -> bytes:
    """Ask for the flows that match (kernel 5.8; an older one sends all of the family)."""
    return nl.message(CT_GET, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, _selection(match))


def dump_translated(sequence: int) -> bytes:
    """Ask for the flows of both families whose destination was translated.

    An older kernel sends all flows: look at ``Flow.translated``.
    """
    bits = _DST_NAT.to_bytes(4, "big")
    body = nl.genmsg(0) + nl.attr(_STATUS, bits) + nl.attr(_STATUS_MASK, bits)
    return nl.message(CT_GET, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, body)


def delete_flow(flow: Flow, sequence: int) -> bytes:
    """Delete exactly this flow: by its tuple and its id, so never a newer one."""
    body = (
        nl.genmsg(AF_NUMBER[flow.family])
        + nl.attr(_TUPLE_ORIG | nl.NESTED, flow.tuple_)
        + nl.attr(_ID, flow.ident)
    )
    if flow.zone is not None:
        body += nl.attr(_ZONE, flow.zone)
    return nl.message(CT_DELETE, nl.NLM_F_REQUEST | nl.NLM_F_ACK, sequence, body)


def flow(msg: nl.Message) -> Flow | None:
    """Read one entry; None for a protocol without ports or a family that is not ours."""
    if msg.kind != CT_NEW:
        return None
    family = next((f for f, n in AF_NUMBER.items() if n == msg.body[0]), None)
    found = nl.attribute_map(msg.body, nl.GENMSG_SIZE)
    if family is None or not {_TUPLE_ORIG, _TUPLE_REPLY, _ID} <= found.keys():
        return None
    destination = _endpoint(family, found[_TUPLE_ORIG], source=False)
    answerer = _endpoint(family, found[_TUPLE_REPLY], source=True)
    if destination is None or answerer is None:
        return None
    status = int.from_bytes(found.get(_STATUS, b""), "big")
    return Flow(
        family,
        found[_TUPLE_ORIG],
        found[_ID],
        found.get(_ZONE),
        destination,
        answerer,
        bool(status & _DST_NAT),
    )


def _endpoint(family: Family, data: bytes, source: bool) -> Endpoint | None:
    parts = nl.attribute_map(data)
    ip = nl.attribute_map(parts.get(_TUPLE_IP, b""))
    proto = nl.attribute_map(parts.get(_TUPLE_PROTO, b""))
    packed = ip.get((_IP_SRC if source else _IP_DST)[family])
    port = proto.get(_PROTO_SRC if source else _PROTO_DST)
    if packed is None or port is None or not proto.get(_PROTO_NUM):
        return None
    address = IPv4Address(packed) if family is Family.V4 else IPv6Address(packed)
    return Endpoint(proto[_PROTO_NUM][0], address, int.from_bytes(port, "big"))
