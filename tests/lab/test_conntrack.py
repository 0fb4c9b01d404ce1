"""Flows deleted precisely, by either way the kernel offers, and counted."""

from __future__ import annotations

import errno
import socket
import subprocess
from collections.abc import Iterator
from ipaddress import ip_address

import pytest

from cni_hostport.host import nftcmd
from cni_hostport.host.conntrack import Conntrack, ConntrackError
from cni_hostport.model import Protocol
from cni_hostport.netfilter import ctmsg
from cni_hostport.netfilter import nlwire as nl
from cni_hostport.netfilter.ctmsg import Endpoint, Match
from lab.private_net import private_net

pytestmark = pytest.mark.lab

UDP, TCP = Protocol.UDP, Protocol.TCP
NODE4, OTHER4, POD4, NEIGHBOUR4 = "192.0.2.1", "198.51.100.1", "10.0.0.2", "10.0.0.3"
NODE6, OTHER6, POD6, NEIGHBOUR6 = "2001:db8::1", "2001:db8:1::1", "fd00::2", "fd00::3"
TRACKING = "table inet track {\n chain c { type filter hook input priority 0; ct state new;\n}\n}\n"

Row = tuple[str, str, int, str, int]
# protocol, original destination, its port, who answers, from which port
ROWS: tuple[Row, ...] = (
    ("udp", NODE4, 53, POD4, 5353),
    ("udp", NODE4, 54, POD4, 5353),
    ("udp", OTHER4, 53, OTHER4, 53),
    ("udp", NODE4, 53, NEIGHBOUR4, 5353),
    ("tcp", NODE4, 53, POD4, 5353),
    ("udp", NODE6, 53, POD6, 5353),
    ("udp", NODE6, 54, POD6, 5353),
    ("udp", OTHER6, 53, OTHER6, 53),
    ("udp", NODE6, 53, NEIGHBOUR6, 5353),
    ("tcp", NODE6, 53, POD6, 5353),
)


def _inject(row: Row, port: int) -> None:
    protocol, to, to_port, answerer, from_port = row
    client = "203.0.113.9" if "." in to else "2001:db8:9::9"
    words = f"-I -p {protocol} -s {client} -d {to} --sport {port} --dport {to_port} -t 600"
    words += f" -r {answerer} -q {client} --reply-port-src {from_port} --reply-port-dst {port}"
    words += " --state ESTABLISHED" if protocol == "tcp" else ""
    subprocess.run(["conntrack", *words.split()], check=True, capture_output=True)


def _rows() -> list[Row]:
    """Every flow the node's own tool lists, as a row."""
    out = ""
    for family in ("ipv4", "ipv6"):
        words = ["conntrack", "-L", "-f", family]
        out += subprocess.run(words, check=True, capture_output=True, text=True).stdout
    found = []
    for line in out.splitlines():
        pairs = [w.split("=", 1) for w in line.split() if "=" in w]
        values = {k: [v for n, v in pairs if n == k] for k, _ in pairs}
        found.append(
            (
                line.split()[0],
                values["dst"][0],
                int(values["dport"][0]),
                values["src"][1],
                int(values["sport"][1]),
            )
        )
    return sorted(found)


@pytest.fixture(autouse=True)
def _own_namespace() -> Iterator[None]:
    with private_net():
        nftcmd.load(TRACKING)
        yield


@pytest.fixture(params=[True, False], ids=["filtered", "singly"])
def conntrack(request: pytest.FixtureRequest) -> Iterator[Conntrack]:
    for at, row in enumerate(ROWS):
        for turn in range(2):
            _inject(row, 4000 + 2 * at + turn)
    assert _rows() == sorted(2 * ROWS)
    made = Conntrack(filtered=request.param)
    yield made
    made.close()


def _left(*gone: int) -> list[Row]:
    return sorted(row for at, row in enumerate(ROWS) if at not in gone for _ in range(2))


@pytest.mark.parametrize(
    ("pairs", "gone"),
    [
        ([(NODE4, 53)], (0, 3)),
        ([(NODE6, 53)], (5, 8)),
        ([(NODE4, 53), (NODE6, 53)], (0, 3, 5, 8)),
        ([(NODE4, 54), (NODE6, 54), (NODE4, 54)], (1, 6)),
        ([(NODE6, 53), (NODE6, 54), (NODE4, 53), (NODE4, 54)], (0, 1, 3, 5, 6, 8)),
        ([(OTHER6, 53), (OTHER4, 53)], (2, 7)),
        ([("192.0.2.77", 53), ("2001:db8::77", 53), (NODE4, 55), (NODE6, 55)], ()),
        ([], ()),
    ],
)
def test_only_udp_flows_to_that_address_and_port_go(
    conntrack: Conntrack, pairs: list[tuple[str, int]], gone: tuple[int, ...]
) -> None:
    conntrack.drop_udp_to((ip_address(a), p) for a, p in pairs)
    assert _rows() == _left(*gone)


@pytest.mark.parametrize(
    ("addresses", "port", "gone"),
    [
        ([POD4], None, (0, 1)),
        ([POD6], None, (5, 6)),
        ([POD4, POD6], None, (0, 1, 5, 6)),
        ([POD4, POD6], 5353, (0, 1, 5, 6)),
        ([POD4, POD6], 53, ()),
        ([POD4, NEIGHBOUR4, POD6, NEIGHBOUR6], None, (0, 1, 3, 5, 6, 8)),
        (["10.9.9.9", "fd00::99"], None, ()),
        ([], None, ()),
    ],
)
def test_only_udp_flows_that_the_pod_answers_go(
    conntrack: Conntrack, addresses: list[str], port: int | None, gone: tuple[int, ...]
) -> None:
    conntrack.drop_udp_from([ip_address(a) for a in addresses], port)
    assert _rows() == _left(*gone)


