"""podman 4 with the CNI backend: containers, pods, and its own reservation of ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from lab.node import NODE4, NODE4_SECOND, SAFE_PATH
from lab.stage import TYPE

from clients.realnode import BIN, ClientNode, eventually, rootfs

WORK = "/run/pm"
IMAGE = "localhost/tiny:latest"
SERVE = ("/bin/httpd", "-f", "-p", "80", "-h", "/www")
PAGE = "served by a container"

# cgroups: crun works without any, so that no layout of the machine matters
CONTAINERS = f"""
[network]
network_backend = "cni"
cni_plugin_dirs = ["{BIN}"]
network_config_dir = "{WORK}/net.d"
default_network = "testnet"
[engine]
cgroup_manager = "cgroupfs"
runtime = "crun"
events_logger = "none"
hooks_dir = ["{WORK}/hooks"]
enable_port_reservation = %s
[containers]
cgroups = "disabled"
log_driver = "k8s-file"
seccomp_profile = "unconfined"
"""
STORAGE = f"""
[storage]
driver = "vfs"
graphroot = "{WORK}/root"
runroot = "{WORK}/runroot"
"""


class Podman:
    """podman on a node, offline, with one image that serves a page."""

    def __init__(self, node: ClientNode) -> None:
        self.node = node
        work = node.path(WORK)
        for name in ("net.d", "hooks", "tmp"):
            (work / name).mkdir(parents=True)
        (work / "storage.conf").write_text(STORAGE)
        (work / "policy.json").write_text('{"default":[{"type":"insecureAcceptAnything"}]}')
        self.configure(reserve="require", podman_reserves=False)
        rootfs(work / "rootfs", PAGE)
        layer = node.run("tar", "-C", f"{WORK}/rootfs", "-c", ".").stdout
        self.do("import", "-q", "-", IMAGE, data=layer)

    def configure(self, *, reserve: str, podman_reserves: bool) -> None:
        """Who reserves ports: ``reservePorts`` of the plugin, and podman itself or not."""
        text = CONTAINERS % ("true" if podman_reserves else "false")
        self.node.path(f"{WORK}/containers.conf").write_text(text)
        path = f"{WORK}/net.d/87-testnet.conflist"
        self.node.conflist(path, version="0.4.0", reservePorts=reserve)

    def call(self, *argv: str, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        """One command; its exit status is the caller's to judge."""
        env = {
            "PATH": SAFE_PATH,
            "CONTAINERS_CONF": f"{WORK}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{WORK}/storage.conf",
            "TMPDIR": f"{WORK}/tmp",
        }
        return self.node.run(
            "podman", "--tmpdir", f"{WORK}/libpod", *argv, check=False, data=data, env=env
        )

    def do(self, *argv: str, data: bytes = b"") -> str:
        """A command that must succeed."""
        done = self.call(*argv, data=data)
        assert done.returncode == 0, done
        return done.stdout.decode().strip()

    def refused(self, *argv: str) -> str:
        """The words of a command that must fail."""
        done = self.call(*argv)
        assert done.returncode != 0, done
        return done.stderr.decode()

    def web(self, name: str, *options: str) -> str:
        """Run a container that serves the page on 80."""
        return self.do("run", "-d", "--name", name, *options, IMAGE, *SERVE)


@pytest.fixture(scope="module")
def podman(node: ClientNode) -> Podman:
    """One node with podman for all tests of this file."""
    return Podman(node)


@pytest.fixture(autouse=True)
def clean(podman: Podman) -> Iterator[None]:
    """Each test ends without containers, ports, or anything in the kernel."""
    podman.configure(reserve="require", podman_reserves=False)
    yield
    podman.do("pod", "rm", "-f", "-t", "0", "-a")
    podman.do("rm", "-f", "-t", "0", "-a")
    podman.node.nothing_left()


def test_run_stop_start_and_remove(podman: Podman) -> None:
    node = podman.node
    name = podman.web("web", "-p", "8080:80", "-p", "8053:53/udp", "-p", "8006:6/sctp")
    assert node.get(8080) == PAGE
    assert node.host_ports() == [8006, 8053, 8080]
    (web,) = {m["containerID"] for m in node.mappings()}
    assert web == name
    assert {m["pod"] for m in node.mappings()} == {"web"}
    podman.do("stop", "-t", "0", "web")
    assert node.closed(8080)
    assert node.host_ports() == []
    podman.do("start", "web")
    assert node.get(8080) == PAGE
    podman.do("restart", "-t", "0", "web")
    assert node.get(8080) == PAGE
    podman.do("rm", "-f", "-t", "0", "web")
    assert node.closed(8080)


def test_kill_and_an_end_of_its_own(podman: Podman) -> None:
    """The clean-up DEL comes from conmon, in an environment of its own."""
    node = podman.node
    podman.web("web", "-p", "8080:80")
    assert node.get(8080) == PAGE
    podman.do("kill", "web")
    eventually(lambda: node.host_ports() == [])
    podman.do("run", "-d", "--name", "short", "-p", "8081:80", IMAGE, "/bin/sleep", "1")
    eventually(lambda: node.host_ports() == [])
    assert podman.do("run", "--rm", "-p", "8082:80", IMAGE, "/bin/echo", "one shot") == "one shot"
    eventually(lambda: node.host_ports() == [])


