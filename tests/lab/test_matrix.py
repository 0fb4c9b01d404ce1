"""The connection matrix: every way to reach a host port, and the source the pod sees.

bridge with isGateway and ipMasq, dual stack, hairpinMode off; TCP and UDP; with
bridged packets passing the IP hooks and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from lab.node import (
    CLIENT4,
    CLIENT6,
    NODE4,
    NODE4_BACK,
    NODE4_SECOND,
    NODE6,
    NODE6_BACK,
    NODE6_SECOND,
    OTHER4,
    OTHER6,
)
from lab.peers import Protocol
from lab.stage import GATEWAY4, GATEWAY6, Backend, Pod, Stage, mapping

PORT = 8080
ANY = ""


@dataclass(frozen=True)
class Row:
    """From where to which address; who answers and which source it sees (empty: not fixed)."""

    name: str
    at: str | None
    target: str
    source: str | None = None
    server: str = "web"
    sees: str = ANY

    def __str__(self) -> str:
        return self.name


NODE = None
ROWS = (
    Row("external -> node", "client", NODE4, sees=CLIENT4),
    Row("external -> second node address", "client", NODE4_SECOND, sees=CLIENT4),
    Row("external -> address of another link", "client", NODE4_BACK, sees=CLIENT4),
    Row("node -> node", NODE, NODE4, sees=NODE4),
    Row("node -> second node address", NODE, NODE4_SECOND),
    Row("node from second address -> node", NODE, NODE4, NODE4_SECOND, sees=NODE4_SECOND),
    Row("node -> gateway", NODE, GATEWAY4),
    Row("node -> 127.0.0.1", NODE, "127.0.0.1", sees=GATEWAY4),
    Row("node -> 127.0.0.5", NODE, "127.0.0.5", sees=GATEWAY4),
    Row("node from 127.0.0.9 -> 127.0.0.1", NODE, "127.0.0.1", "127.0.0.9", sees=GATEWAY4),
    Row("node from 127.0.0.9 -> node", NODE, NODE4, "127.0.0.9"),
    Row("node from node address -> 127.0.0.1", NODE, "127.0.0.1", NODE4, sees=NODE4),
    Row("pod itself -> node", "web", NODE4),
    Row("pod itself -> gateway", "web", GATEWAY4),
    Row("neighbour -> node", "neighbour", NODE4),
    Row("neighbour -> second node address", "neighbour", NODE4_SECOND),
    Row("neighbour -> gateway", "neighbour", GATEWAY4),
    Row("neighbour -> other host", "neighbour", OTHER4, server="other"),
    Row("pod itself -> other host", "web", OTHER4, server="other"),
    Row("external -> other host", "client", OTHER4, server="other", sees=CLIENT4),
    Row("external6 -> node", "client", NODE6, sees=CLIENT6),
    Row("external6 -> second node address", "client", NODE6_SECOND, sees=CLIENT6),
    Row("external6 -> address of another link", "client", NODE6_BACK, sees=CLIENT6),
    Row("node6 -> node", NODE, NODE6, NODE6, sees=NODE6),
    Row("node6 -> gateway", NODE, GATEWAY6),
    Row("node6 from node address -> ::1", NODE, "::1", NODE6, sees=NODE6),
    Row("pod itself6 -> node", "web", NODE6),
    Row("pod itself6 -> gateway", "web", GATEWAY6),
    Row("neighbour6 -> node", "neighbour", NODE6),
    Row("neighbour6 -> gateway", "neighbour", GATEWAY6),
    Row("neighbour6 -> other host", "neighbour", OTHER6, server="other"),
    Row("external6 -> other host", "client", OTHER6, server="other", sees=CLIENT6),
)


def start(backend: Backend, bridge_netfilter: bool, **options: Any) -> tuple[Stage, Pod]:
    """A stage with the pod ``web``, a neighbour, and another host on the same port."""
    stage = Stage(backend, bridge_netfilter=bridge_netfilter)
    network = stage.network(masquerade=True, **options)
    web = stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")], network=network)
    stage.pod("neighbour", network=network)
    stage.servers.serve("other", [("tcp", PORT), ("udp", PORT)], netns="other")
    return stage, web


@pytest.fixture(scope="module", params=[False, True], ids=["br-nf off", "br-nf on"])
def world(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Stage]:
    """One node for all rows of a bridge-netfilter state."""
    stage, _ = start(backend, request.param)
    yield stage
    stage.close()


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_reaches(world: Stage, row: Row, protocol: Protocol) -> None:
    answer = world.ask(row.target, PORT, protocol, at=row.at, source=row.source)
    assert (answer.outcome, answer.server) == ("ok", row.server)
    if row.sees:
        assert answer.source == row.sees


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_loopback6_to_itself_is_refused_at_once(world: Stage, protocol: Protocol) -> None:
    answer = world.ask("::1", PORT, protocol, at=None, source="::1")
    assert answer.refused_at_once(), answer


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("target", [NODE4, NODE6, "127.0.0.1"])
def test_a_port_that_is_not_mapped_stays_refused(
    world: Stage, target: str, protocol: Protocol
) -> None:
    at = None if target == "127.0.0.1" else "client"
    assert world.ask(target, PORT + 1, protocol, at=at).refused_at_once()


@pytest.mark.parametrize("bridge_netfilter", [False, True], ids=["br-nf off", "br-nf on"])
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_masq_all_shows_the_gateway_to_the_pod(
    backend: Backend, bridge_netfilter: bool, protocol: Protocol
) -> None:
    stage, _ = start(backend, bridge_netfilter, masqAll=True)
    try:
        for row in ROWS:
            if row.server == "web":
                answer = stage.ask(row.target, PORT, protocol, at=row.at, source=row.source)
                gateway = GATEWAY6 if ":" in row.target else GATEWAY4
                assert (answer.outcome, answer.server, answer.source) == ("ok", "web", gateway), row
    finally:
        stage.close()
