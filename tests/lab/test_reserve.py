"""Host ports are reserved: who is refused, who is not, and what a refusal says."""

from __future__ import annotations

import socket
import time

import pytest

from lab.node import CLIENT4, NODE4, NODE4_SECOND, NODE6, NODE6_SECOND, wait_for
from lab.peers import Protocol, open_socket
from lab.rivals import DUAL, PLACES4, PLACES6, Rival, rivals, squatter, winners
from lab.stage import Stage, container_id, mapping

PORT = 8080
EVERYBODY = rivals(*PLACES4, *PLACES6, DUAL)


def both(host_ip: str | None = None, port: int = PORT) -> list[dict[str, object]]:
    """The port by TCP and by UDP."""
    return [mapping(port, 80, "tcp", host_ip), mapping(port, 80, "udp", host_ip)]


@pytest.mark.parametrize(
    ("host_ip", "places_left"),
    [
        ("", ()),
        (None, ()),
        ("0.0.0.0", PLACES6),
        ("::", PLACES4),
        (NODE4, ("127.0.0.1", "127.0.0.5", NODE4_SECOND, *PLACES6)),
        (f"::ffff:{NODE4}", ("127.0.0.1", "127.0.0.5", NODE4_SECOND, *PLACES6)),
        ("127.0.0.1", ("127.0.0.5", NODE4, NODE4_SECOND, *PLACES6)),
        (NODE6, ("::1", NODE6_SECOND, *PLACES4)),
    ],
)
def test_for_the_life_of_the_pod_only_other_addresses_are_left(
    stage: Stage, host_ip: str | None, places_left: tuple[str, ...]
) -> None:
    free = winners(stage.node, PORT, EVERYBODY)
    assert free == {str(rival) for rival in EVERYBODY}
    pod = stage.pod("web", both(host_ip))
    left = {str(rival) for rival in rivals(*places_left)}
    assert winners(stage.node, PORT, EVERYBODY) == left
    time.sleep(0.5)
    assert winners(stage.node, PORT, EVERYBODY) == left
    stage.remove(pod)
    assert winners(stage.node, PORT, EVERYBODY) == free


def test_port_is_free_in_the_instant_that_del_answers(stage: Stage) -> None:
    pod = stage.pod("web", both(), serve=False)
    at, config = pod.at, stage.config(pod)
    assert stage.call("DEL", config, at).status == 0
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT)
    assert Rival(DUAL, "plain", "udp").wins(stage.node, PORT)


def test_protocols_and_ports_are_independent(stage: Stage) -> None:
    stage.pod("web", [mapping(PORT, 80, "tcp")])
    assert winners(stage.node, PORT, rivals("0.0.0.0", DUAL)) == {
        str(rival) for rival in rivals("0.0.0.0", DUAL, protocols=("udp",))
    }
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT + 1)


def test_port_53_is_held_address_by_address(stage: Stage) -> None:
    stage.pod("dns", both(port=53))
    stage.node.ip("link add nodelocaldns type ifb", "addr add 169.254.20.10/32 dev nodelocaldns")
    mine = rivals(NODE4, NODE4_SECOND, "127.0.0.1", NODE6, NODE6_SECOND)
    assert winners(stage.node, 53, mine) == set()
    cache = rivals("169.254.20.10")
    assert winners(stage.node, 53, cache) == {str(rival) for rival in cache}


# -- conflicts with processes -------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
@pytest.mark.parametrize("address", ["0.0.0.0", NODE4, "127.0.0.1", "::", NODE6])
def test_a_listening_process_is_named(stage: Stage, address: str, protocol: Protocol) -> None:
    stage.pod("first", [mapping(9000, 80)])
    with squatter(stage.node, address, PORT, protocol) as process:
        before = stage.snapshot()
        error = stage.refused("second", both())
        assert error.code == 101
        assert error.reply.json["cniVersion"] == "1.0.0"
        pid = next(p for p, argv in stage.node.processes().items() if str(PORT) in argv)
        for word in (str(PORT), protocol, "squatter", str(pid)):
            assert word in error.text.lower(), error.text
        assert stage.snapshot() == before
        assert process.poll() is None
    assert stage.ask(NODE4, 9000).server == "first"
    stage.pod("second", both())
    assert stage.ask(NODE4, PORT, protocol).server == "second"


