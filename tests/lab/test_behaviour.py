"""What ADD, DEL and CHECK leave behind: repeated, out of order, late, and after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lab.chain import Attachment, Json, PluginError
from lab.node import NODE4, NODE6
from lab.rivals import Rival, rivals, winners
from lab.stage import BUNDLE, TYPE, Pod, Stage, mapping

SCHEMA = Path(__file__).parents[2] / "docs/status.schema.json"
PORT = 8080
MAPPINGS = [mapping(PORT, 80), mapping(PORT, 80, "udp")]


def moved(result: Json, ip4: str) -> Json:
    """A result in which the pod has another IPv4 address."""
    copy: Json = json.loads(json.dumps(result))
    for entry in copy["ips"]:
        if ":" not in entry["address"]:
            entry["address"] = f"{ip4}/24"
    return copy


def give_address(stage: Stage, pod: Pod, ip4: str) -> None:
    """The pod answers on that address instead of its own."""
    stage.node.ip(
        f"addr del {pod.ip4}/24 dev eth0",
        f"addr add {ip4}/24 dev eth0",
        "route add default via 10.244.7.1",
        netns=pod.name,
    )


# -- ADD again ----------------------------------------------------------------------------------


def test_the_answer_is_prev_result(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    previous: Json = {**(pod.at.result or {}), "vendor": {"kept": True}}
    reply = stage.call("ADD", stage.config(pod, previous), pod.at)
    assert reply.status == 0
    assert reply.json == {**previous, "cniVersion": "1.0.0"}
    assert reply.stderr == b""


def test_identical_add_changes_nothing(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    before = stage.snapshot()
    assert stage.call("ADD", stage.config(pod), pod.at).status == 0
    assert stage.snapshot() == before
    assert stage.ask(NODE4, PORT).server == "web"


def test_add_with_a_new_pod_address_reaches_only_the_new_one(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    old = pod.ip4
    assert stage.ask(NODE4, PORT, "udp", source_port=40000).server == "web"
    give_address(stage, pod, "10.244.7.99")
    assert not stage.ask(NODE4, PORT, timeout=0.3).ok
    result = moved(pod.at.result or {}, "10.244.7.99")
    assert stage.call("ADD", stage.config(pod, result), pod.at).status == 0
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE4, PORT, "udp", source_port=40000).server == "web"
    assert old not in stage.node.ruleset().replace("10.244.7.99", "")
    stage.remove(pod)
    assert "10.244.7.99" not in stage.node.ruleset()


def test_add_with_other_ports_replaces_them(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    pod.at.capability_args["portMappings"] = [mapping(8081, 80), mapping(PORT, 80, "udp")]
    assert stage.call("ADD", stage.config(pod), pod.at).status == 0
    assert stage.ask(NODE4, 8081).server == "web"
    assert stage.ask(NODE4, PORT).refused_at_once()
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT)
    assert not Rival("0.0.0.0", "plain", "udp").wins(stage.node, PORT)


def test_a_changed_add_that_fails_leaves_the_old_one(stage: Stage) -> None:
    pod = stage.pod("web", MAPPINGS)
    stage.pod("sibling", [mapping(8081, 80)])
    before = stage.snapshot()
    pod.at.capability_args["portMappings"] = [mapping(PORT, 80), mapping(8081, 80)]
    assert stage.call("ADD", stage.config(pod), pod.at).code == 101
    assert stage.snapshot() == before
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE4, 8081).server == "sibling"


# -- dead owners and late DELs ------------------------------------------------------------------


def vanish(stage: Stage, pod: Pod) -> None:
    """The pod's namespace goes without a DEL of the plugin; its lease is given back."""
    if pod.server:
        pod.server.close()
    stage.runtime.call(
        "bridge",
        "DEL",
        pod.network.config(pod.network.entry("bridge"), pod.at, pod.at.result),
        pod.at,
    )
    stage.node.delete_netns(pod.name)


