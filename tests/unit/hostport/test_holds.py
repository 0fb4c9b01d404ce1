"""Sockets: every errno at every step, policies, conversions, what is waited for."""

from __future__ import annotations

import errno
import itertools

import pytest
from unit.hostport.world import Opener, Somebody, World, port

from cni_hostport.errors import HostPortError, IOFailure, PortInUse, TryAgain
from cni_hostport.hostport.holds import Holds
from cni_hostport.model import HostPort, ReservePorts

WIDE, UDP = port("0.0.0.0:80"), port("0.0.0.0:80", "udp")
ONE, TWO, LO = port("192.0.2.1:80"), port("10.1.0.1:80"), port("127.0.0.1:80")
NEW = port("0.0.0.0:81")
SETS: tuple[tuple[HostPort, ...], ...] = (
    (), (WIDE,), (WIDE, UDP), (ONE,), (ONE, TWO, LO), (ONE, UDP, NEW), (NEW,),
)  # fmt: skip
SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
OTHER = (errno.EACCES, errno.EADDRNOTAVAIL, errno.EINVAL, errno.EPERM)
POLICIES = (ReservePorts.REQUIRE, ReservePorts.TRY)


def holding(*ports: HostPort) -> tuple[World, Holds]:
    world = World()
    holds = Holds(Opener(world))
    holds.resync("a", ports, ReservePorts.REQUIRE)
    world.calm()
    return world, holds


def open_ports(world: World) -> set[HostPort]:
    return {s.port for s in world.sockets}


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SETS, 2)))
def test_from_any_set_to_any_other(
    before: tuple[HostPort, ...], after: tuple[HostPort, ...]
) -> None:
    world, holds = holding(*before)
    holds.resync("a", after, ReservePorts.REQUIRE)
    assert open_ports(world) == set(after) == holds.held("a")
    assert len(world.sockets) == len(after)
    assert not holds.waiting("a")
    assert ("a" in holds.keys()) == bool(after)  # noqa: SIM118


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(SETS, 2)))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_errno_at_every_step(
    before: tuple[HostPort, ...], after: tuple[HostPort, ...], policy: ReservePorts
) -> None:
    for error in (*SHORT, *OTHER, errno.EADDRINUSE):
        for step in range(1, 5):
            world, holds = holding(*before)
            world.fail_at, world.error = step, error
            try:
                holds.resync("a", after, policy)
            except HostPortError as failure:
                expected = {TryAgain} if error in SHORT else {IOFailure, PortInUse}
                assert type(failure) in expected
                assert error in SHORT or policy is ReservePorts.REQUIRE
                assert open_ports(world) == set(before) == holds.held("a")
            else:
                assert holds.held("a") | holds.waiting("a") >= set(after)
                assert open_ports(world) == holds.held("a")
                world.calm()
                holds.retry("a")
                assert open_ports(world) == set(after) == holds.held("a")
                assert not holds.waiting("a")


def test_a_change_that_is_undone_never_closed_what_was_held() -> None:
    world, holds = holding(WIDE)
    change = holds.change("a", (NEW,), ReservePorts.REQUIRE)
    assert open_ports(world) == {WIDE, NEW}
    assert change.held == {NEW}
    change.undo()
    assert open_ports(world) == {WIDE} == holds.held("a")
    assert world.log == [f"open {NEW}", f"close {NEW}"]


@pytest.mark.parametrize(("before", "after"), [((WIDE,), (ONE, TWO)), ((ONE, TWO), (WIDE,))])
def test_a_conversion_is_undone_by_a_conversion(
    before: tuple[HostPort, ...], after: tuple[HostPort, ...]
) -> None:
    world, holds = holding(*before)
    change = holds.change("a", (*after, NEW), ReservePorts.REQUIRE)
    assert open_ports(world) == {*after, NEW}
    change.undo()
    assert open_ports(world) == set(before) == holds.held("a")
    assert not any(line.startswith("open") and str(NEW) not in line for line in world.log)


