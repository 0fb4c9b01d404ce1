"""Each thing the doctor finds, made for real on a node, and found."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.chain import Json
from lab.node import wait_for
from lab.rivals import squatter
from lab.stage import RUN_DIR, TOOLS, TYPE, Backend, Stage, mapping
from lab.test_install import exists, own_files, write
from lab.test_status import cli

CONF = "/etc/cni/net.d/10-pods.conflist"
PATH = "/run/fake:/usr/sbin:/usr/bin:/sbin:/bin"
ENTRY: Json = {"type": TYPE, "capabilities": {"portMappings": True}}
BRIDGE: Json = {"type": "bridge", "bridge": "cni0"}


@pytest.fixture(scope="module")
def node(backend: Backend) -> Iterator[Stage]:
    """One healthy node for all: plugin in place, conflist, a helper with a pod."""
    stage = Stage(backend)
    try:
        own_files(stage)
        stage.node.run("mkdir", "-p", "/opt/cni/bin", "/run/fake")
        stage.node.run("ln", "-s", f"{TOOLS}/{TYPE}", f"/opt/cni/bin/{TYPE}")
        conflist(stage, BRIDGE, ENTRY)
        stage.pod("web", [mapping(8080, 80)])
        yield stage
    finally:
        stage.close()


def conflist(stage: Stage, *plugins: Json, path: str = CONF) -> None:
    text = json.dumps({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins}, indent=1)
    write(stage, path, text)


def fake(stage: Stage, tool: str, script: str) -> None:
    """A program that is found before the node's own."""
    write(stage, f"/run/fake/{tool}", f"#!/bin/sh\n{script}\n")
    stage.node.run("chmod", "755", f"/run/fake/{tool}")


def doctor(stage: Stage, **env: str) -> dict[str, dict[str, Any]]:
    """Findings by id, and the exit status that goes with them."""
    done = cli(stage, "doctor", "--json", **{"PATH": PATH, **env})
    assert "Traceback" not in done.stderr, done.stderr
    answer = json.loads(done.stdout)
    wrong = [f for f in answer["findings"] if f["level"] != "info"]
    assert answer["ok"] == (not wrong)
    assert done.returncode == (1 if wrong else 0)
    return {f["id"]: f for f in answer["findings"]}


def test_a_healthy_node_has_nothing_to_mend(node: Stage) -> None:
    before = node.snapshot() | {"legacy": ""}
    found = doctor(node)
    assert {k: f for k, f in found.items() if f["level"] != "info"} == {}
    assert node.snapshot() | {"legacy": ""} == before, "looking changes nothing"
    text = cli(node, "doctor", PATH=PATH)
    assert text.stdout.endswith("nothing is wrong\n")


