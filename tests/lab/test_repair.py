"""CHECK tells what is missing, and what is lost comes back: rules, elements, sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from lab.chain import Reply
from lab.node import NODE4, NODE6, wait_for
from lab.peers import Client
from lab.rivals import EVERY_STYLE, Rival, squatter, winners
from lab.stage import TYPE, Pod, Stage, mapping

PORT = 8080
MAPPINGS = [mapping(PORT, 80), mapping(PORT, 80, "udp")]


def kill_helper(stage: Stage) -> int:
    """SIGKILL the node's helper; its process id."""
    (pid,) = stage.node.helpers()
    os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not stage.node.helpers())
    return pid


def check(stage: Stage, pod: Pod) -> Reply:
    return stage.call("CHECK", stage.config(pod), pod.at)


def test_check_of_a_healthy_attachment_says_nothing(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    before = stage.snapshot()
    reply = check(stage, pod)
    assert (reply.status, reply.stdout) == (0, b"")
    assert stage.snapshot() == before
    config = {k: v for k, v in stage.config(pod).items() if k != "prevResult"}
    assert stage.call("CHECK", config, pod.at).status == 1
    config = stage.config(pod)
    stage.remove(pod)
    assert stage.call("CHECK", config, pod.at).code == 3


def check_against(stage: Stage, pod: Pod, damage: list[str]) -> Reply:
    """CHECK that finds the damage: the helper sleeps while it is done."""
    (helper,) = stage.node.helpers()
    os.kill(helper, signal.SIGSTOP)
    try:
        for text in damage:
            stage.node.nft(text)
        with stage.runtime.start(TYPE, "CHECK", pod.at) as p:
            assert p.stdin is not None
            p.stdin.write(json.dumps(stage.config(pod)).encode())
            p.stdin.close()
            time.sleep(0.15)
            os.kill(helper, signal.SIGCONT)
            p.wait(timeout=10)
            assert p.stdout is not None
            return Reply(p.returncode, p.stdout.read(), b"", 0.0)
    finally:
        os.kill(helper, signal.SIGCONT)


def nft_handle(stage: Stage, family: str, chain: str, words: str) -> str:
    """Handle of a rule of ours."""
    text = stage.node.output("nft", "-a", "list", "chain", family, "hostport-manager", chain)
    line = next(line for line in text.splitlines() if re.search(words, line))
    return line.rsplit("handle ", 1)[1]


DAMAGE = {
    "one element": (f"delete element ip hostport-manager ports {{ tcp . {PORT} }}", str(PORT)),
    "an element of IPv6": (
        f"delete element ip6 hostport-manager ports {{ udp . {PORT} }}",
        str(PORT),
    ),
    "all elements": ("flush map ip hostport-manager ports", str(PORT)),
    "the rules of a chain": ("flush chain ip hostport-manager prerouting", "hostport-manager"),
    "the table": ("delete table ip hostport-manager", "hostport-manager"),
    "everything": ("flush ruleset", ""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_by_check_or_mended_already(stage: Stage, damage: str) -> None:
    if stage.backend.name != "nftables":
        pytest.skip("names objects of the nftables backend")
    pod = stage.pod("web", MAPPINGS)
    text, word = DAMAGE[damage]
    reply = check_against(stage, pod, [text])
    if reply.status:
        assert reply.code == 103
        assert word in reply.text, reply.text
    assert wait_for(lambda: stage.ask(NODE4, PORT, timeout=0.1).ok, timeout=0.5)
    assert wait_for(lambda: stage.ask(NODE6, PORT, "udp", timeout=0.1).ok, timeout=0.5)
    assert check(stage, pod).status == 0


def test_check_names_a_port_that_somebody_took_while_no_helper_ran(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    kill_helper(stage)
    with squatter(stage.node, "0.0.0.0", PORT):
        reply = check(stage, pod)
        assert reply.code == 103
        assert str(PORT) in reply.text


def test_check_names_route_localnet_or_it_is_back_already(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    stage.node.sysctl("net/ipv4/conf/cni0/route_localnet", "0")
    reply = check(stage, pod)
    if reply.status:  # else it was put back before CHECK looked
        assert reply.code == 103
        assert "route_localnet" in reply.text
    assert wait_for(lambda: stage.node.sysctl("net/ipv4/conf/cni0/route_localnet") == "1", 1)


@pytest.mark.parametrize("times", [1, 3])
def test_traffic_is_right_within_half_a_second_of_a_flush(stage: Stage, times: int) -> None:
    stage.pod("web", MAPPINGS)
    stage.pod("specific", [mapping(8081, 80, "tcp", NODE4)])
    for _ in range(times):
        stage.node.run("nft", "flush", "ruleset")
        start = time.monotonic()
        assert wait_for(lambda: stage.ask(NODE4, PORT, timeout=0.1).ok, timeout=0.5)
        assert wait_for(lambda: stage.ask(NODE6, PORT, "udp", timeout=0.1).ok, timeout=0.5)
        assert wait_for(lambda: stage.ask(NODE4, 8081, timeout=0.1).ok, timeout=0.5)
        assert time.monotonic() - start < 0.6
        for row in (("127.0.0.1", None), (NODE4, "web"), (NODE4, None)):
            assert stage.ask(row[0], PORT, at=row[1]).server == "web"


def test_a_killed_helper_disturbs_no_traffic_and_the_next_call_brings_it_back(
    stage: Stage,
) -> None:
    pod = stage.pod("web", MAPPINGS)
    with Client(stage.node, NODE4, PORT, netns="client") as old:
        assert old.ask().server == "web"
        first = kill_helper(stage)
        assert old.ask().server == "web"
        assert stage.ask(NODE4, PORT).server == "web"
        assert stage.ask(NODE4, PORT, "udp").server == "web"
        assert check(stage, pod).status == 0
        assert old.ask().server == "web"
    (second,) = stage.node.helpers()
    assert second != first
    assert winners(stage.node, PORT, EVERY_STYLE) == set()
    kill_helper(stage)
    assert stage.refused("another", [mapping(PORT, 80)]).code == 101
    assert winners(stage.node, PORT, EVERY_STYLE) == set()


def test_rules_flushed_while_no_helper_ran_come_back_with_it(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    kill_helper(stage)
    stage.node.run("nft", "flush", "ruleset")
    if stage.backend.flavour == "legacy":
        stage.node.run("iptables-legacy", "-t", "nat", "-F")
    assert stage.ask(NODE4, PORT).outcome == "refused"
    stage.pod("next", [mapping(9000, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    assert check(stage, pod).status == 0


def test_del_after_a_kill_leaves_nothing(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    sibling = stage.pod("sibling", [mapping(9000, 80)])
    kill_helper(stage)
    stage.remove(pod)
    assert stage.ask(NODE4, PORT).refused_at_once()
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT)
    assert len(stage.records()) == 1
    stage.remove(sibling)
    assert stage.records() == {}


def test_a_record_that_cannot_be_read_is_set_aside(stage: Stage) -> None:
    stage.pod("web", MAPPINGS)
    kill_helper(stage)
    stage.node.path("/run/cni-hostport/records/aaaaaaaaaaaaaaaa.json").write_text("{ not JSON")
    stage.pod("next", [mapping(9000, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE4, 9000).server == "next"
