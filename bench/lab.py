"""A node for one plugin: namespaces, a bridge, a pod that is really there, and the agent."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from lab.node import NODE4, Node

from bench import calls, plugins

FIRST_PORT = 10000  # port of the others' number 0
HOST = NODE4


class Failed(Exception):
    """A call that has to work did not: there is nothing to measure."""


class BenchNode:
    """Filled with others on request; closes everything it started."""

    def __init__(self, kind):
        self.kind = kind
        self.node = Node(f"bench-{kind}", bridge_netfilter=True)
        self.others = 0
        node = self.node
        node.add_netns(calls.POD)
        node.ip(
            f"link add {calls.BRIDGE} type bridge",
            f"addr add {calls.GATEWAY4}/16 dev {calls.BRIDGE}",
            f"addr add {calls.GATEWAY6}/64 dev {calls.BRIDGE} nodad",
            f"link add veth0 type veth peer name eth0 netns {calls.POD}",
            f"link set veth0 master {calls.BRIDGE} up",
            f"link set {calls.BRIDGE} up",
        )
        node.ip(
            f"addr add {calls.POD4}/16 dev eth0",
            f"addr add {calls.POD6}/64 dev eth0 nodad",
            "link set eth0 up",
            f"route add default via {calls.GATEWAY4}",
            netns=calls.POD,
        )
        for flavour in ("nft", "legacy"):
            tools = node.path(f"/run/{flavour}")
            tools.mkdir()
            for name in ("iptables", "ip6tables"):
                for suffix in ("", "-save", "-restore"):
                    (tools / f"{name}{suffix}").symlink_to(f"/usr/sbin/{name}-{flavour}{suffix}")
        if kind == "ours" and plugins.LAUNCHER.exists():
            self._copy_with_launcher()
        self._agent = node.popen(
            sys.executable,
            "-I",
            str(plugins.ROOT / "bench/agent.py"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None,
        )

    def _copy_with_launcher(self):
        copy = self.node.path("/run/launcher")
        shutil.copytree(plugins.BUNDLE, copy, symlinks=True)
        if not (copy / "cni-hostport-python").exists():
            (copy / "cni-hostport").rename(copy / "cni-hostport-python")
        shutil.copy(plugins.LAUNCHER, copy / "cni-hostport")

    def close(self):
        """End the agent and the node."""
        self._agent.stdin.close()
        self._agent.wait(timeout=30)
        self._agent.stdout.close()
        self.node.close()

    def ask(self, operation, **arguments):
        """One operation of the agent. Raises Failed."""
        self._agent.stdin.write(json.dumps([operation, arguments]).encode() + b"\n")
        self._agent.stdin.flush()
        answer = json.loads(self._agent.stdout.readline())
        if answer.get("error") or answer.get("status"):
            raise Failed(f"{self.kind}: {operation}: {answer}")
        return answer

    @property
    def helper(self):
        """Process id of the node's helper, 0 where there is none."""
        return next(iter(self.node.helpers()), 0)

    def run(self, plugin, verb, number, ports, **more):
        """One plugin call, measured."""
        argv, env, stdin = plugin.call(verb, number, ports, **more)
        watch = self._watched() if plugin.ours else 0
        return self.ask("run", argv=argv, env=env, stdin=stdin, watch=watch)

    def _watched(self):
        if not getattr(self, "_helper", 0) or not Path(f"/proc/{self._helper}").exists():
            self._helper = self.helper
        return self._helper

    def burst(self, plugin, jobs):
        """Calls (verb, number, ports) all at once."""
        made = [plugin.call(*job) for job in jobs]
        return self.ask("burst", jobs=made, watch=self._watched() if plugin.ours else 0)

    def fill(self, plugin, count, targets=None):
        """Bring the node from the others it has to ``count`` of them."""
        numbers, targets = range(self.others, count), targets or {}
        self.others = count
        if not numbers:
            return
        if plugin.ours:
            span = [numbers.start, numbers.stop]
            self.ask(
                "fill",
                verb="ADD",
                numbers=span,
                first_port=FIRST_PORT,
                plugin=plugin.type,
                backend=plugin.backend,
                targets=targets,
            )
            return
        if plugin.backend == "nftables":
            text = plugins.nft_text(numbers, FIRST_PORT, targets)
            self.node.run("nft", "-f", "-", data=text.encode(), timeout=600)
        else:
            text = plugins.iptables_text(numbers, FIRST_PORT, targets)
            restore = f"/run/{plugin.flavour}/iptables-restore"
            self.node.run(restore, "--noflush", data=text.encode(), timeout=900)
        self._prove(plugin, numbers, targets)

    def warm(self, plugin):
        """What only the first call on a node pays: helper, tables, chains."""
        for verb in ("ADD", "DEL"):
            self.run(plugin, verb, 10**7, calls.mappings(9999))

    def _prove(self, plugin, numbers, targets):
        """What was filled in is what the plugin itself writes."""
        for number in {numbers.start, numbers.stop - 1}:
            addresses = (plugins.target(number, targets), calls.other_address(number)[1])
            ports = calls.mappings(FIRST_PORT + number)
            before = self._rules(plugin)
            verb = "CHECK" if plugin.backend == "nftables" else "ADD"
            self.run(plugin, verb, number, ports, addresses=addresses)
            if self._rules(plugin) != before:
                raise Failed(f"{plugin.name}: {verb} of a filled pod changes the rules")

    def _rules(self, plugin):
        if plugin.backend == "nftables":
            return ""
        text = self.node.output(f"/run/{plugin.flavour}/iptables-save", "-t", "nat")
        return sorted(
            line for line in text.splitlines() if line[:1] in "-:" and " ACCEPT " not in line
        )