CONDITIONS: dict[str, tuple[str, str, str]] = {
    # finding: how it is made, how it is undone, what the text must name
    "no-nft": (
        "mount --bind /dev/null /usr/sbin/nft",
        "umount -l /usr/sbin/nft",
        "nft is not installed",
    ),
    "no-rule-tool": (
        "for t in nft xtables-nft-multi xtables-legacy-multi; do mount --bind /dev/null "
        "/usr/sbin/$t; done",
        "for t in nft xtables-nft-multi xtables-legacy-multi; do umount -l /usr/sbin/$t; done",
        "neither nft nor iptables is installed",
    ),
    "wrong-flavour": (
        "iptables-legacy -t nat -N KUBE-X",
        "iptables-legacy -t nat -X KUBE-X",
        "`iptables` is nf_tables",
    ),
    "two-flavours": (
        "iptables-legacy -t nat -N KUBE-X; iptables-nft -t nat -N CNI-X",
        "iptables-legacy -t nat -X KUBE-X; iptables-nft -t nat -X CNI-X",
        "both flavours",
    ),
    "forwarding-ipv4": (
        "echo 0 > /proc/sys/net/ipv4/ip_forward",
        "echo 1 > /proc/sys/net/ipv4/ip_forward",
        "does not forward IPv4",
    ),
    "forwarding-ipv6": (
        "echo 0 > /proc/sys/net/ipv6/conf/all/forwarding",
        "echo 1 > /proc/sys/net/ipv6/conf/all/forwarding",
        "does not forward IPv6",
    ),
    "br-netfilter": (
        "mount -t tmpfs tmpfs /proc/sys/net/bridge",
        "umount -l /proc/sys/net/bridge",
        "not loaded",
    ),
    "route-localnet": (
        "printf '# x\\nnet.ipv4.conf.all.route_localnet = 0\\n' > /etc/sysctl.d/x.conf",
        "rm /etc/sysctl.d/x.conf",
        "/etc/sysctl.d/x.conf line 2",
    ),
    "forward-drop": (
        "iptables-nft -P FORWARD DROP",
        "iptables-nft -P FORWARD ACCEPT",
        "policy of ip filter FORWARD is DROP",
    ),
    "portmap-rules": (
        "nft 'add table ip cni_hostport; add chain ip cni_hostport hostports'",
        "nft delete table ip cni_hostport",
        "rules of portmap",
    ),
    "crio-rules": (
        "nft 'add table ip crio-hostports; add chain ip crio-hostports hostports'",
        "nft delete table ip crio-hostports",
        "crio-hostports",
    ),
    "crio-manager": (
        "mkdir -p /run/crio /etc/crio; touch /run/crio/crio.sock; "
        "printf '[crio.runtime]\\ndisable_hostport_mapping = false\\n' > /etc/crio/crio.conf",
        "rm -r /run/crio /etc/crio",
        "/etc/crio/crio.conf line 2 says false",
    ),
    "podman-reserves": (
        "mkdir -p /etc/containers; "
        "printf '[network]\\nnetwork_backend = \"cni\"\\n' > /etc/containers/containers.conf",
        "rm /etc/containers/containers.conf",
        "podman run -p",
    ),
    "broken-conflist": (
        "echo '{' > /etc/cni/net.d/50-x.conf",
        "rm /etc/cni/net.d/50-x.conf",
        "/etc/cni/net.d/50-x.conf: no JSON",
    ),
    "portmap-active": (
        'printf \'{"name":"n","plugins":[{"type":"bridge"},\\n{"type":"portmap"}]}\''
        " > /etc/cni/net.d/05-x.conflist",
        "rm /etc/cni/net.d/05-x.conflist",
        "/etc/cni/net.d/05-x.conflist line 2",
    ),
    "plugin-missing": (
        "mv /opt/cni/bin/cni-hostport /run/away",
        "mv /run/away /opt/cni/bin/cni-hostport",
        "/opt/cni/bin/cni-hostport is missing",
    ),
    "damaged-record": (
        "touch /run/cni-hostport/records/aaaaaaaaaaaaaaaa.damaged",
        "rm /run/cni-hostport/records/aaaaaaaaaaaaaaaa.damaged",
        "aaaaaaaaaaaaaaaa.damaged",
    ),
}


@pytest.mark.parametrize("finding", CONDITIONS)
def test_a_condition_is_found_and_gone_when_undone(node: Stage, finding: str) -> None:
    make, undo, words = CONDITIONS[finding]
    if finding == "podman-reserves":
        fake(node, "podman", "exit 0")
    node.node.run("sh", "-ec", make)
    try:
        found = doctor(node)
    finally:
        node.node.run("sh", "-ec", undo)
    assert finding in found, sorted(found)
    assert words in found[finding]["text"]
    assert found[finding]["mend"]
    if finding != "podman-reserves":  # its default reserves as well
        assert finding not in doctor(node)


CONFLISTS: dict[str, tuple[tuple[Json, ...], str]] = {
    "no-capability": ((BRIDGE, {"type": TYPE}), "passes no host ports"),
    "plugin-order": ((ENTRY, BRIDGE), "before the plugin that gives the pod its address"),
    "portmap-twice": ((BRIDGE, {"type": "portmap"}, ENTRY), "map the same ports"),
    "bad-option": ((BRIDGE, {**ENTRY, "reservePorts": "never"}), "reservePorts"),
}


