"""ctnetlink messages: which flows are meant, and how the answers read.

Decides the bytes of a filtered delete, a filtered dump and a delete of one flow
(linux/netfilter/nfnetlink_conntrack.h). Never builds a delete without a tuple:
the kernel takes that for "flush everything".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Literal

from cni_hostport.model import Family, IPAddress, Protocol, family_of
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.nfmsg import AF_NUMBER

CT_NEW, CT_GET, CT_DELETE, CT_STATS = 0x0100, 0x0101, 0x0102, 0x0105
_TUPLE_ORIG, _TUPLE_REPLY, _STATUS, _ID, _ZONE, _FILTER, _STATUS_MASK = 1, 2, 3, 12, 18, 25, 26
_TUPLE_IP, _TUPLE_PROTO = 1, 2
_PROTO_NUM, _PROTO_SRC, _PROTO_DST = 1, 2, 3
_IP_SRC = {Family.V4: 1, Family.V6: 3}
_IP_DST = {Family.V4: 2, Family.V6: 4}
_ORIG_FLAGS, _REPLY_FLAGS = 1, 2
_F_IP_SRC, _F_IP_DST, _F_PROTO, _F_SRC_PORT, _F_DST_PORT = 1, 2, 8, 16, 32
_DST_NAT = 1 << 5
_HOST_U32 = struct.Struct("=I")
_ATTR = struct.Struct("=HH")
_ADDRESS_SIZE = {AF_NUMBER[Family.V4]: 4, AF_NUMBER[Family.V6]: 16}
_NUM_HEAD = _ATTR.pack(5, _PROTO_NUM)
_STATUS_HEAD = _ATTR.pack(8, _STATUS)

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
        """Whether the flow is meant: the kernel's own selection may be wider."""
        end = self.destination if match.side == "original" else self.answerer
        return (
            end.protocol == match.protocol.number
            and end.address == match.address
            and match.port in (None, end.port)
        )


def _selection(matches: Sequence[Match]) -> bytes:
    """Header, partial tuple and filter of what all of the matches have in common.

    IPv6 addresses never go into the filter: the kernel compares them the wrong
    way round (ctnetlink_filter_match_tuple, up to 6.18 at least) and would take
    every flow except those that are meant.
    """
    first = matches[0]
    family = family_of(first.address)
    original = first.side == "original"
    flags = _F_PROTO
    parts = []
    if family is Family.V4 and all(m.address == first.address for m in matches):
        ip = (_IP_DST if original else _IP_SRC)[family]
        parts.append(nl.nest(_TUPLE_IP, nl.attr(ip, first.address.packed)))
        flags |= _F_IP_DST if original else _F_IP_SRC
    proto = nl.attr(_PROTO_NUM, bytes((first.protocol.number,)))
    if first.port is not None and all(m.port == first.port for m in matches):
        kind = _PROTO_DST if original else _PROTO_SRC
        proto += nl.attr(kind, first.port.to_bytes(2, "big"))
        flags |= _F_DST_PORT if original else _F_SRC_PORT
    parts.append(nl.nest(_TUPLE_PROTO, proto))
    return (
        nl.genmsg(AF_NUMBER[family])
        + nl.nest(_TUPLE_ORIG if original else _TUPLE_REPLY, *parts)
        # the kernel wants both flag words, in its own byte order
        + nl.nest(
            _FILTER,
            nl.attr(_ORIG_FLAGS, _HOST_U32.pack(flags if original else 0)),
            nl.attr(_REPLY_FLAGS, _HOST_U32.pack(0 if original else flags)),
        )
    )


def delete_matching(match: Match, sequence: int) -> bytes:
    """Delete all flows that match; the kernel walks its table once. IPv4 only.

    A kernel that does not know the filter takes the partial tuple for an exact
    key, answers EINVAL and deletes nothing. Raises ValueError for IPv6, which
    the kernel cannot narrow down to an address.
    """
    if family_of(match.address) is not Family.V4:
        raise ValueError("the kernel cannot filter a delete by an IPv6 address")
    return nl.message(CT_DELETE, nl.NLM_F_REQUEST | nl.NLM_F_ACK, sequence, _selection([match]))


