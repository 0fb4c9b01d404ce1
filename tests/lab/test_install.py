"""``install``, upgrade and ``uninstall`` of the real bundle on a node of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.chain import Chain
from lab.node import NODE4
from lab.rivals import squatter
from lab.stage import BUNDLE, TYPE, Backend, Stage, bridge_entry, mapping
from lab.test_status import cli

CONF = "/etc/cni/net.d/10-pods.conflist"
PLUGIN = "/opt/cni/bin/cni-hostport"
ODD = """{
   "name":"pods", "cniVersion" : "1.0.0",
\t"plugins": [ %s,
      {"type":"portmap" ,  "snat":true, "capabilities":{"portMappings" : true}, "vendor":1.50}
   ]}"""

# Tries every way to have the port, without a pause, until its stdin ends.
RIVAL = """
import select, socket, sys
won = tried = 0
def attempt(family, kind, address, reuse):
    with socket.socket(family, kind) as s:
        for option in reuse:
            s.setsockopt(socket.SOL_SOCKET, option, 1)
        if family == socket.AF_INET6:
            s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            s.bind((address, 8080))
            if kind == socket.SOCK_STREAM:
                s.listen()
        except OSError:
            return 0
        return 1
ways = [(f, k, a, r) for f, a in ((2, "0.0.0.0"), (2, "127.0.0.1"), (10, "::"), (10, "::1"))
        for k in (socket.SOCK_STREAM, socket.SOCK_DGRAM)
        for r in ((), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,))]
print("ready", flush=True)
while not select.select([0], [], [], 0)[0]:
    for way in ways:
        won += attempt(*way)
        tried += 1
