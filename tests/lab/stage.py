"""One test's stage: a node, the runtime that calls plugins, pods, servers, clients.

Makes conflists with one ``cni-hostport`` entry (of the wanted backend), pods
that answer on the ports they publish, and the short questions a test asks.
Holds no expectation of its own except that nothing outlives it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.chain import Attachment, Chain, Json, PluginError, Reply, Runtime
from lab.echo import Server, Servers
from lab.node import SAFE_PATH, Node
from lab.peers import Answer, Protocol, probe

TYPE = os.environ.get("LAB_PLUGIN", "cni-hostport")
BUNDLE = Path(
    os.environ.get("LAB_BUNDLE", Path(__file__).parents[2] / "dist/cni-hostport/cni-hostport")
)
RUN_DIR = "/run/cni-hostport"
TOOLS = "/run/tools"

GATEWAY4, GATEWAY6 = "10.244.7.1", "2001:db8:7::1"


@dataclass(frozen=True)
class Backend:
    """A value of the conflist's ``backend`` key, with the iptables that PATH finds first."""

    name: str = "nftables"
    flavour: str = ""

    @classmethod
    def parse(cls, text: str) -> Backend:
        """``nftables``, ``iptables-nft`` or ``iptables-legacy``."""
        name, _, flavour = text.partition("-")
        return cls(name, flavour)

    def __str__(self) -> str:
        return f"{self.name}-{self.flavour}" if self.flavour else self.name


@dataclass
class Pod:
    """A pod of the lab: its attachment and the server that answers in it."""

    name: str
    network: Chain
    at: Attachment
    server: Server | None = None

    @property
    def ip4(self) -> str:
        """Its IPv4 address."""
        return self.at.address(4)

    @property
    def ip6(self) -> str:
        """Its IPv6 address."""
        return self.at.address(6)


def mapping(host: int, container: int, protocol: str = "tcp", host_ip: str | None = None) -> Json:
    """One entry of ``runtimeConfig.portMappings``."""
    entry: Json = {"hostPort": host, "containerPort": container, "protocol": protocol}
    return entry if host_ip is None else entry | {"hostIP": host_ip}


def container_id(name: str) -> str:
    """A container ID as a runtime makes them, the same for the same name."""
    return hashlib.sha256(name.encode()).hexdigest()


def bridge_entry(number: int = 0, *, dual: bool = True, masquerade: bool = True) -> Json:
    """The bridge plugin's entry of the node's network with that number.

    Gateway on the bridge ``cni<number>``, hairpinMode off, host-local addresses.
    """
    subnet, bridge = 7 + number, f"cni{number}"
    ranges = [[{"subnet": f"10.244.{subnet}.0/24"}]]
    routes = [{"dst": "0.0.0.0/0"}]
    if dual:
        ranges.append([{"subnet": f"2001:db8:{subnet}::/64"}])
        routes.append({"dst": "::/0"})
    return {
        "type": "bridge",
        "bridge": bridge,
        "isGateway": True,
        "ipMasq": masquerade,
        "hairpinMode": False,
        "capabilities": {"ips": True},
        "ipam": {"type": "host-local", "ranges": ranges, "routes": routes},
    }


