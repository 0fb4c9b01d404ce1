"""cnitool: the reference library's own client, the release's and the newer one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.node import NODE4, NODE6, SAFE_PATH
from lab.stage import TYPE, mapping

from clients.conftest import newer
from clients.realnode import BIN, BUSYBOX, CACHE, ClientNode, eventually, rootfs

Done = subprocess.CompletedProcess[bytes]

CONFIG = "/run/net.d"
OLD, NEW = Path("bin/cnitool"), Path("bin/cnitool13")
PORTS = (mapping(8080, 80), mapping(8053, 53, "udp"))


class Tool:
    """cnitool with the configuration of one network."""

    def __init__(self, node: ClientNode, program: Path) -> None:
        self.node, self.program = node, str(program)

    def run(
        self, verb: str, pod: str = "pod", *mappings: Any
    ) -> subprocess.CompletedProcess[bytes]:
        """One command; its exit status is the caller's to judge."""
        env = {"PATH": SAFE_PATH, "CNI_PATH": BIN, "NETCONFPATH": CONFIG}
        env["CAP_ARGS"] = json.dumps({"portMappings": list(mappings or PORTS)})
        return self.node.run(
            self.program, verb, "testnet", f"/run/netns/{pod}", check=False, env=env
        )

    def do(self, verb: str, pod: str = "pod", *mappings: Any) -> bytes:
        """A command that must succeed."""
        done = self.run(verb, pod, *mappings)
        assert done.returncode == 0, done
        return done.stdout

    def refused(self, verb: str, pod: str = "pod", *mappings: Any) -> str:
        """The words of a command that must fail."""
        done = self.run(verb, pod, *mappings)
        assert done.returncode != 0, done
        return (done.stdout + done.stderr).decode()


@pytest.fixture(params=[OLD, NEW], ids=["cnitool", "cnitool13"])
def tool(request: pytest.FixtureRequest) -> Iterator[Tool]:
    """A node of its own for each test and tool."""
    program = CACHE / request.param if request.param == OLD else newer(str(request.param))
    if not program.exists():
        pytest.skip("no cnitool: run tests/clients/setup.sh")
    with ClientNode() as node:
        yield Tool(node, program)


def serve(node: ClientNode, pod: str) -> Any:
    """A web server in a named namespace; its page is the namespace's name."""
    page = node.path(f"/run/page-{pod}")
    rootfs(page, pod)
    return node.popen(BUSYBOX, "httpd", "-f", "-p", "80", "-h", f"/run/page-{pod}/www", netns=pod)


@pytest.mark.parametrize("version", ["0.4.0", "1.0.0"])
def test_a_pod_from_add_to_del(tool: Tool, version: str) -> None:
    node = tool.node
    node.conflist(f"{CONFIG}/10-test.conflist", version=version, dual=True)
    node.add_netns("pod")
    result = json.loads(tool.do("add"))
    assert result["cniVersion"] == version
    assert len(result["ips"]) == 2
    server = serve(node, "pod")
    tool.do("check")
    for host in (NODE4, NODE6):
        assert node.get(8080, host) == "pod"
    assert node.get(8080, at=None) == "pod"
    assert node.get(8080, "127.0.0.1", at=None) == "pod"
    assert node.get(8080, at="pod") == "pod"
    tool.do("del")
    assert node.closed(8080)
    tool.do("del")
    tool.refused("check")  # of bridge already: nothing is cached any more
    server.kill()
    node.nothing_left()


def test_the_second_pod_is_told_whose_port_it_is(tool: Tool) -> None:
    node = tool.node
    node.conflist(f"{CONFIG}/10-test.conflist", version="1.0.0")
    for pod in ("pod", "pod2"):
        node.add_netns(pod)
    tool.do("add")
    server = serve(node, "pod")
    words = tool.refused("add", "pod2")
    assert f'plugin type="{TYPE}" failed (add)' in words
    assert "8080/tcp" in words
    assert "by container cnitool-" in words
    assert "delete that pod, choose another hostPort" in words
    assert node.get(8080) == "pod"
    tool.do("del", "pod2")  # as a runtime does after a failed ADD
    assert node.get(8080) == "pod"
    tool.do("add", "pod2", mapping(8081, 80))
    assert node.host_ports() == [8053, 8080, 8081]
    tool.do("del", "pod2", mapping(8081, 80))
    tool.do("del")
    server.kill()
    node.nothing_left()


def test_a_process_of_the_host_is_named(tool: Tool) -> None:
    node = tool.node
    node.conflist(f"{CONFIG}/10-test.conflist", version="1.0.0")
    node.add_netns("pod")
    server = node.popen(BUSYBOX, "httpd", "-f", "-p", "8080", "-h", "/run")
    eventually(lambda: not node.closed(8080))
    words = tool.refused("add")
    assert "8080/tcp" in words
    assert "busybox" in words
    assert f"pid {inner_pid(node)}" in words
    assert node.mappings() == []
    for pid in node.pids("httpd"):
        os.kill(pid, signal.SIGKILL)
    server.wait()
    tool.do("del")
    node.nothing_left()


def inner_pid(node: ClientNode) -> int:
    """The web server's process id as the node's own pid namespace numbers it."""
    (pid,) = node.pids("httpd")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("NSpid")).split()[-1])


def test_a_pod_whose_namespace_vanished(tool: Tool) -> None:
    node = tool.node
    node.conflist(f"{CONFIG}/10-test.conflist", version="1.0.0")
    node.add_netns("pod")
    node.add_netns("next")
    tool.do("add")
    node.delete_netns("pod")
    tool.do("add", "next")  # the owner is gone: its port is free
    server = serve(node, "next")
    assert node.get(8080) == "next"
    tool.run("del")  # bridge may object; the port stays the new pod's
    assert node.get(8080) == "next"
    tool.do("del", "next")
    server.kill()
    assert node.mappings() == []


# -- CNI 1.1 --------------------------------------------------------------------------------------


@pytest.fixture
def tool13() -> Iterator[Tool]:
    """The newer tool, with plugins that speak 1.1.0."""
    program = newer("bin/cnitool13")
    with ClientNode([str(newer("new/containernetworking-plugins/usr/lib/cni"))]) as node:
        node.conflist(f"{CONFIG}/10-test.conflist", version="1.1.0")
        yield Tool(node, program)


def test_status_and_gc(tool13: Tool) -> None:
    node = tool13.node
    assert tool13.do("status") == b""
    assert len(node.helpers()) == 1
    for pod in ("pod", "pod2"):
        node.add_netns(pod)
    assert json.loads(tool13.do("add"))["cniVersion"] == "1.1.0"
    tool13.do("add", "pod2", mapping(8081, 80))
    tool13.do("check")
    tool13.do("status")
    node.delete_netns("pod")
    # cnitool passes no list: libcni first sends DEL for every attachment that it remembers
    assert tool13.do("gc") == b""
    assert node.host_ports() == []
    tool13.do("gc")
    tool13.do("status")


def test_status_tells_why_not(tool13: Tool) -> None:
    node = tool13.node
    node.path("/run/cni-hostport").symlink_to("/run/lock")
    words = tool13.refused("status")
    assert "/run/cni-hostport" in words
    assert node.helpers() == []
