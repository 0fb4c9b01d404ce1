"""Flat for ever: memory, descriptors, threads, records and rules over thousands of calls.

LAB_SOAK is the number of ADD/DEL pairs (1,000 in the usual run, 10,000 is the
promise) and a tenth of it that of conflicts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from lab.source import SourceNode, audit, mapping

FROM_SOURCE = True
PAIRS = int(os.environ.get("LAB_SOAK", "1000"))
POOL = range(20000, 20008)
FIXED = (mapping(20000), mapping(20001, 53, "udp"))


@pytest.fixture
def lab() -> Iterator[SourceNode]:
    made = SourceNode()
    try:
        for name in ("fixed", "web"):
            made.pod(name)
        made.start()
        yield made
    finally:
        made.close()


def figures(lab: SourceNode) -> dict[str, float]:
    time.sleep(0.2)  # the last clients are let go
    return {
        "memory": lab.memory(),
        "descriptors": lab.descriptors(),
        "threads": lab.threads(),
        "records": len(lab.records()),
        "elements": sum(len(e) for e in lab.elements().values()),
        "rules": lab.node.ruleset().count("\n"),
    }


def pairs(lab: SourceNode, count: int) -> None:
    """ADD and DEL of a pod whose name, ports and options are another each time."""
    pod = lab.pods["web"]
    for number in range(count):
        # UDP now and then: looking for stale flows costs the kernel 10 ms a family
        udp = [mapping(20003, 53, "udp")] if number % 10 == 0 else []
        mappings = [mapping(20002 + number % 4, 80), *udp]
        keys = ({}, {"snat": False}, {"masqAll": True})[number % 3]
        turn = type(pod)(f"web{number}", pod.number)
        lab._fds[turn.name] = lab._netns(pod)
        assert lab.add(turn, *mappings, **keys).ok
        assert lab.delete(turn).ok
        del lab._fds[turn.name]


def test_ten_thousand_pairs_and_a_thousand_conflicts(lab: SourceNode) -> None:
    fixed = lab.pods["fixed"]
    assert lab.add(fixed, *FIXED).ok
    pairs(lab, 300)  # caches and arenas have their size then
    before = figures(lab)
    begin = time.monotonic()
    pairs(lab, PAIRS)
    seconds = time.monotonic() - begin
    pod = lab.pods["web"]
    for number in range(PAIRS // 10):
        turn = type(pod)(f"rival{number}", pod.number)
        lab._fds[turn.name] = lab._netns(pod)
        assert lab.add(turn, FIXED[number % 2], mapping(20005)).code == 101
        del lab._fds[turn.name]
    after = figures(lab)
    print(f"{PAIRS} pairs in {seconds:.1f} s ({seconds / PAIRS * 1000:.2f} ms each), "
          f"{PAIRS // 10} conflicts: before {before}, after {after}")  # fmt: skip
    assert audit(lab, {"fixed": FIXED}, POOL) == []
    assert {k: v for k, v in after.items() if k != "memory"} == {
        k: v for k, v in before.items() if k != "memory"
    }
    assert after["memory"] <= before["memory"] * 1.03 + 0.5
