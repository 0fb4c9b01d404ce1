"""nf_tables batches and answers: what we build is what we can read."""

from __future__ import annotations

import contextlib
import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_hostport.model import Family
from cni_hostport.netfilter import nfelem, nfmsg, nfreply
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nfevent import EventDigest

V4, V6 = Family.V4, Family.V6
TABLE = "hostport-manager"


def _many(count: int, comment: str = "") -> list[Element]:
    return [
        Element(V4, "ports", struct.pack(">I", i), b"\0\0\0\1\0\0\0\2", comment)
        for i in range(count)
    ]


def test_a_batch_is_framed_by_begin_and_end_and_only_its_last_change_asks_for_an_ack() -> None:
    batch = nfmsg.change(TABLE, [Element(V4, "a", b"1234"), Element(V6, "a", b"1234")], [], 7)
    found = list(nl.messages(batch.data))
    assert [m.kind for m in found] == [0x10, nfmsg.NEWSETELEM, nfmsg.NEWSETELEM, 0x11]
    assert [m.sequence for m in found] == [7, 8, 9, 10]
    assert [bool(m.flags & nl.NLM_F_ACK) for m in found] == [False, False, True, False]
    assert found[0].body == b"\0\0\0\x0a"
    assert [m.body[0] for m in found[1:3]] == [2, 10]
    assert batch.last == 9


def test_adds_are_exclusive_and_come_after_deletes() -> None:
    old, new = Element(V4, "a", b"1234", b"1111"), Element(V4, "a", b"1234", b"2222")
    found = list(nl.messages(nfmsg.change(TABLE, [new], [old], 1).data))[1:-1]
    assert [m.kind for m in found] == [nfmsg.DELSETELEM, nfmsg.NEWSETELEM]
    assert found[1].flags & nl.NLM_F_EXCL
    assert found[1].flags & nl.NLM_F_CREATE


def test_a_delete_carries_the_key_alone() -> None:
    element = Element(V4, "a", b"1234", b"data", "comment")
    body = next(
        m for m in nl.messages(nfmsg.change(TABLE, [], [element], 1).data) if m.body[0]
    ).body
    assert nfelem.message_elements(body) == [Element(V4, "a", b"1234")]


def test_elements_of_one_set_share_messages_whatever_their_order() -> None:
    mixed = [Element(f, "a", bytes([i, 0, 0, 0])) for i in range(10) for f in Family]
    assert len(list(nl.messages(nfmsg.change(TABLE, mixed, [], 1).data))) == 4


@pytest.mark.parametrize(("count", "comment"), [(1201, ""), (1201, "x" * 128)])
def test_no_message_holds_more_than_the_kernel_takes(count: int, comment: str) -> None:
    elements = _many(count, comment)
    batch = nfmsg.change(TABLE, elements, [], 1)
    steps = [step for step in batch.steps if step is not None]
    assert [e for step in steps for e in step.elements] == elements
    assert max(len(step.elements) for step in steps) <= nfmsg.MAX_ELEMENTS
    assert all(len(m.body) < 65000 for m in nl.messages(batch.data))
    bodies = [m for m in nl.messages(batch.data) if m.kind == nfmsg.NEWSETELEM]
    assert nfelem.elements([batch.data]) == elements
    assert len(bodies) == len(steps)


keys = st.integers(1, 40).flatmap(lambda n: st.binary(min_size=n, max_size=n))
comments = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=40)
some = st.builds(
    Element,
    st.sampled_from(Family),
    st.sampled_from(["ports", "s"]),
    keys,
    st.none() | keys,
    comments,
    st.none() | keys,
)


@given(st.lists(some, max_size=30))
def test_what_is_written_reads_back(elements: list[Element]) -> None:
    read = nfelem.elements([nfmsg.change(TABLE, elements, [], 1).data])
    assert sorted(map(repr, read)) == sorted(map(repr, elements))


@given(st.binary(max_size=200))
def test_broken_elements_never_hang_the_reader(data: bytes) -> None:
    body = nl.genmsg(2) + nl.attr(3, data)
    with contextlib.suppress(struct.error):
        nfelem.message_elements(body)


@pytest.mark.parametrize("comment", ["x" * 129, "a\0b"])
def test_a_comment_that_nft_could_not_show_is_refused(comment: str) -> None:
    with pytest.raises(ValueError, match="comment"):
        nfmsg.change(TABLE, [Element(V4, "a", b"1234", None, comment)], [], 1)


def test_the_offset_in_a_refusal_names_the_element() -> None:
    elements = [
        Element(V4, "ports", b"\0" * (4 + 4 * (i % 2)), b"\0" * 8, "c" * i) for i in range(20)
    ]
    batch = nfmsg.change(TABLE, elements, [], 1)
    start = 16 + 4 + 24 + 12 + 4
    for element in elements:
        ack = nl.Ack(2, errno.EEXIST, start)
        assert nfmsg.bad_elements(batch, ack, TABLE) == (element,)
        start += len(nfmsg._packed(element, False))


def test_a_refusal_without_an_offset_means_the_whole_message() -> None:
    elements = _many(3)
    batch = nfmsg.change(TABLE, elements, [], 1)
    assert nfmsg.bad_elements(batch, nl.Ack(2, errno.EEXIST), TABLE) == tuple(elements)
    assert nfmsg.bad_elements(batch, nl.Ack(1, errno.EPERM), TABLE) == ()


