"""A pod, a node and a cluster's DNS in network namespaces, and the agent on the node.

pod (10.244.1.2, fd00:244:1::2) -- node -- backend (10.244.2.2, fd00:244:2::2).
The node translates 10.0.0.10:53 and fd00:0:0:10::10:53 to the backend as
kube-proxy does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
LOCAL, SERVICE = "169.254.20.10", "10.0.0.10"
LOCAL6, SERVICE6 = "fd00:169:254::10", "fd00:0:0:10::10"
BACKEND, BACKEND6 = "10.244.2.2", "fd00:244:2::2"
LINK = "nodelocaldns"
_numbers = itertools.count()

TEMPLATE = """cluster.local:53 {
    errors
    cache {
            success 9984 30
            denial 9984 5
    }
    reload
    loop
    bind __PILLAR__LOCAL__DNS__
    forward . __PILLAR__CLUSTER__DNS__ {
            force_tcp
    }
    prometheus :9253
    health 169.254.20.10:8080
    }
.:53 {
    errors
    cache 30
    reload
    loop
    bind __PILLAR__LOCAL__DNS__
    forward . __PILLAR__UPSTREAM__SERVERS__
    prometheus :9253
    }
"""


def sh(command: str, check: bool = True) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{command}: {done.stderr}{done.stdout}")
    return done.stdout


def until(what: Callable[[], object], seconds: float = 10, step: float = 0.02) -> float:
    """Wait for something to be true; how long it took."""
    begin = time.monotonic()
    while not what():
        if time.monotonic() - begin > seconds:
            raise AssertionError(f"not within {seconds} s: {getattr(what, '__name__', what)}")
        time.sleep(step)
    return time.monotonic() - begin


class Cluster:
    """Everything of one test; ``close`` leaves nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        prefix = f"nc{os.getpid() % 10000}x{next(_numbers)}"
        self.node, self.pod, self.backend = (f"{prefix}-{n}" for n in ("node", "pod", "be"))
        self.processes: list[subprocess.Popen[bytes]] = []
        self.template = folder / "base" / "Corefile.base"
        self.template.parent.mkdir()
        self.kubedns = folder / "kube-dns"
        self.resolv = folder / "resolv.conf"
        self.resolv.write_text(f"nameserver {BACKEND}\n")
        self.write_template(TEMPLATE)
        self.queries = folder / "queries.log"
        self.environment = {
            "CNI_HOSTPORT_RUN_DIR": str(folder / "run"),
            "KUBE_DNS_UPSTREAM_SERVICE_HOST": BACKEND,
            "XTABLES_LOCKFILE": str(folder / "xtables.lock"),
            "STANDIN": str(folder / "standin"),
        }
        self._build()

    def write_template(self, text: str) -> None:
        self.template.write_text(text.replace("__PILLAR__UPSTREAM__SERVERS__", str(self.resolv)))

    def _build(self) -> None:
        for name in (self.node, self.pod, self.backend):
            sh(f"ip netns add {name} && ip -n {name} link set lo up")
        for name, net in ((self.pod, 1), (self.backend, 2)):
            six = f"fd00:244:{net}"
            sh(f"ip -n {self.node} link add v{net} type veth peer name eth0 netns {name}")
            sh(
                f"set -e; ip -n {self.node} addr add 10.244.{net}.1/24 dev v{net};"
                f"ip -n {self.node} addr add {six}::1/64 dev v{net} nodad;"
                f"ip -n {self.node} link set v{net} up; ip -n {name} link set eth0 up;"
                f"ip -n {name} addr add 10.244.{net}.2/24 dev eth0;"
                f"ip -n {name} addr add {six}::2/64 dev eth0 nodad;"
                f"ip -n {name} route add default via 10.244.{net}.1;"
                f"ip -n {name} -6 route add default via {six}::1"
            )
        self.on_node("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
        for tool, service, to in (
            ("iptables", SERVICE, f"{BACKEND}:53"),
            ("ip6tables", SERVICE6, f"[{BACKEND6}]:53"),
        ):
            for chain, protocol in itertools.product(("PREROUTING", "OUTPUT"), ("udp", "tcp")):
                self.on_node(
                    f"{tool} -t nat -A {chain} -p {protocol} -d {service} --dport 53"
                    f" -j DNAT --to-destination {to}"
                )
        for address in (BACKEND, BACKEND6):
            self.dnsd(address)
        try:
            until(self.by_cluster, 30)
            until(lambda: self.by_cluster(SERVICE6), 30)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self._state()}") from None

    def _state(self) -> str:
        """What there is of the cluster, for a failure's message."""
        ended = [process.poll() for process in self.processes]
        parts = [f"servers (None: runs) {ended}"]
        for name in (self.node, self.pod, self.backend):
            parts += [
                f"{name}: {sh(f'ip -n {name} {what}', check=False)}"
                for what in ("-br addr", "route", "neigh")
            ]
        parts.append(self.on_node("iptables-save -t nat -c", check=False))
        parts.append(sh(f"ip netns exec {self.backend} ss -nlup", check=False))
        return "\n".join(parts)

    def dnsd(self, address: str, port: int = 53) -> subprocess.Popen[bytes]:
        return self.spawn(
            self.backend,
            [sys.executable, str(HERE / "dnsd.py"), address, str(port), str(self.queries)],
        )

    def spawn(self, where: str, argv: list[str], **more: object) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(["ip", "netns", "exec", where, *argv], **more)  # type: ignore[call-overload]
        self.processes.append(process)
        return process

    def on_node(self, command: str, check: bool = True) -> str:
        lock = f"XTABLES_LOCKFILE={self.folder}/xtables.lock"
        return sh(f"ip netns exec {self.node} env {lock} {command}", check)

    def agent(
        self, *flags: str, ips: str = f"{LOCAL},{SERVICE}", command: list[str] | None = None
    ) -> Agent:
        return Agent(
            self, ips, flags, command or [sys.executable, "-m", "cni_hostport.cli.node_cache"]
        )

    def asked(self) -> list[str]:
        """Names that the cluster's DNS was asked for."""
        with contextlib.suppress(FileNotFoundError):
            return [
                line.split()[2]
                for line in self.queries.read_text().splitlines()
                if line.count(" ") > 1
            ]
        return []

    def dig(self, name: str, server: str = SERVICE, *, where: str = "", tcp: bool = False) -> str:
        """Address and TTL, "" where there is no answer. TTL 300 is the backend's own answer."""
        out = sh(
            f"ip netns exec {where or self.pod} dig +noall +answer +time=1 +tries=1"
            f" {'+tcp' if tcp else '+notcp'} @{server} {name}",
            check=False,
        )
        found = re.search(r"\s(\d+)\s+IN\s+\S+\s+(\S+)", out)
        return f"{found[2]} {found[1]}" if found else ""

    def by_cache(self, server: str = SERVICE, **how: object) -> bool:
        """Whether a pod's question is answered by the node's cache (which shortens TTLs)."""
        answer = self.dig(f"n{next(_numbers)}.cluster.local", server, **how)  # type: ignore[arg-type]
        return bool(answer) and int(answer.split()[1]) <= 30

    def by_cluster(self, server: str = SERVICE, **how: object) -> bool:
        answer = self.dig(f"n{next(_numbers)}.cluster.local", server, **how)  # type: ignore[arg-type]
        return answer.endswith(" 300")

    def rules(self, tool: str = "iptables") -> list[str]:
        """Rules of ours in the kernel."""
        found = self.on_node(f"{tool}-save")
        if tool == "iptables":
            found += self.on_node("nft list ruleset inet", check=False)
        return [line for line in found.splitlines() if "NodeLocal DNS Cache" in line]

    def has_link(self, name: str = LINK) -> bool:
        return name in sh(f"ip -n {self.node} -br link show")

    def servers(self, name: str = "unbound") -> list[int]:
        """Pids of DNS servers that run in the node."""
        found = []
        for pid in sh(f"ip netns pids {self.node}").split():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if any(word.endswith(name.encode()) for word in words[:2]):
                    found.append(int(pid))
        return found

    @contextlib.contextmanager
    def load(self, *names: str, server: str = SERVICE, rate: int = 200) -> Iterator[Load]:
        out = self.folder / f"load{next(_numbers)}.json"
        process = self.spawn(
            self.pod,
            [sys.executable, str(HERE / "load.py"), server, "53", str(rate), str(out),
             *(names or ("hot.cluster.local", "u%.cluster.local"))],
        )  # fmt: skip
        load = Load(out)
        try:
            until(Path(f"{out}.begun").exists)
            time.sleep(0.2)
            yield load
        finally:
            process.terminate()
            process.wait(10)
        load.read()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for name in (self.node, self.pod, self.backend):
            for pid in sh(f"ip netns pids {name}", check=False).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            sh(f"ip netns del {name}", check=False)