def test_owner_whose_namespace_is_gone_is_reclaimed(stage: Stage) -> None:
    dead = stage.pod("dead", MAPPINGS)
    vanish(stage, dead)
    live = stage.pod("live", MAPPINGS)
    assert stage.ask(NODE4, PORT).server == "live"
    assert stage.ask(NODE4, PORT, "udp").server == "live"
    assert len(stage.records()) == 1
    assert stage.call("DEL", stage.config(dead), dead.at).status == 0
    assert stage.ask(NODE4, PORT).server == "live"
    assert not Rival("0.0.0.0", "reuseaddr", "tcp").wins(stage.node, PORT)
    stage.remove(live)
    assert not stage.records()


def test_owner_whose_path_is_another_namespace_now_is_reclaimed(stage: Stage) -> None:
    dead = stage.pod("name", MAPPINGS)
    vanish(stage, dead)
    stage.node.add_netns("name")  # the path is back, the namespace is not
    stage.pod("live", MAPPINGS)
    assert stage.ask(NODE4, PORT).server == "live"


@pytest.mark.parametrize("port", [PORT, 8081], ids=["same port", "other port"])
def test_del_of_a_dead_attachment_spares_the_live_one_with_its_address(
    stage: Stage, port: int
) -> None:
    network = stage.network()
    dead = stage.pod("dead", MAPPINGS, network=network)
    address = dead.ip4
    vanish(stage, dead)
    live = stage.pod(
        "live",
        [mapping(port, 80), mapping(port, 80, "udp")],
        network=network,
        ips=[f"{address}/24"],
    )
    assert live.ip4 == address
    assert stage.call("DEL", stage.config(dead), dead.at).status == 0
    for at in ("client", "live", None):
        assert stage.ask(NODE4, port, at=at).server == "live", at
        assert stage.ask(NODE4, port, "udp", at=at).server == "live", at
    assert stage.ask("127.0.0.1", port, at=None).server == "live"


def test_two_attachments_with_one_address_do_not_share_their_end(stage: Stage) -> None:
    """Both alive on paper with one address: the end of one keeps the other's masquerade."""
    one = stage.pod("one", [mapping(8001, 80)])
    two = Attachment("e" * 64, one.at.netns, "eth0", "", {"portMappings": [mapping(8002, 80)]})
    config = one.network.config(one.network.entry(TYPE), two, one.at.result)
    assert stage.call("ADD", config, two).status == 0
    assert stage.ask(NODE4, 8002, at="one").server == "one"
    assert stage.call("DEL", config, two).status == 0
    assert stage.ask(NODE4, 8001, at="one").server == "one"
    assert stage.ask("127.0.0.1", 8001, at=None).server == "one"


def without(config: Json, *keys: str) -> Json:
    return {key: value for key, value in config.items() if key not in keys}


POOR_FORMS: dict[str, tuple[Any, dict[str, str | None]]] = {
    "empty list": (lambda c: {**c, "runtimeConfig": {"portMappings": []}}, {}),
    "no runtimeConfig": (lambda c: without(c, "runtimeConfig"), {}),
    "no prevResult": (lambda c: without(c, "prevResult"), {}),
    "nothing but the name": (
        lambda c: {"name": c["name"], "cniVersion": c["cniVersion"], "type": c["type"]},
        {},
    ),
    "no netns": (lambda c: c, {"CNI_NETNS": None}),
    "empty netns, no prevResult": (lambda c: without(c, "prevResult"), {"CNI_NETNS": ""}),
    "netns that is not there": (lambda c: c, {"CNI_NETNS": "/run/netns/nowhere"}),
    "no args": (lambda c: c, {"CNI_ARGS": None}),
    "hostPort 0": (lambda c: {**c, "runtimeConfig": {"portMappings": [mapping(0, 80)]}}, {}),
    "other mappings": (lambda c: {**c, "runtimeConfig": {"portMappings": [mapping(7, 7)]}}, {}),
    "other options": (lambda c: {**c, "snat": False, "masqAll": True}, {}),
    "an older version": (lambda c: {**without(c, "prevResult"), "cniVersion": "0.3.1"}, {}),
}


@pytest.mark.parametrize("form", POOR_FORMS)
def test_del_needs_only_the_name_of_the_attachment(stage: Stage, form: str) -> None:
    stage.pod("sibling", [mapping(9000, 80)])
    before = stage.snapshot()
    pod = stage.pod("web", MAPPINGS, serve=False)
    change, environment = POOR_FORMS[form]
    reply = stage.call("DEL", change(stage.config(pod)), pod.at, **environment)
    assert (reply.status, reply.stdout) == (0, b"")
    assert stage.snapshot() == before
    assert not winners(stage.node, PORT, rivals("0.0.0.0")) ^ {str(r) for r in rivals("0.0.0.0")}
    again = stage.call("DEL", change(stage.config(pod)), pod.at, **environment)
    assert (again.status, again.stdout) == (0, b"")