print(won, tried, flush=True)
"""


def own_files(stage: Stage) -> None:
    """Give the node an /opt, /etc and /usr/local of its own, without CNI in them."""
    run = stage.node.run
    for folder in ("opt", "etc", "usr/local"):
        run("mkdir", "-p", f"/run/own/{folder}/up", f"/run/own/{folder}/work")
        options = f"lowerdir=/{folder},upperdir=/run/own/{folder}/up"
        options += f",workdir=/run/own/{folder}/work"
        run("mount", "-t", "overlay", "overlay", "-o", options, f"/{folder}")
    run("rm", "-rf", "/etc/cni/net.d", "/opt/cni", "/opt/cni-hostport", f"/usr/local/bin/{TYPE}")
    run("mkdir", "-p", "/etc/cni/net.d")


@pytest.fixture
def node(backend: Backend) -> Iterator[Stage]:
    """A stage whose /opt, /etc and /usr/local are its own."""
    if BUNDLE.name != TYPE or not (BUNDLE.parent / "cni-hostport-helper").exists():
        pytest.skip(f"no bundle at {BUNDLE}")
    stage = Stage(backend)
    try:
        own_files(stage)
        yield stage
    finally:
        stage.close()


def write(stage: Stage, path: str, text: str) -> None:
    stage.node.run("sh", "-c", f"cat > {path}", data=text.encode())


def text_of(stage: Stage, path: str) -> str:
    return stage.node.output("cat", path)


def exists(stage: Stage, path: str) -> bool:
    return stage.node.run("test", "-e", path, check=False).returncode == 0


def tree(stage: Stage) -> str:
    """Every file that an installation may touch, with content and time of change."""
    script = "find /etc/cni /opt /usr/local/bin /etc/systemd -printf '%p %l %T@ %s\\n' | sort"
    return stage.node.output("sh", "-c", script)


def newer(stage: Stage) -> str:
    """Another build of the bundle, somewhere else on the node."""
    target = stage.node.path("/run/newer")
    shutil.copytree(BUNDLE.parent, target, symlinks=True)
    (target / "_internal" / "newer").write_text("a file that the other one has not\n")
    return "/run/newer"


def conflist(stage: Stage) -> str:
    text = ODD % json.dumps(bridge_entry())
    write(stage, CONF, text)
    stage.node.run("chmod", "640", CONF)
    return text


def test_install_and_uninstall_leave_the_node_as_it_was(node: Stage) -> None:
    text = conflist(node)
    before = tree(node)
    dry = cli(node, "install", "--replace-portmap", "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert '-      {"type":"portmap" ,  "snat":true' in dry.stdout
    assert '+      {"type":"cni-hostport" ,  "snat":true' in dry.stdout
    assert tree(node) == before, "a dry run changes nothing"

    done = cli(node, "install", "--replace-portmap")
    assert done.returncode == 0, done.stderr + done.stdout
    assert text_of(node, CONF) == text.replace("portmap", "cni-hostport")
    assert node.node.output("stat", "-c", "%a", CONF) == "640\n"
    assert text_of(node, CONF + ".before-cni-hostport") == text
    target = node.node.output("readlink", PLUGIN).strip()
    assert target == "/opt/cni-hostport/0.1.0/cni-hostport"
    assert cli(node, "version").returncode == 0
    assert node.node.output("/usr/local/bin/cni-hostport", "version").startswith("cni-hostport")

    state = tree(node)
    again = cli(node, "install", "--replace-portmap")
    assert (again.returncode, again.stdout) == (0, "nothing to do\n")
    assert tree(node) == state, "the same command again changes nothing"

    back = cli(node, "uninstall")
    assert back.returncode == 0, back.stderr
    assert text_of(node, CONF) == text
    assert not exists(node, PLUGIN)
    assert not exists(node, "/opt/cni-hostport")
    assert not exists(node, CONF + ".before-cni-hostport")
    assert not exists(node, "/run/cni-hostport")


def test_an_installed_plugin_serves_and_an_upgrade_leaves_no_port_free(
    node: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    conflist(node)
    assert cli(node, "install", "--replace-portmap").returncode == 0
    found = node.runtime.binary  # it looks from outside, where an absolute link leads elsewhere
    monkeypatch.setattr(node.runtime, "binary", lambda n: PLUGIN if n == TYPE else found(n))
    chain = Chain(node.runtime, json.loads(text_of(node, CONF)))
    pod = node.pod("web", [mapping(8080, 80), mapping(8080, 80, "udp")], network=chain)
    assert node.ask(NODE4, 8080).server == "web"
    (old,) = node.node.helpers()

    rival = node.node.popen(
        "/usr/bin/python3", "-I", "-S", "-c", RIVAL, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert rival.stdout is not None
    assert rival.stdout.readline() == b"ready\n"
    done = node.node.run(f"{newer(node)}/cni-hostport", "install", "--replace-portmap")
    out, _ = rival.communicate(b"x")
    won, tried = map(int, out.split())
    assert b"helper --replace" in done.stdout
    assert (won, tried > 1000) == (0, True), (won, tried)
    (new,) = node.node.helpers()
    assert new != old
    program = Path(f"/proc/{new}/exe").readlink().name
    assert program == "cni-hostport-helper"
    assert "0.1.0+" in node.node.output("readlink", PLUGIN)
    assert node.ask(NODE4, 8080).server == "web"
    assert (
        node.call("CHECK", chain.config(chain.entry(TYPE), pod.at, pod.at.result), pod.at).status
        == 0
    )
    print(f"bind attempts during the upgrade: {tried}, won: {won}")

    # pods still need us: the conflist goes back, the rest stays
    left = node.node.run("/usr/local/bin/cni-hostport", "uninstall", check=False)
    assert left.returncode == 1
    assert b"still has host ports: shop/web" in left.stderr
    assert "portmap" in text_of(node, CONF)
    assert node.ask(NODE4, 8080).server == "web"
    node.remove(pod)
    gone = node.node.run("/usr/local/bin/cni-hostport", "uninstall")
    assert gone.returncode == 0
    assert not node.node.helpers()
    assert not exists(node, "/run/cni-hostport")
    assert "hostport-manager" not in node.node.ruleset()


def test_force_cuts_the_ports_of_running_pods(node: Stage) -> None:
    conflist(node)
    assert cli(node, "install", "--replace-portmap").returncode == 0
    node.pod("web", [mapping(8080, 80)])
    assert cli(node, "uninstall", "--force").returncode == 0
    assert not node.node.helpers()
    assert "hostport-manager" not in node.node.ruleset()
    assert node.ask(NODE4, 8080).refused_at_once()


@pytest.mark.parametrize(
    ("address", "port", "protocol"),
    [("0.0.0.0", 8080, "tcp"), ("127.0.0.53", 53, "udp")],
    ids=["a process", "as systemd-resolved"],
)
def test_conflicts_are_told_before(node: Stage, address: str, port: int, protocol: Any) -> None:
    conflist(node)
    chain = Chain(node.runtime, json.loads(text_of(node, CONF)))
    at = node.attachment("web", [mapping(port, 80, protocol)])
    chain.add(at)
    entry = {
        "kind": "cniCacheV1",
        "containerId": at.container_id,
        "networkName": "pods",
        "capabilityArgs": at.capability_args,
    }
    node.node.run("mkdir", "-p", "/var/lib/cni/results")
    write(node, f"/var/lib/cni/results/pods-{at.container_id}-eth0", json.dumps(entry))
    with squatter(node.node, address, port, protocol) as process:
        shown = cli(node, "install", "--replace-portmap", "--dry-run").stdout
    assert f"(pid {process.pid}) listens on {address}:{port}/{protocol}" in shown
    for way in ("hostIP", "nodeAddresses", "reservePorts"):
        assert way in shown
    assert "conflict" not in cli(node, "install", "--replace-portmap", "--dry-run").stdout
    chain.delete(at)


def test_a_node_without_portmap_is_told_so(node: Stage) -> None:
    before = tree(node)
    done = cli(node, "install", "--replace-portmap")
    assert done.returncode == 1
    assert "no conflist names portmap; looked in /etc/cni/net.d" in done.stderr
    assert tree(node) == before
    write(node, CONF, "{")
    done = cli(node, "install", "--conflist", CONF)
    assert done.returncode == 1
    assert "no network configuration" in done.stderr
    assert cli(node, "install", "--conflist", "relative").returncode == 2


def test_below_a_mounted_root(node: Stage) -> None:
    """As a container does it: the node's file system is somewhere else."""
    conflist(node)
    node.node.run("mkdir", "-p", "/run/host/opt", "/run/host/usr/lib", "/run/host/usr/local/bin")
    node.node.run("cp", "-a", "/etc/cni", "/run/host/")
    node.node.run("mkdir", "-p", "/run/host/etc")
    node.node.run("mv", "/run/host/cni", "/run/host/etc/")
    refused = cli(node, "install", "--root", "/run/host", "--replace-portmap")
    assert refused.returncode == 1
    assert "this node has no glibc" in refused.stderr
    libc = (
        "printf 'GNU C Library (Old) stable release version 2.%s.\\n' > /run/host/usr/lib/libc.so.6"
    )
    node.node.run("sh", "-c", libc % "31")
    refused = cli(node, "install", "--root", "/run/host", "--replace-portmap")
    assert "this node has 2.31" in refused.stderr
    node.node.run("sh", "-c", libc % "99")
    done = cli(node, "install", "--root", "/run/host", "--replace-portmap")
    assert done.returncode == 0, done.stderr
    link = node.node.output("readlink", "/run/host" + PLUGIN).strip()
    assert link == "/opt/cni-hostport/0.1.0/cni-hostport", "as the node sees it"
    assert exists(node, "/run/host" + link)
    assert "cni-hostport" in text_of(node, "/run/host" + CONF)
    assert "portmap" in text_of(node, CONF)
    assert cli(node, "uninstall", "--root", "/run/host").returncode == 0
    assert not exists(node, "/run/host/opt/cni-hostport")


