"""What is measured: each part returns figures, raw and in order, and judges nothing.

Everybody takes turns inside a part, call by call, so that a noisy machine is noisy for all.
"""

import contextlib
import statistics
import time
from dataclasses import replace
from pathlib import Path

from bench import calls, plugins
from bench.lab import FIRST_PORT, HOST, BenchNode, Failed

PYTHON = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]
PORT = 30080
COLUMNS = ("wall", "cpu", "helper")


class Bench:
    """The plugins of this run, how often things are done, and the figures so far."""

    def __init__(self, peers, quick, say):
        self.peers = peers
        self.quick = quick
        self.say = say
        self.figures = {}
        self._number = 10**6

    def names(self):
        return [p.name for p in self.peers]

    def number(self):
        """A container ID that nobody had yet."""
        self._number += 1
        return self._number

    def save(self, key, value):
        self.figures["/".join(map(str, key))] = value

    @contextlib.contextmanager
    def nodes(self, peers):
        """One node for each kind that these plugins need, warmed up."""
        with contextlib.ExitStack() as stack:
            made = {}
            for plugin in peers:
                if plugin.node not in made:
                    made[plugin.node] = BenchNode(plugin.node)
                    stack.callback(made[plugin.node].close)
                    made[plugin.node].warm(plugin)
            yield made


def summary(samples):
    """Medians of wall, CPU and helper's CPU, and the fastest wall."""
    found = {c: statistics.median(s[c] for s in samples) for c in COLUMNS}
    return found | {"best": min(s["wall"] for s in samples), "runs": len(samples)}


def verbs_of(plugin):
    """portmap before 1.3 fails CHECK of a pod without IPv6, so there is none to time."""
    broken = plugin.type == "portmap" and plugin.backend is None
    return ("ADD", "DEL") if broken else ("ADD", "CHECK", "DEL")


def turns(bench, nodes, peers, rounds, ports, key, **more):
    """Rounds of ADD, CHECK, DEL by everybody in turn."""
    samples = {}
    for turn in range(rounds):
        shift = turn % len(peers)
        for plugin in (*peers[shift:], *peers[:shift]):
            number = bench.number()
            for verb in verbs_of(plugin):
                found = nodes[plugin.node].run(plugin, verb, number, ports, **more)
                samples.setdefault((plugin.name, verb), []).append(found)
    for (name, verb), found in samples.items():
        bench.save((*key, name, verb), summary(found))


def start_cost(bench):
    """CPU of a plugin call against a start of Python that does nothing."""
    peers = [p for p in bench.peers if p in (plugins.OURS, plugins.FRONT)]
    with bench.nodes([plugins.OURS]) as nodes:
        node, samples = nodes["ours"], {}
        for _ in range(15 if bench.quick else 60):
            found = node.ask("run", argv=PYTHON, env={"PATH": calls.PATH}, stdin="")
            samples.setdefault("python", []).append(found)
            for plugin in peers:
                argv, env, stdin = plugin.call("VERSION", 1, [])
                found = node.ask("run", argv=argv, env=env, stdin=stdin)
                samples.setdefault(f"{plugin.name}/VERSION", []).append(found)
                number = bench.number()
                for verb in ("ADD", "DEL"):
                    found = node.run(plugin, verb, number, calls.mappings(PORT))
                    samples.setdefault(f"{plugin.name}/{verb}", []).append(found)
    for name, found in samples.items():
        bench.save(("start", name), summary(found))


