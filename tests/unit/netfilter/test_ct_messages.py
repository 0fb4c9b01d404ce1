"""conntrack requests: always narrow, and never the one that flushes the table."""

from __future__ import annotations

import struct
from ipaddress import ip_address

import pytest

from cni_hostport.model import Family, IPAddress, Protocol
from cni_hostport.netfilter import ctmsg
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.ctmsg import Endpoint, Match

A4, B4, A6 = ip_address("192.0.2.1"), ip_address("192.0.2.2"), ip_address("2001:db8::1")
UDP = Protocol.UDP


def _read(data: bytes) -> tuple[int, dict[int, bytes], tuple[int, int]]:
    msg = next(nl.messages(data))
    top = nl.attribute_map(msg.body, 4)
    words = nl.attribute_map(top[25])
    flags = struct.unpack("=I", words[1])[0], struct.unpack("=I", words[2])[0]
    return msg.body[0], top, flags


def test_a_delete_by_original_destination_names_address_protocol_and_port() -> None:
    family, top, flags = _read(ctmsg.delete_matching(Match("original", UDP, A4, 53), 1))
    assert (family, flags) == (2, (2 | 8 | 32, 0))
    parts = nl.attribute_map(top[1])
    assert nl.attribute_map(parts[1]) == {2: A4.packed}
    assert nl.attribute_map(parts[2]) == {1: b"\x11", 3: b"\0\x35"}
    assert 2 not in top


def test_a_delete_by_reply_source_names_address_and_protocol() -> None:
    _, top, flags = _read(ctmsg.delete_matching(Match("reply", UDP, A4), 1))
    assert flags == (0, 1 | 8)
    parts = nl.attribute_map(top[2])
    assert nl.attribute_map(parts[1]) == {1: A4.packed}
    assert 1 not in top


def test_no_delete_by_an_ipv6_address_is_ever_left_to_the_kernel() -> None:
    with pytest.raises(ValueError, match="IPv6"):
        ctmsg.delete_matching(Match("original", UDP, A6, 53), 1)


def test_an_ipv6_dump_is_narrowed_by_protocol_and_port_alone() -> None:
    family, top, flags = _read(ctmsg.dump_matching([Match("original", UDP, A6, 53)], 1))
    assert (family, flags) == (10, (8 | 32, 0))
    assert set(nl.attribute_map(top[1])) == {2}


@pytest.mark.parametrize(
    ("matches", "flags"),
    [
        ([Match("original", UDP, A4, 53)], (2 | 8 | 32, 0)),
        ([Match("original", UDP, A4, 53), Match("original", UDP, B4, 53)], (8 | 32, 0)),
        ([Match("original", UDP, A4, 53), Match("original", UDP, A4, 54)], (2 | 8, 0)),
        ([Match("reply", UDP, A4), Match("reply", UDP, B4)], (0, 8)),
    ],
)
def test_one_dump_is_narrowed_by_what_its_matches_share(
    matches: list[Match], flags: tuple[int, int]
) -> None:
    assert _read(ctmsg.dump_matching(matches, 1))[2] == flags


@pytest.mark.parametrize(
    "matches",
    [
        [],
        [Match("reply", UDP, A4), Match("reply", UDP, A6)],
        [Match("reply", UDP, A4), Match("original", UDP, A4, 1)],
        [Match("reply", UDP, A4), Match("reply", Protocol.TCP, A4)],
    ],
)
def test_a_dump_is_for_matches_of_one_kind(matches: list[Match]) -> None:
    with pytest.raises(ValueError, match="matches of several"):
        ctmsg.dump_matching(matches, 1)


def test_a_match_by_original_destination_needs_a_port() -> None:
    with pytest.raises(ValueError, match="needs a port"):
        Match("original", UDP, A4)


