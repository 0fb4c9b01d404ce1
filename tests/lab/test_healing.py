"""What strangers break is mended at once, told, counted, and never fought over.

Times are printed; what is asserted is the best of three tries, stretched where the
machine that runs the tests is busy with something else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from lab.echo import Servers
from lab.node import CLIENT4, NODE4, NODE6, wait_for
from lab.peers import Client, probe
from lab.source import NET4, NET6, SourceNode, audit, busy, mapping

FROM_SOURCE = True
WEB = (mapping(20000), mapping(20000, 80, "udp"), mapping(20001, 80, "tcp", NODE4))
OTHER = (mapping(20004, 80), mapping(20005, 80, "udp"))
POOL = range(20000, 20012)
WANTED = {"a": WEB, "b": OTHER}
PROMISED = 0.25
MADE_ANEW = ("a map of another type", "a map that is too small", "a stranger's hook")
"""Damage that no addition mends: nft runs a second time, with the tables whole."""
TABLE = "hostport-manager"


@pytest.fixture(scope="module")
def node() -> Iterator[SourceNode]:
    made = SourceNode()
    servers = Servers(made.node)
    try:
        for name in ("a", "b"):
            made.pod(name)
            servers.serve(name, [("tcp", 80), ("udp", 80)], netns=name)
        yield made
    finally:
        servers.close()
        made.close()


@pytest.fixture
def lab(node: SourceNode) -> Iterator[SourceNode]:
    """Two pods with ports, and a helper that has no memory of earlier damage."""
    if node.pid:
        node.kill()
    node.start()
    for name, mappings in WANTED.items():
        assert node.add(node.pods[name], *mappings).ok
    time.sleep(0.1)
    yield node
    assert audit(node, WANTED, POOL) == []


def works(lab: SourceNode) -> bool:
    """Whether every kind of connection to the two pods is right."""
    asks = (
        (NODE4, 20000, "tcp", "client", "a"), (NODE6, 20000, "tcp", "client", "a"),
        (NODE4, 20000, "udp", "client", "a"), (NODE4, 20001, "tcp", "client", "a"),
        (NODE6, 20005, "udp", "client", "b"), ("127.0.0.1", 20004, "tcp", None, "b"),
        (NODE4, 20004, "tcp", "b", "b"),
    )  # fmt: skip
    return all(
        probe(lab.node, host, port, kind, netns=at, timeout=0.1).server == server  # type: ignore[arg-type]
        for host, port, kind, at, server in asks
    )


def heal(lab: SourceNode, damage: Callable[[], object], limit: float = 5.0) -> float:
    """Do damage; seconds from its end until it is repaired and everything works."""
    before = repairs(lab)
    damage()
    begin = time.monotonic()
    mended = wait_for(lambda: repairs(lab) > before and works(lab), limit, 0.002)
    assert mended, lab.stderr()[-3000:]
    return time.monotonic() - begin


def repairs(lab: SourceNode) -> int:
    return int(lab.status()["repairs"]["count"])


def rule(lab: SourceNode, family: str, chain: str, words: str) -> str:
    """``chain handle N`` of a rule of ours."""
    text = lab.node.output("nft", "-a", "list", "chain", family, TABLE, chain)
    line = next(line for line in text.splitlines() if re.search(words, line))
    return f"{chain} handle {line.rsplit('handle ', 1)[1]}"


def nft(text: str) -> Callable[[SourceNode], None]:
    return lambda lab: lab.node.nft(text)


def delete_rule(family: str, chain: str, words: str) -> Callable[[SourceNode], None]:
    return lambda lab: lab.node.nft(
        f"delete rule {family} {TABLE} {rule(lab, family, chain, words)}"
    )


def delete_set(lab: SourceNode) -> None:
    at = rule(lab, "ip", "input", r"@held_udp\b(?!_)")
    lab.node.nft(f"delete rule ip {TABLE} {at}\ndelete set ip {TABLE} held_udp")


def other_type(lab: SourceNode) -> None:
    """The table as a stranger would have it: our map's name with another type."""
    lab.node.nft(
        f"delete table ip {TABLE}\nadd table ip {TABLE}\n"
        f"add map ip {TABLE} ports {{ type inet_service : ipv4_addr; }}"
    )


def too_small(lab: SourceNode) -> None:
    lab.node.nft(
        f"delete table ip {TABLE}\nadd table ip {TABLE}\n"
        f"add map ip {TABLE} ports {{ type inet_proto . inet_service : ipv4_addr . inet_service; "
        "size 1; }"
    )


