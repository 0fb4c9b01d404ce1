"""Elements over netlink against the real kernel, judged by the node's own nft."""

from __future__ import annotations

import errno
import json
import select
import subprocess
import threading
from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from cni_hostport.errors import NetfilterFailed
from cni_hostport.host import nftcmd
from cni_hostport.host.nfevents import NftEvents
from cni_hostport.host.nfnetlink import Nftables, NftError
from cni_hostport.host.nfsocket import NetfilterSocket
from cni_hostport.model import Family, Protocol
from cni_hostport.netfilter import elements as e
from cni_hostport.netfilter import nfelem, nfmsg, nfreply, nftrules
from cni_hostport.netfilter.elements import Element
from lab.private_net import private_net

pytestmark = pytest.mark.lab

V4, V6 = Family.V4, Family.V6
A4, A6, POD4, POD6 = (ip_address(a) for a in ("192.0.2.1", "2001:db8::1", "10.0.0.2", "fd00::2"))
POD = {V4: POD4, V6: POD6}
TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
OWNER = "abcdefghijklmnop"

SHAPES = """
table ip shapes {
  map ports { type inet_proto . inet_service : ipv4_addr . inet_service
  }
  map hosts { type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
  }
  set pairs { type ipv4_addr . ipv4_addr
  }
  set addrs { type ipv4_addr
  }
  set services { type inet_service
  }
  set sockets { type ipv4_addr . inet_service
  }
  set links { type ifname . ipv4_addr
  flags interval
  }
}
"""
SHAPES += SHAPES.replace("table ip ", "table ip6 ").replace("ipv4_addr", "ipv6_addr")


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    with private_net():
        nftcmd.load(SHAPES)
        yield


@pytest.fixture
def nft() -> Iterator[Nftables]:
    made = Nftables("shapes")
    yield made
    made.close()


def _elements(family: Family) -> dict[str, Element]:
    node, pod = (A4, POD4) if family is V4 else (A6, POD6)
    low, high = e.link_net_key("cni0", ip_network("10.88.0.0/16" if family is V4 else "fd00::/64"))
    return {
        "ports": Element(family, "ports", e.port_key(TCP, 8080), e.target(pod, 80), OWNER),
        "hosts": Element(
            family, "hosts", e.addr_port_key(node, UDP, 53), e.target(pod, 5353), OWNER
        ),
        "pairs": Element(family, "pairs", e.pair_key(pod, pod), None, OWNER),
        "addrs": Element(family, "addrs", e.addr_key(node)),
        "services": Element(family, "services", e.service_key(53), None, "x" * 128),
        "sockets": Element(family, "sockets", e.addr_service_key(node, 53), None, OWNER),
        "links": Element(family, "links", low, None, OWNER, high),
    }


def _all() -> list[Element]:
    return [element for family in Family for element in _elements(family).values()]


def _port(port: int, family: Family = V4, to: int = 80, protocol: Protocol = TCP) -> Element:
    data = e.target(POD[family], to)
    return Element(family, "ports", e.port_key(protocol, port), data, OWNER)


def _listed(family: str, name: str) -> Any:
    words = ["nft", "-j", "list", "set" if name not in ("ports", "hosts") else "map"]
    out = subprocess.run(
        [*words, family, "shapes", name], check=True, capture_output=True, text=True
    ).stdout
    body = next(iter(json.loads(out)["nftables"][1].values()))
    return body.get("elem", [])


def _marked(what: Any) -> dict[str, Any]:
    return {"elem": {"val": what, "comment": OWNER}}


