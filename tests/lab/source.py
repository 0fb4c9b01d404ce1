"""A lab node with a helper run from source, driven through its socket.

No bundle, no CNI plugins, no process a call: what a test needs to make thousands
of calls, to kill the helper between two instructions, and to compare the machine
with what the answered calls describe. Reads the machine by the system's own tools
(nft, ip, /proc, bind), never by the code under test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_interface
from pathlib import Path
from typing import Any

from cni_hostport import shim
from cni_hostport.model import AttachmentID
from lab.node import SAFE_PATH, Node, wait_for

Json = dict[str, Any]
RUN_DIR = "/run/cni-hostport"
FAULT = "/run/fault"
NET4, NET6 = "10.244.7", "2001:db8:7::"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Reply:
    """An answer of the helper; ``status`` None: it died before it answered."""

    status: int | None
    out: bytes = b""
    err: bytes = b""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the call succeeded."""
        return self.status == 0

    @property
    def error(self) -> Json:
        """The CNI error."""
        found = json.loads(self.out)
        assert isinstance(found, dict)
        return found

    @property
    def code(self) -> int:
        """The error's code, 0 for success."""
        return 0 if self.ok else int(self.error["code"])


@dataclass(frozen=True)
class LabPod:
    """A namespace with addresses and a port of the bridge, ready to be an attachment."""

    name: str
    number: int
    network: str = "podnet"

    @property
    def ip4(self) -> str:
        return f"{NET4}.{self.number}"

    @property
    def ip6(self) -> str:
        return f"{NET6}{self.number:x}"

    @property
    def netns(self) -> str:
        return f"/run/netns/{self.name}"

    @property
    def key(self) -> str:
        return AttachmentID(network=self.network, container_id=self.name, ifname="eth0").key

    def result(self) -> Json:
        """prevResult as the bridge plugin gives it."""
        return {
            "cniVersion": "1.1.0",
            "interfaces": [
                {"name": "cni0"},
                {"name": f"v{self.number}"},
                {"name": "eth0", "sandbox": self.netns},
            ],
            "ips": [
                {"address": f"{self.ip4}/24", "interface": 2},
                {"address": f"{self.ip6}/64", "interface": 2},
            ],
        }