def by_others(bench):
    """Each verb with 0, 100, 1,000 and 10,000 other mappings on the node."""
    peers = bench.peers
    # stays empty: what growing costs is seen within one run, call beside call
    empties = [
        replace(p, name=f"empty-{p.name}", node="empty")
        for p in peers
        if p in (plugins.OURS, plugins.FRONT)
    ]
    with contextlib.ExitStack() as stack:
        nodes = stack.enter_context(bench.nodes(peers))
        if empties:
            nodes["empty"] = BenchNode("ours")
            stack.callback(nodes["empty"].close)
            nodes["empty"].warm(plugins.OURS)
        for others in (0, 100, 1000) if bench.quick else (0, 100, 1000, 10000):
            peers = [p for p in bench.peers if p.most >= others]
            for plugin in peers:
                if plugin is not plugins.FRONT:
                    bench.say(f"  {plugin.name}: {others} others")
                    nodes[plugin.node].fill(plugin, others)
            ports = calls.mappings(PORT)
            rounds = 3 if bench.quick or others >= 10000 else 20
            turns(bench, nodes, peers, rounds, ports, ("others", others))
            grown = [p for p in peers if p in (plugins.OURS, plugins.FRONT)]
            rounds = 6 if bench.quick else 40
            if others:
                turns(bench, nodes, [*grown, *empties], rounds, ports, ("flat", others))


def by_shape(bench):
    """1 and 20 mappings, single and dual stack, on an otherwise empty node."""
    with bench.nodes(bench.peers) as nodes:
        for count in (1, 20):
            for dual in (False, True):
                rounds = 3 if bench.quick else 20
                key = ("shape", count, "dual" if dual else "single")
                turns(
                    bench, nodes, bench.peers, rounds, calls.mappings(PORT, count), key, dual=dual
                )


def bursts(bench):
    """100 ADDs at once for 100 pods, 100 DELs at once, and one port asked for 100 times."""
    count = 100
    for turn in range(1 if bench.quick else 5):
        for plugin in bench.peers:
            bench.say(f"  {plugin.name}, turn {turn + 1}")
            with bench.nodes([plugin]) as nodes:
                node = nodes[plugin.node]
                numbers = [bench.number() for _ in range(count)]
                for verb in ("ADD", "DEL"):
                    jobs = [(verb, n, calls.mappings(20000 + i)) for i, n in enumerate(numbers)]
                    found = node.burst(plugin, jobs)
                    bench.figures.setdefault(f"burst/{plugin.name}/{verb}", []).append(found)
                same = [("ADD", n, calls.mappings(PORT)) for n in numbers]
                found = node.burst(plugin, same)
                bench.figures.setdefault(f"burst/{plugin.name}/same", []).append(found)
                if plugin is plugins.OURS:  # what so many starts of Python alone cost
                    jobs = [(PYTHON, {"PATH": calls.PATH}, "")] * count
                    found = node.ask("burst", jobs=jobs)
                    bench.figures.setdefault("burst/python/ADD", []).append(found)


def connections(bench):
    """New connections a second from another host, by number of mappings and place among them."""
    everybody = [p for p in bench.peers if p is not plugins.FRONT]
    sizes = (1, 1000) if bench.quick else (1, 1000, 10000)
    rounds, count = (3, 100) if bench.quick else (12, 400)
    rates = {}
    for size in sizes:
        peers = [p for p in everybody if p.most >= size]
        with bench.nodes(peers) as nodes, contextlib.ExitStack() as stack:
            ones = {p.name: BenchNode(p.node) for p in peers}
            for plugin in peers:
                stack.callback(ones[plugin.name].close)
                ones[plugin.name].warm(plugin)
                bench.say(f"  {plugin.name}: {size} mappings")
                ends = {"0": calls.POD4, str(size - 1): calls.POD4}
                nodes[plugin.node].fill(plugin, size, ends)
                ones[plugin.name].fill(plugin, 1, {"0": calls.POD4})
                for node in (nodes[plugin.node], ones[plugin.name]):
                    node.ask("serve", netns=calls.POD, port=80)
            for _ in range(rounds):
                for plugin in peers:
                    node, one = nodes[plugin.node], ones[plugin.name]
                    places = (("one", one, 0), ("first", node, 0), ("last", node, size - 1))
                    for place, where, number in places:
                        found = where.ask(
                            "connect",
                            netns="client",
                            host=HOST,
                            port=FIRST_PORT + number,
                            count=count if place != "last" or size < 10000 else count // 2,
                        )
                        many = count if place != "last" or size < 10000 else count // 2
                        rate = many / found["seconds"]
                        rates.setdefault((size, plugin.name, place), []).append(rate)
    for (size, name, place), found in rates.items():
        bench.save(("connections", size, name, place), statistics.median(found))
        # turn by turn: what else the machine does is in both
        turns = zip(found, rates[size, name, "one"], strict=True)
        bench.save(("turns", size, name, place), statistics.median(a / b for a, b in turns))


