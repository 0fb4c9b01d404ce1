"""Elements in nf_tables answers: datagrams in, elements out, tens of thousands at a time.

Decides what an element's bytes mean; never asks for anything. Unknown
attributes are skipped, so that a newer kernel does not disturb us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from cni_hostport.model import Family
from cni_hostport.netfilter import nfmsg
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nfreply import comment_span

FAMILY_OF = {number: family for family, number in nfmsg.AF_NUMBER.items()}
_ATTR = struct.Struct("=HH")


def elements(datagrams: Iterable[bytes]) -> list[Element]:
    """Elements of NEWSETELEM messages, in the kernel's order."""
    return [
        found
        for data in datagrams
        for msg in nl.messages(data)
        if msg.kind == nfmsg.NEWSETELEM
        for found in message_elements(msg.body)
    ]


def message_elements(body: bytes) -> list[Element]:
    """Elements of one NEWSETELEM message's body; none where the family is not ours."""
    family = FAMILY_OF.get(body[0])
    if family is None:
        return []
    top = nl.attribute_map(body, nl.GENMSG_SIZE)
    return _list(family, nl.text(top.get(2, b"")), top.get(3, b""))


class _Shape:
    """Where the fields of an element stand, learnt from one and tried on the next.

    The elements of one set nearly always look alike: four times faster than
    walking the attributes of each.
    """

    def __init__(self, data: bytes, at: int, stop: int, spans: Sequence[_Span]) -> None:
        layout, fields, last = "=", [], at
        for start, end, field in sorted(spans):
            layout += f"{start - last}s{end - start}s"
            fields.append(field)
            last = end
        self.struct = struct.Struct(f"{layout}{stop - last}s")
        self.size = stop - at
        self.heads = self.struct.unpack_from(data, at)[::2]
        self.order = tuple(2 * fields.index(f) + 1 if f in fields else -1 for f in range(4))


_Span = tuple[int, int, int]
_FIELDS = {1: 0, 2: 1, 10: 3}


def _list(family: Family, name: str, data: bytes) -> list[Element]:
    out: list[Element] = []
    at, end = 0, len(data)
    while at < end:
        stop, spans = _spans(data, at)
        found = {field: data[start:to] for start, to, field in spans}
        if 0 in found:
            out.append(_element(family, name, found))
            if stop < end:
                stop = _alike(out, data, stop, _Shape(data, at, stop, spans))
        at = stop
    return out


def _alike(out: list[Element], data: bytes, at: int, shape: _Shape) -> int:
    """Read elements as long as they have this shape; returns where the first other one starts."""
    family, name = out[-1].family, out[-1].set
    make, unpack, size, heads = tuple.__new__, shape.struct.unpack_from, shape.size, shape.heads
    key, value, comment, key_end = shape.order
    last = len(data) - size
    while at <= last:
        parts = unpack(data, at)
        if parts[::2] != heads:
            break
        fields = (
            family,
            name,
            parts[key],
            parts[value] if value > 0 else None,
            parts[comment].decode("utf-8", "surrogateescape") if comment > 0 else "",
            parts[key_end] if key_end > 0 else None,
        )
        out.append(make(Element, fields))
        at += size
    return at


def _element(family: Family, name: str, found: dict[int, bytes]) -> Element:
    comment = found.get(2, b"").decode("utf-8", "surrogateescape")
    return Element(family, name, found[0], found.get(1), comment, found.get(3))


def _spans(data: bytes, at: int) -> tuple[int, list[_Span]]:
    """End of the element at ``at``, and (start, end, field) of what we read in it."""
    unpack = _ATTR.unpack_from
    size = unpack(data, at)[0]
    end = at + size
    spans: list[_Span] = []
    at += 4
    while at + 4 <= end:
        length, kind = unpack(data, at)
        if length < 4:
            break
        kind &= nl.TYPE_MASK
        if kind in _FIELDS:
            spans.append((at + 8, at + 4 + unpack(data, at + 4)[0], _FIELDS[kind]))
        elif kind == 6:
            spans.extend(
                (at + 4 + a, at + 4 + b, 2) for a, b in comment_span(data[at + 4 : at + length])
            )
        at += (length + 3) & ~3
    return min(len(data), (max(end, at) + 3) & ~3), spans
