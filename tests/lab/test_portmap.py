"""Moving from portmap: Debian's portmap made the pods, our plugin takes them away."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from lab.chain import Attachment, Chain, Json
from lab.node import NODE4, NODE6, wait_for
from lab.stage import TYPE, Backend, Stage, bridge_entry, mapping

PORT = 8080
BACKENDS = ("nftables", "iptables-nft", "iptables-legacy")


@pytest.fixture(params=BACKENDS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    if not os.access("/usr/lib/cni/portmap", os.X_OK):
        pytest.skip("portmap is not installed (containernetworking-plugins)")
    made = Stage(Backend.parse(request.param))
    try:
        yield made
    finally:
        made.close()


def with_plugin(stage: Stage, plugin: str, **more: Any) -> Chain:
    """The same conflist with one or the other plugin."""
    entry: Json = {"type": plugin, "capabilities": {"portMappings": True}, "snat": True, **more}
    plugins = [bridge_entry(), entry]
    return Chain(stage.runtime, {"cniVersion": "1.0.0", "name": "podnet", "plugins": plugins})


def old_pod(stage: Stage, name: str, *ports: int) -> Attachment:
    at = stage.attachment(name, [m for p in ports for m in (mapping(p, 80), mapping(p, 80, "udp"))])
    with_plugin(stage, "portmap").add(at)
    stage.servers.serve(name, [("tcp", 80), ("udp", 80)], netns=name)
    return at


def portmaps(stage: Stage) -> list[str]:
    """Lines of portmap's own per-container rules, every tool."""
    text = ""
    for tool in ("iptables", "ip6tables"):
        for flavour in ("nft", "legacy"):
            text += stage.node.output(f"{tool}-{flavour}-save")
    return [line for line in text.splitlines() if "CNI-DN-" in line]


@pytest.mark.parametrize("helper_first", [True, False], ids=["helper runs", "helper comes"])
def test_pods_of_portmap_are_deleted_through_us(stage: Stage, helper_first: bool) -> None:
    ours = with_plugin(stage, TYPE, backend=stage.backend.name)
    if helper_first and stage.backend.flavour == "legacy":
        helper_first = (
            False  # legacy has no events: known from the helper's start, or half a minute
        )
    if helper_first:
        stage.pod("early", [mapping(7000, 80)], network=ours)
    one, two = old_pod(stage, "one", PORT), old_pod(stage, "two", 8081, 8082)
    three = old_pod(stage, "three", 8083)
    for port, name in ((PORT, "one"), (8082, "two"), (8083, "three")):
        assert stage.ask(NODE4, port).server == name
        assert stage.ask(NODE4, port, "udp", source_port=40000).server == name
    count = len(portmaps(stage))
    ours.delete(one)
    assert 0 < len(portmaps(stage)) < count
    assert stage.ask(NODE4, 8082).server == "two"
    assert not stage.ask(NODE4, PORT, timeout=0.3).ok
    new = stage.pod("new", [mapping(PORT, 80), mapping(PORT, 80, "udp")], network=ours)
    for target in (NODE4, NODE6):
        assert stage.ask(target, PORT).server == "new"
    assert stage.ask(NODE4, PORT, "udp", source_port=40000).server == "new"
    for at in (two, three):
        ours.delete(at)
    assert portmaps(stage) == []
    ours.delete(three)
    assert stage.ask(NODE4, PORT).server == "new"
    stage.remove(new)


def test_a_pod_of_portmap_on_our_port_is_told_with_the_command(stage: Stage) -> None:
    """Its DEL never came: its rule stands before ours."""
    old_pod(stage, "old", PORT, 8081)
    stage.pod("web", [mapping(PORT, 80), mapping(8082, 80)], network=with_plugin(
        stage, TYPE, backend=stage.backend.name
    ))  # fmt: skip

    def warnings() -> list[str]:
        done = stage.node.run(stage.runtime.binary(TYPE), "status", "--json", env=stage.runtime.env)
        return list(json.loads(done.stdout)["warnings"])

    assert wait_for(lambda: len(warnings()) == 2, timeout=45, step=0.5)
    assert {w.partition(":")[0] for w in warnings()} == {
        f"port {PORT}/tcp (IPv{f})" for f in (4, 6)
    }
    assert stage.ask(NODE4, PORT).server == "old"
    for warning in warnings():
        stage.node.run("sh", "-c", warning.rpartition("If its pod is gone: ")[2])
    for target in (NODE4, NODE6):
        assert stage.ask(target, PORT).server == "web"


