"""Which addresses answer, which sockets reserve them, which elements say so."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from unit.hostport.world import ADDRESSES, pod, port

from cni_hostport.errors import InvalidConfig
from cni_hostport.hostport import answering
from cni_hostport.hostport.nftplan import attachment_elements, node_elements
from cni_hostport.hostport.node import NodeView, PodLink
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Family, Options
from cni_hostport.netfilter import nftrules as rules
from cni_hostport.netfilter.elements import Element, describe

NODE = NodeView.of((ip_address(a), link) for a, link in ADDRESSES)
DNS = NodeView.of([(n.address, n.link) for n in NODE.addresses]
                  + [(ip_address("169.254.20.10"), "nodelocaldns")])  # fmt: skip
ALL4 = ["10.1.0.1", "127.0.0.1", "192.0.2.1"]
ALL6 = ["::1", "2001:db8::1"]


def answered(family: Family, node: NodeView = NODE, **options: object) -> list[str]:
    return [str(a) for a in answering.answered_addresses(family, Options(**options), node)]


def holds(*mappings: str, node: NodeView = NODE, **options: object) -> list[str]:
    return [str(h) for h in answering.planned_holds(pod("web", *mappings, **options), node)]


def test_a_wildcard_answers_on_every_local_address_but_excluded_links() -> None:
    assert answered(Family.V4) == ALL4
    assert answered(Family.V6) == ALL6
    assert answered(Family.V4, DNS) == ALL4
    assert "169.254.20.10" in answered(Family.V4, DNS, exclude_interfaces=())
    assert answered(Family.V4, exclude_interfaces=("eth0",)) == ["10.1.0.1", "127.0.0.1"]
    assert answered(Family.V4, snat=False) == ["10.1.0.1", "192.0.2.1"]
    assert answered(Family.V6, snat=False) == ALL6
    networks = (ip_network("192.0.2.0/24"), ip_network("2001:db8::/32"))
    assert answered(Family.V4, node_addresses=networks) == ["192.0.2.1"]
    assert answered(Family.V6, node_addresses=networks) == ["2001:db8::1"]


@pytest.mark.parametrize(
    ("mappings", "options", "expected"),
    [
        (["80:80"], {}, ["0.0.0.0:80/tcp", "[::]:80/tcp"]),
        (["0.0.0.0:80:80"], {}, ["0.0.0.0:80/tcp"]),
        (["[::]:80:80"], {}, ["[::]:80/tcp"]),
        (["192.0.2.1:80:80/udp"], {}, ["192.0.2.1:80/udp"]),
        (["192.0.2.77:80:80"], {}, ["192.0.2.77:80/tcp"]),  # not on the node yet
        (["80:80/sctp"], {}, []),
        (["80:80"], {"reserve_ports": "no"}, []),
        (["0.0.0.0:53:53/udp"], {}, [f"{a}:53/udp" for a in ALL4]),
        (["0.0.0.0:80:80"], {"snat": False}, ["10.1.0.1:80/tcp", "192.0.2.1:80/tcp"]),
        # other exclusions than the default count while they make a difference here
        (["0.0.0.0:80:80"], {"exclude_interfaces": ()}, ["0.0.0.0:80/tcp"]),
        (
            ["0.0.0.0:80:80"],
            {"exclude_interfaces": ("eth0",)},
            ["10.1.0.1:80/tcp", "127.0.0.1:80/tcp"],
        ),
        (["0.0.0.0:80:80", "192.0.2.1:80:81"], {}, ["0.0.0.0:80/tcp"]),
        (["192.0.2.1:80:80", "0.0.0.0:80:81"], {}, ["0.0.0.0:80/tcp"]),
    ],
)
def test_what_is_held(mappings: list[str], options: dict[str, object], expected: list[str]) -> None:
    assert holds(*mappings, **options) == expected


def test_where_an_excluded_link_is_there_addresses_are_held_one_by_one() -> None:
    assert holds("0.0.0.0:80:80", node=DNS) == [f"{a}:80/tcp" for a in ALL4]
    assert holds("[::]:80:80", node=DNS) == ["[::]:80/tcp"]
    more = sorted([*ALL4, "169.254.20.10"], key=ip_address)
    assert holds("0.0.0.0:80:80", node=DNS, exclude_interfaces=()) == [f"{a}:80/tcp" for a in more]
    web = pod("web", "0.0.0.0:80:80", "[::]:80:80", "53:53/udp", "81:81/sctp")
    assert answering.needs_loopback_scan(web, DNS) == (port("0.0.0.0:80"),)
    assert answering.needs_loopback_scan(web, NODE) == ()


def test_a_family_that_the_pod_lacks_is_left_out() -> None:
    web = pod("web", "80:80", "[2001:db8::1]:81:81", ips=("10.1.0.2/16",))
    assert [str(h) for h in answering.planned_holds(web, NODE)] == ["0.0.0.0:80/tcp"]


@pytest.mark.parametrize(
    ("mapping", "options", "words"),
    [
        ("169.254.20.10:53:53", {}, r"portMappings\[0\]\.hostIP: 169\.254\.20\.10"),
        ("127.0.0.1:80:80", {"snat": False}, "127.0.0.1"),
        ("192.0.2.1:80:80", {"node_addresses": ("10.0.0.0/8",)}, "192.0.2.1"),
    ],
)
def test_a_host_ip_that_never_answers_is_refused(
    mapping: str, options: dict[str, object], words: str
) -> None:
    with pytest.raises(InvalidConfig, match=words):
        answering.check_host_ips(pod("web", mapping, **options), DNS)


def test_an_annotation_may_only_name_addresses_of_the_node() -> None:
    stranger = pod("web", "192.0.2.77:8080:80")
    answering.check_host_ips(stranger, NODE)
    with pytest.raises(InvalidConfig, match=r"192\.0\.2\.77"):
        answering.check_host_ips(stranger, NODE, must_be_local=True)
    answering.check_host_ips(pod("a", "127.0.0.5:8080:80"), NODE, must_be_local=True)


def test_stale_flows_are_those_to_addresses_that_answer() -> None:
    web = pod("web", "80:80/tcp", "0.0.0.0:53:53/udp", "[2001:db8::1]:54:54/udp")
    targets = [(str(a), p) for a, p in answering.flow_targets(web, DNS)]
    assert targets == [*[(a, 53) for a in ALL4], ("2001:db8::1", 54)]


def test_route_localnet_is_needed_where_loopback_answers() -> None:
    assert answering.answers_loopback(pod("a", "80:80"), NODE)
    assert answering.answers_loopback(pod("a", "127.0.0.3:80:80"), NODE)
    assert not answering.answers_loopback(pod("a", "192.0.2.1:80:80"), NODE)
    assert not answering.answers_loopback(pod("a", "80:80", snat=False), NODE)
    assert not answering.answers_loopback(pod("a", "80:80", ips=("fd00::2/64",)), NODE)
    assert not answering.answers_loopback(pod("a", "80:80", node_addresses=("192.0.2.0/24",)), NODE)


# elements


def placed(
    *mappings: str, bridge: bool = True, held: tuple[str, ...] = (), **more: object
) -> Placed:
    ports = frozenset(port(h.partition("/")[0], h.partition("/")[2] or "tcp") for h in held)
    link = PodLink("cni0", 7, bridge)
    return Placed(pod("web", *mappings, **more), link, ports)


def shown(elements: tuple[Element, ...]) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for element in elements:
        out.setdefault(f"{int(element.family)} {element.set}", []).append(describe(element))
    return out


def test_elements_of_a_plain_pod() -> None:
    elements = attachment_elements(placed("8080:80"), NODE)
    assert shown(elements) == {
        "4 ports": ["tcp . 8080 : 10.1.0.2 . 80"],
        "6 ports": ["tcp . 8080 : fd00::2 . 80"],
        "4 snat_pods": ["10.1.0.2"],
        "6 snat_pods": ["fd00::2"],
        "4 hairpins": ["10.1.0.2 . 10.1.0.2"],
        "6 hairpins": ["fd00::2 . fd00::2"],
        "4 neighbours": ['"cni0" . 10.1.0.0/16'],
        "6 neighbours": ['"cni0" . fd00::/64'],
    }
    assert {e.comment for e in elements} == {pod("web").key}


def test_elements_follow_the_options() -> None:
    assert shown(attachment_elements(placed("8080:80", snat=False), NODE)).keys() == {
        "4 hostip_ports",
        "6 hostip_ports",
    }
    everything = shown(attachment_elements(placed("8080:80", masq_all=True), NODE))
    assert everything["4 masq_all_pods"] == ["10.1.0.2"]
    assert "4 neighbours" not in everything
    assert "4 neighbours" not in shown(attachment_elements(placed("8080:80", bridge=False), NODE))
    host_route = placed("8080:80", ips=("10.1.0.2/32",))
    assert "4 neighbours" not in shown(attachment_elements(host_route, NODE))


def test_an_address_that_only_this_attachment_answers_is_masqueraded_too() -> None:
    wide = shown(attachment_elements(placed("0.0.0.0:53:53/udp", exclude_interfaces=()), DNS))
    assert wide["4 answering"] == ["169.254.20.10"]
    assert "169.254.20.10 . udp . 53 : 10.1.0.2 . 53" in wide["4 hostip_ports"]


def test_only_udp_ports_that_are_really_held_are_rejected() -> None:
    nothing = shown(attachment_elements(placed("80:80/udp"), NODE))
    assert not any("held" in name for name in nothing)
    held = placed("80:80/udp", "192.0.2.1:81:81/udp", "82:82",
                  held=("0.0.0.0:80/udp", "192.0.2.1:81/udp", "0.0.0.0:82/tcp"))  # fmt: skip
    some = shown(attachment_elements(held, NODE))
    assert some["4 held_udp"] == ["80"]
    assert some["4 held_udp_addresses"] == ["192.0.2.1 . 81"]


def test_the_node_says_where_ports_answer_and_where_never() -> None:
    found = shown(node_elements(DNS, "node"))
    assert found["4 answering"] == ["10.1.0.1", "192.0.2.1"]
    assert found["6 answering"] == ALL6
    assert found["4 excluded"] == ["169.254.20.10"]
    known = set(rules.SETS)
    assert {name.partition(" ")[2] for name in found} <= known
