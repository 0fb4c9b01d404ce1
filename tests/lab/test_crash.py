"""SIGKILL at every instant: the next start has what the answered calls describe.

Every effect of ADD, replace, DEL and GC is the last one of a helper in turn, then
the same at random, with the recovery killed too. Compared are sockets, elements,
sysctls, hairpin flags, records and the queue.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lab.node import NODE4, NODE4_SECOND, NODE6
from lab.source import FAULT, Json, LabPod, Reply, SourceNode, audit, mapping

FROM_SOURCE = True
ROUNDS = int(os.environ.get("LAB_CRASH_ROUNDS", "200"))
POOL = range(20000, 20012)

WEB = (mapping(20000), mapping(20000, 80, "udp"), mapping(20001, 81, "tcp", NODE4_SECOND))
WEB2 = (mapping(20000, 90), mapping(20002, 80, "udp"), mapping(20003, 80, "udp", NODE6))
OTHER = (mapping(20004), mapping(20005, 53, "udp"))


@pytest.fixture(scope="module")
def lab() -> Iterator[SourceNode]:
    made = SourceNode()
    try:
        for name in ("a", "b", "c", "d"):
            made.pod(name)
        made.start()
        yield made
    finally:
        made.close()


Wanted = dict[str, tuple[Json, ...]]


def clear(lab: SourceNode) -> None:
    """Nothing attached, a helper up, no fault ordered."""
    lab.fault("")
    if not lab.pid:
        lab.start()
    for pod in lab.pods.values():
        assert lab.delete(pod).ok


def effects(lab: SourceNode, call: Callable[[], Reply]) -> list[str]:
    """Names of the effects of a call, in order."""
    log = lab.node.path(f"{FAULT}.log")
    log.unlink(missing_ok=True)
    lab.fault("kill 0")
    assert call().ok
    lab.fault("")
    return [line.split()[1] for line in log.read_text().splitlines()]


def pods(lab: SourceNode) -> tuple[LabPod, LabPod]:
    return lab.pods["a"], lab.pods["b"]


def scene_add(lab: SourceNode) -> tuple[Wanted, Callable[[], Reply], Wanted]:
    a, _ = pods(lab)
    return {}, lambda: lab.add(a, *WEB), {"a": WEB}


def scene_second(lab: SourceNode) -> tuple[Wanted, Callable[[], Reply], Wanted]:
    a, b = pods(lab)
    assert lab.add(b, *OTHER).ok
    return {"b": OTHER}, lambda: lab.add(a, *WEB), {"a": WEB, "b": OTHER}


def scene_replace(lab: SourceNode) -> tuple[Wanted, Callable[[], Reply], Wanted]:
    a, b = pods(lab)
    assert lab.add(a, *WEB).ok
    assert lab.add(b, *OTHER).ok
    return {"a": WEB, "b": OTHER}, lambda: lab.add(a, *WEB2), {"a": WEB2, "b": OTHER}


def scene_delete(lab: SourceNode) -> tuple[Wanted, Callable[[], Reply], Wanted]:
    a, _ = pods(lab)
    assert lab.add(a, *WEB).ok
    return {"a": WEB}, lambda: lab.delete(a), {}


def scene_gc(lab: SourceNode) -> tuple[Wanted, Callable[[], Reply], Wanted]:
    a, b = pods(lab)
    assert lab.add(a, *WEB).ok
    assert lab.add(b, *OTHER).ok
    return {"a": WEB, "b": OTHER}, lambda: lab.gc(b), {"b": OTHER}


SCENES = {
    "ADD": scene_add,
    "second ADD": scene_second,
    "replace": scene_replace,
    "DEL": scene_delete,
    "GC": scene_gc,
}


@pytest.mark.parametrize("name", SCENES)
def test_killed_after_every_effect(lab: SourceNode, name: str) -> None:
    clear(lab)
    _, call, _ = SCENES[name](lab)
    steps = effects(lab, call)
    assert any("apply" in s or "load" in s for s in steps), steps
    starts, survived = [], 0
    for number in range(1, len(steps) + 1):
        clear(lab)
        before, call, after = SCENES[name](lab)
        lab.fault(f"kill {number}")
        reply = call()
        if not lab.died():  # the first time something else was done as well
            assert reply.ok
            continue
        starts.append(lab.start())
        what = f"{name}, killed after {number} {steps[number - 1]}"
        if reply.ok:  # it died after the answer
            survived += 1
            assert audit(lab, after, POOL) == [], what
            continue
        assert reply.status is None, what
        problems = {n: audit(lab, w, POOL) for n, w in (("before", before), ("after", after))}
        assert not all(problems.values()), f"{what}: {problems}"
        # and the runtime's next step works: the same again
        assert call().ok, what
        assert audit(lab, after, POOL) == [], what
    print(f"{name}: {len(steps)} effects, killed after each; {survived} answered before; "
          f"start {max(starts) * 1000:.0f} ms at most")  # fmt: skip


def random_mappings(rng: random.Random, taken: set[int]) -> tuple[Json, ...]:
    """Some mappings on ports of the pool that nobody has."""
    ports = [p for p in POOL if p not in taken]
    rng.shuffle(ports)
    return tuple(
        mapping(port, rng.choice((80, 443)), rng.choice(("tcp", "udp")),
                rng.choice(("", "", "0.0.0.0", "::", NODE4, NODE6)))
        for port in ports[: rng.randint(1, 3)]
    )  # fmt: skip


def _kill_later(pid: int, delay: float) -> None:
    time.sleep(delay)
    with contextlib.suppress(ProcessLookupError):  # it died of an earlier fault
        os.kill(pid, 9)


def test_killed_at_random(lab: SourceNode) -> None:
    seed = int(os.environ.get("LAB_SEED", str(random.randrange(1 << 32))))
    print(f"seed {seed}")
    rng = random.Random(seed)
    clear(lab)
    wanted: Wanted = {}
    killed = answered = refused = recovery_kills = 0
    starts: list[float] = []
    for turn in range(ROUNDS):
        after, call, what = random_call(rng, lab, wanted)
        late = None
        if rng.random() < 0.6:
            lab.fault(f"kill {rng.randint(1, 14)}")
        else:
            pid, delay = lab.pid, rng.random() * 0.004
            late = threading.Thread(target=_kill_later, args=(pid, delay))
            late.start()
        reply = call()
        if late:
            late.join()
        # in one step: between a look and the taking back the helper could still die of it
        taken_back = lab.fault("")
        if late or reply.status is None or not taken_back:
            assert lab.died()
            killed += 1
        if not lab.pid:
            if rng.random() < 0.3:  # the recovery is killed too
                lab.fault(f"kill {rng.randint(1, 10)}")
                lab.start(wait=False)
                time.sleep(0.05)
                lab.fault("")
                if not lab.died(0):
                    lab.kill()
                recovery_kills += 1
            starts.append(lab.start())
        text = f"seed {seed}, round {turn}: {what}, answer {reply.status} {reply.out!r}"
        if reply.ok:
            answered += 1
            wanted = after
        elif reply.status == 1:
            refused += 1
        if reply.status is not None:
            assert audit(lab, wanted, POOL) == [], text
            continue
        if what.startswith("GC"):  # as far as it came, one attachment after the other
            wanted = {
                n: m
                for n, m in wanted.items()
                if n in after or f"{lab.pods[n].key}.json" in lab.records()
            }
            after = wanted
        problems = {n: audit(lab, w, POOL) for n, w in (("before", wanted), ("after", after))}
        assert not all(problems.values()), f"{text}: {problems}"
        if problems["before"]:
            wanted = after
    print(f"{ROUNDS} rounds: {killed} kills during calls, {recovery_kills} during recoveries, "
          f"{answered} calls answered, {refused} refused; start {max(starts) * 1000:.0f} ms at "
          f"most, {sum(starts) / len(starts) * 1000:.0f} ms on average")  # fmt: skip
    assert killed > ROUNDS // 3


def random_call(
    rng: random.Random, lab: SourceNode, wanted: Wanted
) -> tuple[Wanted, Callable[[], Reply], str]:
    """A call, and what the machine is like after it."""
    name = rng.choice(sorted(lab.pods))
    pod = lab.pods[name]
    kind = rng.choice(("add", "add", "add", "del", "gc"))
    if kind == "add":
        taken = {m["hostPort"] for n, ms in wanted.items() if n != name for m in ms}
        mappings = random_mappings(rng, taken)
        return {**wanted, name: mappings}, lambda: lab.add(pod, *mappings), f"ADD {name} {mappings}"
    if kind == "del":
        rest = {n: m for n, m in wanted.items() if n != name}
        return rest, lambda: lab.delete(pod), f"DEL {name}"
    return {n: m for n, m in wanted.items() if n == name}, lambda: lab.gc(pod), f"GC but {name}"


def test_no_process_is_left_and_the_log_tells_of_no_error(lab: SourceNode) -> None:
    clear(lab)
    assert len(lab.node.helpers()) == 1  # the zygote: its forked helper looks like it
    text = lab.stderr()
    assert "internal error" not in text
    assert "Traceback" not in text, text[text.index("Traceback") :][:2000]
    assert "job failed" not in text