def test_a_port_that_cannot_be_taken_back_is_waited_for() -> None:
    world, holds = holding(WIDE)
    change = holds.change("a", (ONE,), ReservePorts.REQUIRE)
    world.fail_at, world.forever, world.error = world.count + 1, True, errno.EADDRINUSE
    change.undo()
    assert holds.waiting("a") == {WIDE}
    assert not holds.held("a")
    world.calm()
    world.forever = False
    assert holds.retry("a") == {WIDE}


def test_require_names_the_owner_and_try_waits() -> None:
    world, holds = holding()
    world.strangers[port("0.0.0.0:80")] = Somebody("nginx")
    with pytest.raises(PortInUse, match=r"0\.0\.0\.0:80/tcp .*nginx \(pid 42\)"):
        holds.resync("a", (WIDE,), ReservePorts.REQUIRE)
    assert holds.keys() == ()
    holds.resync("a", (WIDE, UDP), ReservePorts.TRY)
    assert holds.waiting("a") == {WIDE}
    assert holds.retry("a") == frozenset()
    world.strangers.clear()
    assert holds.retry("a") == {WIDE}
    assert holds.held("a") == {WIDE, UDP}


def test_a_port_busy_only_with_connections_is_no_conflict() -> None:
    world, holds = holding()
    world.strangers[ONE] = None
    holds.resync("a", (WIDE,), ReservePorts.REQUIRE)
    assert holds.waiting("a") == {WIDE}


def test_whoever_is_gone_since_is_no_conflict() -> None:
    world, holds = holding()
    world.fail_at, world.error = 1, errno.EADDRINUSE
    holds.resync("a", (WIDE,), ReservePorts.REQUIRE)
    assert holds.held("a") == {WIDE}


def test_a_loopback_listener_is_looked_for_where_it_does_not_collide() -> None:
    world, holds = holding()
    world.strangers[port("127.0.0.9:80")] = Somebody("stub")
    with pytest.raises(PortInUse, match="stub"):
        holds.resync("a", (ONE,), ReservePorts.REQUIRE, scan=(WIDE,))
    assert open_ports(world) == set()


def test_an_old_socket_stays_while_the_wildcard_is_waited_for() -> None:
    """A listener on an address that we left out: the rest must stay reserved."""
    world, holds = holding(ONE, LO)
    world.strangers[port("169.254.20.10:80")] = Somebody("dns")
    holds.resync("a", (WIDE,), ReservePorts.REQUIRE, patient=True)
    assert open_ports(world) == {ONE, LO}
    assert holds.waiting("a") == {WIDE}
    world.strangers.clear()
    assert holds.retry("a") == {WIDE}
    assert open_ports(world) == {WIDE}


def test_patience_takes_every_failure() -> None:
    for error in (*SHORT, *OTHER, errno.EADDRINUSE):
        world, holds = holding()
        world.fail_at, world.forever, world.error = 1, True, error
        holds.resync("a", (WIDE, UDP), ReservePorts.REQUIRE, patient=True)
        assert holds.waiting("a") == {WIDE, UDP}


def test_sockets_are_adopted_and_told_of() -> None:
    world = World()
    holds = Holds(Opener(world))
    told: list[tuple[str, int]] = []
    holds.watch(lambda key, sockets: told.append((key, len(sockets))))
    opener = Opener(world)
    holds.adopt("a", WIDE, opener.open(WIDE))
    twin = opener.open(NEW)
    holds.adopt("a", NEW, twin)
    holds.adopt("a", NEW, opener.open(UDP))  # a second one for a port is closed
    assert open_ports(world) == {WIDE, NEW}
    holds.resync("a", (WIDE,), ReservePorts.REQUIRE)
    assert open_ports(world) == {WIDE}
    holds.release("a")
    holds.release("a")
    assert told == [("a", 1), ("a", 0)]
    assert open_ports(world) == set()
