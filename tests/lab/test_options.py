"""Options of the plugin, each alone and two networks side by side; Kubernetes' own cases."""

from __future__ import annotations

import pytest

from lab.chain import Json
from lab.node import (
    CLIENT4,
    CLIENT6,
    NODE4,
    NODE4_BACK,
    NODE4_SECOND,
    NODE6,
    NODE6_BACK,
    OTHER4,
    wait_for,
)
from lab.peers import Protocol
from lab.rivals import Rival, squatter
from lab.stage import GATEWAY4, TYPE, Stage, mapping

PORT = 54323


# -- Kubernetes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("loopback", "node"), [("127.0.0.1", NODE4), ("::1", NODE6)])
def test_conformance_same_port_with_different_host_ip_and_protocol(
    stage: Stage, loopback: str, node: str
) -> None:
    network = stage.network(masquerade=True)
    stage.pod("pod1", [mapping(PORT, 8080, "tcp", loopback)], network=network)
    stage.pod("pod2", [mapping(PORT, 8080, "tcp", node)], network=network)
    stage.pod("pod3", [mapping(PORT, 8080, "udp", node)], network=network)
    assert stage.ask(loopback, PORT, at=None, source=node).server == "pod1"
    assert stage.ask(node, PORT, at=None, source=node).server == "pod2"
    assert stage.ask(node, PORT, "udp", at=None, source=node).server == "pod3"
    assert stage.ask(node, PORT).server == "pod2"
    assert stage.ask(node, PORT, "udp").server == "pod3"


@pytest.mark.parametrize("specific", [NODE4, NODE6, "127.0.0.1"])
def test_scheduler_wildcard_conflicts_with_a_specific_address(stage: Stage, specific: str) -> None:
    stage.pod("pod4", [mapping(PORT, 80)])
    assert stage.refused("pod5", [mapping(PORT, 80, "tcp", specific)]).code == 101


# -- snat, masqAll ------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_without_snat_loopback_is_refused_at_once(stage: Stage, protocol: Protocol) -> None:
    network = stage.network(masquerade=True, snat=False)
    stage.pod("web", [mapping(PORT, 80, protocol)], network=network)
    external = stage.ask(NODE4, PORT, protocol)
    assert (external.server, external.source) == ("web", CLIENT4)
    external6 = stage.ask(NODE6, PORT, protocol)
    assert (external6.server, external6.source) == ("web", CLIENT6)
    own = stage.ask(NODE4, PORT, protocol, at=None)
    assert (own.server, own.source) == ("web", NODE4)
    assert stage.ask(NODE6, PORT, protocol, at=None).server == "web"
    for target in ("127.0.0.1", "127.0.0.5", "::1"):
        answer = stage.ask(target, PORT, protocol, at=None)
        assert answer.refused_at_once(), (target, answer)
    assert stage.node.sysctl("net/ipv4/conf/cni0/route_localnet") == "0"


def test_without_snat_a_loopback_listener_is_no_conflict(stage: Stage) -> None:
    stage.servers.serve("host", [("tcp", PORT)], addresses=["127.0.0.1"])
    stage.pod("web", [mapping(PORT, 80)], network=stage.network(snat=False))
    assert stage.ask("127.0.0.1", PORT, at=None).server == "host"
    assert stage.ask(NODE4, PORT).server == "web"
    assert not Rival(NODE4, "reuseaddr", "tcp").wins(stage.node, PORT)


def test_options_of_two_networks_never_mix(stage: Stage) -> None:
    red = stage.network("red", snat=False)
    blue = stage.network("blue", masqAll=True)
    stage.pod("one", [mapping(8001, 80)], network=red)
    two = stage.pod("two", [mapping(8002, 80)], network=blue)
    plain = stage.pod("three", [mapping(8003, 80)])
    gateway = two.ip4.rsplit(".", 1)[0] + ".1"
    for _ in range(2):
        assert stage.ask(NODE4, 8001).source == CLIENT4
        assert stage.ask("127.0.0.1", 8001, at=None).refused_at_once()
        assert stage.ask(NODE4, 8002).source == gateway
        stage.remove(plain)
        plain = stage.pod("three", [mapping(8003, 80)])
        assert stage.ask(NODE4, 8003).source == CLIENT4
        assert stage.ask("127.0.0.1", 8003, at=None).source == GATEWAY4