SYSTEMCTL = """#!/bin/sh
echo "$*" >> /run/systemctl.log
case "$1" in is-enabled) test -e /run/enabled && echo enabled || { echo disabled; exit 1; } ;;
enable) touch /run/enabled ;; esac
"""


def test_with_systemd_the_unit_is_enabled_and_restarted(node: Stage) -> None:
    node.node.run("mkdir", "-p", "/run/systemd/system")
    node.node.run("mkdir", "/run/fake")
    write(node, "/run/fake/systemctl", SYSTEMCTL)
    node.node.run("chmod", "755", "/run/fake/systemctl")
    fake = "/run/fake:/usr/sbin:/usr/bin"
    assert cli(node, "install", "--bin-dir", "/opt/other", PATH=fake).returncode == 0
    unit = text_of(node, "/etc/systemd/system/cni-hostport.service")
    assert "ExecStart=/opt/other/cni-hostport helper --replace\n" in unit
    said = text_of(node, "/run/systemctl.log").splitlines()
    assert [w.split()[0] for w in said if "is-" not in w] == ["daemon-reload", "enable", "restart"]
    node.node.run("rm", "/run/systemctl.log")
    assert cli(node, "uninstall", PATH=fake).returncode == 0
    assert "disable --now" in text_of(node, "/run/systemctl.log")
    assert not exists(node, "/etc/systemd/system/cni-hostport.service")
    assert not exists(node, "/opt/other/cni-hostport")