def test_a_listener_on_another_address_is_no_conflict(stage: Stage) -> None:
    with squatter(stage.node, NODE4_SECOND, PORT):
        stage.pod("web", [mapping(PORT, 80, "tcp", NODE4)])
        assert stage.ask(NODE4, PORT).server == "web"


@pytest.mark.parametrize("reuse", [True, False], ids=["server reused", "server did not reuse"])
def test_time_wait_of_an_earlier_server_is_no_conflict(stage: Stage, reuse: bool) -> None:
    options = (socket.SO_REUSEADDR,) if reuse else ()
    listener = open_socket(stage.node, NODE4, PORT, "tcp", options=options, listen=True)
    with stage.node.within("client"):
        client = socket.socket()
    client.connect((NODE4, PORT))
    server, _ = listener.accept()
    server.close()  # the side that closes first keeps the port in TIME_WAIT
    assert client.recv(1) == b""
    client.close()
    listener.close()
    assert "TIME-WAIT" in stage.node.output("ss", "-tan")
    pod = stage.pod("web", [mapping(PORT, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    if reuse:
        assert winners(stage.node, PORT, rivals("0.0.0.0", protocols=("tcp",))) == set()
    stage.remove(pod)


def test_source_port_of_an_outgoing_connection_is_no_conflict_and_held_later(stage: Stage) -> None:
    listener = open_socket(stage.node, CLIENT4, 7777, "tcp", netns="client", listen=True)
    outgoing = open_socket(stage.node, NODE4, PORT, "tcp")
    outgoing.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    outgoing.connect((CLIENT4, 7777))
    stage.pod("web", [mapping(PORT, 80)])
    assert stage.ask(NODE4, PORT, source_port=23456).server == "web"
    outgoing.close()
    listener.close()
    everybody = rivals("0.0.0.0", NODE4, DUAL, protocols=("tcp",))
    assert wait_for(lambda: not winners(stage.node, PORT, everybody), timeout=5, step=0.5)


# -- conflicts between pods ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second"),
    [("", ""), ("", NODE4), (NODE4, ""), ("0.0.0.0", "127.0.0.1"), (NODE6, "::"), (NODE4, NODE4)],
)
@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_a_second_pod_is_refused_with_the_owners_name(
    stage: Stage, first: str, second: str, protocol: str
) -> None:
    network = stage.network("blue")
    stage.pod("owner", [mapping(PORT, 80, protocol, first)], network=network, serve=False)
    if protocol != "sctp":
        stage.servers.serve("owner", [("tcp", 80), ("udp", 80)], netns="owner")
    before = stage.snapshot()
    wanted = [mapping(9001, 80), mapping(PORT, 81, protocol, second)]
    error = stage.refused("rival", wanted, network=network)
    assert error.code == 101
    for word in (str(PORT), protocol, "blue", "shop/owner", container_id("owner")[:12]):
        assert word in error.text, error.text
    assert stage.snapshot() == before
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, 9001)
    if protocol in ("tcp", "udp"):
        target = first if first not in ("", "0.0.0.0") else NODE4
        kind: Protocol = "udp" if protocol == "udp" else "tcp"
        assert stage.ask(target, PORT, kind).server == "owner"


@pytest.mark.parametrize(
    ("first", "second"),
    [(NODE4, NODE4_SECOND), (NODE4, "127.0.0.1"), ("0.0.0.0", "::"), (NODE4, NODE6)],
)
def test_different_addresses_do_not_conflict(stage: Stage, first: str, second: str) -> None:
    stage.pod("one", both(first))
    stage.pod("two", both(second))
    for address, name in ((first, "one"), (second, "two")):
        target = {"0.0.0.0": NODE4, "::": NODE6}.get(address, address)
        at = None if target == "127.0.0.1" else "client"
        assert stage.ask(target, PORT, at=at).server == name
        assert stage.ask(target, PORT, "udp", at=at).server == name


def test_sctp_is_mapped_without_a_socket(stage: Stage) -> None:
    stage.pod("web", [mapping(9000, 9000, "sctp")], serve=False)
    assert "sctp" in stage.node.ruleset()
    assert error_code(stage, [mapping(9000, 9000, "sctp")]) == 101


def error_code(stage: Stage, mappings: list[dict[str, object]]) -> int:
    """The code of an ADD that must fail."""
    return stage.refused("another", mappings).code