def test_same_container_on_two_networks_and_two_interfaces(stage: Stage) -> None:
    red, blue = stage.network("red"), stage.network("blue")
    one = stage.pod("web", [mapping(8001, 80)], network=red)
    two = stage.attachment("web", [mapping(8002, 80)], ifname="eth1")
    three = stage.attachment("web", [mapping(8003, 80)], ifname="net2")
    blue.add(two)
    red.add(three)
    ports = {8001, 8002, 8003}
    targets = {p: stage.ask(NODE4, p, at=None).server for p in ports}
    assert targets == dict.fromkeys(ports, "web")
    blue.delete(two)
    assert stage.ask(NODE4, 8001, at=None).server == "web"
    assert stage.ask(NODE4, 8003, at=None).server == "web"
    assert stage.ask(NODE4, 8002, at=None).refused_at_once()
    red.delete(three)
    # Two interfaces in one subnet answered for each other: the node still knows the one that went.
    stage.node.run("ip", "neigh", "flush", "all")
    assert stage.ask(NODE4, 8001).server == "web"
    assert one.at.container_id == two.container_id


def targets(stage: Stage) -> dict[str, str]:
    """IPv4 address that each kind of mapping in ``status`` leads to; empty where to none."""
    text = stage.node.output(str(BUNDLE), "status", "--json")
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))
    rows = json.loads(text)["mappings"]
    return {row["held"]: "".join(row["targets"][:1]).partition(":")[0] for row in rows}


@pytest.mark.parametrize("first_to_go", ["red", "blue"])
def test_the_same_ports_on_two_networks_of_a_container(stage: Stage, first_to_go: str) -> None:
    """podman passes a container's ports to each of its networks: the first has them."""
    red, blue = stage.network("red"), stage.network("blue")
    one = stage.pod("web", MAPPINGS, network=red).at
    two = stage.attachment("web", MAPPINGS, ifname="eth1")
    blue.add(two)
    before = stage.snapshot()
    reply = stage.call("ADD", blue.config(blue.entry(TYPE), two, two.result), two)
    assert reply.status == 0
    assert stage.snapshot() == before
    red.check(one)
    blue.check(two)
    assert targets(stage) == {"yes": one.address(4), "yielded": ""}
    left, going = (two, (red, one)) if first_to_go == "red" else (one, (blue, two))
    going[0].delete(going[1])
    for kind in ("tcp", "udp"):
        assert stage.ask(NODE4, PORT, kind, at=None).server == "web"  # type: ignore[arg-type]
    assert targets(stage) == {"yes": left.address(4)}
    assert not Rival("0.0.0.0", "reuseaddr", "tcp").wins(stage.node, PORT)
    with pytest.raises(PluginError) as failed:
        stage.pod("late", MAPPINGS, network=red)
    assert failed.value.code == 101
    (blue if first_to_go == "red" else red).delete(left)
    assert stage.records() == {}
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT)


def test_many_ports_and_every_spelling(stage: Stage) -> None:
    ports = range(8000, 8040)
    shouted = [{"HostPort": p, "ContainerPort": 80, "Protocol": "TCP", "HostIP": ""} for p in ports]
    shouted += [{"hostport": 8000, "CONTAINERPORT": 80, "protocol": "Udp"}]
    shouted += [{"hostPort": 0, "containerPort": 80}, shouted[0]]
    pod = stage.pod("web", [mapping(9000, 80), mapping(9000, 80, "udp")])
    pod.at.capability_args["portMappings"] = shouted
    assert stage.call("ADD", stage.config(pod), pod.at).status == 0
    for port in (8000, 8014, 8015, 8016, 8039):
        assert stage.ask(NODE4, port).server == "web"
        assert stage.ask(NODE6, port).server == "web"
    assert stage.ask(NODE4, 8000, "udp").server == "web"
    assert stage.ask(NODE4, 9000).refused_at_once()
