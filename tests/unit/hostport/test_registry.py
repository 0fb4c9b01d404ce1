"""Who claims what, in constant time, and that nothing is left of what is gone."""

from __future__ import annotations

import random

import pytest
from unit.hostport.world import pod

from cni_hostport.hostport.record import LinkRecord, Record
from cni_hostport.hostport.registry import Registry


def record(
    name: str, *mappings: str, index: int = 7, found: int | None = 0, **more: object
) -> Record:
    return Record(
        attachment=pod(name, *mappings, **more),
        link=LinkRecord(name="cni0", index=index),
        route_localnet_found=found,
    )


@pytest.mark.parametrize(
    ("theirs", "mine", "conflict"),
    [
        ("80:80", "80:81", True),
        ("80:80", "81:80", False),
        ("80:80/tcp", "80:80/udp", False),
        ("80:80/sctp", "80:80/sctp", True),
        ("80:80", "192.0.2.1:80:80", True),
        ("192.0.2.1:80:80", "80:80", True),
        ("192.0.2.1:80:80", "192.0.2.2:80:80", False),
        ("192.0.2.1:80:80", "192.0.2.1:80:80", True),
        ("0.0.0.0:80:80", "[::]:80:80", False),
        ("[::]:80:80", "[2001:db8::1]:80:80", True),
    ],
)
def test_conflicts(theirs: str, mine: str, conflict: bool) -> None:
    registry = Registry()
    registry.put(record("a", theirs))
    found = registry.conflicts(pod("b", mine))
    assert bool(found) == conflict
    assert not registry.conflicts(pod("a", mine))
    if found:
        wanted, other, owner = found[0]
        assert wanted.overlaps(other)
        assert owner.attachment.identity.container_id == "a"


def test_a_family_that_a_pod_lacks_is_no_conflict() -> None:
    registry = Registry()
    registry.put(record("a", "80:80", ips=("10.1.0.2/16",)))
    assert not registry.conflicts(pod("b", "80:80", ips=("fd00::3/64",)))


def test_shared_links_and_addresses() -> None:
    registry = Registry()
    first, second = record("a", "80:80"), record("b", "81:80", found=0)
    registry.put(first)
    assert registry.route_localnet_found(7) == 0
    assert registry.route_localnet_found(8) is None
    assert not registry.shares_link(first)
    registry.put(second)
    assert registry.shares_link(first)
    assert registry.shares_address(first)
    registry.drop(second.key)
    assert not registry.shares_link(first)
    assert not registry.shares_address(first)
    registry.put(record("c", "82:80", found=None))
    assert not registry.shares_link(first)


def test_nothing_is_left_of_ten_thousand_links() -> None:
    """Every ptp pod brings a link of its own: each trace must go with the pod."""
    registry = Registry()
    empty = sizes(registry)
    rng = random.Random(1)
    alive: list[Record] = []
    for number in range(1000):
        made = record(f"p{number}", f"{number + 1}:80", "53:53/udp", index=number,
                      ips=(f"10.1.{number // 250}.{number % 250}/32",))  # fmt: skip
        registry.put(made)
        registry.put(made)  # the same again
        alive.append(made)
        if rng.random() < 0.5:
            registry.drop(alive.pop(rng.randrange(len(alive))).key)
    for made in alive:
        registry.drop(made.key)
        registry.drop(made.key)
    assert sizes(registry) == empty
    assert len(registry) == 0


def sizes(registry: Registry) -> dict[str, int]:
    return {name: len(value) for name, value in vars(registry).items() if hasattr(value, "__len__")}


def test_who_is_on_a_link_and_behind_a_port() -> None:
    registry = Registry()
    first, second = record("a", "80:80"), record("b", "81:80", index=9)
    ported = first.model_copy(update={"link": LinkRecord(name="cni0", index=7, ports=((5, "v"),))})
    assert not registry.has_ports
    for made in (ported, second):
        registry.put(made)
    assert registry.has_ports
    assert registry.on_link(7) == (ported,)
    assert registry.on_link(9) == (second,)
    assert registry.on_port(5) == (ported,)
    assert registry.on_port(6) == registry.on_link(8) == ()
    registry.put(first)  # the same attachment, its port unknown now
    assert registry.on_port(5) == ()
    registry.drop(first.key)
    assert not registry.has_ports
    assert registry.on_link(7) == ()


def test_records_of_a_network() -> None:
    registry = Registry()
    registry.put(record("a", "80:80", network="one"))
    registry.put(record("b", "81:80", network="two"))
    assert [r.attachment.identity.container_id for r in registry.of_network("two")] == ["b"]
    assert not registry.of_network("three")