@pytest.mark.parametrize("finding", CONFLISTS)
def test_a_wrong_conflist_is_found(node: Stage, finding: str) -> None:
    plugins, words = CONFLISTS[finding]
    conflist(node, *plugins)
    try:
        found = doctor(node)
    finally:
        conflist(node, BRIDGE, ENTRY)
    assert found[finding]["level"] == "error"
    assert words in found[finding]["text"]
    assert f"{CONF} line " in found[finding]["text"]


@pytest.mark.parametrize(
    ("finding", "tool", "script", "words"),
    [
        (
            "kernel-nftables",
            "nft",
            '[ "$1" != -f ] || { echo Not supported >&2; exit 1; }; exec /usr/sbin/nft "$@"',
            "Not supported",
        ),
        (
            "old-nft",
            "nft",
            '[ "$1" != --version ] || { echo nftables v0.9.8; exit; }; exec /usr/sbin/nft "$@"',
            "0.9.8",
        ),
        ("nerdctl-reserves", "nerdctl", "echo nerdctl version 2.1.6", "nerdctl 2.1.6"),
    ],
)
def test_a_tool_that_is_not_what_it_should_be(
    node: Stage, finding: str, tool: str, script: str, words: str
) -> None:
    fake(node, tool, script)
    try:
        found = doctor(node)
    finally:
        node.node.run("rm", f"/run/fake/{tool}")
    assert words in found[finding]["text"]


def test_the_unit_and_the_labels(node: Stage) -> None:
    fake(node, "systemctl", "echo disabled; exit 1")
    line = "Would relabel /opt/cni/bin/cni-hostport from a:b:container_file_t:s0 to a:b:bin_t:s0"
    fake(node, "restorecon", f"echo {line}")
    make = "mkdir -p /run/systemd/system; mount -t tmpfs tmpfs /sys/fs; mkdir /sys/fs/selinux"
    node.node.run("sh", "-ec", f"{make}; echo 1 > /sys/fs/selinux/enforce")
    try:
        found = doctor(node)
    finally:
        node.node.run("sh", "-ec", "umount -l /sys/fs; rm -r /run/systemd /run/fake/*")
    assert "disabled" in found["unit-not-enabled"]["text"]
    assert found["unit-not-enabled"]["mend"] == "systemctl enable --now cni-hostport"
    assert "container_file_t" in found["selinux-label"]["text"]
    assert found["selinux-label"]["mend"] == "restorecon -R /opt/cni/bin/cni-hostport"


@pytest.mark.parametrize(
    ("release", "finding", "words"),
    [("5.4.0-1", "old-kernel", "5.4 numbers no"), ("6.1.0", "hidden-holders", "6.1 hides sockets")],
)
def test_an_old_kernel(node: Stage, release: str, finding: str, words: str) -> None:
    file = "/proc/sys/kernel/osrelease"
    write(node, "/run/osrelease", f"{release}\n")
    node.node.run("mount", "--bind", "/run/osrelease", file)
    try:
        found = doctor(node)
    finally:
        node.node.run("umount", "-l", file)
    assert words in found[finding]["text"]


