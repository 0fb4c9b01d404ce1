"""Calls of one moment: served in groups they end as they would one after the other."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.helper.test_fuzz import CONFIG, ENV, fuzz
from unit.hostport.world import Helper, Somebody, World, port

from cni_hostport.helper.answer import Outcome
from cni_hostport.helper.asked import CallRequest, read
from cni_hostport.helper.core import Core
from cni_hostport.helper.metrics import Metrics
from cni_hostport.host import queue

Call = tuple[dict[str, str], Any]


def call(verb: str, container: str, *mappings: dict[str, object], **options: object) -> Call:
    """A call for one of a few containers; each has an address of its own."""
    number = ord(container[0]) - ord("a") + 2
    env = {
        "CNI_COMMAND": verb,
        "CNI_CONTAINERID": container,
        "CNI_IFNAME": "eth0",
        "CNI_NETNS": f"/run/netns/{container}",
        "CNI_PATH": "/opt/cni/bin",
    }
    result = {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "cni0"}, {"name": "eth0", "sandbox": env["CNI_NETNS"]}],
        "ips": [
            {"address": f"10.1.0.{number}/16", "interface": 1},
            {"address": f"fd00::{number}/64", "interface": 1},
        ],
    }
    config = {"cniVersion": "1.1.0", "name": "net", "type": "cni-hostport", "prevResult": result}
    return env, config | options | {"runtimeConfig": {"portMappings": list(mappings)}}


def mapping(host: int, protocol: str = "tcp", **more: object) -> dict[str, object]:
    return {"hostPort": host, "containerPort": 80, "protocol": protocol, **more}


def requests(calls: Sequence[Call]) -> list[CallRequest]:
    return [CallRequest(env=env, stdin=json.dumps(config).encode()) for env, config in calls]


class Node:
    """A helper's core on a world of its own."""

    def __init__(self, folder: str, world: World) -> None:
        self.helper = Helper(world)
        self.core = Core(self.helper.manager, Path(folder), Metrics())
        self.groups: list[int] = []

    def together(self, calls: Sequence[Call]) -> list[Outcome]:
        waiting = [read(r) for r in requests(calls)]
        outcomes: list[Outcome] = []
        while waiting:
            served = self.core.serve(waiting)
            assert served
            self.groups.append(len(served))
            outcomes += served
            del waiting[: len(served)]
        return outcomes

    def one_by_one(self, calls: Sequence[Call]) -> list[Outcome]:
        return [self.core.handle(request) for request in requests(calls)]

    def close(self) -> None:
        os.close(self.core.adds.home)


