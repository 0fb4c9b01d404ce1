"""A fault at every effect of every verb: all of it or nothing, and never a leak."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest
from unit.hostport.world import Helper, Killed, World, flush, pod

from cni_hostport.errors import HostPortError
from cni_hostport.hostport.adding import Wish

Action = Callable[[Helper], object]

WEB = pod("web", "8080:80/tcp", "8080:80/udp", "192.0.2.1:53:53/udp", "9132:9132/sctp")
OTHER = pod("other", "9000:80/tcp", "9000:80/udp", ips=("10.1.0.3/16",), interfaces=())
MOVED = pod("web", "8080:81/tcp", "8081:80/udp", "53:53/udp", ips=("10.1.0.9/16", "fd00::9/64"))
FIRST = pod(
    "first", "8080:80/tcp", "8080:80/udp", "192.0.2.1:53:53/udp", "9132:9132/sctp",
    ips=("10.1.0.2/16",),
)  # fmt: skip
THIRD = pod("third", "9100:80/tcp", "127.0.0.1:9101:80/udp", ips=("10.1.0.4/16", "fd00::4/64"))
FOURTH = pod("fourth", "9200:80/udp", ips=("10.2.0.4/16",), interfaces=())
THREE = [Wish(FIRST, netns_cookie=5), Wish(OTHER), Wish(THIRD)]
WIDER = pod("web", "8080:80/tcp", "192.0.2.1:8090:80/udp", node_addresses=("192.0.2.0/24",))


def nothing(helper: Helper) -> None:
    """No call before."""


def add_web(helper: Helper) -> object:
    return helper.manager.attach(WEB, netns_cookie=5)


def add_other(helper: Helper) -> object:
    return helper.manager.attach(OTHER)


def add_both(helper: Helper) -> None:
    add_web(helper)
    add_other(helper)


def replace(helper: Helper) -> object:
    return helper.manager.attach(MOVED, netns_cookie=6)


def narrow(helper: Helper) -> object:
    return helper.manager.attach(WIDER)


def move_link(helper: Helper) -> object:
    helper.world.link_of_pods = 8
    return helper.manager.attach(MOVED)


def add_three(helper: Helper) -> None:
    assert helper.manager.apart(THREE) == 3
    if not helper.manager.attach_together(THREE):
        raise HostPortError("not together")


def delete(helper: Helper) -> object:
    return helper.manager.detach(WEB.key)


def gc(helper: Helper) -> None:
    if errors := helper.manager.gc("net", []):
        raise errors[0]


SCENES: dict[str, tuple[Action, Action]] = {
    "first ADD": (nothing, add_web),
    "second ADD": (add_other, add_web),
    "three ADDs together": (nothing, add_three),
    "three more together": (lambda helper: helper.manager.attach(FOURTH), add_three),
    "replace": (add_both, replace),
    "replace by addresses one by one": (add_both, narrow),
    "replace on another link": (add_web, move_link),
    "DEL of two": (add_both, delete),
    "DEL of the last": (add_web, delete),
    "GC": (add_both, gc),
}
UNDOING = {"DEL of two", "DEL of the last", "GC"}


def scene(name: str) -> tuple[World, Action]:
    """The world before the call, and the call."""
    prepare, call = SCENES[name]
    world = World()
    prepare(Helper(world))
    world.calm()
    return world, call


def fresh(world: World) -> tuple[World, Helper]:
    """An independent copy of the world with a living helper in it."""
    twin = world.twin()
    helper = Helper(twin)
    twin.calm()
    return twin, helper


def steps(name: str) -> int:
    world, call = scene(name)
    twin, helper = fresh(world)
    call(helper)
    return twin.count


def outcomes(name: str) -> tuple[dict[str, object], dict[str, object]]:
    """State before, state after."""
    world, call = scene(name)
    twin, helper = fresh(world)
    before = twin.state()
    call(helper)
    return before, twin.state()


def midway(name: str) -> list[dict[str, object]]:
    """States in which some of several calls are done, in their order, and the others not at all."""
    if "together" not in name:
        return []
    states = []
    for count in (1, 2):
        twin, helper = fresh(scene(name)[0])
        for wish in THREE[:count]:
            helper.manager.attach(wish.attachment, netns_cookie=wish.netns_cookie)
        states.append(twin.state())
    return states


def cases() -> Iterator[tuple[str, int]]:
    for name in SCENES:
        for number in range(1, steps(name) + 1):
            yield name, number


CASES = list(cases())
ERRNOS = (errno.EMFILE, errno.EPERM, errno.EEXIST)


@pytest.mark.parametrize("name", SCENES)
def test_a_fault_at_every_effect_leaves_all_or_nothing(name: str) -> None:
    before, after = outcomes(name)
    world, call = scene(name)
    seen = {"refused": 0, "done": 0}
    for number in range(1, steps(name) + 1):
        for error in ERRNOS:
            twin, helper = fresh(world)
            twin.fail_at, twin.error = number, error
            what = f"{name}: errno {error} at effect {number}"
            try:
                call(helper)
            except HostPortError:
                seen["refused"] += 1
                expected = before
                if name in UNDOING and helper.manager._undeleted:
                    twin.calm()
                    helper.manager.retry_unfinished()
                    expected = after
                elif name == "GC":  # what failed stays, the others went
                    assert helper.consistent() == []
                    twin.calm()
                    call(helper)
                    expected = after
            else:
                seen["done"] += 1
                expected = after
            twin.calm()
            assert twin.state() == expected or recovers(helper, expected), what
            assert helper.consistent() == [], what
            assert not helper.backend.repair(), what
    assert seen["done"]


def recovers(helper: Helper, expected: dict[str, object]) -> bool:
    """A flag that could not be read or set is put right by the next look."""
    helper.manager.refresh_links()
    return helper.world.state() == expected


@pytest.mark.parametrize("name", SCENES)
def test_faults_from_an_effect_on_are_mended_once_they_stop(name: str) -> None:
    """Even the undo fails: the books stay right, and repair brings the node after them."""
    before, after = outcomes(name)
    world, call = scene(name)
    for number in range(1, steps(name) + 1):
        twin, helper = fresh(world)
        twin.fail_at, twin.forever, twin.error = number, True, errno.ENOSPC
        try:
            call(helper)
        except HostPortError:
            allowed = [before, after] if name in UNDOING else [before]
        else:
            allowed = [after]
        what = f"{name}: from effect {number} on"
        twin.calm()
        twin.forever = False
        helper.manager.retry_unfinished()
        helper.backend.repair()
        helper.manager.refresh_links()
        helper.manager.retry_waiting()
        twin.adding.clear()  # never valid; dropped at the next start
        if name != "GC":
            settled = twin.state()
            if settled not in allowed:
                # flags of a link that could not be put back are not ours any more
                settled = {k: v for k, v in settled.items() if k != "links"}
                assert settled in [{k: v for k, v in s.items() if k != "links"} for s in allowed], (
                    what
                )
        assert helper.consistent() == [], what


@pytest.mark.parametrize("name", SCENES)
def test_killed_after_every_effect_the_next_start_has_all_or_nothing(name: str) -> None:
    before, after = outcomes(name)
    world, call = scene(name)
    for number in range(1, steps(name) + 1):
        twin, helper = fresh(world)
        twin.kill_after = number
        with pytest.raises(Killed):
            call(helper)
            twin.effect("the answer")
        last = twin.log[-1]
        revived = helper.again()
        what = f"{name}: killed after effect {number} ({last})"
        if name == "GC":
            assert set(revived.world.records) <= set(world.records), what
        else:
            assert revived.world.state() in (before, after, *midway(name)), what
        assert revived.consistent() == [], what
        assert not revived.backend.repair(), what


@pytest.mark.parametrize("name", SCENES)
def test_killed_again_during_the_recovery(name: str) -> None:
    before, after = outcomes(name)
    world, call = scene(name)
    for number in range(1, steps(name) + 1, 3):
        for second in range(1, 12, 2):
            twin, helper = fresh(world)
            twin.kill_after = number
            with pytest.raises(Killed):
                call(helper)
                twin.effect("the answer")
            twin.end_process()
            twin.kill_after = second
            try:
                Helper(twin)
            except Killed:
                pass
            revived = helper.again()
            if name != "GC":
                assert revived.world.state() in (before, after, *midway(name)), (
                    name,
                    number,
                    second,
                )
            assert revived.consistent() == [], (name, number, second)


@pytest.mark.parametrize("name", SCENES)
def test_rules_flushed_at_every_effect_come_back(name: str) -> None:
    """Somebody flushes the ruleset in the middle of a call."""
    _, after = outcomes(name)
    world, call = scene(name)
    for number in range(1, steps(name) + 1):
        twin, helper = fresh(world)
        plain = twin.effect

        def flushing(what: str, *, fallible: bool = True, at: int = number) -> None:
            plain(what, fallible=fallible)
            if twin.count == at:
                flush(twin)

        twin.effect = flushing  # type: ignore[method-assign]
        call(helper)
        twin.effect = plain  # type: ignore[method-assign]
        helper.backend.repair()
        assert twin.state() == after, (name, number)
        assert helper.consistent() == []


def test_how_many_faults_these_tests_inject() -> None:
    """The figure: a change that removes effects from the model is noticed here."""
    assert len(CASES) > 100
    print(f"{len(CASES)} effects in {len(SCENES)} calls, {len(CASES) * len(ERRNOS)} faults")