def resident(pid):
    """Resident memory of a process in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise Failed("the helper is gone")


def helper_life(bench):
    """Memory and idle CPU of the helper, repair after a flush, start from records."""
    size, few = (1000, 100) if bench.quick else (10000, 1000)
    with bench.nodes([plugins.OURS]) as nodes:
        node = nodes["ours"]
        time.sleep(6)  # the empty tables are gone by then
        bench.save(("memory", "idle"), resident(node.helper))
        bench.save(("idle", "cpu"), _idle(node, 5 if bench.quick else 65))
        node.ask("serve", netns=calls.POD, port=80)
        node.fill(plugins.OURS, 1, {"0": calls.POD4})
        # three: from the fourth within a minute on, repairs slow down on purpose
        seconds = [_repair(node) for _ in range(3)]
        bench.save(("repair", 1), statistics.median(seconds))
        node.fill(plugins.OURS, few)
        bench.save(("start", few), statistics.median(_restart(bench, node) for _ in range(3)))
        node.fill(plugins.OURS, size)
        time.sleep(1)
        bench.save(("memory", size), resident(node.helper))
        bench.save(("idle", f"cpu at {size}"), _idle(node, 5 if bench.quick else 65))
        time.sleep(61)  # damage counts as new again: no back-off
        repaired = [_repair_all(node, size) for _ in range(1 if bench.quick else 3)]
        bench.save(("repair", size), statistics.median(repaired))
        time.sleep(3)
        bench.save(("memory", "after repair"), resident(node.helper))
    with bench.nodes([plugins.OURS]) as nodes:
        node = nodes["ours"]
        node.ask("pairs", count=200, plugin="cni-hostport")
        bench.save(("memory", "before pairs"), resident(node.helper))
        node.ask("pairs", count=500 if bench.quick else 10000, plugin="cni-hostport")
        bench.save(("memory", "after pairs"), resident(node.helper))


def _idle(node, seconds):
    pid = node.helper
    before = node.ask("cpu_of", pid=pid)["cpu"]
    time.sleep(seconds)
    return (node.ask("cpu_of", pid=pid)["cpu"] - before) / seconds / 10


def _repair(node):
    """Seconds from a flush of the whole ruleset until the port answers again."""
    time.sleep(0.2)
    node.node.run("nft", "flush", "ruleset")
    found = node.ask("until_connects", host=HOST, port=FIRST_PORT, limit=60)
    return found["seconds"]


def _repair_all(node, size):
    """Seconds from a flush until every element is back."""
    from cni_hostport.host.nfnetlink import Nftables
    from cni_hostport.model import Family

    with node.node.within():
        tables = Nftables()
    node.node.run("nft", "flush", "ruleset")
    begin = time.monotonic()
    while time.monotonic() - begin < 60:
        with contextlib.suppress(OSError):
            if (tables._count(Family.V4, "ports") or 0) >= size:
                return time.monotonic() - begin
        time.sleep(0.005)
    raise Failed("nothing was repaired within a minute")


def _restart(bench, node):
    """Seconds of a call that finds the helper killed, from its start to its answer."""
    node.node.run("kill", "-9", str(node.helper))
    found = node.run(plugins.OURS, "ADD", number := bench.number(), calls.mappings(PORT))
    node.run(plugins.OURS, "DEL", number, calls.mappings(PORT))
    return found["wall"] / 1000


PARTS = {
    "start": start_cost,
    "others": by_others,
    "shape": by_shape,
    "burst": bursts,
    "connections": connections,
    "helper": helper_life,
}