def both_ways(calls: Sequence[Call], world: World) -> Node:
    """The node on which they were served together; the other way must have ended the same."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        grouped, single = Node(folder, world.twin()), Node(other, world.twin())
        try:
            answers = [o.answer for o in grouped.together(calls)]
            assert answers == [o.answer for o in single.one_by_one(calls)]
            assert grouped.helper.world.state() == single.helper.world.state()
            for node in (grouped, single):
                assert node.helper.consistent() == []
                assert not node.helper.backend.repair()
        finally:
            grouped.close()
            single.close()
    return grouped


VERBS = st.sampled_from(("ADD",) * 8 + ("DEL", "CHECK"))
MAPPINGS = st.lists(
    st.builds(
        mapping,
        st.integers(8000, 8006),
        st.sampled_from(("tcp", "tcp", "udp", "sctp")),
        hostIP=st.sampled_from(("", "", "192.0.2.1", "::", "10.1.0.1", "203.0.113.9")),
    ),
    max_size=2,
)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "snat": st.booleans(),
        "reservePorts": st.sampled_from(("require", "try", "no")),
        "nodeAddresses": st.just(["192.0.2.0/24"]),
        "conditionsV4": st.sampled_from((["-s", "10.9.0.0/16"], [])),
    },
)
CALLS = st.lists(
    st.builds(
        lambda verb, container, mappings, options: call(verb, container, *mappings, **options),
        VERBS,
        st.sampled_from("abcdefghij"),
        MAPPINGS,
        OPTIONS,
    ),
    max_size=12,
)


@fuzz
@given(CALLS, st.booleans(), st.sets(st.sampled_from("abc")))
def test_together_as_one_by_one(calls: list[Call], taken: bool, gone: set[str]) -> None:
    world = World(gone={f"/run/netns/{name}" for name in gone})
    if taken:
        world.strangers[port("0.0.0.0:8001")] = Somebody("nginx")
    both_ways(calls, world)


@fuzz
@given(st.lists(st.tuples(ENV, CONFIG), min_size=2, max_size=8))
def test_calls_that_nobody_meant_together_as_one_by_one(calls: list[Call]) -> None:
    both_ways(calls, World())


def adds(count: int) -> list[Call]:
    return [call("ADD", f"{chr(97 + n)}", mapping(8000 + n)) for n in range(count)]


def test_adds_that_do_not_concern_each_other_are_served_at_once() -> None:
    assert both_ways(adds(5), World()).groups == [5]
    assert both_ways(adds(20), World()).groups == [16, 4]


@pytest.mark.parametrize(
    ("middle", "groups"),
    [
        (call("DEL", "a"), [2, 1, 2]),
        (call("CHECK", "a"), [2, 1, 2]),
        (call("GC", "a"), [2, 1, 2]),
        (call("ADD", "x", mapping(8000)), [2, 1, 2]),
        (call("ADD", "x", mapping(0)), [2, 1, 2]),
        (call("ADD", "x"), [2, 1, 2]),
        (call("ADD", "x", mapping(9000), backend="iptables"), [2, 1, 2]),
        (call("ADD", "x", mapping(9000), snat=False), [5]),
    ],
)
def test_the_order_in_which_they_came_is_kept(middle: Call, groups: list[int]) -> None:
    first, second, *rest = adds(4)
    node = both_ways([first, second, middle, *rest], World())
    assert node.groups == groups


def test_where_one_has_to_fail_the_others_do_not() -> None:
    world = World(strangers={port("0.0.0.0:8002"): Somebody("nginx")})
    node = both_ways(adds(4), world)
    assert len(node.helper.world.records) == 3


def test_what_failed_together_is_not_tried_together_again(tmp_path: Path) -> None:
    world = World(strangers={port("0.0.0.0:8015"): Somebody("nginx")})
    node = Node(str(tmp_path), world)
    node.together(adds(16))
    assert node.groups == [1] * 16
    opened = [line for line in world.log if line.startswith("open 0.0.0.0:8000")]
    assert len(opened) == 2
    node.close()


def test_flows_of_ipv6_hold_up_nobody_else() -> None:
    slow = call("ADD", "x", mapping(9000, "udp"))
    first, second, third, fourth = adds(4)
    assert both_ways([first, second, slow, third, fourth], World()).groups == [2, 1, 2]
    only4 = call("ADD", "x", mapping(9000, "udp", hostIP="192.0.2.1"))
    assert both_ways([first, second, only4, third, fourth], World()).groups == [5]


def test_a_queue_that_cannot_be_written_does_not_undo_what_was_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only")

    queue.put(tmp_path, {b"CNI_COMMAND": b"DEL"}, b"{}")
    monkeypatch.setattr(queue, "cancel", refuse)
    node = Node(str(tmp_path), World())
    outcomes = node.together(adds(2))
    assert [o.answer.status for o in outcomes] == [0, 0]
    assert all(o.undo is not None for o in outcomes)
    assert "may come yet" in caplog.text
    node.close()


def test_one_whose_caller_has_gone_is_not_done(tmp_path: Path) -> None:
    node = Node(str(tmp_path), World())
    waiting = [read(r) for r in requests(adds(3))]
    gone = CallRequest(
        env=waiting[1].request.env, stdin=waiting[1].request.stdin, alive=lambda: False
    )
    waiting[1] = read(gone)
    answers = []
    while waiting:
        served = node.core.serve(waiting)
        answers += [o.answer.status for o in served]
        del waiting[: len(served)]
    assert answers == [0, 1, 0]
    assert len(node.helper.world.records) == 2
    node.close()


def test_what_no_error_of_ours_ends_is_served_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(str(tmp_path), World())

    def broken(_: object) -> bool:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(node.helper.manager, "attach_together", broken)
    assert [o.answer.status for o in node.together(adds(3))] == [0, 0, 0]
    assert "a mistake of ours" in caplog.text
    node.close()