def test_a_program_and_a_node_that_do_not_fit(node: Stage) -> None:
    """A newer program than the helper, on a node older than the installed bundle."""
    script = (
        "import cni_hostport; cni_hostport.__version__ = '9.9.9'\n"
        "from cni_hostport.host import glibc; glibc.of_node = lambda *_: (2, 20)\n"
        "from cni_hostport.cli import main; main.main(['doctor', '--json'])\n"
    )
    env = {"PATH": PATH, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = node.node.run(sys.executable, "-c", script, env=env)
    found = {f["id"]: f for f in json.loads(done.stdout)["findings"]}
    assert "the program is 9.9.9" in found["other-version"]["text"]
    assert found["other-version"]["mend"] == "cni-hostport install"
    assert "this node has 2.20" in found["glibc"]["text"]


def test_dels_that_cannot_be_done(node: Stage) -> None:
    pod = node.pod("stuck", [mapping(8084, 80)], serve=False)
    records = f"{RUN_DIR}/records"
    node.node.run("mount", "--bind", records, records)
    node.node.run("mount", "-o", "remount,bind,ro", records)
    try:
        assert node.call("DEL", node.config(pod), pod.at).status == 0
        found = doctor(node)
    finally:
        node.node.run("umount", "-l", records)
    assert "1 DELs wait" in found["queue"]["text"]
    assert wait_for(lambda: "queue" not in doctor(node), 60, 1.0)


def test_a_run_directory_that_a_reboot_keeps(node: Stage) -> None:
    found = doctor(node, CNI_HOSTPORT_RUN_DIR="/usr/nowhere/cni")
    assert "/usr/nowhere/cni" in found["run-dir-persistent"]["text"]
    assert "no-helper" in found
    assert not exists(node, "/usr/nowhere")


def test_attachments_that_are_not_as_they_should_be(node: Stage) -> None:
    dead = node.pod("dead", [mapping(8081, 80)], serve=False)
    node.node.delete_netns("dead")
    unjudged = node.attachment("unjudged", [mapping(8082, 80)])
    config = dead.network.config(dead.network.entry(TYPE), unjudged, dead.at.result)
    assert node.call("ADD", config, unjudged, CNI_NETNS="/run/netns/elsewhere").status == 0
    with squatter(node.node, "0.0.0.0", 8083) as process:
        waits = node.pod("waits", [mapping(8083, 80)], network=node.network(reservePorts="try"))
        found = doctor(node)
    assert "shop/dead" in found["stale"]["text"]
    assert "8081/tcp" in found["stale"]["text"]
    assert found["stale"]["mend"] == "cni-hostport gc"
    assert "shop/unjudged" in found["unjudged"]["text"]
    assert "8083/tcp of shop/waits" in found["mapped-unheld"]["text"]
    assert f"(pid {process.pid})" in found["mapped-unheld"]["text"]
    node.remove(waits)
    assert node.call("DEL", config, unjudged).status == 0
    assert cli(node, "gc").returncode == 0
    assert "stale" not in doctor(node)


def test_a_running_pod_of_portmap_whose_port_a_process_has(node: Stage) -> None:
    at = node.attachment("old", [mapping(9090, 80)])
    config = {"plugins": [{"type": "bridge"}, {"type": "portmap"}]}
    entry = {
        "containerId": at.container_id,
        "networkName": "old",
        "config": base64.b64encode(json.dumps(config).encode()).decode(),
        "capabilityArgs": at.capability_args,
    }
    node.node.run("mkdir", "-p", "/var/lib/cni/results")
    write(node, "/var/lib/cni/results/old", json.dumps(entry))
    with squatter(node.node, "0.0.0.0", 9090) as process:
        found = doctor(node)
    node.node.run("rm", "/var/lib/cni/results/old")
    assert "9090/tcp" in found["reservation-conflict"]["text"]
    assert f"(pid {process.pid})" in found["reservation-conflict"]["text"]


def test_somebody_who_keeps_setting_route_localnet_back(node: Stage) -> None:
    def repairs() -> int:
        status = json.loads(cli(node, "status", "--json").stdout)
        return int(status["repairs"]["count"])

    for _ in range(4):
        before = repairs()
        node.node.sysctl("net/ipv4/conf/cni0/route_localnet", "0")
        node.node.run("nft", "flush", "ruleset")  # an event: the helper looks at once
        assert wait_for(lambda count=before: repairs() > count, 10, 0.1)
    found = doctor(node)["keeps-breaking"]
    assert "somebody keeps" in found["text"]
    assert "removed by" in found["mend"]


def test_a_helper_that_cannot_repair(backend: Backend) -> None:
    """nft is gone and somebody empties the ruleset: said, with what each pod lacks."""
    stage = Stage(backend)
    try:
        assert "no-helper" in doctor(stage)
        stage.pod("web", [mapping(8080, 80)])
        stage.node.run("cp", "/usr/sbin/nft", "/run/nft")
        stage.node.run("mount", "--bind", "/dev/null", "/usr/sbin/nft")
        stage.node.run("/run/nft", "flush", "ruleset")
        assert "shop/web" in doctor(stage)["differs"]["text"]
        found = doctor(stage)
        assert "nft" in found["helper-problem"]["text"]
    finally:
        stage.close()
