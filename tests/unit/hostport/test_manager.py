"""The manager's verbs, and hostport_manager.go's scenarios, on the fake node."""

from __future__ import annotations

import json
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from unit.hostport.world import BRIDGE, PORT_OF_POD, Helper, Link, Somebody, World, flush, pod, port

from cni_hostport.errors import HostPortError, InvalidConfig, NetfilterFailed, PortInUse
from cni_hostport.hostport.manager import HostPortManager, PodPortMapping
from cni_hostport.model import Family, PortMapping

DATA = json.loads((Path(__file__).parents[2] / "data/hostport_manager.json").read_text())
WEB = pod("web", "8080:80/tcp", "8080:80/udp")
SCENARIOS = (
    ("manager_ipv4", "sockets_after", [Family.V4]),
    ("manager_ipv6", "sockets_after", [Family.V6]),
    ("dual_stack", "sockets_after_ipv4", list(Family)),
    ("dual_stack", "sockets_after_ipv6", list(Family)),
)


def mapping(raw: dict[str, Any]) -> PortMapping:
    return PortMapping(
        host_port=raw["hostPort"],
        container_port=raw["containerPort"],
        protocol=raw["protocol"].lower(),
        host_ip=raw["hostIP"] or None,
    )


@pytest.mark.parametrize(("name", "sockets", "families"), SCENARIOS)
def test_scenarios_of_the_hostport_manager(name: str, sockets: str, families: list[Family]) -> None:
    world = World()
    manager = Helper(world, families).manager
    for number, call in enumerate(DATA[name]["calls"]):
        who, _, namespace = call["pod"].partition("_")
        request = PodPortMapping(
            namespace=namespace,
            name=who,
            port_mappings=tuple(map(mapping, call["portMappings"])),
            ip=ip_address(call["podIP"]),
        )
        before = world.state()
        try:
            manager.add(f"{call['id']}-{number}", request, call["natInterface"])
        except HostPortError as error:
            wanted = {"occupied": PortInUse, "family": InvalidConfig}[call["expect_error"]]
            assert isinstance(error, wanted), call
            assert world.state() == before
        else:
            assert call["expect_error"] is None, call
    held = {
        (int(s.port.family), "" if s.port.address is None else str(s.port.address), s.port.port,
         str(s.port.protocol)) for s in world.sockets
    }  # fmt: skip
    wanted_sockets = {tuple(s) for s in DATA[name][sockets]}
    assert {h for h in held if h[0] in {s[0] for s in wanted_sockets}} == wanted_sockets
    for number, call in enumerate(DATA[name]["calls"]):
        manager.remove(f"{call['id']}-{number}")
    assert world.sockets == []
    assert world.records == {}


def test_a_pod_on_the_host_network_is_a_no_op() -> None:
    world = World()
    manager = Helper(world).manager
    world.calm()
    on_host = PodPortMapping(host_network=True, port_mappings=(mapping_of(80),))
    manager.add("id", on_host)
    manager.remove("id", on_host)
    manager.add("id", PodPortMapping())
    assert world.log == []
    with pytest.raises(InvalidConfig):
        manager.add("id", PodPortMapping(port_mappings=(mapping_of(80),)))


def mapping_of(number: int) -> PortMapping:
    return PortMapping(host_port=number, container_port=number)


def add(world: World) -> tuple[Helper, HostPortManager]:
    helper = Helper(world)
    helper.manager.attach(WEB, netns_cookie=1)
    world.calm()
    return helper, helper.manager


def test_the_same_again_does_nothing_and_another_content_replaces() -> None:
    world = World()
    _, manager = add(world)
    assert manager.attach(WEB, netns_cookie=1) is False
    assert world.log == []
    assert manager.attach(pod("web", "8081:80"), netns_cookie=1) is True
    assert {s.port.port for s in world.sockets} == {8081}
    assert manager.attach(pod("web"), netns_cookie=1) is True
    assert world.records == {}
    assert manager.attach(pod("web")) is False


def test_an_owner_is_named_and_a_dead_one_reclaimed() -> None:
    world = World()
    _, manager = add(world)
    rival = pod("rival", "192.0.2.1:8080:80")
    with pytest.raises(PortInUse, match=r"192\.0\.2\.1:8080/tcp .*shop/web .*network net, .* web"):
        manager.attach(rival)
    world.gone.add(WEB.netns)
    assert [r.key for r in manager.dead()] == [WEB.key]
    assert manager.attach(rival)
    assert list(world.records) == [rival.key]


def test_gc_takes_what_is_not_listed_of_its_network_alone() -> None:
    world = World()
    _, manager = add(world)
    keep, stranger = pod("keep", "1:1"), pod("stranger", "2:2", network="elsewhere")
    manager.attach(keep)
    manager.attach(stranger)
    assert manager.gc("net", [("keep", "eth0")]) == []
    assert set(world.records) == {keep.key, stranger.key}