def test_nft_reads_our_elements_back_exactly(nft: Nftables) -> None:
    nft.apply(_all(), [])
    for family, node, pod, net in (
        ("ip", "192.0.2.1", "10.0.0.2", {"addr": "10.88.0.0", "len": 16}),
        ("ip6", "2001:db8::1", "fd00::2", {"addr": "fd00::", "len": 64}),
    ):
        expected = {
            "ports": [[_marked({"concat": ["tcp", 8080]}), {"concat": [pod, 80]}]],
            "hosts": [[_marked({"concat": [node, "udp", 53]}), {"concat": [pod, 5353]}]],
            "pairs": [_marked({"concat": [pod, pod]})],
            "addrs": [node],
            "services": [{"elem": {"val": 53, "comment": "x" * 128}}],
            "sockets": [_marked({"concat": [node, 53]})],
            "links": [_marked({"concat": ["cni0", {"prefix": net}]})],
        }
        assert {name: _listed(family, name) for name in expected} == expected


def test_what_nft_writes_is_the_same_element_to_us(nft: Nftables) -> None:
    for family in Family:
        for name, element in _elements(family).items():
            words, colon, value = e.describe(element).partition(" : ")
            comment = f' comment "{element.comment}"' if element.comment else ""
            table = f"{nftrules.nft_family(family)} shapes"
            nftcmd.load(f"add element {table} {name} {{ {words}{comment}{colon}{value} }}\n")
            assert nft.dump(family, name) == [element]
            assert nft.get([element]) == [element]


def test_get_and_dump_return_what_was_written(nft: Nftables) -> None:
    nft.apply(_all(), [])
    assert nft.get(_all()) == _all()
    assert [x for f in Family for s in _elements(f) for x in nft.dump(f, s)] == _all()


def test_get_says_none_for_what_is_missing_and_reads_the_rest(nft: Nftables) -> None:
    there = [_port(i) for i in range(100, 300)]
    nft.apply(there, [])
    asked = [x for one in there for x in (one, one._replace(set="nowhere"), _port(7))]
    found = nft.get(asked)
    assert found[::3] == there
    assert not any(found[1::3])
    assert not any(found[2::3])
    assert nft.get([]) == []


def test_get_is_by_key_and_shows_the_value_that_is_there(nft: Nftables) -> None:
    nft.apply([_port(80, to=1)], [])
    assert nft.get([_port(80, to=2)._replace(comment="me")]) == [_port(80, to=1)]


@pytest.mark.parametrize("to", [80, 81])
def test_a_second_owner_is_refused_whatever_the_value(nft: Nftables, to: int) -> None:
    nft.apply([_port(8080)], [])
    second = _port(8080, to=to)._replace(comment="another")
    with pytest.raises(NftError) as caught:
        nft.apply([second], [])
    assert caught.value.errno == errno.EEXIST
    assert caught.value.failed == [(second, "add", errno.EEXIST)]
    assert "tcp . 8080 : 10.0.0.2" in str(caught.value)
    assert nft.dump(V4, "ports") == [_port(8080)]


def test_deleting_what_is_missing_is_refused(nft: Nftables) -> None:
    with pytest.raises(NftError) as caught:
        nft.apply([], [_port(1)])
    assert caught.value.failed == [(_port(1), "delete", errno.ENOENT)]


def test_a_key_is_replaced_in_one_transaction(nft: Nftables) -> None:
    old, new = _port(80, to=1), _port(80, to=2)._replace(comment="new")
    nft.apply([old], [])
    nft.apply([new], [old])
    assert nft.dump(V4, "ports") == [new]


def test_one_bad_element_of_one_family_changes_nothing_in_either(nft: Nftables) -> None:
    nft.apply([_port(1, V6), _port(2, V4)], [])
    with pytest.raises(NftError) as caught:
        nft.apply([_port(3, V4), _port(1, V6)], [_port(2, V4)])
    assert caught.value.failed == [(_port(1, V6), "add", errno.EEXIST)]
    assert nft.dump(V4, "ports") == [_port(2, V4)]
    assert nft.dump(V6, "ports") == [_port(1, V6)]


def test_every_message_with_a_bad_element_names_its_first_one(nft: Nftables) -> None:
    there = [_port(700), _port(1700)]
    nft.apply(there, [])
    missing = _port(9, protocol=UDP)
    with pytest.raises(NftError) as caught:
        nft.apply([_port(i) for i in range(1, 2001)], [missing])
    assert caught.value.errno == errno.ENOENT
    assert caught.value.failed == [
        (missing, "delete", errno.ENOENT),
        (there[0], "add", errno.EEXIST),
        (there[1], "add", errno.EEXIST),
    ]
    assert sorted(nft.dump(V4, "ports")) == there