class Stage:
    """A node with everything a test needs; ``close`` asserts that nothing is left."""

    def __init__(self, backend: Backend, *, bridge_netfilter: bool = True) -> None:
        self.backend = backend
        self.node = Node(bridge_netfilter=bridge_netfilter)
        self.servers = Servers(self.node)
        self._numbers = {"podnet": 0}
        tools = self.node.path(TOOLS)
        tools.mkdir()
        if BUNDLE.name == TYPE:
            (tools / TYPE).symlink_to(BUNDLE)
        if backend.flavour:
            for family in ("iptables", "ip6tables"):
                for suffix in ("", "-save", "-restore"):
                    link = tools / f"{family}{suffix}"
                    link.symlink_to(f"/usr/sbin/{family}-{backend.flavour}{suffix}")
        self.runtime = Runtime(self.node, [TOOLS], {"PATH": f"{TOOLS}:{SAFE_PATH}"})

    def close(self) -> None:
        """Stop the servers and drop the node."""
        self.servers.close()
        self.node.close()

    # -- networks and pods ----------------------------------------------------------------------

    def entry(self, **options: Any) -> Json:
        """The plugin's entry of a conflist, with these options."""
        base = {"type": TYPE, "capabilities": {"portMappings": True}, "backend": self.backend.name}
        return {**base, **options}

    def network(
        self,
        name: str = "podnet",
        *,
        dual: bool = True,
        masquerade: bool = False,
        version: str = "1.0.0",
        **options: Any,
    ) -> Chain:
        """bridge + cni-hostport with these options; each name has its own bridge and subnets."""
        number = self._numbers.setdefault(name, len(self._numbers))
        plugins = [bridge_entry(number, dual=dual, masquerade=masquerade), self.entry(**options)]
        return Chain(self.runtime, {"cniVersion": version, "name": name, "plugins": plugins})

    def attachment(
        self, name: str, mappings: Sequence[Json], *, ips: Sequence[str] = (), ifname: str = "eth0"
    ) -> Attachment:
        """An attachment of a pod whose namespace is made if it is not there."""
        if not self.node.path(f"/run/netns/{name}").exists():
            self.node.add_netns(name)
        args: Json = {"portMappings": list(mappings)}
        if ips:
            args["ips"] = list(ips)
        words = f"IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME={name}"
        return Attachment(container_id(name), f"/run/netns/{name}", ifname, words, args)

    def pod(
        self,
        name: str,
        mappings: Sequence[Json] = (),
        *,
        network: Chain | None = None,
        ips: Sequence[str] = (),
        serve: bool = True,
    ) -> Pod:
        """ADD a pod that serves its container ports (TCP and UDP as mapped) under its name."""
        network = network or self.network()
        at = self.attachment(name, mappings, ips=ips)
        network.add(at)
        pod = Pod(name, network, at)
        if serve and mappings:
            ports: set[tuple[Protocol, int]] = {
                ("udp" if str(m["protocol"]).lower() == "udp" else "tcp", m["containerPort"])
                for m in mappings
            }
            pod.server = self.servers.serve(name, sorted(ports), netns=name)
        return pod

    def refused(self, name: str, mappings: Sequence[Json], **more: Any) -> PluginError:
        """The error of an ADD that must fail, its bridge part undone as a runtime undoes it."""
        network = more.pop("network", None) or self.network()
        at = self.attachment(name, mappings, **more)
        try:
            network.add(at)
        except PluginError as error:
            assert error.plugin == TYPE, error
            network.delete(at)
            return error
        raise AssertionError(f"ADD of {name} {mappings} succeeded")

    def remove(self, pod: Pod) -> None:
        """DEL the pod, its server and its namespace."""
        pod.network.delete(pod.at)
        if pod.server:
            pod.server.close()
        self.node.delete_netns(pod.name)

    # -- questions --------------------------------------------------------------------------------

    def ask(
        self,
        host: str,
        port: int,
        protocol: Protocol = "tcp",
        *,
        at: str | None = "client",
        source: str | None = None,
        source_port: int = 0,
        timeout: float = 1.0,
    ) -> Answer:
        """One question, by default from the external client; ``at=None`` is the node itself."""
        return probe(
            self.node,
            host,
            port,
            protocol,
            netns=at,
            source=source,
            source_port=source_port,
            timeout=timeout,
        )

    def call(
        self, verb: str, config: Json | bytes, at: Attachment | None = None, **more: Any
    ) -> Reply:
        """Call the plugin alone."""
        return self.runtime.call(TYPE, verb, config, at, **more)

    def config(self, pod: Pod, previous: Json | None = None) -> Json:
        """The stdin that libcni would give the plugin for this pod."""
        return pod.network.config(pod.network.entry(TYPE), pod.at, previous or pod.at.result)

    def records(self) -> dict[str, bytes]:
        """The record files of the node, by name."""
        folder = self.node.path(f"{RUN_DIR}/records")
        with contextlib.suppress(FileNotFoundError):
            return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}
        return {}

    def snapshot(self) -> dict[str, object]:
        """What a call that changes nothing must leave as it was: rules, records, queue, holders."""
        queue = self.node.path(f"{RUN_DIR}/queue")
        return {
            "legacy": self.node.output("iptables-legacy", "-t", "nat", "-S"),
            "rules": self.node.ruleset(),  # second: to look at a legacy table makes it
            "records": self.records(),
            "queue": sorted(f.name for f in queue.iterdir()) if queue.exists() else [],
            "sockets": self.held_sockets(),
        }

    def held_sockets(self) -> int:
        """How many sockets the helpers of the node keep open.

        The last client's goes a moment after its answer: the least of a few looks counts.
        """
        return min(self._sockets_now(0.0), self._sockets_now(0.03), self._sockets_now(0.1))

    def _sockets_now(self, wait: float) -> int:
        time.sleep(wait)
        count = 0
        for pid in self.node.helpers():
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    count += file.readlink().name.startswith("socket:")
        return count
