"""SCTP mappings carry both directions; conflicts come from records, since nothing is held."""

from __future__ import annotations

import pytest

from lab.node import CLIENT4, CLIENT6, NODE4, NODE4_SECOND, NODE6
from lab.sctp import INIT, INIT_ACK, associate
from lab.stage import Stage, mapping

PORT, POD_PORT = 8006, 36412


@pytest.mark.parametrize(("host", "client"), [(NODE4, CLIENT4), (NODE6, CLIENT6)])
def test_an_association_is_carried(stage: Stage, host: str, client: str) -> None:
    pod = stage.pod("core", [mapping(PORT, POD_PORT, "SCTP")], serve=False)
    seen, back = associate(stage.node, host, PORT, pod="core", pod_port=POD_PORT)
    assert seen is not None
    assert (seen.sender, seen.target, seen.chunk) == (client, POD_PORT, INIT)
    assert seen.intact
    assert back is not None
    assert (back.sender, back.source, back.chunk) == (host, PORT, INIT_ACK)
    assert back.intact
    stage.remove(pod)


def test_only_the_mapped_port_and_protocol_and_only_while_it_lives(stage: Stage) -> None:
    pod = stage.pod("core", [mapping(PORT, POD_PORT, "sctp", NODE4)], serve=False)
    arguments = {"pod": "core", "pod_port": POD_PORT}
    assert associate(stage.node, NODE4, PORT, **arguments)[1] is not None
    assert associate(stage.node, NODE4_SECOND, PORT, **arguments) == (None, None)
    assert associate(stage.node, NODE4, PORT + 1, **arguments) == (None, None)
    assert stage.ask(NODE4, PORT).refused_at_once()
    assert stage.call("DEL", stage.config(pod), pod.at).status == 0
    assert associate(stage.node, NODE4, PORT, **arguments) == (None, None)


def test_a_conflict_names_the_owner_and_protocols_are_apart(stage: Stage) -> None:
    stage.pod("core", [mapping(PORT, POD_PORT, "sctp")], serve=False)
    error = stage.refused("late", [mapping(PORT, 1, "sctp")])
    assert error.code == 101
    assert f"{PORT}/sctp" in error.text
    assert "pod shop/core" in error.text
    other = stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
    assert stage.ask(NODE4, PORT).server == "web"
    assert other.ip4