def test_a_missing_set_or_table_is_named(nft: Nftables) -> None:
    for bad in (Element(V4, "nowhere", b"1234"), Element(V6, "nowhere", b"1234")):
        with pytest.raises(NftError) as caught:
            nft.apply([bad], [])
        assert caught.value.failed == [(bad, "add", errno.ENOENT)]
    with pytest.raises(NftError) as caught:
        Nftables("nowhere").apply([_port(1)], [])
    assert caught.value.errno == errno.ENOENT


def test_a_key_of_the_wrong_length_is_refused(nft: Nftables) -> None:
    with pytest.raises(NftError) as caught:
        nft.apply([Element(V4, "addrs", b"12345678")], [])
    assert caught.value.errno == errno.EINVAL


def test_a_socket_works_on_after_refusals(nft: Nftables) -> None:
    for _ in range(3):
        with pytest.raises(NftError):
            nft.apply([], [_port(i) for i in range(2000)])
    nft.apply([_port(1)], [])
    assert nft.get([_port(1)]) == [_port(1)]


def test_ten_thousand_of_each_family_are_one_transaction(nft: Nftables) -> None:
    many = [_port(p, f, to=p) for p in range(1, 10001) for f in Family]
    before = nft.generation()
    nft.apply(many, [])
    assert nft.generation() == before + 1
    assert sorted(nft.dump(V4, "ports")) == [x for x in many if x.family is V4]
    assert sorted(nft.dump(V6, "ports")) == [x for x in many if x.family is V6]
    assert nft.get(many[::500]) == many[::500]
    with pytest.raises(NftError) as caught:
        nft.apply([*many[:-1], _port(10001)], [])
    assert len(nft.dump(V4, "ports")) == 10000
    assert len(caught.value.failed) == 40
    nft.apply([], many)
    assert nft.dump(V4, "ports") == nft.dump(V6, "ports") == []


def test_empty_takes_everything_out(nft: Nftables) -> None:
    nft.apply(_all(), [])
    nft.empty([(f, name) for f in Family for name in _elements(f)])
    assert not any(nft.dump(f, name) for f in Family for name in _elements(f))


@pytest.mark.parametrize("table", ["shapes", "nowhere"])
def test_a_dump_of_a_missing_set_says_so(table: str) -> None:
    with pytest.raises(NftError) as caught:
        Nftables(table).dump(V4, "nowhere")
    assert caught.value.errno == errno.ENOENT


