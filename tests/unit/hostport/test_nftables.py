"""The nftables backend on fake tables: shared elements, strangers, mend and retry."""

from __future__ import annotations

import errno
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.hostport.world import Helper, World, flush, pod

from cni_hostport.errors import NetfilterFailed
from cni_hostport.hostport.networks import NETWORK
from cni_hostport.model import Family
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nfreply import Chain, Rule

A = pod("a", "80:80", ips=("10.1.0.2/16",), interfaces=())
B = pod("b", "81:80", ips=("10.1.0.3/16",), interfaces=())
C = pod("c", "82:80", ips=("10.1.0.4/16",), interfaces=())


def both() -> tuple[World, Helper]:
    world = World()
    helper = Helper(world)
    helper.manager.attach(A)
    helper.manager.attach(B)
    world.calm()
    return world, helper


def neighbours(world: World) -> list[Element]:
    return [e for e in world.elements.values() if e.set == "neighbours"]


def ports(world: World) -> list[Element]:
    return [e for e in world.elements.values() if e.set == "ports"]


def transactions(world: World) -> list[str]:
    return [line for line in world.log if line.startswith("apply")]


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_networks_element_stays_as_it_is_until_a_look_after_the_last(order: str) -> None:
    """The kernel copies the interval set for each change of it."""
    world, helper = both()
    shared = neighbours(world)
    assert [e.comment for e in shared] == [NETWORK]
    pods = {"a": A, "b": B}
    for one in order:
        assert not helper.backend.repair()
        helper.manager.detach(pods[one].key)
        assert neighbours(world) == shared
    assert not helper.backend.in_use
    helper.manager.attach(A)
    assert neighbours(world) == shared
    assert not helper.backend.repair()


def test_the_element_of_a_network_without_attachments_goes_with_the_next_look() -> None:
    world, helper = both()
    elsewhere = pod("d", "83:80", ips=("10.2.0.2/16",), interfaces=())
    helper.manager.attach(elsewhere)
    assert not helper.backend.repair()
    here, there = neighbours(world)
    helper.manager.detach(elsewhere.key)
    assert neighbours(world) == [here, there]
    assert not helper.backend.repair()
    assert neighbours(world) == [here]
    world.calm()
    assert not helper.backend.repair()
    assert transactions(world) == []
    helper.manager.attach(elsewhere)
    assert neighbours(world) == [here, there]
    assert helper.consistent() == []


def test_a_look_that_cannot_take_it_away_tries_again(caplog: pytest.LogCaptureFixture) -> None:
    world, helper = both()
    elsewhere = pod("d", "83:80", ips=("10.2.0.2/16",), interfaces=())
    helper.manager.attach(elsewhere)
    assert not helper.backend.repair()
    helper.manager.detach(elsewhere.key)
    world.calm()
    world.fail_at, world.forever = 2, True  # the first effect is a look at the generation
    assert not helper.backend.repair()
    assert "stay for now" in caplog.text
    world.forever = False
    world.calm()
    assert len(neighbours(world)) == 2
    assert helper.consistent() == []
    assert not helper.backend.repair()
    assert len(neighbours(world)) == 1
    assert helper.consistent() == []


@pytest.mark.parametrize("again", ["10.2.5.3/24", "10.2.0.3/24", "10.2.0.3/17", "10.2.0.3/15"])
@pytest.mark.parametrize("others", [True, False])
def test_a_network_that_comes_back_with_another_mask(again: str, others: bool) -> None:
    """The kernel refuses ranges that overlap, and what nobody needs is in nobody's way."""
    world = World()
    helper = Helper(world)
    if others:
        helper.manager.attach(A)
    helper.manager.attach(pod("d", "83:80", ips=("10.2.0.2/16",), interfaces=()))
    helper.backend.repair()
    helper.manager.detach(pod("d").key)
    world.calm()
    helper.manager.attach(pod("e", "84:80", ips=(again,), interfaces=()))
    assert len(transactions(world)) == 1
    assert len(neighbours(world)) == 1 + others
    assert helper.consistent() == []
    assert not helper.backend.repair()


MASKS = ["10.2.5.3/24", "10.2.0.3/24", "10.2.0.4/16", "10.2.0.5/17", "10.2.128.3/17", "10.3.0.2/16",
         "10.2.5.4/32", "10.2.0.6/15"]  # fmt: skip


def test_the_wider_of_two_networks_on_a_link_serves_both() -> None:
    """As after a change of the mask while pods live: the kernel refuses ranges that overlap."""
    for first, second in itertools.permutations(MASKS[:4], 2):
        world = World()
        helper = Helper(world)
        one = pod("d", "83:80", ips=(first,), interfaces=())
        helper.manager.attach(one)
        world.calm()
        helper.manager.attach(pod("e", "84:80", ips=(second,), interfaces=()))
        assert len(transactions(world)) == 1
        assert helper.consistent() == []
        again = helper.again()
        assert again.consistent() == []
        again.manager.detach(one.key)
        assert again.consistent() == []
        assert not again.backend.repair()