class Load:
    """What became of the questions of one load."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.questions: list[tuple[float, float | None, int | None]] = []

    def read(self) -> None:
        self.questions = json.loads(self.path.read_text())

    @property
    def lost(self) -> int:
        return sum(answered is None for _, answered, _ in self.questions)

    @property
    def gap(self) -> float:
        """Longest time, in seconds, in which no question that was sent got an answer."""
        sent = [s for s, answered, _ in self.questions if answered is not None]
        first, last = self.questions[0][0], self.questions[-1][0]
        moments = [first, *sent, last]
        return max(b - a for a, b in itertools.pairwise(moments))

    def by(self) -> dict[str, int]:
        """How many each of the two answered."""
        cache = sum(1 for _, _, ttl in self.questions if ttl is not None and ttl <= 30)
        cluster = sum(1 for _, _, ttl in self.questions if ttl is not None and ttl > 30)
        return {"cache": cache, "cluster": cluster}

    def __str__(self) -> str:
        return (
            f"{len(self.questions)} questions, {self.lost} lost, longest gap "
            f"{self.gap * 1000:.0f} ms, answered by {self.by()}"
        )


class Agent:
    """The agent as a process on the node."""

    def __init__(
        self, cluster: Cluster, ips: str, flags: tuple[str, ...], command: list[str]
    ) -> None:
        self.cluster = cluster
        self.log = cluster.folder / f"agent{next(_numbers)}.log"
        argv = [
            *("-localip", ips, "-interfacekind", "ifb", "-upstreamsvc", "kube-dns-upstream"),
            *("-conf", str(cluster.folder / "Corefile"), "-basecorefile", str(cluster.template)),
            *("-kubednscm", str(cluster.kubedns)),
            *flags,
        ]
        self.process = cluster.spawn(
            cluster.node,
            [*command, *argv],
            stderr=self.log.open("w"),
            stdout=subprocess.DEVNULL,
            env=os.environ | cluster.environment,
        )

    def said(self, text: str) -> bool:
        return text in self.log.read_text()

    def serving(self, seconds: float = 15) -> Agent:
        """Wait until the rules are in."""
        self._wait(lambda: self.said("-> serving"), seconds)
        return self

    def _wait(self, what: Callable[[], bool], seconds: float) -> None:
        with contextlib.suppress(AssertionError):
            until(lambda: what() or self.process.poll() is not None, seconds)
        assert what(), self.log.read_text()

    def stop(self, number: int = signal.SIGTERM, seconds: float = 20) -> int:
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def metric(self, name: str, port: int = 9353) -> float:
        """A sample's value; the name with its labels as the exposition has it."""
        page = self.cluster.on_node(
            f"curl --noproxy '*' -sS -m 10 http://127.0.0.1:{port}/metrics 2>&1", check=False
        )
        for line in page.splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[-1])
        raise AssertionError(f"no {name} in {page[:2000]}")