def test_two_dumps_that_lose_the_same_are_not_believed(
    nft: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a busy machine: the resize waited, and every other element was missing."""
    many = [_port(p) for p in range(1, 101)]
    nft.apply(many, [])
    plain, losing = nfelem.elements, iter([True, True, True, False])
    monkeypatch.setattr(nfelem, "elements", lambda data: plain(data)[:: 2 if next(losing) else 1])
    assert sorted(nft.dump(V4, "ports")) == many
    assert next(losing, None) is None


@pytest.mark.parametrize("counted", [True, False])
def test_a_dump_with_some_twice_and_others_not_at_all_is_not_believed(
    counted: bool, nft: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on a busy machine: the number was right, a fifth was missing."""
    many = [_port(p) for p in range(1, 101)]
    nft.apply(many, [])
    if not counted:
        monkeypatch.setattr(nfreply, "set_count", lambda msg: None)
    plain, turn = nfelem.elements, iter(range(99))
    monkeypatch.setattr(
        nfelem, "elements", lambda data: plain(data)[:50] * 2 if next(turn) < 3 else plain(data)
    )
    assert sorted(nft.dump(V4, "ports")) == many


@pytest.mark.parametrize("counted", [True, False])
def test_a_dump_is_of_one_instant_while_others_write(
    counted: bool, nft: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a change nor the kernel's resizing of its hash table may show."""
    if not counted:
        monkeypatch.setattr(nfreply, "set_count", lambda msg: None)
    halves = [{_port(p, to=to) for p in range(1, 2001)} for to in (1, 2)]
    nft.apply(list(halves[0]), [])
    stop = threading.Event()

    def churn() -> None:
        other, turn = Nftables("shapes"), 0
        while not stop.wait(0.05):
            other.apply(list(halves[1 - turn]), list(halves[turn]))
            turn = 1 - turn
        other.close()

    writer = threading.Thread(target=churn)
    writer.start()
    try:
        for _ in range(50):
            found = nft.dump(V4, "ports")
            assert len(found) == 2000
            assert set(found) in halves
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("when", [1, 2, 3, 4, 6, 8])
def test_an_overtaken_dump_is_read_again(
    when: int, nft: Nftables, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = [_port(p) for p in range(1, 3001)]
    nft.apply(many, [])
    other, plain, reads = Nftables("shapes"), NetfilterSocket.receive, 0

    def receive(sock: NetfilterSocket) -> bytes:
        nonlocal reads
        if sock is nft._sock:
            reads += 1
            if reads == when:
                other.apply([_port(5000)], [])
        return plain(sock)

    monkeypatch.setattr(NetfilterSocket, "receive", receive)
    assert sorted(nft.dump(V4, "ports")) == [*many, _port(5000)]


def test_tables_sets_chains_and_rules_read_back() -> None:
    nftcmd.load(nftrules.tables_text())
    nft = Nftables()
    assert set(nft.tables()) == {(f, name) for f in (2, 10) for name in ("shapes", nftrules.TABLE)}
    for family in Family:
        assert nft.has_table(family)
        assert {s.name for s in nft.sets(family)} >= set(nftrules.SETS)
        by_name = {s.name: s for s in nft.sets(family)}
        size = 4 if family is V4 else 16
        assert by_name[nftrules.PORTS].key_length == 8
        assert by_name[nftrules.PORTS].data_length == size + 4
        assert by_name[nftrules.NEIGHBOURS].flags & 0x4
        count = nftrules.rule_count(family)
        rules = nft.rules(family)
        assert {c.name for c in nft.chains(family)} == set(count)
        assert {n: sum(r.chain == n for r in rules) for n in count} == count
        hook = next(c for c in nft.chains(family) if c.name == "prerouting")
        assert (hook.type, hook.hook, hook.priority, hook.policy) == ("nat", 0, -90, 1)
        plain = next(c for c in nft.chains(family) if c.name == "translate")
        assert (plain.type, plain.hook) == (None, None)


def test_the_same_text_gives_the_same_rules_and_a_changed_rule_shows() -> None:
    nft = Nftables()

    def look() -> list[tuple[str, bytes]]:
        return [(r.chain, r.expressions) for f in Family for r in nft.rules(f)]

    nftcmd.load(nftrules.tables_text())
    first = look()
    nftcmd.load(nftrules.tables_text())
    assert look() == first
    nft.delete_tables()
    nftcmd.load(nftrules.tables_text())
    assert look() == first
    nftcmd.load(f'insert rule ip {nftrules.TABLE} prerouting accept comment "stranger"\n')
    assert look() != first
    assert "stranger" in {r.comment for r in nft.rules(V4)}


def test_a_missing_table_reads_as_empty() -> None:
    nft = Nftables("nowhere")
    for family in Family:
        assert not nft.has_table(family)
        assert nft.rules(family) == []
        assert nft.chains(family) == []
        assert nft.sets(family) == []


@pytest.mark.parametrize("missing", [[], ["ip"], ["ip", "ip6"]])
def test_our_tables_go_and_missing_ones_are_well(nft: Nftables, missing: list[str]) -> None:
    nftcmd.load("table ip other {\n}\n" + "".join(f"delete table {f} shapes\n" for f in missing))
    nft.delete_tables()
    assert nft.tables() == [(2, "other")]


def test_the_generation_moves_with_every_change_and_only_then(nft: Nftables) -> None:
    first = nft.generation()
    nft.dump(V4, "ports")
    nft.get([_port(1)])
    assert nft.generation() == first
    nftcmd.load("table ip other {\n}\n")
    assert nft.generation() == first + 1


def test_events_tell_own_changes_from_foreign_ones(nft: Nftables) -> None:
    events = NftEvents("shapes")
    assert not events.read().ours
    nft.apply([_port(1)], [])
    assert select.select([events], [], [], 1)[0]
    seen = events.read()
    assert seen.ours
    assert seen.writers == {nft.portid}
    assert not seen.foreign({nft.portid})
    assert seen.generation == nft.generation()
    nftcmd.load("flush map ip shapes ports\n")
    seen = events.read()
    assert seen.foreign({nft.portid})
    assert seen.culprits({nft.portid}) == ("nft",)
    assert not select.select([events], [], [], 0)[0]


def test_own_changes_wake_nobody_where_they_need_not_be_told(nft: Nftables) -> None:
    events = NftEvents("shapes", own=nft.portid)
    nft.apply([_port(p, f) for p in range(1, 200) for f in Family], [])
    nft.apply([], [_port(1)])
    assert not select.select([events], [], [], 0.05)[0]
    other = Nftables("shapes")
    other.apply([_port(1)], [])
    seen = events.read()
    assert (seen.ours, seen.writers) == (True, {other.portid})
    nftcmd.load("flush map ip shapes ports\n")
    assert events.read().culprits({nft.portid}) == ("nft",)


@pytest.mark.parametrize(
    "text",
    ["flush ruleset\n", "delete table ip6 shapes\n", "add chain ip shapes new\n"],
)
def test_damage_to_our_tables_is_heard(text: str, nft: Nftables) -> None:
    events = NftEvents("shapes")
    nftcmd.load(text)
    assert events.read().foreign({nft.portid})


def test_other_peoples_tables_are_only_named() -> None:
    events = NftEvents("shapes")
    nftcmd.load("table inet cni_hostport { chain x {\n}\n}\ntable ip shapes2 {\n}\n")
    seen = events.read()
    assert not seen.ours
    assert not seen.foreign(())
    assert seen.created == {"cni_hostport", "shapes2"}


def test_lost_events_are_said(monkeypatch: pytest.MonkeyPatch, nft: Nftables) -> None:
    monkeypatch.setattr("cni_hostport.host.nfevents._BUFFER", 4096)
    events = NftEvents("shapes")
    for turn in range(20):
        nft.apply([_port(p) for p in range(turn * 100 + 1, turn * 100 + 101)], [])
    seen = events.read()
    assert seen.overflow
    assert seen.foreign({nft.portid})
    assert not events.read().overflow


def test_twenty_thousand_foreign_events_fit(nft: Nftables) -> None:
    events = NftEvents("ours")
    nft.apply([_port(p, f) for p in range(1, 10001) for f in Family], [])
    seen = events.read()
    assert not seen.overflow
    assert not seen.ours


def test_a_refused_text_changes_nothing_and_carries_nfts_words(nft: Nftables) -> None:
    with pytest.raises(NetfilterFailed) as caught:
        nftcmd.load("table ip new {\n}\ntable ip x {\n chain c { frobnicate }\n}\n")
    assert "frobnicate" in caught.value.details
    assert {name for _, name in nft.tables()} == {"shapes"}


def test_a_batch_too_large_for_the_socket_is_an_error_and_not_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cni_hostport.host.nfsocket._SEND_LIMIT", 4096)
    nft = Nftables("shapes")
    with pytest.raises(NftError) as caught:
        nft.apply([_port(p) for p in range(1, 20001)], [])
    assert caught.value.errno == errno.EMSGSIZE
    nft.apply([_port(1)], [])


def test_family_numbers_are_the_kernels() -> None:
    assert nfmsg.AF_NUMBER == {V4: 2, V6: 10}