def test_an_ack_with_words_reads_back() -> None:
    tlvs = nl.attr(1, b"no such set\0") + nl.attr(2, struct.pack("=I", 60))
    body = struct.pack("=i", -errno.ENOENT) + b"\0" * 16 + tlvs
    data = nl.message(nl.NLMSG_ERROR, nl.NLM_F_CAPPED | nl.NLM_F_ACK_TLVS, 5, body)
    ack = nl.ack(next(nl.messages(data)))
    assert ack == nl.Ack(5, errno.ENOENT, 60, "no such set")
    assert not nl.is_success(data, 5)


def test_success_is_only_the_answer_to_that_request() -> None:
    data = nl.message(nl.NLMSG_ERROR, 0, 5, struct.pack("=i", 0) + b"\0" * 16)
    assert nl.is_success(data, 5)
    assert not nl.is_success(data, 6)
    assert not nl.is_success(b"", 5)


def _part(flags: int = 0) -> bytes:
    return nl.message(nfmsg.NEWSETELEM, flags, 2, nl.genmsg(2))


GENERATION = nl.message(nfmsg.NEWGEN, 0, 1, nl.genmsg(0) + nl.attr(1, struct.pack(">I", 70000)))
DONE = nl.message(nl.NLMSG_DONE, 0, 2, struct.pack("=i", 0))


def test_a_dump_tells_its_generation() -> None:
    end = nfreply.dump_end([GENERATION, _part() + _part(), DONE], 2)
    assert end == nfreply.DumpEnd(0, False, 70000)


def test_a_dump_that_is_flagged_was_overtaken() -> None:
    assert nfreply.dump_end([GENERATION, _part(nl.NLM_F_DUMP_INTR) + DONE], 2).overtaken


def test_a_dump_without_an_end_is_no_dump() -> None:
    assert nfreply.dump_end([GENERATION, _part()], 2).errno == errno.EPROTO


def test_an_error_ends_a_dump() -> None:
    data = nl.message(nl.NLMSG_ERROR, 0, 1, struct.pack("=i", -errno.ENOENT) + b"\0" * 16)
    assert nfreply.dump_end([data], 1).errno == errno.ENOENT


def _event(kind: int, table: str, portid: int, extra: bytes = b"") -> bytes:
    body = nl.genmsg(2, 3) + nl.attr(1, nl.string(table)) + extra
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, portid) + body


def _generation(number: int, name: str, portid: int) -> bytes:
    body = nl.genmsg(0) + nl.attr(1, struct.pack(">I", number)) + nl.attr(3, nl.string(name))
    return struct.pack("=IHHII", 16 + len(body), nfmsg.NEWGEN, 0, 0, portid) + body


def test_events_add_up_to_who_touched_our_tables() -> None:
    digest = EventDigest(TABLE)
    digest.feed(_event(nfmsg.NEWTABLE, "cni_hostport", 11) + _event(nfmsg.NEWCHAIN, "x", 11))
    digest.feed(_generation(5, "portmap", 11))
    assert not digest.ours
    digest.feed(_event(nfmsg.NEWCHAIN, "x", 12) + _event(nfmsg.DELTABLE, TABLE, 12))
    digest.feed(_generation(6, "nft", 12))
    assert digest.ours
    assert digest.writers == {12}
    assert digest.created == {"cni_hostport"}
    assert digest.processes == {11: "portmap", 12: "nft"}
    assert digest.generation == 6


@pytest.mark.parametrize("name", [TABLE + "2", "my-" + TABLE])
def test_a_table_whose_name_only_contains_ours_is_not_ours(name: str) -> None:
    digest = EventDigest(TABLE)
    digest.feed(_event(nfmsg.NEWSETELEM, name, 11))
    assert not digest.ours


def test_making_our_own_table_is_no_other_table() -> None:
    digest = EventDigest(TABLE)
    digest.feed(_event(nfmsg.NEWTABLE, TABLE, 11))
    assert digest.ours
    assert not digest.created


def event(kind: int, table: str, chain: str = "", attribute: int = 2) -> bytes:
    """An event about a chain of a table, as iptables-nft's changes come."""
    body = nl.genmsg(2, 0) + nl.attr(1, nl.string(table))
    if chain:
        body += nl.attr(attribute, nl.string(chain))
    return nl.message(kind, 0, 1, body)


@pytest.mark.parametrize(
    ("data", "iptables", "portmap"),
    [
        (event(nfmsg.NEWRULE, "nat", "KUBE-HOSTPORTS"), True, False),
        (event(nfmsg.NEWRULE, "nat", "KUBE-SVC-X"), False, False),
        (event(nfmsg.DELRULE, "nat", "KUBE-SVC-X"), False, False),
        (event(nfmsg.DELRULE, "nat", "PREROUTING"), True, False),
        (event(nfmsg.NEWRULE, "nat", "PREROUTING"), False, False),
        (event(nfmsg.DELRULE, "filter", "INPUT"), True, False),
        (event(nfmsg.DELRULE, "somebody", "INPUT"), False, False),
        (event(nfmsg.DELTABLE, "raw"), True, False),
        (event(nfmsg.DELTABLE, "somebody"), False, False),
        (event(nfmsg.DELCHAIN, "nat", "POSTROUTING", 3), True, False),
        (event(nfmsg.NEWRULE, "nat", "CNI-HOSTPORT-DNAT"), False, True),
        (event(nfmsg.NEWRULE, "cni_hostport", "hostports"), False, True),
    ],
)
def test_events_of_iptables_are_told_by_our_chains_and_by_lost_hooks(
    data: bytes, iptables: bool, portmap: bool
) -> None:
    digest = EventDigest(TABLE)
    digest.feed(data)
    assert (digest.iptables, digest.portmap, digest.ours) == (iptables, portmap, False)