def _tuple(kind: int, src: IPAddress, dst: IPAddress, sport: int, dport: int) -> bytes:
    ip = (1, 2) if src.version == 4 else (3, 4)
    ports = nl.attr(2, struct.pack(">H", sport)) + nl.attr(3, struct.pack(">H", dport))
    return nl.nest(
        kind,
        nl.nest(1, nl.attr(ip[0], src.packed), nl.attr(ip[1], dst.packed)),
        nl.nest(2, nl.attr(1, b"\x11"), ports),
    )


def _entry(
    client: IPAddress, node: IPAddress, pod: IPAddress, status: int = 0, between: bytes = b""
) -> nl.Message:
    body = (
        nl.genmsg(2 if client.version == 4 else 10)
        + _tuple(1, client, node, 4000, 53)
        + _tuple(2, pod, client, 5353, 4000)
        + between
        + nl.attr(3, struct.pack(">I", status))
        + nl.attr(12, b"\1\2\3\4")
    )
    return next(nl.messages(nl.message(ctmsg.CT_NEW, 0, 1, body)))


@pytest.mark.parametrize("family", Family)
def test_an_entry_reads_back(family: Family) -> None:
    net = "10.0.0." if family is Family.V4 else "fd00::"
    client, node, pod = (ip_address(f"{net}{i}") for i in (1, 2, 3))
    flow = ctmsg.flow(_entry(client, node, pod, 1 << 5))
    assert flow is not None
    assert flow.destination == Endpoint(17, node, 53)
    assert flow.answerer == Endpoint(17, pod, 5353)
    assert flow.translated
    assert flow.matches(Match("original", UDP, node, 53))
    assert flow.matches(Match("reply", UDP, pod))
    assert flow.matches(Match("reply", UDP, pod, 5353))
    assert not flow.matches(Match("reply", UDP, pod, 53))
    assert not flow.matches(Match("reply", Protocol.TCP, pod))
    assert not flow.matches(Match("original", UDP, pod, 53))


def test_one_flow_is_deleted_by_its_tuple_and_its_id() -> None:
    flow = ctmsg.flow(_entry(A4, B4, B4))
    assert flow is not None
    msg = next(nl.messages(ctmsg.delete_flow(flow, 1)))
    top = nl.attribute_map(msg.body, 4)
    assert msg.kind == ctmsg.CT_DELETE
    assert top == {1: flow.tuple_, 12: b"\1\2\3\4"}


def test_an_entry_without_ports_is_skipped() -> None:
    body = nl.genmsg(2) + nl.nest(1) + nl.nest(2) + nl.attr(12, b"\1\2\3\4")
    assert ctmsg.flow(next(nl.messages(nl.message(ctmsg.CT_NEW, 0, 1, body)))) is None


@pytest.mark.parametrize("family", Family)
@pytest.mark.parametrize("between", [b"", nl.attr(18, b"\0\1")], ids=["fast", "slow"])
def test_who_answers_a_translated_flow_reads_the_same_either_way(
    family: Family, between: bytes
) -> None:
    net = "10.0.0." if family is Family.V4 else "fd00::"
    client, node, pod = (ip_address(f"{net}{i}") for i in (1, 2, 3))
    raw = ctmsg.translated_answerer(_entry(client, node, pod, 1 << 5 | 8, between))
    assert raw is not None
    assert ctmsg.endpoint(raw) == Endpoint(17, pod, 5353)
    assert ctmsg.translated_answerer(_entry(client, node, pod, 8, between)) is None


def test_the_end_of_a_dump_is_found_behind_its_last_entries() -> None:
    part = nl.message(ctmsg.CT_NEW, 0, 1, b"1234" * 5)
    done = nl.message(nl.NLMSG_DONE, 0, 1, struct.pack("=i", -4))
    assert ctmsg.end_of_dump(part * 3) is None
    end = ctmsg.end_of_dump(part * 3 + done)
    assert end is not None
    assert end.errno == 4


def test_the_number_of_flows_reads_back() -> None:
    body = nl.genmsg(0) + nl.attr(1, struct.pack(">I", 100_000))
    assert ctmsg.count(next(nl.messages(nl.message(ctmsg.CT_STATS, 0, 1, body)))) == 100_000