# -- the loopback guard -------------------------------------------------------------------------


def open_loopback_route(stage: Stage, netns: str, gateway: str) -> None:
    """Make a namespace send packets for 127.0.0.1 to the node, as an attacker would."""
    node = stage.node
    node.sysctl("net/ipv4/conf/all/route_localnet", "1", netns=netns)
    node.ip("route del local 127.0.0.0/8 dev lo table local", netns=netns)
    node.ip("route del local 127.0.0.1 dev lo table local", netns=netns)
    node.ip(f"route add 127.0.0.1/32 via {gateway}", netns=netns)


def test_nobody_reaches_a_loopback_service_of_the_node(stage: Stage) -> None:
    stage.pod("neighbour")
    secret = stage.servers.serve("secret", [("udp", 6000), ("tcp", 6000)], addresses=["127.0.0.1"])
    open_loopback_route(stage, "neighbour", GATEWAY4)
    open_loopback_route(stage, "client", NODE4)
    stage.node.sysctl("net/ipv4/conf/cni0/route_localnet", "1")
    stage.ask("127.0.0.1", 6000, "udp", at="neighbour", timeout=0.2)
    assert secret.seen, "the attack must work where nobody guards"
    stage.node.sysctl("net/ipv4/conf/cni0/route_localnet", "0")
    secret.seen.clear()
    stage.pod("web", [mapping(PORT, 80)])
    for at in ("neighbour", "client"):
        for protocol in ("udp", "tcp"):
            kind: Protocol = "udp" if protocol == "udp" else "tcp"
            assert not stage.ask("127.0.0.1", 6000, kind, at=at, timeout=0.3).ok
    assert secret.seen == []
    assert not stage.ask("127.0.0.1", PORT, at="client", timeout=0.3).ok
    assert stage.ask("127.0.0.1", PORT, at=None).server == "web"
    assert stage.ask("127.0.0.1", 6000, at=None).server == "secret"


def test_route_localnet_is_put_back_with_its_last_user(stage: Stage) -> None:
    stage.pod("neighbour")
    links = ("all", "cni0", "uplink")
    before = [stage.node.sysctl(f"net/ipv4/conf/{link}/route_localnet") for link in links]
    one = stage.pod("one", [mapping(8001, 80)])
    two = stage.pod("two", [mapping(8002, 80)])
    assert stage.node.sysctl("net/ipv4/conf/cni0/route_localnet") == "1"
    assert stage.node.sysctl("net/ipv4/conf/all/route_localnet") == "0"
    stage.remove(one)
    assert stage.ask("127.0.0.1", 8002, at=None).server == "two"
    stage.remove(two)
    assert [stage.node.sysctl(f"net/ipv4/conf/{x}/route_localnet") for x in links] == before


# -- excludeInterfaces, nodeAddresses, hostIP ---------------------------------------------------


SERVICE_LINK = ("link add kube-ipvs0 type ifb", "addr add 10.96.0.1/32 dev kube-ipvs0")


@pytest.mark.parametrize("when", ["link and server before", "server after", "link after"])
def test_excluded_link_is_never_answered(stage: Stage, when: str) -> None:
    services: list[tuple[Protocol, int]] = [("tcp", 443), ("udp", 443)]
    if when != "link after":
        stage.node.ip(*SERVICE_LINK)
    if when == "link and server before":
        stage.servers.serve("service", services, addresses=["10.96.0.1"])
    stage.pod("neighbour")
    stage.pod("web", [mapping(443, 443), mapping(443, 443, "udp")])
    if when == "link after":
        stage.node.ip(*SERVICE_LINK)
    if when != "link and server before":
        for kind in ("tcp", "udp"):
            free = Rival("10.96.0.1", "plain", "udp" if kind == "udp" else "tcp")
            assert wait_for(lambda r=free: r.wins(stage.node, 443), timeout=2)
        stage.servers.serve("service", services, addresses=["10.96.0.1"])
        # rules follow sockets: with iptables a moment later
        udp = lambda: stage.ask("10.96.0.1", 443, "udp", at="client", timeout=0.2).ok  # noqa: E731
        assert wait_for(udp, timeout=1)
    for at in ("neighbour", "client", None):
        for kind in ("tcp", "udp"):
            protocol: Protocol = "udp" if kind == "udp" else "tcp"
            assert stage.ask("10.96.0.1", 443, protocol, at=at).server == "service"
            assert stage.ask(NODE4, 443, protocol, at=at).server == "web"
    assert not Rival(NODE4, "reuseaddr", "tcp").wins(stage.node, 443)


