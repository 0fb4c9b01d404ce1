"""nf_tables answers: datagrams in, rules, chains, sets and tables out.

Decides what the kernel's words mean; never asks for anything. Unknown
attributes are skipped, so that a newer kernel does not disturb us.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from errno import EPROTO

from cni_hostport.netfilter import nfmsg
from cni_hostport.netfilter import nlwire as nl

_U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_U64 = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; ``expressions`` is NFTA_RULE_EXPRESSIONS as the kernel gave it.

    The bytes are the same for the same text on the same kernel, but name
    anonymous sets (``__set0``) and hold counters where a rule has them.
    """

    chain: str
    handle: int
    expressions: bytes
    comment: str = ""


@dataclass(frozen=True, slots=True)
class Chain:
    """One chain; type, hook, priority and policy are None for a chain without a hook.

    ``hook`` is NF_INET_*: 0 prerouting, 1 input, 2 forward, 3 output, 4 postrouting.
    ``policy`` is 1 accept, 0 drop.
    """

    name: str
    type: str | None = None
    hook: int | None = None
    priority: int | None = None
    policy: int | None = None


@dataclass(frozen=True, slots=True)
class SetInfo:
    """One set or map: lengths in bytes, types and flags as nft numbers them."""

    name: str
    flags: int
    key_type: int
    key_length: int
    data_type: int | None = None
    data_length: int | None = None


@dataclass(frozen=True, slots=True)
class DumpEnd:
    """How a dump ended, and the generation that was asked for with it (None: no answer).

    ``overtaken``: the kernel itself says that a change came in between. It does
    so for rules, chains, sets and tables, not for elements.
    """

    errno: int
    overtaken: bool = False
    generation: int | None = None
    text: str = ""


def dump_end(datagrams: Iterable[bytes], sequence: int) -> DumpEnd:
    """Judge a finished dump; one without an end reads as EPROTO."""
    flagged, number = False, None
    for data in datagrams:
        for msg in nl.messages(data):
            if msg.kind == nfmsg.NEWGEN:
                number = generation(msg)[0]
            if msg.sequence != sequence:
                continue
            flagged = flagged or bool(msg.flags & nl.NLM_F_DUMP_INTR)
            if msg.kind in (nl.NLMSG_ERROR, nl.NLMSG_DONE):
                verdict = nl.ack(msg)
                return DumpEnd(verdict.errno, flagged, number, verdict.text)
    return DumpEnd(EPROTO)


def comment_span(data: bytes) -> list[tuple[int, int]]:
    """Where the comment stands in user data: records of type, length, bytes; type 0 it is."""
    at = 0
    while at + 2 <= len(data):
        kind, size = data[at], data[at + 1]
        if kind == 0:
            raw = data[at + 2 : at + 2 + size]
            return [(at + 2, at + 2 + len(raw.partition(b"\0")[0]))]
        at += 2 + size
    return []


def user_comment(data: bytes) -> str:
    """The comment in an element's or a rule's user data, else nothing."""
    return "".join(data[a:b].decode("utf-8", "surrogateescape") for a, b in comment_span(data))


def _objects(datagrams: Iterable[bytes], kind: int, table: str) -> Iterator[dict[int, bytes]]:
    wanted = nl.string(table)
    for data in datagrams:
        for msg in nl.messages(data):
            if msg.kind == kind:
                found = nl.attribute_map(msg.body, nl.GENMSG_SIZE)
                if found.get(1) == wanted:
                    yield found


def rules(datagrams: Iterable[bytes], table: str) -> list[Rule]:
    """Rules of the table, chain by chain, in the order in which they are run."""
    return [
        Rule(
            nl.text(found.get(2, b"")),
            _U64.unpack(found[3])[0],
            found.get(4, b""),
            user_comment(found.get(7, b"")),
        )
        for found in _objects(datagrams, nfmsg.NEWRULE, table)
    ]


def chains(datagrams: Iterable[bytes], table: str) -> list[Chain]:
    """Chains of the table."""
    return [_chain(found) for found in _objects(datagrams, nfmsg.NEWCHAIN, table)]


def _chain(found: dict[int, bytes]) -> Chain:
    name = nl.text(found.get(3, b""))
    if 4 not in found:
        return Chain(name)
    hook = nl.attribute_map(found[4])
    policy = found.get(5)
    return Chain(
        name,
        nl.text(found.get(7, b"")),
        _U32.unpack(hook[1])[0],
        _I32.unpack(hook[2])[0],
        None if policy is None else _U32.unpack(policy)[0],
    )


def sets(datagrams: Iterable[bytes], table: str) -> list[SetInfo]:
    """Sets and maps of the table, anonymous ones (``__set0``) included."""
    return [
        SetInfo(
            nl.text(found.get(2, b"")),
            _number(found, 3) or 0,
            _number(found, 4) or 0,
            _number(found, 5) or 0,
            _number(found, 6),
            _number(found, 7),
        )
        for found in _objects(datagrams, nfmsg.NEWSET, table)
    ]


def set_count(msg: nl.Message) -> int | None:
    """Number of elements in a NEWSET message; None where an older kernel does not say."""
    return _number(nl.attribute_map(msg.body, nl.GENMSG_SIZE), 20)


def _number(found: dict[int, bytes], kind: int) -> int | None:
    raw = found.get(kind)
    return None if raw is None else int.from_bytes(raw, "big")


def tables(datagrams: Iterable[bytes]) -> list[tuple[int, str]]:
    """(family number as the kernel has it, name) of every table."""
    return [
        (msg.body[0], nl.text(nl.attribute_map(msg.body, nl.GENMSG_SIZE).get(1, b"")))
        for data in datagrams
        for msg in nl.messages(data)
        if msg.kind == nfmsg.NEWTABLE
    ]


def generation(msg: nl.Message) -> tuple[int, str]:
    """(generation, name of the process that made it) of a NEWGEN message."""
    found = nl.attribute_map(msg.body, nl.GENMSG_SIZE)
    return _number(found, 1) or 0, nl.text(found.get(3, b""))