def test_a_rule_in_portmaps_nft_table_is_told_with_the_command(stage: Stage) -> None:
    """As portmap's nftables backend writes it; a lone IPv6 one and ports of others stay untold."""
    head = "chain prerouting { type nat hook prerouting priority dstnat; fib daddr type local jump"
    stage.node.nft(
        "table ip cni_hostport {\n chain hostports {\n"
        '  tcp dport 8080 dnat to 10.244.7.9:80 comment "old"\n'
        '  udp dport 8080 dnat to 10.244.7.9:80 comment "old"\n'
        f'  tcp dport 8081 dnat to 10.244.7.9:80 comment "old"\n }}\n {head} hostports; }}\n}}\n'
        "table ip6 cni_hostport {\n chain hostip_hostports {\n"
        '  ip6 daddr ::1 tcp dport 9999 dnat to [2001:db8::9]:80 comment "old"\n }\n}\n'
    )
    web = with_plugin(stage, TYPE, backend=stage.backend.name)
    stage.pod("web", [mapping(PORT, 80)], network=web)

    def warnings() -> list[str]:
        done = stage.node.run(stage.runtime.binary(TYPE), "status", "--json", env=stage.runtime.env)
        return [w for w in json.loads(done.stdout)["warnings"] if "of portmap (old)" in w]

    assert wait_for(lambda: len(warnings()) == 1, timeout=45, step=0.5)
    (warning,) = warnings()
    assert warning.startswith(f"port {PORT}/tcp (IPv4): ")
    assert "leads to 10.244.7.9:80" in warning
    wins = "it wins over ours" if stage.backend.name == "nftables" else "the younger"
    assert wins in warning
    assert stage.ask(NODE4, PORT, timeout=0.3).ok == (stage.backend.name != "nftables")
    stage.node.run("sh", "-c", warning.rpartition("If its pod is gone: ")[2])
    assert stage.ask(NODE4, PORT).server == "web"


def test_portmaps_nft_table_is_cleaned_by_container(stage: Stage) -> None:
    """Rules as newer versions of portmap write them."""
    ours = with_plugin(stage, TYPE, backend=stage.backend.name)
    at = stage.attachment("old", [mapping(PORT, 80)])
    stage.node.nft(
        "table ip cni_hostport {\n chain hostports {\n"
        f'  tcp dport 8080 dnat to 10.244.7.9:80 comment "{at.container_id}"\n'
        '  tcp dport 8081 dnat to 10.244.7.8:80 comment "other"\n }\n'
        " chain masquerading {\n"
        f'  ip saddr 10.244.7.9 ip daddr 10.244.7.9 masquerade comment "{at.container_id}"\n'
        " }\n}\n"
    )
    config = ours.config(ours.entry(TYPE), at, None)
    assert stage.call("DEL", config, at).status == 0

    def left() -> str:
        return stage.node.output("nft", "list", "table", "ip", "cni_hostport")

    assert wait_for(lambda: at.container_id not in left())
    assert "other" in left()


def test_portmaps_nft_table_is_cleaned_where_no_iptables_is() -> None:
    """The event of that table must not send us to tools that the node lacks."""
    stage = Stage(Backend.parse("nftables"))
    try:
        network = stage.network()
        stage.pod("early", [mapping(7000, 80)], network=network)
        stage.node.path("/run/empty").touch()
        for name in ("xtables-nft-multi", "xtables-legacy-multi"):
            stage.node.run("mount", "--bind", "/run/empty", f"/usr/sbin/{name}")
        at = stage.attachment("old", [mapping(PORT, 80)])
        stage.node.nft(
            "table ip cni_hostport {\n chain hostports {\n"
            f'  tcp dport 8080 dnat to 10.244.7.9:80 comment "{at.container_id}"\n }}\n}}\n'
        )
        time.sleep(0.2)
        reply = stage.call("DEL", network.config(network.entry(TYPE), at, None), at)
        assert (reply.status, reply.stderr) == (0, b"")
        assert at.container_id not in stage.node.output("nft", "list", "ruleset")
    finally:
        stage.close()