def test_gc_goes_on_after_an_error_and_tells_it() -> None:
    world = World()
    helper, manager = add(world)
    manager.attach(pod("other", "1:1"))
    world.calm()
    world.fail_at = 1
    errors = manager.gc("net", [])
    assert [type(e) for e in errors] == [NetfilterFailed] or errors == []
    assert manager.gc("net", []) == []
    assert world.records == {}
    assert helper.consistent() == []


def test_a_record_that_cannot_be_deleted_is_deleted_later() -> None:
    world = World()
    _, manager = add(world)
    world.forever = True
    world.fail_at = next(n for n in range(1, 40) if _log(n) == "delete record")
    with pytest.raises(HostPortError, match="cannot delete the record"):
        manager.detach(WEB.key)
    assert world.sockets == []
    with pytest.raises(HostPortError):
        manager.detach(WEB.key)
    world.calm()
    world.forever = False
    assert list(world.records) == [WEB.key]
    manager.retry_unfinished()
    assert world.records == {}
    assert manager.detach(WEB.key) is False


def test_ports_are_taken_up_once_the_others_record_is_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else a restart would find two records of one port."""
    caplog.set_level("INFO")
    world = World()
    helper, manager = add(world)
    other = pod("web", "8080:80/tcp", ips=("10.2.0.2/16",), network="second")
    assert manager.attach(other)
    assert not manager.attach(other)
    manager.retry_unfinished()
    assert caplog.text.count("to another network of its container") == 1
    world.forever = True
    world.fail_at = next(n for n in range(1, 40) if _log(n) == "delete record")
    world.count = 0
    with pytest.raises(HostPortError, match="cannot delete the record"):
        manager.detach(WEB.key)
    assert manager.registry.get(other.key).attachment.yielded  # type: ignore[union-attr]
    world.calm()
    world.forever = False
    manager.retry_unfinished()
    assert list(world.records) == [other.key]
    assert not manager.registry.get(other.key).attachment.yielded  # type: ignore[union-attr]
    assert helper.consistent() == []


def _log(number: int) -> str:
    world = World()
    _, manager = add(world)
    manager.detach(WEB.key)
    return world.log[number - 1]


def test_check_names_everything_that_is_missing() -> None:
    world = World()
    _, manager = add(world)
    assert manager.check(WEB) == []
    world.links[BRIDGE].route_localnet = 0
    world.links[PORT_OF_POD].hairpin = False
    element = next(e for e in world.elements.values() if e.set == "ports")
    del world.elements[element.place]
    manager.holds.release(WEB.key)
    found = " | ".join(manager.check(WEB))
    for word in ("8080/tcp", "8080/udp", "route_localnet", "hairpin", "veth1", "tcp . 8080"):
        assert word in found
    assert "mappings of the record" in " ".join(manager.check(pod("web", "1:1")))
    assert manager.check(pod("none", "1:1")) == ["record of the attachment"]
    assert manager.check(pod("none")) == []
    flush(world)
    assert any("table" in m for m in manager.check(WEB))


# links


def test_flags_are_set_and_put_back_with_the_last_user() -> None:
    world = World()
    _, manager = add(world)
    second = pod("second", "9000:80", interfaces=())
    manager.attach(second)
    assert world.links[BRIDGE].route_localnet == 1
    assert world.links[PORT_OF_POD].hairpin is True
    manager.detach(WEB.key)
    assert world.links[BRIDGE].route_localnet == 1
    assert world.links[PORT_OF_POD].hairpin is False
    manager.detach(second.key)
    assert world.links[BRIDGE].route_localnet == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_was_set_before_us_stays_set(order: tuple[int, int]) -> None:
    world = World()
    world.links[BRIDGE].route_localnet = 1
    world.links[PORT_OF_POD].hairpin = True
    helper = Helper(world)
    pods = [WEB, pod("second", "9000:80", interfaces=())]
    for one in pods:
        helper.manager.attach(one)
    helper = helper.again()
    for number in order:
        helper.manager.detach(pods[number].key)
    assert world.links[BRIDGE].route_localnet == 1
    assert world.links[PORT_OF_POD].hairpin is True


def test_no_hairpin_without_bridge_netfilter_or_snat() -> None:
    for world, options in ((World(bridge_nf=False), {}), (World(), {"snat": False})):
        Helper(world).manager.attach(pod("web", "80:80", **options))
        assert world.links[PORT_OF_POD].hairpin is False


def test_a_flag_that_cannot_be_put_back_is_put_back_later() -> None:
    world = World()
    helper, manager = add(world)
    at = next(n for n in range(1, 40) if _log(n).startswith("route_localnet of"))
    world.fail_at = at
    manager.detach(WEB.key)
    assert world.links[BRIDGE].route_localnet == 1
    world.calm()
    manager.refresh_links()
    assert world.links[BRIDGE].route_localnet == 0
    assert helper.consistent() == []


def test_changed_flags_are_mended_and_named() -> None:
    world = World()
    _, manager = add(world)
    assert manager.refresh_links() == []
    world.links[BRIDGE].route_localnet = 0
    world.links[PORT_OF_POD].hairpin = False
    assert manager.refresh_links({"eth0"}) == []
    mended = manager.refresh_links({"cni0"})
    assert mended == ["net.ipv4.conf.cni0.route_localnet", "hairpin of port veth1"]
    assert world.links[BRIDGE].route_localnet == 1


def test_a_bridge_made_again_gets_its_flags_and_a_vanished_one_is_no_error() -> None:
    world = World()
    helper, manager = add(world)
    del world.links[BRIDGE]
    assert manager.refresh_links() == []
    world.links[20] = Link("cni0")
    world.link_of_pods = 20
    assert "link cni0, made again" in manager.refresh_links()
    assert world.links[20].route_localnet == 1
    assert manager.refresh_links() == []
    helper = helper.again()
    helper.manager.detach(WEB.key)
    assert world.links[20].route_localnet == 0


def test_a_default_route_in_place_of_the_bridge_is_left_alone() -> None:
    world = World()
    _, manager = add(world)
    del world.links[BRIDGE]
    world.links[2], world.link_of_pods = Link("eth0"), 2
    assert manager.refresh_links() == []
    assert world.links[2].route_localnet == 0


# following the node


def test_an_excluded_link_narrows_and_widens_the_sockets() -> None:
    world = World()
    helper, manager = add(world)
    world.addresses.append(("169.254.20.10", "nodelocaldns"))
    manager.follow_addresses()
    addresses = {str(s.port.address) for s in world.sockets if s.port.family is Family.V4}
    assert addresses == {"10.1.0.1", "127.0.0.1", "192.0.2.1"}
    assert helper.consistent() == []
    world.addresses.pop()
    manager.follow_addresses()
    assert {s.port for s in world.sockets if s.port.family is Family.V4} == {
        port("0.0.0.0:8080"), port("0.0.0.0:8080", "udp")}  # fmt: skip
    assert not any(line.startswith(("open", "close")) for line in world.log)


def test_a_listener_left_on_an_excluded_address_fails_no_other_call() -> None:
    world = World()
    world.addresses.append(("169.254.20.10", "nodelocaldns"))
    helper, manager = add(world)
    world.strangers[port("169.254.20.10:8080")] = Somebody("dns")
    world.addresses.pop()
    manager.follow_addresses()
    manager.attach(pod("next", "9000:80"))
    assert port("0.0.0.0:8080") in manager.holds.waiting(WEB.key)
    world.strangers.clear()
    manager.retry_waiting()
    assert not manager.holds.waiting(WEB.key)
    assert helper.consistent() == []


def test_new_and_gone_addresses_are_followed() -> None:
    world = World()
    helper, manager = add(world)
    dns = pod("dns", "0.0.0.0:53:53/udp", ips=("10.1.0.9/16",))
    manager.attach(dns)
    world.addresses.append(("198.51.100.1", "eth1"))
    manager.follow_addresses()
    assert port("198.51.100.1:53", "udp") in manager.holds.held(dns.key)
    assert any(e.set == "answering" and e.key == bytes([198, 51, 100, 1])
               for e in world.elements.values())  # fmt: skip
    world.addresses.pop()
    manager.follow_addresses()
    assert port("198.51.100.1:53", "udp") not in manager.holds.held(dns.key)
    assert helper.consistent() == []


def test_ports_waited_for_are_taken_and_their_rules_follow() -> None:
    world = World()
    world.strangers[port("0.0.0.0:8080", "udp")] = None
    helper, manager = add(world)
    assert not any(e.set == "held_udp" and e.family is Family.V4 for e in world.elements.values())
    world.strangers.clear()
    assert manager.retry_waiting() == {WEB.key: {port("0.0.0.0:8080", "udp")}}
    assert any(e.set == "held_udp" and e.family is Family.V4 for e in world.elements.values())
    assert helper.consistent() == []


def test_flows_of_the_gap_are_dropped_by_port_and_address() -> None:
    world = World()
    _, manager = add(world)
    world.flows_to.clear()
    manager.drop_gap_flows()
    assert {p for _, p in world.flows_to} == {8080}
    assert {str(a) for a, _ in world.flows_to} >= {"192.0.2.1", "2001:db8::1", "127.0.0.1"}


def test_a_start_without_descriptors_or_backend_is_not_fatal() -> None:
    world = World()
    helper, _ = add(world)
    world.end_process()
    world.fail_at, world.forever, world.error = 1, True, 24
    twin = world.twin()
    twin.fail_at, twin.forever, twin.error = 0, False, 24
    raw = twin.records[WEB.key].replace(
        b'"backend":"nftables","created"', b'"backend":"iptables","created"'
    )
    twin.records[WEB.key] = raw
    revived = Helper(twin)
    assert revived.manager.registry.get(WEB.key) is not None
    assert len(twin.sockets) == 4
    with pytest.raises(NetfilterFailed):
        revived.manager.detach(WEB.key)
    revived.manager.attach(pod("next", "9000:80"))
    twin.addresses.append(("169.254.20.10", "nodelocaldns"))
    revived.manager.follow_addresses()
