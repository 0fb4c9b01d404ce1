"""Many calls at once: one port has one winner, many ports all succeed."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from lab.chain import Attachment, Json, Reply
from lab.node import NODE4, wait_for
from lab.rivals import Rival
from lab.stage import TYPE, Stage, container_id, mapping


def many(stage: Stage, count: int, same_port: bool) -> tuple[list[Attachment], list[Json]]:
    """Attachments of one network that share a namespace, and the stdin of each."""
    network = stage.network()
    stage.node.add_netns("shared")
    entry = network.entry(TYPE)
    found, configs = [], []
    for number in range(count):
        wanted = [mapping(20000 if same_port else 20000 + number, 80)]
        at = Attachment(
            container_id(f"c{number}"),
            "/run/netns/shared",
            "eth0",
            f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=c{number}",
            {"portMappings": wanted},
        )
        address = f"10.244.{20 + number // 200}.{2 + number % 200}"
        result = {
            "cniVersion": "1.0.0",
            "interfaces": [{"name": "eth0", "sandbox": "/run/netns/shared"}],
            "ips": [
                {"address": f"{address}/16", "interface": 0},
                {"address": f"2001:db8:7::{number + 2:x}/64", "interface": 0},
            ],
        }
        found.append(at)
        configs.append(network.config(entry, at, result))
    return found, configs


def at_once(stage: Stage, verb: str, found: list[Attachment], configs: list[Json]) -> list[Reply]:
    """All calls running at the same time; replies in order."""
    processes = [stage.runtime.start(TYPE, verb, at) for at in found]

    def finish(process: subprocess.Popen[bytes], config: Json) -> Reply:
        with process:
            out, err = process.communicate(json.dumps(config).encode(), timeout=60)
        return Reply(process.returncode, out, err, 0.0)

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(finish, processes, configs))


def test_thirty_adds_for_one_port_have_one_winner(stage: Stage) -> None:
    found, configs = many(stage, 30, same_port=True)
    replies = at_once(stage, "ADD", found, configs)
    assert Counter(reply.code for reply in replies) == {0: 1, 101: 29}
    winner = next(i for i, reply in enumerate(replies) if reply.status == 0)
    for index, reply in enumerate(replies):
        if index != winner:
            assert found[winner].container_id[:12] in reply.text
    assert len(stage.node.helpers()) == 1
    assert len(stage.records()) == 1
    address = configs[winner]["prevResult"]["ips"][0]["address"].split("/")[0]
    assert address in stage.node.ruleset()
    assert all(reply.status == 0 for reply in at_once(stage, "DEL", found, configs))
    assert stage.records() == {}
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, 20000)


def test_a_hundred_adds_for_a_hundred_ports_all_succeed(stage: Stage) -> None:
    found, configs = many(stage, 100, same_port=False)
    replies = at_once(stage, "ADD", found, configs)
    assert Counter(reply.code for reply in replies) == {0: 100}, [r for r in replies if r.status][
        :1
    ]
    assert len(stage.node.helpers()) == 1
    assert len(stage.records()) == 100
    assert not any(Rival(NODE4, "reuseaddr", "tcp").wins(stage.node, 20000 + n) for n in range(100))
    checks = at_once(stage, "CHECK", found[::10], configs[::10])
    assert Counter(reply.code for reply in checks) == {0: 10}
    dels = at_once(stage, "DEL", found, configs)
    assert Counter(reply.code for reply in dels) == {0: 100}
    assert stage.records() == {}
    rules = stage.node.ruleset()
    assert "10.244." not in rules
    assert wait_for(lambda: Rival("0.0.0.0", "plain", "tcp").wins(stage.node, 20050), timeout=1)


def test_add_and_del_of_other_pods_at_once_leave_one_pod_undisturbed(stage: Stage) -> None:
    stage.pod("web", [mapping(8080, 80)])
    found, configs = many(stage, 20, same_port=False)
    processes = [stage.runtime.start(TYPE, "ADD", at) for at in found]
    for process, config in zip(processes, configs, strict=True):
        assert process.stdin is not None
        process.stdin.write(json.dumps(config).encode())
        process.stdin.close()
        assert stage.ask(NODE4, 8080).server == "web"
    for process in processes:
        assert process.wait(timeout=30) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        process.stderr.close()
    assert {r.code for r in at_once(stage, "DEL", found, configs)} == {0}
    assert stage.ask(NODE4, 8080).server == "web"


def test_two_nodes_side_by_side_share_nothing(stage: Stage) -> None:
    stage.pod("web", [mapping(8080, 80)])
    second = Stage(stage.backend)
    try:
        other = second.pod("pod2", [mapping(8080, 80)])
        assert second.ask(NODE4, 8080).server == "pod2"
        assert stage.ask(NODE4, 8080).server == "web"
        assert stage.node.helpers() != second.node.helpers()
        second.remove(other)
        assert stage.ask(NODE4, 8080).server == "web"
        assert second.records() == {}
    finally:
        second.close()
    assert stage.ask(NODE4, 8080).server == "web"
    assert len(stage.node.helpers()) == 1
