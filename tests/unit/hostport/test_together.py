"""ADDs of one moment: which may go together, and that it is all of them or nothing."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from unit.hostport.world import Helper, Somebody, World, pod, port

from cni_hostport.hostport.adding import Wish
from cni_hostport.model import Attachment


def wish(name: str, *mappings: str, ip: str = "", backend: str = "nftables") -> Wish:
    address = ip or f"10.1.0.{ord(name[0])}/16"
    return Wish(pod(name, *mappings, ips=(address,), interfaces=()), backend=backend)


A, B, C = wish("a", "80:80"), wish("b", "81:80"), wish("c", "82:80/udp")


def helper_with(*there: Attachment) -> Helper:
    helper = Helper(World())
    for attachment in there:
        helper.manager.attach(attachment)
    helper.world.calm()
    return helper


def transactions(world: World) -> int:
    return len([line for line in world.log if line.startswith("apply")])


def test_all_in_one_transaction() -> None:
    helper = helper_with(wish("x", "9:9").attachment)
    assert helper.manager.apart([A, B, C]) == 3
    assert helper.manager.attach_together([A, B, C])
    assert transactions(helper.world) == 1
    assert helper.consistent() == []
    assert not helper.backend.repair()
    for one in (A, B, C):
        assert helper.manager.check(one.attachment) == []


def test_together_and_one_by_one_end_in_the_same_state() -> None:
    together, single = helper_with(), helper_with()
    assert together.manager.attach_together([A, B, C])
    for one in (A, B, C):
        assert single.manager.attach(one.attachment)
    assert together.world.state() == single.world.state()
    for helper in (together, single):
        for one in (B, A, C):
            assert helper.manager.detach(one.attachment.key)
        assert helper.consistent() == []
    assert together.world.state() == single.world.state()
    assert together.world.sockets == []


SAME_CONTAINER = Wish(pod("a", "90:80", ips=("10.1.0.9/16",), interfaces=(), network="second"))


@pytest.mark.parametrize(
    ("there", "wishes", "count"),
    [
        ((), [A, B, C], 3),
        ((), [A], 1),
        ((), [A, wish("b", "80:81"), C], 1),
        ((), [A, B, wish("c", "81:1", "82:82")], 2),
        ((), [A, wish("b", "80:80/udp"), C], 3),
        ((), [A, wish("b", "192.0.2.1:80:80")], 1),
        ((), [wish("a", "192.0.2.1:80:80"), wish("b", "10.1.0.1:80:80")], 1),
        ((), [wish("a", "9132:1/sctp"), wish("b", "9132:1/sctp")], 1),
        ((), [A, SAME_CONTAINER, B], 1),
        ((), [A, wish("b", "81:80", backend="iptables")], 1),
        ((), [A, wish("b")], 1),
        ((A,), [A, B, C], 1),
        ((B,), [A, B, C], 1),
        ((wish("x", "82:1/udp"),), [A, B, C], 2),
    ],
)
def test_what_concerns_another_ends_it(
    there: tuple[Wish, ...], wishes: list[Wish], count: int
) -> None:
    helper = helper_with(*(w.attachment for w in there))
    assert helper.manager.apart(wishes) == count


def stranger(world: World) -> None:
    world.strangers[port("0.0.0.0:81")] = Somebody("nginx")


def refusing_kernel(world: World) -> None:
    world.fail_at, world.error, world.forever = 1, errno.EPERM, True


@pytest.mark.parametrize("trouble", [stranger, refusing_kernel])
def test_what_fails_for_one_is_undone_for_all(trouble: Callable[[World], None]) -> None:
    helper = helper_with(wish("x", "9:9").attachment)
    before = helper.world.state()
    trouble(helper.world)
    assert not helper.manager.attach_together([A, B, C])
    helper.world.forever = False
    helper.world.calm()
    assert helper.world.state() == before
    assert helper.consistent() == []
    assert not helper.backend.repair()


def test_a_bad_address_of_one_is_found_before_anything_is_done() -> None:
    helper = helper_with()
    before = helper.world.state()
    bad = Wish(wish("b", "203.0.113.9:81:80").attachment, must_be_local=True)
    assert not helper.manager.attach_together([A, bad])
    assert helper.world.state() == before
    assert "open" not in " ".join(helper.world.log)
