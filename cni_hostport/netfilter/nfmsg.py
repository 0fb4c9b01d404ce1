"""nf_tables messages: what we send and how the answers read (linux/netfilter/nf_tables.h).

Decides how a change becomes one batch, how reads are asked for, and which
element a refusal means. Pure bytes: sockets are ``host/nfnetlink.py``'s.

Kernel facts this rests on: a batch is all or nothing across families; each bad
message is reported, with the offset of its first bad element when extended acks
are on; a nested list is limited to 64 KiB; an element that exists with another
value is EEXIST, with NLM_F_EXCL also one with the same value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from cni_hostport.model import Family
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.elements import MAX_COMMENT, Element

NEWTABLE, GETTABLE, DELTABLE = 0x0A00, 0x0A01, 0x0A02
NEWCHAIN, GETCHAIN, DELCHAIN = 0x0A03, 0x0A04, 0x0A05
NEWRULE, GETRULE, DELRULE = 0x0A06, 0x0A07, 0x0A08
NEWSET, GETSET = 0x0A09, 0x0A0A
NEWSETELEM, GETSETELEM, DELSETELEM = 0x0A0C, 0x0A0D, 0x0A0E
NEWGEN, GETGEN = 0x0A0F, 0x0A10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_SUBSYSTEM = 10

MAX_ELEMENTS = 500
_MAX_LIST = 60_000

_TABLE, _SET, _ELEMENTS = 1, 2, 3
_LIST_ELEM = 1
_KEY, _DATA, _USERDATA, _KEY_END = 1, 2, 6, 10
_VALUE = 1
_UDATA_COMMENT = 0
_VALUE_HEAD = struct.Struct("=HHHH")

AF_NUMBER = {Family.V4: 2, Family.V6: 10}
"""Our families as the kernel numbers them (NFPROTO_IPV4, NFPROTO_IPV6)."""

Verb = Literal["add", "delete"]


@dataclass(frozen=True, slots=True)
class Step:
    """One message of a batch: which elements it adds or deletes."""

    verb: Verb
    elements: tuple[Element, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """One transaction as bytes; message ``i`` of it has sequence number ``first + i``."""

    data: bytes
    first: int
    steps: tuple[Step | None, ...]

    @property
    def last(self) -> int:
        """Sequence number of the message that asks for an acknowledgement."""
        return self.first + len(self.steps) - 2

    def step(self, sequence: int) -> Step | None:
        """What the message of that number does; None for begin, end and table messages."""
        at = sequence - self.first
        return self.steps[at] if 0 <= at < len(self.steps) else None


def _value(kind: int, value: bytes) -> bytes:
    size = len(value)
    pad = -size & 3
    head = _VALUE_HEAD.pack(size + pad + 8, kind | nl.NESTED, size + 4, _VALUE)
    return head + value + bytes(pad)


@lru_cache(maxsize=4096)
def _userdata(comment: str) -> bytes:
    raw = comment.encode("utf-8", "surrogateescape")
    if len(raw) > MAX_COMMENT or b"\0" in raw:
        raise ValueError(f"comment of {len(raw)} bytes: {comment!r}")
    return nl.attr(_USERDATA, bytes((_UDATA_COMMENT, len(raw) + 1)) + raw + b"\0")


def _packed(element: Element, key_only: bool) -> bytes:
    body = _value(_KEY, element.key)
    if element.key_end is not None:
        body += _value(_KEY_END, element.key_end)
    if not key_only:
        if element.data is not None:
            body += _value(_DATA, element.data)
        if element.comment:
            body += _userdata(element.comment)
    return nl.attr(_LIST_ELEM | nl.NESTED, body)


@lru_cache(maxsize=256)
def _place(family: Family, table: str, name: str) -> bytes:
    return (
        nl.genmsg(AF_NUMBER[family])
        + nl.attr(_TABLE, nl.string(table))
        + nl.attr(_SET, nl.string(name))
    )


_EDGE = nl.genmsg(0, _SUBSYSTEM)


class _Builder:
    """Collects the messages of one batch between its begin and its end."""

    def __init__(self, table: str, first: int) -> None:
        self.table = table
        self.first = first
        self.steps: list[Step | None] = [None]
        self.parts = [nl.message(_BATCH_BEGIN, nl.NLM_F_REQUEST, first, _EDGE)]
        self.pending: tuple[int, int, bytes] | None = None

    def message(self, kind: int, flags: int, body: bytes, step: Step | None) -> None:
        """Queue one message; written only when it is known whether it is the last."""
        self._write(0)
        self.pending = (kind, flags | nl.NLM_F_REQUEST, body)
        self.steps.append(step)

    def elements(self, verb: Verb, elements: Iterable[Element]) -> None:
        """Queue elements, grouped by set, in as many messages as they need."""
        groups: dict[tuple[Family, str], list[Element]] = {}
        for element in elements:
            groups.setdefault((element.family, element.set), []).append(element)
        kind, flags = (
            (NEWSETELEM, nl.NLM_F_CREATE | nl.NLM_F_EXCL) if verb == "add" else (DELSETELEM, 0)
        )
        for (family, name), members in groups.items():
            place = _place(family, self.table, name)
            for part, packed in _portions(members, key_only=verb == "delete"):
                body = place + nl.attr(_ELEMENTS | nl.NESTED, packed)
                self.message(kind, flags, body, Step(verb, part))

    def finish(self) -> Batch:
        """The batch; its last message asks for an acknowledgement."""
        self._write(nl.NLM_F_ACK)
        end = self.first + len(self.steps)
        self.parts.append(nl.message(_BATCH_END, nl.NLM_F_REQUEST, end, _EDGE))
        self.steps.append(None)
        return Batch(b"".join(self.parts), self.first, tuple(self.steps))

    def _write(self, extra: int) -> None:
        if self.pending is not None:
            kind, flags, body = self.pending
            number = self.first + len(self.steps) - 1
            self.parts.append(nl.message(kind, flags | extra, number, body))


def _portions(
    elements: Sequence[Element], key_only: bool
) -> Iterator[tuple[tuple[Element, ...], bytes]]:
    packed: list[bytes] = []
    start = size = 0
    for at, element in enumerate(elements):
        one = _packed(element, key_only)
        if packed and (len(packed) == MAX_ELEMENTS or size + len(one) > _MAX_LIST):
            yield tuple(elements[start:at]), b"".join(packed)
            start, size, packed = at, 0, []
        packed.append(one)
        size += len(one)
    if packed:
        yield tuple(elements[start:]), b"".join(packed)


def change(table: str, add: Sequence[Element], delete: Sequence[Element], first: int) -> Batch:
    """One transaction: deletes first, so that a key's value can be replaced.

    Raises ValueError for a comment that nft could not show.
    """
    builder = _Builder(table, first)
    builder.elements("delete", delete)
    builder.elements("add", add)
    return builder.finish()


def empty(table: str, sets: Iterable[tuple[Family, str]], first: int) -> Batch:
    """One transaction that takes every element out of the given sets."""
    builder = _Builder(table, first)
    for family, name in sets:
        builder.message(DELSETELEM, 0, _place(family, table, name), None)
    return builder.finish()


def delete_tables(table: str, families: Iterable[Family], first: int) -> Batch:
    """One transaction that removes the table of each family with all it holds."""
    builder = _Builder(table, first)
    for family in families:
        builder.message(DELTABLE, 0, _table(family, table), None)
    return builder.finish()


def delete_rules(places: Iterable[bytes], first: int) -> Batch:
    """One transaction that removes rules; a place is family, table, chain and handle."""
    builder = _Builder("", first)
    for place in places:
        builder.message(DELRULE, 0, place, None)
    return builder.finish()


def bad_elements(batch: Batch, ack: nl.Ack, table: str) -> tuple[Element, ...]:
    """Elements that a refusal means: one where the kernel gave the place, else all of its message.

    Empty for a refusal of the whole batch.
    """
    step = batch.step(ack.sequence)
    if step is None:
        return ()
    first = step.elements[0]
    at = nl.HEADER_SIZE + len(_place(first.family, table, first.set)) + 4
    for element in step.elements:
        end = at + len(_packed(element, step.verb == "delete"))
        if at <= ack.offset < end:
            return (element,)
        at = end
    return step.elements


def _table(family: Family, table: str) -> bytes:
    return nl.genmsg(AF_NUMBER[family]) + nl.attr(_TABLE, nl.string(table))


def get_element(table: str, element: Element, sequence: int) -> bytes:
    """Ask for one element by its key."""
    body = _place(element.family, table, element.set) + nl.nest(
        _ELEMENTS, _packed(element, key_only=True)
    )
    return nl.message(GETSETELEM, nl.NLM_F_REQUEST, sequence, body)


def dump_elements(table: str, family: Family, name: str, sequence: int) -> bytes:
    """Ask for every element of a set."""
    flags = nl.NLM_F_REQUEST | nl.NLM_F_DUMP
    return nl.message(GETSETELEM, flags, sequence, _place(family, table, name))


def get_set(table: str, family: Family, name: str, sequence: int) -> bytes:
    """Ask what one set is."""
    return nl.message(GETSET, nl.NLM_F_REQUEST, sequence, _place(family, table, name))


def dump_objects(kind: int, table: str, family: Family, sequence: int) -> bytes:
    """Ask for all rules, chains or sets of a family.

    The kernel narrows rules and sets down to the table, chains not.
    """
    flags = nl.NLM_F_REQUEST | nl.NLM_F_DUMP
    return nl.message(kind, flags, sequence, _table(family, table))


def dump_tables(sequence: int) -> bytes:
    """Ask for the tables of every family."""
    return nl.message(GETTABLE, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, nl.genmsg(0))


def get_table(table: str, family: Family, sequence: int) -> bytes:
    """Ask for our table of a family."""
    return nl.message(GETTABLE, nl.NLM_F_REQUEST, sequence, _table(family, table))


def get_generation(sequence: int) -> bytes:
    """Ask for the generation of the ruleset."""
    return nl.message(GETGEN, nl.NLM_F_REQUEST, sequence, nl.genmsg(0))