def test_host_addresses_and_ranges(podman: Podman) -> None:
    node = podman.node
    podman.web("web", "-p", f"{NODE4}:8080:80", "-p", "9000-9002:79-81", "-p", "127.0.0.1:8081:80")
    assert node.get(8080) == PAGE
    assert node.get(9001) == PAGE
    assert node.closed(8080, NODE4_SECOND)
    assert node.closed(8081)
    assert node.get(8081, "127.0.0.1", at=None) == PAGE
    assert node.host_ports() == [8080, 8081, 9000, 9001, 9002]


def test_network_reload(podman: Podman) -> None:
    node = podman.node
    podman.web("web", "-p", "8080:80")
    assert node.get(8080) == PAGE
    podman.do("network", "reload", "web")
    assert node.get(8080) == PAGE
    assert node.host_ports() == [8080]


def test_pod(podman: Podman) -> None:
    node = podman.node
    infra = ("--infra-image", IMAGE, "--infra-command", "/bin/sleep 100000")
    podman.do("pod", "create", "--name", "p1", "-p", "8080:80", *infra)
    podman.do("run", "-d", "--pod", "p1", "--name", "web", IMAGE, *SERVE)
    assert node.get(8080) == PAGE
    podman.do("pod", "stop", "-t", "0", "p1")
    assert node.closed(8080)
    podman.do("pod", "start", "p1")
    assert node.get(8080) == PAGE


def test_the_second_container_is_told_whose_port_it_is(podman: Podman) -> None:
    node = podman.node
    first = podman.web("web", "-p", "8080:80")
    words = podman.refused("run", "-d", "--name", "late", "-p", "8080:80", IMAGE, *SERVE)
    assert f'plugin type="{TYPE}" failed (add)' in words
    assert "8080/tcp" in words
    assert "pod web (network testnet" in words
    assert first[:12] in words
    assert "choose another hostPort" in words
    assert node.get(8080) == PAGE
    assert node.host_ports() == [8080]
    podman.do("rm", "-f", "-t", "0", "late")
    assert node.get(8080) == PAGE


def test_a_process_of_the_host_is_named(podman: Podman) -> None:
    node = podman.node
    server = node.popen("/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/run")
    eventually(lambda: not node.closed(8080))
    words = podman.refused("run", "-d", "--name", "late", "-p", "8080:80", IMAGE, *SERVE)
    assert "8080/tcp" in words
    assert "busybox" in words
    for pid in node.pids("httpd"):
        os.kill(pid, signal.SIGKILL)
    server.wait()


def test_a_killed_helper_is_replaced(podman: Podman) -> None:
    node = podman.node
    podman.web("web", "-p", "8080:80")
    (helper,) = node.helpers()
    os.kill(helper, signal.SIGKILL)
    eventually(lambda: not node.helpers())
    assert node.get(8080) == PAGE
    podman.do("rm", "-f", "-t", "0", "web")
    assert node.closed(8080)


# -- podman's own reservation: enable_port_reservation, on by default for root ---------------------


def test_both_reserve(podman: Podman) -> None:
    """podman 4 binds after ADD: its own error, and nothing of the container is left."""
    podman.configure(reserve="require", podman_reserves=True)
    words = podman.refused("run", "-d", "--name", "web", "-p", "8080:80", IMAGE, *SERVE)
    assert "8080" in words
    assert "address already in use" in words
    assert podman.node.closed(8080)
    podman.do("rm", "-f", "-t", "0", "web")
    assert podman.node.host_ports() == []


def test_podman_alone_reserves(podman: Podman) -> None:
    """``reservePorts: no``: podman's sockets hold the port, our rules carry the traffic."""
    node = podman.node
    podman.configure(reserve="no", podman_reserves=True)
    podman.web("web", "-p", "8080:80")
    assert node.get(8080) == PAGE
    assert [m["held"] for m in node.mappings()] == ["no"]
    words = podman.refused("run", "-d", "--name", "late", "-p", "8080:80", IMAGE, *SERVE)
    assert "8080/tcp" in words
    assert "pod web (network testnet" in words
    assert node.get(8080) == PAGE
    podman.do("rm", "-f", "-t", "0", "web", "late")
    assert node.closed(8080)


def test_nobody_asks_for_more_than_it_needs(podman: Podman) -> None:
    """podman asks VERSION for every plugin of every network; that starts no helper."""
    for pid in podman.node.helpers():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not podman.node.helpers())
    names = json.loads(podman.do("network", "ls", "--format", "json"))
    assert [network["name"] for network in names] == ["testnet"]
    assert podman.node.helpers() == []


def test_a_container_on_two_networks_publishes_once(podman: Podman) -> None:
    """podman passes the ports to every network; the others take them up when the first goes."""
    node = podman.node
    text = node.path(f"{WORK}/net.d/87-testnet.conflist").read_text()
    for first_one, second_one in (("testnet", "second"), ("cni0", "cni1"), ("10.89.7", "10.89.8")):
        text = text.replace(first_one, second_one)
    node.path(f"{WORK}/net.d/88-second.conflist").write_text(text)
    podman.web("web", "-p", "8080:80", "--network", "testnet,second")
    assert node.get(8080) == PAGE
    held = sorted((m["network"], m["held"]) for m in node.mappings())
    assert sorted(how for _, how in held) == ["yes", "yielded"]
    (first,) = (network for network, how in held if how == "yes")
    (left,) = {"testnet", "second"} - {first}
    podman.do("network", "disconnect", first, "web")
    assert [(m["network"], m["held"]) for m in node.mappings()] == [(left, "yes")]
    podman.do("rm", "-f", "-t", "0", "web")
    assert node.closed(8080)