def busy() -> float:
    """By how much a promise in seconds is stretched: 1 on a machine that has a free core."""
    return max(1.0, min(8.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def mapping(host: int, container: int = 80, protocol: str = "tcp", host_ip: str = "") -> Json:
    """One entry of portMappings."""
    return {"hostPort": host, "containerPort": container, "protocol": protocol, "hostIP": host_ip}


@dataclass
class SourceNode:
    """The node, its zygote, and the helper that runs now."""

    node: Node = field(default_factory=lambda: Node(bridge_netfilter=True))
    pods: dict[str, LabPod] = field(default_factory=dict)
    pid: int = 0
    env: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.node.ip(
            "link add cni0 type bridge",
            f"addr add {NET4}.1/24 dev cni0",
            f"addr add {NET6}1/64 dev cni0 nodad",
            "link set cni0 up",
        )
        self._zygote = self.node.popen(
            sys.executable, "-I", str(ROOT / "tests/lab/zygote.py"), "helper",
            env={"PATH": SAFE_PATH, "CHP_FAULT_FILE": FAULT, "LANG": "C.UTF-8", **self.env},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=open(self.node.path("/run/stderr"), "ab"),
        )  # fmt: skip
        assert self._said() == "ready"

    def _said(self) -> str:
        assert self._zygote.stdout is not None
        return self._zygote.stdout.readline().decode().strip()

    def _tell(self, line: str) -> None:
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(f"{line}\n".encode())
        self._zygote.stdin.flush()

    def close(self) -> None:
        """End the helper and the node."""
        if self.pid:
            self.kill()
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait(10)
        self._zygote.stdout.close()
        self.node.close()

    # -- the helper's life ----------------------------------------------------------------------

    def setenv(self, name: str, value: str) -> None:
        """For helpers started from now on."""
        self._tell(f"env {name}={value}")

    def start(self, *, wait: bool = True, limit: float = 20.0) -> float:
        """Start a helper; seconds until it answered."""
        begin = time.monotonic()
        self._tell("start")
        word, _, pid = self._said().partition(" ")
        assert word == "up", word
        self.pid = int(pid)
        if wait:
            ready = wait_for(lambda: self.operate("ping", limit=1.0).ok, limit, 0.005)
            assert ready, self.stderr()[-2000:]
        return time.monotonic() - begin

    def ended(self) -> int:
        """Wait for the helper's end; its exit status as subprocess has it."""
        word, pid, status = self._said().split()
        assert (word, int(pid)) == ("down", self.pid), (word, pid)
        self.pid = 0
        return int(status)

    def died(self, limit: float = 2.0) -> bool:
        """Whether the helper ends by itself in that time."""
        if not wait_for(lambda: not Path(f"/proc/{self.pid}").exists(), limit, 0.002):
            return False
        self.ended()
        return True

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Signal the helper and wait for its end."""
        with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
            os.kill(self.pid, number)
        return self.ended()

    def others(self) -> list[int]:
        """Helpers that plugin calls of the node have started."""
        return [p for p, words in self.node.processes().items() if "cni_hostport" in words]

    def end_others(self) -> None:
        """Kill those."""
        for pid in self.others():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not self.others())

    def restart(self) -> float:
        """Kill and start; seconds until the new one answers."""
        self.kill()
        return self.start()

    def stderr(self) -> str:
        """What helpers of this node have logged."""
        return self.node.path("/run/stderr").read_text(errors="replace")

    def fault(self, order: str) -> bool:
        """Order a fault (see zygote.py); empty: none, and whether one was taken back in time."""
        path = self.node.path(FAULT)
        if order:
            path.with_name("fault.new").write_text(order)
            path.with_name("fault.new").rename(path)
        else:
            try:
                path.unlink()
            except FileNotFoundError:
                return False
        return True

    # -- pods and calls -------------------------------------------------------------------------

    def pod(self, name: str, *, network: str = "podnet", wired: bool = True) -> LabPod:
        """A pod; ``wired`` False: a name and addresses only."""
        made = LabPod(name, len(self.pods) + 2, network)
        self.pods[name] = made
        if wired:
            self.wire(made)
        return made

    def wire(self, pod: LabPod) -> None:
        """Namespace, veth and addresses of a pod."""
        self.node.add_netns(pod.name)
        host = f"v{pod.number}"
        self.node.ip(f"link add {host} type veth peer name eth0 netns {pod.name}",
                     f"link set {host} master cni0 up")  # fmt: skip
        self.node.ip(
            f"addr add {pod.ip4}/24 dev eth0", f"addr add {pod.ip6}/64 dev eth0 nodad",
            "link set eth0 up", f"route add default via {NET4}.1",
            f"route add ::/0 via {NET6}1", netns=pod.name,
        )  # fmt: skip

    def connect(self, limit: float = 5.0) -> socket.socket:
        """A connection to the helper. Raises OSError."""
        folder = os.fsencode(self.node.path(RUN_DIR))
        return socket.socket(fileno=shim.connect(folder, limit).detach())

    def send(self, frame: bytes, fds: Sequence[int] = (), limit: float = 35.0) -> Reply:
        """One exchange; a helper that dies or is not there gives a status of None."""
        begin = time.monotonic()
        try:
            with self.connect() as sock:
                status, out, err = shim.exchange(sock, frame, fds, begin + limit)
        except TimeoutError:
            raise
        except OSError as error:
            return Reply(None, str(error).encode(), b"", time.monotonic() - begin)
        return Reply(status, out, err, time.monotonic() - begin)

    def operate(self, operation: str, limit: float = 10.0, **more: object) -> Reply:
        """An operator's request."""
        body = json.dumps({"op": operation, **more}).encode()
        return self.send(shim.pack_request(shim.KIND_OPERATOR, 0, {}, body), (), limit)

    def status(self) -> Json:
        """The status document."""
        found = json.loads(self.operate("status").out)
        assert isinstance(found, dict)
        return found

    def env_of(self, verb: str, pod: LabPod | None) -> dict[bytes, bytes]:
        """CNI_* of a call."""
        words = {"CNI_COMMAND": verb, "CNI_PATH": "/opt/cni/bin"}
        if pod is not None:
            words |= {
                "CNI_CONTAINERID": pod.name, "CNI_NETNS": pod.netns, "CNI_IFNAME": "eth0",
                "CNI_ARGS": f"K8S_POD_NAMESPACE=shop;K8S_POD_NAME={pod.name}",
            }  # fmt: skip
        return {k.encode(): v.encode() for k, v in words.items()}

    def call(
        self, verb: str, pod: LabPod | None, mappings: Iterable[Json] = (), limit: float = 35.0,
        **keys: Any,
    ) -> Reply:  # fmt: skip
        """A CNI call as the plugin sends it."""
        return self.send(*self.request(verb, pod, mappings, **keys), limit=limit)

    def request(
        self, verb: str, pod: LabPod | None, mappings: Iterable[Json] = (), **keys: Any
    ) -> tuple[bytes, list[int]]:
        """Frame and descriptors of a call; the descriptors are kept open for the next one."""
        network = pod.network if pod else keys.pop("name", "podnet")
        config: Json = {
            "cniVersion": "1.1.0", "name": network, "type": "cni-hostport",
            "runtimeConfig": {"portMappings": list(mappings)}, **keys,
        }  # fmt: skip
        if pod is not None and verb in ("ADD", "CHECK"):
            config["prevResult"] = pod.result()
        fds, flags = [self._own()], shim.FLAG_OWN_NETNS
        if pod is not None and (there := self._netns(pod)) >= 0:
            fds.append(there)
            flags |= shim.FLAG_POD_NETNS
        env = self.env_of(verb, pod)
        return shim.pack_request(b"C", flags, env, json.dumps(config).encode()), fds

    _fds: dict[str, int] = field(default_factory=dict)

    def _own(self) -> int:
        if "" not in self._fds:
            self._fds[""] = os.open(self.node.namespace_path(), os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[""]

    def _netns(self, pod: LabPod) -> int:
        if pod.name not in self._fds:
            try:
                self._fds[pod.name] = os.open(
                    self.node.namespace_path(pod.name), os.O_RDONLY | os.O_CLOEXEC
                )
            except OSError:
                return -1
        return self._fds[pod.name]

    def add(self, pod: LabPod, *mappings: Json, **keys: Any) -> Reply:
        """ADD."""
        return self.call("ADD", pod, mappings, **keys)

    def delete(self, pod: LabPod) -> Reply:
        """DEL."""
        return self.call("DEL", pod)

    def gc(self, *valid: LabPod, network: str = "podnet") -> Reply:
        """GC."""
        listed = [{"containerID": p.name, "ifname": "eth0"} for p in valid]
        return self.call("GC", None, name=network, **{"cni.dev/valid-attachments": listed})

    # -- what is on the machine -----------------------------------------------------------------

    def elements(self) -> dict[tuple[str, str], dict[str, str]]:
        """Elements of our tables: (family, set) -> key -> comment, by nft itself."""
        document = json.loads(self.node.output("nft", "-j", "list", "ruleset"))
        found: dict[tuple[str, str], dict[str, str]] = {}
        for entry in document["nftables"]:
            body = entry.get("set") or entry.get("map")
            if body and body["table"] == "hostport-manager":
                here = found.setdefault((body["family"], body["name"]), {})
                for element in body.get("elem", []):
                    key, value = element if isinstance(element, list) else (element, None)
                    comment = ""
                    if isinstance(key, dict) and "elem" in key:
                        comment, key = key["elem"].get("comment", ""), key["elem"]["val"]
                    text = _words(key) + (f" : {_words(value)}" if value is not None else "")
                    here[text] = comment
        return found

    def records(self) -> set[str]:
        """Names of the files among the records."""
        folder = self.node.path(f"{RUN_DIR}/records")
        return {f.name for f in folder.iterdir()} if folder.exists() else set()

    def queued(self) -> list[str]:
        """Names of queued calls."""
        folder = self.node.path(f"{RUN_DIR}/queue")
        return sorted(f.name for f in folder.iterdir()) if folder.exists() else []

    def route_localnet(self, link: str = "cni0") -> int:
        return int(self.node.sysctl(f"net/ipv4/conf/{link}/route_localnet"))

    def hairpins(self) -> set[str]:
        """Bridge ports with the hairpin flag."""
        found = json.loads(self.node.output("bridge", "-j", "-d", "link"))
        return {entry["ifname"] for entry in found if entry.get("hairpin")}

    def free(self, ports: Iterable[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
        """Those of (protocol, address, port) that a plain server could have now."""
        out = set()
        with self.node.within():
            for protocol, address, port in ports:
                v6 = ":" in address
                kind = socket.SOCK_STREAM if protocol == "tcp" else socket.SOCK_DGRAM
                with socket.socket(socket.AF_INET6 if v6 else socket.AF_INET, kind) as sock:
                    if v6:
                        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    try:
                        sock.bind((address, port))
                    except OSError:
                        continue
                    out.add((protocol, address, port))
        return out

    def descriptors(self) -> int:
        """How many the helper has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def memory(self) -> float:
        """The helper's resident memory in MiB."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        return int(fields["VmRSS"].split()[0]) / 1024

    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/task"))


def _words(value: Any) -> str:
    if isinstance(value, dict):
        if "concat" in value:
            return " . ".join(map(_words, value["concat"]))
        if "prefix" in value:
            return f"{value['prefix']['addr']}/{value['prefix']['len']}"
        if "range" in value:
            return "-".join(map(_words, value["range"]))
    return str(value)


Wanted = Mapping[str, tuple[Json, ...]]
"""What the answered calls describe: mappings by the name of their pod."""


def audit(lab: SourceNode, wanted: Wanted, pool: Iterable[int]) -> list[str]:
    """Everything on the machine that is not as wanted; empty when all is well."""
    found: list[str] = []
    pods = {name: lab.pods[name] for name in wanted}
    files = {f"{p.key}.json" for p in pods.values()}
    if lab.records() != files:
        found.append(f"records {sorted(lab.records() ^ files)}")
    found += _audit_elements(lab, wanted)
    found += _audit_sockets(lab, wanted, pool)
    with_v4 = any(_loopback(m) for ms in wanted.values() for m in ms)
    if lab.route_localnet() != int(with_v4):
        found.append(f"route_localnet {lab.route_localnet()}")
    ports = {f"v{p.number}" for p in pods.values()}
    if lab.hairpins() != ports:
        found.append(f"hairpins {lab.hairpins()}, wanted {ports}")
    if lab.queued():
        found.append(f"queue {lab.queued()}")
    for name, mappings in wanted.items():
        reply = lab.call("CHECK", lab.pods[name], mappings)
        if not reply.ok:
            found.append(f"CHECK of {name}: {reply.out.decode()}")
    return found


def _loopback(entry: Json) -> bool:
    host = entry["hostIP"]
    return host in ("", "0.0.0.0") or host.startswith("127.")


def _families(entry: Json) -> list[int]:
    host = entry["hostIP"]
    return [4, 6] if not host else [ip_interface(host).version]


def _audit_elements(lab: SourceNode, wanted: Wanted) -> list[str]:
    expected: dict[tuple[str, str], dict[str, str]] = {}
    for name, mappings in wanted.items():
        pod = lab.pods[name]
        for entry in mappings:
            for family in _families(entry):
                ip = "ip" if family == 4 else "ip6"
                target = f"{pod.ip4 if family == 4 else pod.ip6} . {entry['containerPort']}"
                key = f"{entry['protocol']} . {entry['hostPort']}"
                where = "ports"
                if entry["hostIP"] not in ("", "0.0.0.0", "::"):
                    key, where = f"{entry['hostIP']} . {key}", "hostip_ports"
                expected.setdefault((ip, where), {})[f"{key} : {target}"] = pod.key
                if entry["protocol"] == "udp":
                    addressed = where == "hostip_ports"
                    place = (ip, "held_udp_addresses" if addressed else "held_udp")
                    host = f"{entry['hostIP']} . " if addressed else ""
                    expected.setdefault(place, {})[f"{host}{entry['hostPort']}"] = pod.key
    actual = lab.elements()
    found = []
    for place in {
        *expected, *(p for p in actual if p[1] in ("ports", "hostip_ports", "held_udp",
                                                   "held_udp_addresses")),
    }:  # fmt: skip
        have, want = actual.get(place, {}), expected.get(place, {})
        if have != want:
            found.append(f"elements of {place}: {sorted(have.items() ^ want.items())}")
    keys = {lab.pods[name].key for name in wanted} | {"node"}
    found += [
        f"element of nobody in {place}: {text} {comment}"
        for place, elements in actual.items()
        for text, comment in elements.items()
        if comment not in keys and (place[1], comment) != ("neighbours", "network")
    ]
    return found


def _audit_sockets(lab: SourceNode, wanted: Wanted, pool: Iterable[int]) -> list[str]:
    asked = {
        (protocol, address, port)
        for protocol in ("tcp", "udp")
        for address in ("0.0.0.0", "::", "192.0.2.5", "2001:db8:1::5")
        for port in pool
    }
    held = set()
    for mappings in wanted.values():
        for entry in mappings:
            for family in _families(entry):
                wide = "0.0.0.0" if family == 4 else "::"
                other = "192.0.2.5" if family == 4 else "2001:db8:1::5"
                places = {wide}
                if entry["hostIP"] in ("", "0.0.0.0", "::", other):
                    places.add(other)
                held |= {(entry["protocol"], p, entry["hostPort"]) for p in places}
    free = lab.free(asked)
    return [f"free and should be held: {sorted(free & held)}"] * bool(free & held) + [
        f"held and should be free: {sorted(asked - free - held)}"
    ] * bool(asked - free - held)
