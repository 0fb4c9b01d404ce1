"""containerd's CRI, as kubelet drives it: the release's version and 2.x with CNI 1.1."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.node import NODE4, NODE4_SECOND, NODE6, NODE6_SECOND, SAFE_PATH
from lab.stage import TYPE, mapping

from clients.conftest import newer
from clients.cri import Cri, Refused, Sandbox, image_archive
from clients.realnode import BIN, SYSTEM_BIN, ClientNode, eventually, rootfs

WORK = "/run/cd"
IMAGE = "localhost/pause:1"
PAGE = "served by a pod"
ANNOTATION = "hostport.example.com/mappings"

COMMON = f"""
root = "{WORK}/root"
state = "{WORK}/state"
oom_score = 0
[grpc]
  address = "{WORK}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{WORK}/opt"
"""
CONFIG_2 = f"""version = 2
{COMMON}
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{IMAGE}"
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{BIN}"
    conf_dir = "{WORK}/net.d"
    max_conf_num = 1
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""
CONFIG_3 = f"""version = 3
{COMMON}
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
  use_local_image_pull = true
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{IMAGE}"
[plugins."io.containerd.grpc.v1.cri"]
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
[plugins."io.containerd.cri.v1.runtime"]
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{BIN}"]
    conf_dir = "{WORK}/net.d"
    max_conf_num = 1
  [plugins."io.containerd.cri.v1.runtime".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


class Containerd:
    """containerd on a node, offline, with one image."""

    def __init__(self, node: ClientNode, folder: str, config: str, version: str) -> None:
        self.node, self.folder = node, folder
        self.path = SAFE_PATH if folder == "/usr/bin" else f"{folder}:{SAFE_PATH}"
        work = node.path(WORK)
        (work / "net.d").mkdir(parents=True)
        (work / "config.toml").write_text(config)
        node.conflist(
            f"{WORK}/net.d/10-test.conflist",
            version=version,
            dual=True,
            capabilities={"portMappings": True, "io.kubernetes.cri.pod-annotations": True},
            portMappingsAnnotation=ANNOTATION,
        )
        rootfs(work / "rootfs", PAGE)
        (work / "image.tar").write_bytes(image_archive(work / "rootfs", IMAGE))
        self.start()
        # 2.x would unpack through a service that knows the default snapshotter only
        local = () if folder == "/usr/bin" else ("--local",)
        self.ctr("images", "import", *local, "--snapshotter", "native", f"{WORK}/image.tar")

    def ctr(self, *argv: str) -> None:
        socket = f"{WORK}/containerd.sock"
        self.node.run(f"{self.folder}/ctr", "-a", socket, "-n", "k8s.io", *argv)

    def start(self) -> None:
        """Start the daemon and wait until it answers."""
        config = f"{WORK}/config.toml"
        self.daemon = self.node.daemon(
            f"{self.folder}/containerd",
            "--config",
            config,
            log=f"{WORK}/log",
            env={"PATH": self.path, "NOTIFY_SOCKET": "/run/nobody"},
        )
        address = self.node.path(f"{WORK}/containerd.sock")
        eventually(address.exists, 20)
        self.cri = Cri(str(address), self.node.cgroup)
        eventually(self.answers, 20)

    def answers(self) -> bool:
        """Whether it serves: it listens some time before."""
        try:
            self.cri.sandboxes()
        except Refused:
            return False
        return True

    def kill(self) -> None:
        """End the daemon as a crash does."""
        self.cri.close()
        for pid in self.node.pids("containerd"):
            os.kill(pid, signal.SIGKILL)
        self.daemon.wait()
        self.node.path(f"{WORK}/containerd.sock").unlink()

    def web(self, name: str, *ports: str) -> Sandbox:
        """A pod that serves the page on 80."""
        pod = self.cri.run(name, *ports)
        self.cri.container(pod, IMAGE, "/bin/httpd", "-f", "-p", "80", "-h", "/www")
        return pod


@pytest.fixture(scope="module", params=["1.6", "2.x"])
def engine(request: pytest.FixtureRequest) -> Iterator[Containerd]:
    """One node with that containerd for all tests of this file."""
    if request.param == "1.6":
        with ClientNode() as node:
            yield Containerd(node, "/usr/bin", CONFIG_2, "1.0.0")
        return
    folder = newer("new/containerd/usr/bin")
    plugins = str(newer("new/containernetworking-plugins/usr/lib/cni"))
    with ClientNode([SYSTEM_BIN, plugins]) as node:
        yield Containerd(node, str(folder), CONFIG_3, "1.1.0")


@pytest.fixture(autouse=True)
def clean(engine: Containerd) -> Iterator[None]:
    """Each test ends without sandboxes, ports, or anything in the kernel."""
    yield
    for sandbox in engine.cri.sandboxes():
        engine.cri.stop(sandbox)
        engine.cri.remove(sandbox)
    engine.node.nothing_left()


def test_a_pod_with_every_protocol(engine: Containerd) -> None:
    node, runtime = engine.node, engine.cri
    pod = engine.web("web", "8080:80", "8053:53/udp", "8006:6/sctp", "0:81")
    for host in (NODE4, NODE6):
        assert node.get(8080, host) == PAGE
    assert node.get(8080, "127.0.0.1", at=None) == PAGE
    found = {(m["hostPort"], m["protocol"], m["pod"], m["namespace"]) for m in node.mappings()}
    assert found == {
        (p, t, "web", "shop") for p, t in ((8080, "tcp"), (8053, "udp"), (8006, "sctp"))
    }
    assert {m["containerID"] for m in node.mappings()} == {pod.id}
    runtime.stop(pod.id)
    assert node.closed(8080)
    assert node.host_ports() == []
    runtime.stop(pod.id)
    runtime.remove(pod.id)
    runtime.remove(pod.id)


def test_host_addresses(engine: Containerd) -> None:
    node = engine.node
    pod = engine.web("web", f"{NODE4}:8080:80", f"[{NODE6}]:8081:80")
    other = engine.web("web2", f"{NODE4_SECOND}:8080:80")
    assert node.get(8080) == PAGE
    assert node.get(8080, NODE4_SECOND) == PAGE
    assert node.get(8081, NODE6) == PAGE
    assert node.closed(8081)
    assert node.closed(8081, NODE6_SECOND)
    assert node.closed(8080, NODE6)
    for sandbox in (pod, other):
        sandbox.end()


def test_the_second_pod_is_told_whose_port_it_is(engine: Containerd) -> None:
    node = engine.node
    first = engine.web("web", "8080:80")
    with pytest.raises(Refused) as refused:
        engine.cri.run("late", "8081:80", "8080:80")
    words = str(refused.value)
    assert f'plugin type="{TYPE}" failed (add)' in words
    assert "8080/tcp" in words
    assert f"pod shop/web (network testnet, container {first.id}" in words
    assert "delete that pod, choose another hostPort" in words
    assert node.get(8080) == PAGE
    assert node.host_ports() == [8080]
    for sandbox in set(engine.cri.sandboxes()) - {first.id}:
        engine.cri.stop(sandbox)
        engine.cri.remove(sandbox)
    assert node.get(8080) == PAGE
    first.end()
    engine.web("late", "8080:80").end()


def test_a_process_of_the_host_is_named(engine: Containerd) -> None:
    node = engine.node
    server = node.popen("/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/run")
    eventually(lambda: not node.closed(8080))
    with pytest.raises(Refused) as refused:
        engine.cri.run("late", "8080:80")
    assert "8080/tcp" in str(refused.value)
    assert "busybox" in str(refused.value)
    for pid in node.pids("httpd"):
        os.kill(pid, signal.SIGKILL)
    server.wait()


def test_the_daemon_is_killed_and_started_again(engine: Containerd) -> None:
    node = engine.node
    pod = engine.web("web", "8080:80")
    helpers = node.helpers()
    engine.kill()
    assert node.get(8080) == PAGE
    engine.start()
    assert node.get(8080) == PAGE
    assert node.helpers() == helpers
    engine.cri.stop(pod.id)
    assert node.closed(8080)
    engine.cri.remove(pod.id)


def test_the_pause_process_is_killed(engine: Containerd) -> None:
    """No runtime calls anything then; the port goes with StopPodSandbox."""
    node = engine.node
    pod = engine.cri.run("web", "8080:80")
    node.run("kill", "-KILL", str(engine.cri.pid(pod.id)))
    eventually(lambda: not engine.cri.ready(pod.id))
    assert node.host_ports() == [8080]
    engine.cri.stop(pod.id)
    assert node.host_ports() == []
    engine.cri.stop(pod.id)
    engine.cri.remove(pod.id)


def test_a_killed_helper_is_replaced(engine: Containerd) -> None:
    node = engine.node
    pod = engine.web("web", "8080:80")
    for pid in node.helpers():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not node.helpers())
    assert node.get(8080) == PAGE
    pod.end()
    assert node.closed(8080)


def test_ports_of_the_pods_annotation(engine: Containerd) -> None:
    """As CRI-O's pods must have them; containerd passes annotations in the same way."""
    node = engine.node
    wanted = {ANNOTATION: json.dumps([mapping(8080, 80)])}
    pod = engine.cri.run("web", annotations=wanted)
    engine.cri.container(pod, IMAGE, "/bin/httpd", "-f", "-p", "80", "-h", "/www")
    assert node.get(8080) == PAGE
    with pytest.raises(Refused) as refused:
        engine.cri.run("low", annotations={ANNOTATION: json.dumps([mapping(80, 80)])})
    assert ANNOTATION in str(refused.value)
    with pytest.raises(Refused) as refused:
        engine.cri.run("late", annotations=wanted)
    assert "pod shop/web" in str(refused.value)
    assert node.get(8080) == PAGE
    pod.end()


def test_network_ready(engine: Containerd) -> None:
    """containerd 2 asks STATUS for each of kubelet's questions; 1.6 does not know the verb."""
    node = engine.node
    assert engine.cri.network() == (True, " ")
    if engine.folder == "/usr/bin":
        return
    for pid in node.helpers():
        os.kill(pid, signal.SIGSTOP)
    ready, words = engine.cri.network()
    for pid in node.helpers():
        os.kill(pid, signal.SIGCONT)
    assert not ready
    assert "cni-hostport" in words
    eventually(lambda: engine.cri.network()[0])


def test_the_environment_is_containerds(engine: Containerd) -> None:
    """LD_LIBRARY_PATH and NOTIFY_SOCKET of the daemon do not reach the helper it started."""
    assert engine.cri.network()[0]
    pod = engine.cri.run("web", "8080:80")
    (daemon,) = engine.node.pids("containerd")
    assert b"NOTIFY_SOCKET" in Path(f"/proc/{daemon}/environ").read_bytes()
    for pid in engine.node.helpers():
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"NOTIFY_SOCKET" not in environ
        assert f"LD_LIBRARY_PATH={WORK}".encode() not in environ
    pod.end()