@given(st.lists(st.tuples(st.sampled_from("defghi"), st.sampled_from(MASKS), st.integers(0, 3))))
def test_whatever_networks_come_and_go_each_pods_neighbours_are_known(
    turns: list[tuple[str, str, int]],
) -> None:
    world = World()
    helper = Helper(world)
    for name, address, what in turns:
        one = pod(name, f"{ord(name)}:80", ips=(address,), interfaces=())
        if what == 0:
            helper.manager.detach(one.key)
        elif what == 1:
            helper.backend.repair()
        elif what == 2 and len(turns) % 2:
            helper = helper.again()
        else:
            helper.manager.attach(one)
        ranges = [(e.key[-4:], e.key_end or b"") for e in neighbours(world)]
        for record in helper.manager.registry:
            (mine,) = record.attachment.addresses
            if mine.prefixlen < 32:
                low, high = mine.network.network_address, mine.network.broadcast_address
                assert any(a <= low.packed and high.packed <= b for a, b in ranges)
        assert helper.consistent() == []
    helper.backend.repair()
    assert not helper.backend.repair()
    if not helper.manager.registry:
        helper.backend.retire()
        assert neighbours(world) == []


def test_networks_that_come_and_go_leave_nothing_while_others_change_the_ruleset() -> None:
    world, helper = both()
    for number in range(3, 9):
        one = pod("d", "83:80", ips=(f"10.{number}.0.2/16",), interfaces=())
        helper.manager.attach(one)
        helper.manager.detach(one.key)
        world.generation += 7  # somebody else's transaction
        assert not helper.backend.repair()
        assert len(neighbours(world)) == 1


def test_an_element_of_an_earlier_version_is_taken_over_without_a_change() -> None:
    world, helper = both()
    (mine,) = neighbours(world)
    world.elements[mine.place] = mine._replace(comment=A.key)
    helper = helper.again()
    world.calm()
    assert not helper.backend.repair()
    assert transactions(world) == []
    helper.manager.detach(A.key)
    assert neighbours(world) == [mine]
    assert not helper.backend.repair()


def test_what_is_damaged_is_mended_although_no_attachment_wants_it_any_more() -> None:
    world, helper = both()
    helper.manager.detach(A.key)
    helper.manager.detach(B.key)
    (mine,) = neighbours(world)
    del world.elements[mine.place]
    helper.manager.attach(A)
    helper.backend.repair()
    assert helper.consistent() == []


@pytest.mark.parametrize("leaving", [A, B, C])
def test_after_a_restart_the_kernels_owner_counts(leaving: object) -> None:
    """Records are read in the order of their keys, the kernel has the first ADD's comment."""
    world, helper = both()
    helper.manager.attach(C)
    helper = helper.again()
    helper.manager.detach(leaving.key)  # type: ignore[attr-defined]
    assert helper.consistent() == []
    assert not helper.backend.repair()
    for one in (A, B, C):
        assert helper.manager.check(one) == [] or one is leaving


def test_one_transaction_a_call() -> None:
    world, helper = both()
    helper.manager.attach(C)
    assert [line.partition(" ")[0] for line in world.log if line[:5] in ("apply", "load ")] == [
        "apply"
    ]
    world.calm()
    helper.manager.detach(C.key)
    assert len([line for line in world.log if line.startswith("apply")]) == 1


def test_nothing_is_made_for_nothing_and_everything_goes_in_the_end() -> None:
    world = World()
    helper = Helper(world)
    assert world.chains == {}
    helper.manager.attach(A)
    helper.manager.detach(A.key)
    assert helper.backend.installed
    assert helper.backend.retire()
    assert world.chains == {}
    assert not helper.backend.retire()


@pytest.mark.parametrize("damage", ["flush", "element", "foreign", "value", "comment", "rule"])
def test_a_change_of_damaged_tables_mends_and_succeeds(damage: str) -> None:
    world, helper = both()
    (first, _) = ports(world)
    if damage == "flush":
        flush(world)
    elif damage == "element":
        del world.elements[first.place]
    elif damage == "foreign":
        key = b"\x06\0\0\0\0\x52\0\0"
        alien = Element(Family.V4, "ports", key, first.data, "alien")
        world.elements[alien.place] = alien
    elif damage == "value":
        world.elements[first.place] = first._replace(data=b"\x01\x02\x03\x04\0\x07\0\0")
    elif damage == "comment":
        world.elements[first.place] = first._replace(comment="someone")
    else:
        world.rules[Family.V4].pop()
    helper.manager.detach(A.key)
    helper.manager.attach(C)
    helper.backend.repair()
    assert {e.comment for e in ports(world)} == {B.key, C.key}
    assert helper.consistent() == []
    assert not helper.backend.repair()


def test_what_a_call_had_to_mend_is_told_by_the_next_repair() -> None:
    world, helper = both()
    flush(world)
    helper.manager.attach(C)
    report = helper.backend.repair()
    assert report.tables
    assert report.missing > 0
    assert "rules of ip hostport-manager" in str(report)
    assert not helper.backend.repair()


