"""UDP flows: none keeps going to a pod that is gone, and no other flow is touched."""

from __future__ import annotations

import pytest

from lab.node import CLIENT4, CLIENT6, NODE4, NODE4_SECOND, NODE6, OTHER4, OTHER6
from lab.peers import Client
from lab.stage import Stage, mapping

PORT = 5353
SOURCE_PORT = 40053


BRAND = "77"


def brand(stage: Stage, speaker: Client, port: int) -> None:
    """Mark the flow of a client: one that is dropped and made anew has no mark."""
    hooks = "\n".join(
        f"chain {hook} {{ type filter hook {hook} priority 0; ct state new counter\n"
        f"udp dport {port} ct mark set {BRAND}\n}}"
        for hook in ("prerouting", "output")
    )
    stage.node.nft(f"table inet track {{\n{hooks}\n}}")
    assert speaker.ask().ok
    for hook in ("prerouting", "output"):
        stage.node.run("nft", "flush", "chain", "inet", "track", hook)
        stage.node.run("nft", "add", "rule", "inet", "track", hook, "ct", "state", "new", "counter")


def branded(stage: Stage, host: str, port: int) -> bool:
    """Whether the marked flow is still the one it was."""
    family = ("-f", "ipv6") if ":" in host else ()
    text = stage.node.output("conntrack", "-L", *family, "-p", "udp", "--dport", str(port))
    return f"mark={BRAND} " in text


def client(stage: Stage, host: str, port: int = PORT, at: str | None = "client") -> Client:
    """A client that keeps its source port."""
    source = {"client": (CLIENT6 if ":" in host else CLIENT4)}.get(at or "")
    return Client(stage.node, host, port, "udp", netns=at, source=source, source_port=SOURCE_PORT)


@pytest.mark.parametrize("host", [NODE4, NODE6])
@pytest.mark.parametrize("silence", [True, False], ids=["quiet between", "sending between"])
def test_same_client_port_reaches_the_pod_that_replaces_another(
    stage: Stage, host: str, silence: bool
) -> None:
    mappings = [mapping(PORT, 53, "udp")]
    old = stage.pod("old", mappings)
    with client(stage, host) as speaker:
        assert speaker.ask().server == "old"
        assert speaker.ask().server == "old"
        stage.remove(old)
        if not silence:
            assert not speaker.ask(timeout=0.2).ok
            assert not speaker.ask(timeout=0.2).ok
        new = stage.pod("new", mappings)
        assert new.ip4 != "10.244.7.2"
        assert speaker.ask().server == "new"


@pytest.mark.parametrize("host", [NODE4, NODE6])
def test_host_process_gets_the_port_and_the_flow_after_del(stage: Stage, host: str) -> None:
    pod = stage.pod("web", [mapping(PORT, 53, "udp")])
    with client(stage, host) as speaker:
        assert speaker.ask().server == "web"
        stage.remove(pod)
        stage.servers.serve("host", [("udp", PORT)], addresses=[host])
        assert speaker.ask().server == "host"


def test_flow_from_the_node_itself_is_dropped_with_its_pod(stage: Stage) -> None:
    mappings = [mapping(PORT, 53, "udp")]
    with client(stage, "127.0.0.1", at=None) as speaker:
        old = stage.pod("old", mappings)
        assert speaker.ask().server == "old"
        stage.remove(old)
        stage.pod("new", mappings)
        assert speaker.ask().server == "new"


@pytest.mark.parametrize("target", [OTHER4, OTHER6])
@pytest.mark.parametrize("at", ["client", "neighbour"])
def test_foreign_dns_flow_through_the_node_is_left_alone(
    stage: Stage, target: str, at: str
) -> None:
    network = stage.network(masquerade=True)
    stage.pod("neighbour", network=network)
    stage.servers.serve("other", [("udp", 53)], netns="other")
    with client(stage, target, 53, at=at) as speaker:
        assert speaker.ask().server == "other"
        brand(stage, speaker, 53)
        pod = stage.pod("dns", [mapping(53, 53, "udp")], network=network)
        assert speaker.ask().server == "other"
        stage.remove(pod)
        assert speaker.ask().server == "other"
        assert branded(stage, target, 53)


def test_flow_to_an_address_that_is_not_mapped_is_left_alone(stage: Stage) -> None:
    stage.servers.serve("host", [("udp", PORT)], addresses=[NODE4_SECOND])
    with client(stage, NODE4_SECOND) as speaker:
        assert speaker.ask().server == "host"
        brand(stage, speaker, PORT)
        pod = stage.pod("web", [mapping(PORT, 53, "udp", NODE4)])
        assert speaker.ask().server == "host"
        stage.remove(pod)
        assert branded(stage, NODE4, PORT)


def test_tcp_mapping_touches_no_udp_flow(stage: Stage) -> None:
    stage.servers.serve("host", [("udp", PORT)], addresses=[NODE4])
    with client(stage, NODE4) as speaker:
        assert speaker.ask().server == "host"
        brand(stage, speaker, PORT)
        stage.remove(stage.pod("web", [mapping(PORT, 53, "tcp")]))
        assert branded(stage, NODE4, PORT)
        assert speaker.ask().server == "host"


@pytest.mark.parametrize("at", ["client", "neighbour", None])
@pytest.mark.parametrize("target", [OTHER4, OTHER6])
def test_host_port_53_takes_nothing_that_is_not_addressed_to_the_node(
    stage: Stage, target: str, at: str | None
) -> None:
    network = stage.network(masquerade=True)
    stage.pod("neighbour", network=network)
    stage.pod("dns", [mapping(53, 53, "udp"), mapping(53, 53, "tcp")], network=network)
    stage.servers.serve("other", [("udp", 53), ("tcp", 53)], netns="other")
    for _ in range(3):
        assert stage.ask(target, 53, "udp", at=at).server == "other"
        assert stage.ask(target, 53, "tcp", at=at).server == "other"
    node = NODE6 if ":" in target else NODE4
    assert stage.ask(node, 53, "udp", at=at).server == "dns"
    assert stage.ask(node, 53, "tcp", at=at).server == "dns"


def test_datagrams_to_a_held_port_that_is_not_translated_are_refused_at_once(
    stage: Stage,
) -> None:
    stage.pod("web", [mapping(PORT, 53, "udp")], network=stage.network(snat=False))
    assert stage.ask("127.0.0.1", PORT, "udp", at=None).refused_at_once()
    assert stage.ask("::1", PORT, "udp", at=None).refused_at_once()