def dump_matching(matches: Sequence[Match], sequence: int) -> bytes:
    """Ask for all flows that any of the matches means, and more: look at ``Flow.matches``.

    The matches are of one family, side and protocol. The kernel selects by what
    they have in common (IPv6: never the address; before 5.8 only the family;
    between 5.8 and 5.10.83 or 5.15.6 nothing comes for the reply side).
    """
    kinds = {(family_of(m.address), m.side, m.protocol) for m in matches}
    if len(kinds) != 1:
        raise ValueError("matches of several families, sides or protocols in one dump")
    flags = nl.NLM_F_REQUEST | nl.NLM_F_DUMP
    return nl.message(CT_GET, flags, sequence, _selection(matches))


def dump_translated(sequence: int) -> bytes:
    """Ask for the flows of both families whose destination was translated.

    An older kernel sends all flows: look at ``Flow.translated``.
    """
    bits = _DST_NAT.to_bytes(4, "big")
    body = nl.genmsg(0) + nl.attr(_STATUS, bits) + nl.attr(_STATUS_MASK, bits)
    return nl.message(CT_GET, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, body)


def dump_untranslated(family: Family, protocol: Protocol, sequence: int) -> bytes:
    """Ask for the flows of a protocol whose destination was left as it was.

    An older kernel sends more: look at ``Flow.translated`` and ``Flow.destination``.
    """
    proto = nl.nest(_TUPLE_PROTO, nl.attr(_PROTO_NUM, bytes((protocol.number,))))
    body = (
        nl.genmsg(AF_NUMBER[family])
        + nl.nest(_TUPLE_ORIG, proto)
        + nl.nest(
            _FILTER,
            nl.attr(_ORIG_FLAGS, _HOST_U32.pack(_F_PROTO)),
            nl.attr(_REPLY_FLAGS, _HOST_U32.pack(0)),
        )
        + nl.attr(_STATUS, bytes(4))
        + nl.attr(_STATUS_MASK, _DST_NAT.to_bytes(4, "big"))
    )
    return nl.message(CT_GET, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, body)


def end_of_dump(data: bytes) -> nl.Ack | None:
    """How the dump ended, if it did in this datagram: the end is the last message in it."""
    at, end = 0, len(data)
    while at + nl.HEADER_SIZE <= end:
        size, kind, _, _, _ = nl.HEADER.unpack_from(data, at)
        if kind in (nl.NLMSG_ERROR, nl.NLMSG_DONE):
            return nl.ack(next(nl.messages(data[at:])))
        at += max(nl.HEADER_SIZE, (size + 3) & ~3)
    return None


def get_count(sequence: int) -> bytes:
    """Ask how many flows the namespace has."""
    return nl.message(CT_STATS, nl.NLM_F_REQUEST | nl.NLM_F_ACK, sequence, nl.genmsg(0))


def count(msg: nl.Message) -> int:
    """Read the answer to ``get_count``; it has no other attribute that matters."""
    return int.from_bytes(nl.attribute_map(msg.body, nl.GENMSG_SIZE).get(1, b""), "big")


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


def translated_answerer(msg: nl.Message) -> bytes | None:
    """Who answers a translated flow, as bytes to count by (``endpoint`` reads them).

    Fast where the entry looks as the kernel writes it today, right in any case.
    """
    body = msg.body
    size = _ADDRESS_SIZE.get(body[0])
    if size is None or msg.kind != CT_NEW:
        return None
    ip = nl.GENMSG_SIZE + _ATTR.unpack_from(body, nl.GENMSG_SIZE)[0] + 4
    proto = ip + 12 + 2 * size
    status = proto + 28
    if body[proto + 4 : proto + 8] == _NUM_HEAD and body[status : status + 4] == _STATUS_HEAD:
        if not body[status + 7] & _DST_NAT:
            return None
        return (
            body[proto + 8 : proto + 9]
            + body[proto + 16 : proto + 18]
            + body[ip + 8 : ip + 8 + size]
        )
    found = flow(msg)
    if found is None or not found.translated:
        return None
    end = found.answerer
    return bytes((end.protocol,)) + end.port.to_bytes(2, "big") + end.address.packed


def endpoint(raw: bytes) -> Endpoint:
    """Read what ``translated_answerer`` gave."""
    address = IPv4Address(raw[3:]) if len(raw) == 7 else IPv6Address(raw[3:])
    return Endpoint(raw[0], address, int.from_bytes(raw[1:3], "big"))


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