def test_a_change_that_is_refused_twice_is_an_error_and_changes_nothing() -> None:
    world, helper = both()
    before = world.state()
    world.fail_at, world.forever, world.error = 1, True, errno.EPERM
    with pytest.raises(NetfilterFailed, match="nft list table ip hostport-manager"):
        helper.backend.place({A.key: None}, helper.manager.node)
    world.forever = False
    world.calm()
    assert world.state() == before
    assert not helper.backend.repair()
    assert helper.backend.elements_of(A.key)


def test_repair_counts_and_names() -> None:
    world, helper = both()
    for element in ports(world):
        del world.elements[element.place]
    stranger = Element(Family.V6, "snat_pods", bytes(16), None, "alien")
    world.elements[stranger.place] = stranger
    report = helper.backend.repair()
    assert (report.missing, report.foreign, report.tables) == (2, 1, [])
    assert str(report).startswith("2 missing, 1 too many or wrong (such as tcp . 80 : 10.1.0.2")
    assert not helper.backend.repair()


def test_what_nobody_has_touched_is_not_read_again() -> None:
    world, helper = both()
    backend = helper.manager.backends["nftables"]
    assert not backend.repair()
    world.log.clear()
    assert not backend.repair()
    assert world.log == ["generation"]
    del world.elements[ports(world)[0].place]
    assert backend.repair().missing == 1
    assert not backend.repair()
    helper.manager.attach(C)
    world.log.clear()
    assert not backend.repair()
    assert world.log == ["generation"]  # our own transaction is counted


def test_our_own_changes_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world, helper = both()
    backend = helper.manager.backends["nftables"]
    generation = 7
    monkeypatch.setattr(type(backend._tables), "generation", lambda _: generation)  # type: ignore[attr-defined]
    assert not backend.repair()
    for own, others, read in ((1, 0, False), (1, 0, False), (1, 1, True), (0, 1, True)):
        for _ in range(own):
            helper.manager.detach(C.key)
            helper.manager.attach(C)
        world.log.clear()
        generation += 2 * own + others
        if own and generation == 9:
            generation -= 1  # there was nothing to detach
        assert not backend.repair()
        assert ("dump" in world.log) is read


def test_a_strangers_rule_or_hook_in_our_tables_does_not_stay() -> None:
    world, helper = both()
    world.rules[Family.V4].append(Rule("prerouting", 99, b"drop"))
    assert helper.backend.repair().tables
    assert not any(r.expressions == b"drop" for r in world.rules[Family.V4])
    world.chains[Family.V4].append(Chain("evil", "filter", 0, -500, 0))
    assert helper.backend.repair().tables
    assert not any(c.name == "evil" for c in world.chains[Family.V4])
    assert helper.consistent() == []
    world.chains[Family.V4].append(Chain("harmless"))
    helper.backend.repair()
    assert not helper.backend.repair()


def test_sets_that_take_no_elements_are_made_anew() -> None:
    world, helper = both()
    del world.elements[ports(world)[0].place]
    names = list(_repair_log(helper))
    world2, helper2 = both()
    del world2.elements[ports(world2)[0].place]
    world2.fail_at = names.index(next(n for n in names if n.startswith("apply"))) + 1
    world2.error = errno.ENFILE
    assert helper2.backend.repair().missing > 0
    assert "load fresh" in world2.log
    assert helper2.consistent() == []


def _repair_log(helper: Helper) -> list[str]:
    helper.backend.repair()
    return list(helper.world.log)


def test_check_changes_nothing() -> None:
    world, helper = both()
    assert helper.backend.check(A.key) == []
    assert helper.backend.check("nobody") == []
    world.calm()
    flush(world)
    assert helper.backend.check(A.key) == ["table hostport-manager"]
    assert not any(line.startswith(("apply", "load")) for line in world.log)


def test_without_nft_the_tables_of_an_earlier_helper_are_used_until_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, helper = both()
    helper = helper.again()
    loads: list[str] = []

    def no_nft(text: str) -> None:
        loads.append(text)
        raise NetfilterFailed("cannot run nft")

    real = helper.backend._load
    monkeypatch.setattr(helper.backend, "_snapshot", None)
    monkeypatch.setattr(helper.backend, "_load", no_nft)
    assert not helper.backend.repair()
    helper.manager.attach(C)
    helper.manager.detach(A.key)
    assert helper.consistent() == []
    before = len(loads)
    assert not helper.backend.repair()
    assert len(loads) > before, "nft is tried at every look"
    monkeypatch.setattr(helper.backend, "_load", real)
    helper.backend.repair()
    world.calm()
    assert not helper.backend.repair()
    assert "load" not in world.log
    monkeypatch.setattr(helper.backend, "_load", no_nft)
    world.rules[Family.V4].pop()
    with pytest.raises(NetfilterFailed):
        helper.backend.repair()