DAMAGE: dict[str, Callable[[SourceNode], None]] = {
    "everything": lambda lab: lab.node.nft("flush ruleset"),
    "one element": nft(f"delete element ip {TABLE} ports {{ tcp . 20000 }}"),
    "one element of IPv6": nft(f"delete element ip6 {TABLE} ports {{ tcp . 20000 }}"),
    "a map": nft(f"flush map ip {TABLE} ports"),
    "an element of a set": nft(f"delete element ip {TABLE} hairpins {{ {NET4}.3 . {NET4}.3 }}"),
    "a value": nft(
        f"delete element ip {TABLE} ports {{ tcp . 20000 }}\n"
        f"add element ip {TABLE} ports {{ tcp . 20000 : {NET4}.3 . 80 }}"
    ),
    "a rule": delete_rule("ip", "prerouting", "fib"),
    "a rule of IPv6": delete_rule("ip6", "translate", "@ports"),
    "a chain's rules": nft(f"flush chain ip {TABLE} translate"),
    "a chain": nft(
        f"flush chain ip {TABLE} output\ndelete chain ip {TABLE} output"
    ),
    "a set with its rule": delete_set,
    "the table": nft(f"delete table ip {TABLE}"),
    "the table of IPv6": nft(f"delete table ip6 {TABLE}"),
    "a map of another type": other_type,
    "a map that is too small": too_small,
    "a stranger's rule": nft(f"insert rule ip {TABLE} translate drop"),
    "a stranger's hook": nft(
        f"add chain ip {TABLE} evil {{ type filter hook prerouting priority -400; policy drop; }}"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_mended_in_time(lab: SourceNode, name: str) -> None:
    assert wait_for(lambda: works(lab), 2.0)
    before = repairs(lab)
    times = [heal(lab, lambda: DAMAGE[name](lab)) for _ in range(3)]
    print(f"{name}: mended in {', '.join(f'{t * 1000:.0f}' for t in times)} ms")
    assert min(times) <= (1.0 if name in MADE_ANEW else PROMISED) * busy()
    assert wait_for(lambda: audit(lab, WANTED, POOL) == [], 2.0)
    assert repairs(lab) >= before + 2
    assert lab.status()["repairs"]["last"]
    assert b'cni_hostport_repairs_total{kind="rules"}' in lab.operate("metrics").out
    log = [line for line in lab.stderr().splitlines() if "repaired after" in line]
    assert log and "removed by" in log[-1]


def test_firewalls_of_others_are_none_of_ours(lab: SourceNode) -> None:
    """iptables -F and a table that comes and goes: no look, no repair."""
    before = repairs(lab)
    for _ in range(3):
        lab.node.run("iptables-nft", "-F")
        lab.node.run("iptables-nft", "-t", "nat", "-F")
        lab.node.nft("add table inet firewalld\ndelete table inet firewalld")
    time.sleep(0.2)
    assert works(lab)
    assert repairs(lab) == before


def test_the_sysctl_is_put_right(lab: SourceNode) -> None:
    times = []
    for _ in range(2):
        lab.node.sysctl("net/ipv4/conf/cni0/route_localnet", "0")
        begin = time.monotonic()
        assert wait_for(lambda: lab.route_localnet() == 1, 3.0)
        times.append(time.monotonic() - begin)
    print(f"route_localnet: mended in {', '.join(f'{t * 1000:.0f}' for t in times)} ms")
    assert "route_localnet" in lab.status()["repairs"]["last"]


def make_bridge(lab: SourceNode) -> None:
    lab.node.ip("link delete cni0")
    lab.node.ip(
        "link add cni0 type bridge", f"addr add {NET4}.1/24 dev cni0",
        f"addr add {NET6}1/64 dev cni0 nodad", "link set cni0 up",
        *(f"link set v{p.number} master cni0" for p in lab.pods.values()),
    )  # fmt: skip


def test_a_bridge_that_is_made_again(lab: SourceNode) -> None:
    def broken() -> None:
        make_bridge(lab)
        for pod in lab.pods.values():  # the routes went with the old bridge's neighbours
            lab.node.run("ip", "neigh", "flush", "all", netns=pod.name)

    seconds = heal(lab, broken, 10.0)
    print(f"bridge: right again after {seconds * 1000:.0f} ms")
    assert wait_for(lambda: lab.hairpins() == {"v2", "v3"}, 35.0, 0.2)
    lab.restart()
    assert audit(lab, WANTED, POOL) == []
    assert lab.delete(lab.pods["a"]).ok
    assert lab.delete(lab.pods["b"]).ok
    assert lab.route_localnet() == 0
    for name, mappings in WANTED.items():
        assert lab.add(lab.pods[name], *mappings).ok


def test_an_excluded_link_that_comes_and_goes(lab: SourceNode) -> None:
    """Its address is nobody's host port, and whoever serves there may do so at once."""
    services = "10.96.0.10"
    for _ in range(2):
        lab.node.ip("link add kube-ipvs0 type ifb", f"addr add {services}/32 dev kube-ipvs0",
                    "link set kube-ipvs0 up")  # fmt: skip
        mine = {("tcp", services, 20000), ("udp", services, 20000)}
        assert wait_for(lambda: lab.free(mine) == mine, 1.0)
        refused = probe(lab.node, services, 20000, netns="client", timeout=0.3)
        assert refused.outcome == "refused"
        assert works(lab)
        others = {(p, a, 20000) for p in ("tcp", "udp") for a in (NODE4, "127.0.0.1", f"{NET4}.1")}
        assert lab.free(others) == set()
        lab.node.ip("link delete kube-ipvs0")
        wild = {("tcp", "127.0.0.9", 20000), ("udp", "127.0.0.9", 20000)}
        assert wait_for(lambda: lab.free(wild) == set(), 1.0)
    assert works(lab)


@pytest.mark.parametrize("host", [NODE4, NODE6])
def test_flows_that_began_in_the_gap_are_dropped(lab: SourceNode, host: str) -> None:
    with Client(lab.node, host, 20000, "udp", netns="client", source_port=41000) as client:
        os.kill(lab.pid, signal.SIGSTOP)
        try:
            lab.node.nft("flush ruleset")
            for _ in range(3):
                assert not client.ask(timeout=0.05).ok
        finally:
            os.kill(lab.pid, signal.SIGCONT)
        begin = time.monotonic()
        assert wait_for(lambda: client.ask(timeout=0.05).server == "a", 2.0, 0.01)
        print(f"the gap's flow to {host}: right again after {time.monotonic() - begin:.3f} s")
    assert CLIENT4


def test_flows_that_work_are_left_alone(lab: SourceNode) -> None:
    with Client(lab.node, NODE4, 20000, "tcp", netns="client") as client:
        assert client.ask().server == "a"
        lab.node.nft("flush ruleset")
        # In the gap itself nothing translates: a packet sent then would be reset.
        assert wait_for(lambda: works(lab), 2.0)
        for _ in range(20):
            assert client.ask().server == "a"


def test_somebody_who_keeps_removing_things(lab: SourceNode) -> None:
    """Repairs slow down, one clear line says why, and all is well once it stops."""
    already = len([x for x in lab.stderr().splitlines() if "keeps removing" in x])
    before = repairs(lab)
    stop = threading.Event()

    def remover() -> None:
        while not stop.is_set():
            with contextlib.suppress(RuntimeError):
                lab.node.run("nft", "flush", "ruleset")
            time.sleep(0.02)

    enemy = threading.Thread(target=remover)
    enemy.start()
    time.sleep(4.0)
    stop.set()
    enemy.join()
    fought = repairs(lab) - before
    begin = time.monotonic()
    assert wait_for(lambda: works(lab), 8.0, 0.05)
    lines = [x for x in lab.stderr().splitlines() if "keeps removing" in x]
    print(f"{fought} repairs in 4 s against a remover, well {time.monotonic() - begin:.1f} s after")
    assert 3 <= fought <= 8
    assert len(lines) - already == 1
    assert "(removed by nft)" in lines[-1]


def test_ten_thousand_mappings_come_back(lab: SourceNode) -> None:
    extra = [lab.pod(f"many{n}", wired=False) for n in range(100)]
    try:
        for number, pod in enumerate(extra):
            lots = [mapping(25000 + 100 * number + n, 80) for n in range(100)]
            reply = lab.add(pod, *lots, reservePorts="no")
            assert reply.ok, reply.out
        time.sleep(1.0)
        lab.node.nft("flush ruleset")
        assert wait_for(lambda: works(lab), 5.0)
        time.sleep(0.5)
        memory = lab.memory()
        times = []
        for _ in range(2):
            lab.node.nft("flush ruleset")
            begin = time.monotonic()
            assert wait_for(lambda: works(lab), 5.0, 0.01)
            times.append(time.monotonic() - begin)
            time.sleep(0.5)
        grown = lab.memory()
        document = lab.elements()
        assert len(document["ip", "ports"]) > 10_000
        assert len(document["ip6", "ports"]) > 10_000
        print(f"10,000 mappings: mended in {', '.join(f'{t:.2f}' for t in times)} s, memory "
              f"{memory:.1f} MiB before, {grown:.1f} after")  # fmt: skip
        assert min(times) <= 1.0 * busy()
        assert grown <= memory * 1.1
    finally:
        assert lab.gc(lab.pods["a"], lab.pods["b"]).ok
        for pod in extra:
            del lab.pods[pod.name]


def test_the_log_is_one_line_an_event(lab: SourceNode) -> None:
    for line in lab.stderr().splitlines():
        assert re.match(r"(time=\S+ )?level=", line), line
    assert json.dumps(lab.status())
