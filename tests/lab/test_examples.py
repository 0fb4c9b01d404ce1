"""Every conflist of conflist-examples/ is loaded as it is and used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.chain import Attachment, Chain, Json, PluginError
from lab.node import CLIENT4, NODE4, NODE4_BACK, NODE6
from lab.rivals import Rival
from lab.stage import Stage, container_id, mapping

FOLDER = Path(__file__).parents[2] / "conflist-examples"
FILES = sorted(FOLDER.glob("*.conflist"))
BY_RUNTIME = {"bridge", "bridge-dual-stack", "ptp", "k3s-flannel", "portmap-migration"}


def load(stage: Stage, name: str) -> Chain:
    """The example with the backend under test; flannel's part is played by what it delegates to."""
    conflist: Json = json.loads((FOLDER / f"{name}.conflist").read_text())
    plugins = []
    for original in conflist["plugins"]:
        entry = original
        if entry["type"] == "flannel":
            ipam = {"type": "host-local", "ranges": [[{"subnet": "10.42.0.0/24"}]]}
            entry = {
                "type": "bridge",
                "bridge": "cni0",
                "ipMasq": True,
                **entry["delegate"],
                "ipam": ipam,
            }
        if entry["type"] == "cni-hostport" and "conditionsV4" not in entry:
            entry = {**entry, "backend": stage.backend.name}
        plugins.append(entry)
    return Chain(stage.runtime, {**conflist, "plugins": plugins})


def attach(stage: Stage, chain: Chain, args: Json) -> Attachment:
    """ADD of a pod ``web`` that serves on 80, 443 and 53."""
    netns = stage.node.add_netns("web")
    at = Attachment(
        container_id("web"),
        netns,
        "eth0",
        "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=web",
        args,
    )
    chain.add(at)
    stage.servers.serve("web", [("tcp", 80), ("tcp", 443), ("udp", 53)], netns="web")
    return at


def test_every_example_is_known_to_these_tests() -> None:
    names = {file.stem for file in FILES}
    assert names == BY_RUNTIME | {"crio-annotation", "static"}
    readme = (FOLDER / "README.md").read_text()
    for name in names:
        assert f"`{name}.conflist`" in readme


@pytest.mark.parametrize("name", sorted(BY_RUNTIME))
def test_ports_that_the_runtime_passes(stage: Stage, name: str) -> None:
    if name == "portmap-migration" and stage.backend.name != "nftables":
        pytest.skip("its conditions are in nftables' syntax")
    chain = load(stage, name)
    at = attach(stage, chain, {"portMappings": [mapping(8080, 80), mapping(8053, 53, "udp")]})
    answer = stage.ask(NODE4, 8080)
    assert (answer.server, answer.source) == ("web", CLIENT4)
    assert stage.ask(NODE4, 8053, "udp").server == "web"
    dual = len(at.addresses()) == 2
    assert stage.ask(NODE6, 8080).server == ("web" if dual else "")
    if name == "portmap-migration":
        assert stage.ask(NODE4, 8080, at="other").refused_at_once()
    else:
        assert stage.ask("127.0.0.1", 8080, at=None).server == "web"
        assert stage.ask(NODE4, 8080, at="web").server == "web"
    assert not Rival("0.0.0.0", "reuseaddr", "tcp").wins(stage.node, 8080)
    for entry in chain.conflist["plugins"]:
        if entry["type"] == "cni-hostport":
            config = chain.config(entry, at, at.result)
            assert stage.call("CHECK", config, at).status == 0
    chain.delete(at)
    assert stage.ask(NODE4, 8080).refused_at_once()
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, 8080)


def test_static_list(stage: Stage) -> None:
    chain = load(stage, "static")
    at = attach(stage, chain, {})
    assert stage.ask(NODE4, 8443).server == "web"
    assert stage.ask(NODE6, 8443).server == "web"
    assert stage.ask(NODE4, 8053, "udp").server == "web"
    assert stage.ask(NODE4_BACK, 8443).refused_at_once()
    chain.delete(at)
    assert stage.ask(NODE4, 8443).refused_at_once()


def annotated(text: str) -> Json:
    return {"io.kubernetes.cri.pod-annotations": {"hostport.example.com/mappings": text}}


def test_annotation(stage: Stage) -> None:
    chain = load(stage, "crio-annotation")
    at = attach(stage, chain, annotated(json.dumps([mapping(8080, 80), mapping(8053, 53, "udp")])))
    assert stage.ask(NODE4, 8080).server == "web"
    assert stage.ask(NODE6, 8053, "udp").server == "web"
    chain.delete(at)
    assert stage.ask(NODE4, 8080).refused_at_once()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("not JSON", "hostport.example.com/mappings"),
        ('{"hostPort": 8080}', "hostport.example.com/mappings"),
        (json.dumps([mapping(80, 80)]), "80"),
        (json.dumps([mapping(8080, 80, "tcp", "203.0.113.9")]), "203.0.113.9"),
        (json.dumps([mapping(70000, 80)]), "70000"),
    ],
)
def test_bad_annotation_is_refused(stage: Stage, text: str, word: str) -> None:
    chain = load(stage, "crio-annotation")
    with pytest.raises(PluginError) as failed:
        attach(stage, chain, annotated(text))
    assert failed.value.plugin == "cni-hostport"
    assert failed.value.code == 7
    assert word in failed.value.text
    assert stage.records() == {}


def test_pod_without_the_annotation_is_left_alone(stage: Stage) -> None:
    chain = load(stage, "crio-annotation")
    at = attach(stage, chain, {"io.kubernetes.cri.pod-annotations": {"other": "x"}})
    assert stage.records() == {}
    chain.delete(at)