def test_no_link_is_excluded_where_the_list_is_empty(stage: Stage) -> None:
    stage.node.ip(*SERVICE_LINK)
    stage.pod("web", [mapping(443, 443)], network=stage.network(excludeInterfaces=[]))
    assert stage.ask("10.96.0.1", 443).server == "web"


def test_node_addresses_limit_where_host_ports_answer(stage: Stage) -> None:
    wanted = stage.network(nodeAddresses=["192.0.2.0/30", "2001:db8:1::/64"])
    stage.servers.serve("host", [("tcp", PORT)], addresses=[NODE4_BACK])
    stage.pod("web", [mapping(PORT, 80)], network=wanted)
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE6, PORT).server == "web"
    assert stage.ask(NODE4_BACK, PORT).server == "host"
    for target in (NODE4_SECOND, NODE6_BACK):
        assert stage.ask(target, PORT).refused_at_once(), target
    assert stage.ask("127.0.0.1", PORT, at=None).refused_at_once()
    assert Rival(NODE4_SECOND, "plain", "tcp").wins(stage.node, PORT)
    assert not Rival(NODE4, "reuseaddr", "tcp").wins(stage.node, PORT)


def test_address_that_comes_later_answers_and_is_held(stage: Stage) -> None:
    limited = stage.network("limited", nodeAddresses=["192.0.2.0/24"])
    stage.pod("wild", [mapping(8001, 80)])
    stage.pod("limited", [mapping(8002, 80)], network=limited)
    stage.pod("specific", [mapping(8003, 80, "tcp", "192.0.2.77")])
    stage.node.ip("addr add 192.0.2.77/24 dev uplink")
    for port, name in ((8001, "wild"), (8002, "limited"), (8003, "specific")):
        assert wait_for(lambda p=port, n=name: stage.ask("192.0.2.77", p).server == n, timeout=1)
        rival = Rival("192.0.2.77", "reuseaddr", "tcp")
        assert wait_for(lambda p=port, r=rival: not r.wins(stage.node, p), timeout=1)


@pytest.mark.parametrize("options", [{}, {"nodeAddresses": ["203.0.113.0/24", "2001:db8:77::/64"]}])
@pytest.mark.parametrize("when", ["before", "after"])
def test_address_that_is_local_by_a_route(stage: Stage, options: Json, when: str) -> None:
    """A cloud's load balancer gives its virtual address to the node as a route."""
    virtual = ("203.0.113.7", "2001:db8:77::7")
    routes = [f"route add local {a} dev uplink proto 66" for a in virtual]
    if when == "before":
        stage.node.ip(*routes)
    network = stage.network(**options)
    stage.pod("neighbour", network=network)
    stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")], network=network)
    if when == "after":
        stage.node.ip(*routes)
    for address in virtual:
        # flows from before an address came are dropped once it has: ask again until then
        for kind in ("tcp", "udp"):
            ask = lambda a=address, k=kind: stage.ask(a, PORT, k, at="web").server == "web"  # noqa: E731
            assert wait_for(ask, timeout=2)
        for at in ("client", "other", "neighbour", "web", None):
            for kind in ("tcp", "udp"):
                protocol: Protocol = "udp" if kind == "udp" else "tcp"
                assert stage.ask(address, PORT, protocol, at=at).server == "web", (address, at)
        assert not Rival(address, "reuseaddr", "tcp").wins(stage.node, PORT)


def test_host_ip_of_a_family_that_the_pod_lacks_is_skipped(stage: Stage) -> None:
    network = stage.network("v4only", dual=False)
    stage.pod(
        "web", [mapping(PORT, 80, "tcp", NODE6), mapping(PORT, 80, "tcp", NODE4)], network=network
    )
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE6, PORT).refused_at_once()
    assert Rival("::", "plain", "tcp").wins(stage.node, PORT)