@pytest.mark.parametrize(
    ("address", "port", "protocol", "count"),
    [(POD4, 5353, UDP, 4), (POD4, 5353, TCP, 2), (POD6, 5353, UDP, 4), (POD6, 53, UDP, 0)],
)
def test_flows_are_counted_by_who_answers(
    conntrack: Conntrack, address: str, port: int, protocol: Protocol, count: int
) -> None:
    assert conntrack.flows(ip_address(address), port, protocol) == count


def test_a_kernel_that_does_not_filter_is_noticed_and_flows_go_singly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for at, row in enumerate(ROWS):
        _inject(row, 4000 + at)
    with_filter, sent = ctmsg.delete_matching, []

    def without_filter(match: Match, sequence: int) -> bytes:
        msg = next(nl.messages(with_filter(match, sequence)))
        kept = [nl.attr(k | nl.NESTED, v) for k, v in nl.attributes(msg.body, 4) if k != 25]
        sent.append(match)
        return nl.message(msg.kind, msg.flags, sequence, msg.body[:4] + b"".join(kept))

    monkeypatch.setattr(ctmsg, "delete_matching", without_filter)
    conntrack = Conntrack()
    assert conntrack.filtered
    assert conntrack.drop_udp_to([(ip_address(NODE4), 53)]) == 2
    assert not conntrack.filtered
    assert conntrack.drop_udp_from([ip_address(POD4)]) == 1
    assert len(sent) == 1
    assert _rows() == sorted(row for at, row in enumerate(ROWS) if at not in (0, 1, 3))


def test_an_error_that_is_not_about_the_filter_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    conntrack = Conntrack()

    def wrong(match: Match, sequence: int) -> bytes:
        return nl.message(0x01FF, nl.NLM_F_REQUEST | nl.NLM_F_ACK, sequence, nl.genmsg(2))

    monkeypatch.setattr(ctmsg, "delete_matching", wrong)
    monkeypatch.setattr(
        ctmsg,
        "dump_matching",
        lambda matches, sequence: nl.message(
            0x01FF, nl.NLM_F_REQUEST | nl.NLM_F_DUMP, sequence, nl.genmsg(2)
        ),
    )
    with pytest.raises(ConntrackError) as caught:
        conntrack.drop_udp_to([(ip_address(NODE4), 53)])
    assert caught.value.errno == errno.EINVAL
    assert conntrack.filtered


def _talk(family: socket.AddressFamily, to: tuple[str, int], port: int) -> None:
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.bind(("", port))
        client.sendto(b"x", to)


def test_real_translated_flows_are_counted_and_dropped() -> None:
    nftcmd.load(
        "table ip nat { chain o { type nat hook output priority -90;\n"
        " udp dport 53 dnat to 127.0.0.2:5353\n}\n}\n"
        "table ip6 nat { chain o { type nat hook output priority -90;\n"
        " udp dport 53 dnat to [::1]:5353\n}\n}\n"
    )
    conntrack = Conntrack()
    servers = []
    for family, host in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
        server = socket.socket(family, socket.SOCK_DGRAM)
        server.bind((host, 5353))
        servers.append(server)
    for turn in range(3):
        _talk(socket.AF_INET, ("127.0.0.9", 53), 20000 + turn)
        _talk(socket.AF_INET6, ("::1", 53), 20000 + turn)
    _talk(socket.AF_INET, ("127.0.0.2", 5353), 20010)
    pod4, pod6 = ip_address("127.0.0.2"), ip_address("::1")
    assert conntrack.connections() == {Endpoint(17, pod4, 5353): 3, Endpoint(17, pod6, 5353): 3}
    assert conntrack.flows(pod4, 5353, UDP) == 4
    conntrack.drop_udp_to([(ip_address("127.0.0.9"), 53), (pod6, 53)])
    assert not conntrack.connections()
    assert conntrack.flows(pod4, 5353, UDP) == 1
    for server in servers:
        server.close()
    conntrack.close()


def test_hundreds_of_flows_go_in_one_call() -> None:
    nftcmd.load("table ip nat { chain o { type nat hook output priority -90;\n}\n}\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 5353))
        for turn in range(300):
            _talk(socket.AF_INET, ("127.0.0.1", 5353), 20000 + turn)
        singly = Conntrack(filtered=False)
        assert singly.flows(ip_address("127.0.0.1"), 5353, UDP) == 300
        assert singly.drop_udp_to([(ip_address("127.0.0.1"), 5353)]) == 300
        assert singly.flows(ip_address("127.0.0.1"), 5353, UDP) == 0


def test_many_addresses_in_a_full_table_take_one_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    _inject(ROWS[0], 4000)
    _inject(ROWS[2], 4001)
    conntrack = Conntrack()
    pairs = [(ip_address(f"192.0.2.{i}"), 53) for i in range(10)]
    assert conntrack._walks_are_cheaper(len(pairs))
    monkeypatch.setattr(ctmsg, "count", lambda msg: 100_000)
    assert not conntrack._walks_are_cheaper(len(pairs))
    assert conntrack.drop_udp_to(pairs) == 1
    assert conntrack.filtered
    assert _rows() == [ROWS[2]]
