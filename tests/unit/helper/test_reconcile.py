"""When and how often damage is mended, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from unit.hostport.world import BRIDGE, Helper, Link, World, flush, pod

from cni_hostport.helper import reconcile
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.reconcile import Backoff, Reconciler


class Clock:
    """A clock that only a test moves."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(reconcile, "time", made)
    return made


def start(*pods: object) -> tuple[World, Helper, Reconciler, Metrics]:
    world = World()
    helper = Helper(world)
    for one in pods or (pod("web", "80:80/udp"),):
        helper.manager.attach(one)
    world.calm()
    metrics = Metrics()
    return world, helper, Reconciler(helper.manager, metrics), metrics


def test_backoff_doubles_from_the_fourth_time_and_ends_with_calm() -> None:
    backoff = Backoff()
    now, waits = 0.0, []
    for _ in range(14):
        wait = backoff.delay(now)
        waits.append(wait)
        now += wait
        backoff.repaired(now)
    assert waits[:9] == [0, 0, 0, 0.5, 1, 2, 4, 8, 16]
    assert set(waits[9:]) == {30.0}
    assert backoff.delay(now + 61) == 0.0
    assert backoff.repaired(now + 61) is False


def test_a_flush_is_mended_counted_and_told_once(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world, helper, reconciler, metrics = start()
    flush(world)
    with caplog.at_level(logging.INFO):
        reconciler.look("a change of our tables", "nft")
    assert helper.consistent() == []
    assert metrics.repairs == 1
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert line.startswith("repaired after a change of our tables (removed by nft): nftables: ")
    assert reconciler.last.what in line
    assert b'cni_hostport_repairs_total{kind="rules"} 1.0' in metrics.text()
    assert {p for _, p in world.flows_to} == {80}
    reconciler.look()
    assert metrics.repairs == 1


def test_somebody_who_keeps_removing_things_is_not_fought(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world, helper, reconciler, metrics = start()
    begin = clock.now
    with caplog.at_level(logging.ERROR):
        while clock.now < begin + 300:
            flush(world)
            clock.now += reconciler.delay()
            reconciler.look("a change of our tables", "firewalld")
    assert metrics.repairs < 25
    errors = [r.getMessage() for r in caplog.records]
    assert len(errors) == 1
    assert "removed by firewalld" in errors[0]
    clock.now += 61
    flush(world)
    assert reconciler.delay() == reconcile.SETTLE
    reconciler.look()
    assert helper.consistent() == []


def test_a_look_that_comes_too_early_leaves_the_rules_for_later(clock: Clock) -> None:
    world, helper, reconciler, metrics = start()
    for _ in range(4):
        flush(world)
        clock.now += reconciler.delay()
        assert reconciler.look() is False
    flush(world)
    assert reconciler.look() is True
    assert metrics.repairs == 4
    clock.now += reconciler.delay()
    assert reconciler.look() is False
    assert metrics.repairs == 5
    assert helper.consistent() == []


def test_many_links_at_once_are_one_repair(clock: Clock) -> None:
    """`sysctl -w net.ipv4.conf.all...` on a node of ptp pods must not look like a fight."""
    pods = [pod(f"p{n}", f"{n}:80", interfaces=()) for n in range(1, 9)]
    world, _, reconciler, metrics = start(*pods)
    world.links[BRIDGE].route_localnet = 0
    reconciler.look()
    assert metrics.repairs == 1
    assert reconciler.delay() == reconcile.SETTLE
    assert reconciler.last.what == "net.ipv4.conf.cni0.route_localnet"


def test_links_and_rules_have_their_own_patience(clock: Clock) -> None:
    world, helper, reconciler, metrics = start()
    for _ in range(6):
        world.links[BRIDGE].route_localnet = 0
        reconciler.look()
    assert metrics.repairs == 3
    assert reconciler.delay() == reconcile.SETTLE
    flush(world)
    reconciler.look()
    assert metrics.repairs == 4
    clock.now += 61
    reconciler.look()
    assert helper.consistent() == []


def test_an_address_change_looks_at_its_links_alone(clock: Clock) -> None:
    world, _, reconciler, metrics = start()
    world.links[BRIDGE].route_localnet = 0
    world.addresses.append(("198.51.100.1", "eth1"))
    reconciler.follow()
    assert metrics.repairs == 0
    world.addresses.append(("10.1.0.7", "cni0"))
    reconciler.follow()
    assert metrics.repairs == 1


def test_a_failing_look_is_a_problem_until_one_succeeds(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    world, _, reconciler, _ = start()
    flush(world)
    world.fail_at, world.forever = 1, True
    reconciler.look()
    assert reconciler.problem
    assert reconciler.broken <= {"nftables"}
    assert all("\n" not in r.getMessage() for r in caplog.records)
    world.forever = False
    world.calm()
    reconciler.look()
    assert (reconciler.problem, reconciler.broken) == ("", frozenset())


def test_whose_problem_it_is(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    _, helper, reconciler, _ = start()

    def refuse() -> None:
        raise OSError("no rules today")

    monkeypatch.setattr(helper.backend, "repair", refuse)
    reconciler.look()
    assert (reconciler.broken, "no rules" in reconciler.problem) == ({"nftables"}, True)
    monkeypatch.setattr(helper.manager, "retry_unfinished", refuse)
    reconciler.look()
    assert (reconciler.broken, "no rules" in reconciler.problem) == (frozenset(), True)


def test_empty_tables_go_after_some_seconds(clock: Clock) -> None:
    world, helper, reconciler, _ = start()
    reconciler.retire()
    assert not reconciler.wants_retire
    helper.manager.detach(pod("web").key)
    assert reconciler.wants_retire
    reconciler.retire()
    assert world.chains
    clock.now += reconcile.RETIRE_AFTER
    reconciler.retire()
    assert not world.chains
    assert not reconciler.wants_retire


def test_tables_that_are_used_again_stay(clock: Clock) -> None:
    world, helper, reconciler, _ = start()
    helper.manager.detach(pod("web").key)
    reconciler.retire()
    assert helper.manager.attach(pod("web", "80:80/udp"))
    reconciler.retire()
    clock.now += reconcile.RETIRE_AFTER
    helper.manager.detach(pod("web").key)
    reconciler.retire()
    assert world.chains


def test_empty_tables_that_cannot_go_are_tried_again(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, helper, reconciler, _ = start()
    helper.manager.detach(pod("web").key)
    reconciler.retire()
    clock.now += reconcile.RETIRE_AFTER
    with monkeypatch.context() as broken:
        broken.setattr(helper.backend, "retire", lambda: (_ for _ in ()).throw(OSError("busy")))
        reconciler.retire()
    assert "busy" in reconciler.problem
    clock.now += reconcile.RETIRE_AFTER
    reconciler.retire()
    assert not world.chains


def test_a_glance_tells_when_a_look_at_links_is_worthwhile() -> None:
    world, helper, reconciler, metrics = start()
    world.calm()
    assert not reconciler.glance()
    assert world.log == []
    world.links[BRIDGE].route_localnet = 0
    assert reconciler.glance()
    reconciler.peek()
    assert world.links[BRIDGE].route_localnet == 1
    assert metrics.repairs == 1
    assert not reconciler.glance()
    world.links[BRIDGE].name = "renamed"  # the number counts; the name is only a short cut
    assert reconciler.glance()
    reconciler.peek()
    assert metrics.repairs == 1
    helper.manager.detach(pod("web").key)
    assert not reconciler.glance()


def test_each_of_many_links_gets_its_glance() -> None:
    world, helper, reconciler, _ = start()
    for number in range(20, 30):
        world.links[number] = Link(f"br{number}")
        world.link_of_pods = number
        helper.manager.attach(pod(f"pod{number}", f"{number}:80", interfaces=(f"br{number}",)))
    world.links[27].route_localnet = 0
    turns = 0
    while not reconciler.glance():
        turns += 1
        assert turns < 4
    reconciler.peek()
    assert world.links[27].route_localnet == 1