def test_a_pod_all_of_whose_mappings_are_skipped_passes_check(stage: Stage) -> None:
    network = stage.network("v4only", dual=False)
    pod = stage.pod("web", [mapping(PORT, 80, "tcp", NODE6)], network=network)
    assert stage.records() == {}
    assert stage.call("CHECK", stage.config(pod), pod.at).status == 0
    never = stage.attachment("never", [mapping(PORT, 80, "tcp", NODE4)])
    config = network.config(network.entry(TYPE), never, pod.at.result)
    assert stage.call("CHECK", config, never).code == 3
    stage.remove(pod)


# -- conditions, openForward, reservePorts ------------------------------------------------------


def condition(stage: Stage, network: str) -> list[str]:
    """Only sources of that network, in the backend's syntax."""
    return ["ip", "saddr", network] if stage.backend.name == "nftables" else ["-s", network]


def test_conditions_are_each_networks_own(stage: Stage) -> None:
    near = stage.network("near", conditionsV4=condition(stage, "192.0.2.0/24"))
    far = stage.network("far", conditionsV4=condition(stage, "198.51.100.0/24"))
    stage.pod("one", [mapping(8001, 80)], network=near)
    stage.pod("two", [mapping(8002, 80)], network=far)
    stage.pod("three", [mapping(8003, 80)])
    assert stage.ask(NODE4, 8001).server == "one"
    assert stage.ask(NODE4, 8001, at="other").refused_at_once()
    assert stage.ask(NODE4, 8002, at="other").server == "two"
    assert stage.ask(NODE4, 8002).refused_at_once()
    for at in ("client", "other"):
        assert stage.ask(NODE4, 8003, at=at).server == "three"
        assert stage.ask(NODE6, 8001, at=at).server == "one"


@pytest.mark.parametrize("iptables", ["iptables-nft", "iptables-legacy"])
def test_open_forward_accepts_what_we_translated_and_nothing_else(
    stage: Stage, iptables: str
) -> None:
    for tool in (iptables, iptables.replace("iptables", "ip6tables")):
        stage.node.run(tool, "-P", "FORWARD", "DROP")
        stage.node.run(
            tool, "-A", "FORWARD", "-m", "conntrack", "--ctstate", "ESTABLISHED", "-j", "ACCEPT"
        )
    opened = stage.network("opened", openForward=True)
    one = stage.pod("one", [mapping(8001, 80)], network=opened)
    stage.pod("two", [mapping(8002, 80)])
    assert stage.ask(NODE4, 8001).server == "one"
    assert stage.ask(NODE6, 8001).server == "one"
    assert not stage.ask(NODE4, 8002, timeout=0.3).ok
    assert not stage.ask(one.ip4, 80, timeout=0.3).ok
    assert not stage.ask(OTHER4, 80, timeout=0.3).ok
    stage.remove(one)
    assert "ACCEPT" not in [
        line.split()[-1]
        for line in stage.node.output(iptables, "-S", "FORWARD").splitlines()
        if "ESTABLISHED" not in line
    ]


def test_try_maps_a_port_that_is_taken_and_holds_it_when_it_is_free(stage: Stage) -> None:
    network = stage.network(reservePorts="try")
    with squatter(stage.node, "0.0.0.0", PORT):
        stage.pod("web", [mapping(PORT, 80)], network=network)
        assert stage.ask(NODE4, PORT).server == "web"
    rival = Rival("0.0.0.0", "reuseaddr", "tcp")
    assert wait_for(lambda: not rival.wins(stage.node, PORT), timeout=35, step=0.5)


def test_no_reservation_binds_nothing(stage: Stage) -> None:
    network = stage.network(reservePorts="no")
    with squatter(stage.node, NODE4, PORT):
        stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")], network=network)
    assert stage.ask(NODE4, PORT).server == "web"
    assert Rival("0.0.0.0", "plain", "tcp").wins(stage.node, PORT)
    assert Rival("0.0.0.0", "plain", "udp").wins(stage.node, PORT)
