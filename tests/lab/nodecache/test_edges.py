"""Health, metrics, processes run, ports in use: the agent's edges."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cni_hostport.nodecache import rules
from lab.nodecache.cluster import LOCAL, LOCAL6, SERVICE, Cluster, until

pytestmark = pytest.mark.lab
FROM_SOURCE = True


def curl(cluster: Cluster, url: str, *more: str) -> str:
    return cluster.on_node(f"curl --noproxy '*' -s -m 10 {' '.join(more)} {url}", check=False)


def test_health_and_metrics_of_the_template(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    assert curl(cluster, f"http://{LOCAL}:8080/health") == "OK"
    assert curl(cluster, f"http://{LOCAL}:8080/ready") == "OK"
    for port in (9253, 9353):
        page = curl(cluster, f"http://127.0.0.1:{port}/metrics")
        for kind in ("iptables", "iptables_lock", "interface_add", "interface_check", "configmap"):
            assert f'coredns_nodecache_setup_errors_total{{errortype="{kind}"}}' in page
        assert "cni_hostport_nodecache_server_up 1.0" in page
        assert "cni_hostport_nodecache_rules 24.0" in page
    for _ in range(5):
        cluster.dig("hit.cluster.local")
    assert agent.metric("cni_hostport_nodecache_cache_hits_total") >= 4
    assert agent.metric("cni_hostport_nodecache_queries_total") >= 5
    assert "404" in curl(cluster, "http://127.0.0.1:9353/", "-o /dev/null -w '%{http_code}'")


def test_a_metrics_address_that_is_taken_is_tried_again(cluster: Cluster) -> None:
    other = cluster.spawn(cluster.node, [sys.executable, "-m", "http.server", "9353"])
    time.sleep(0.7)
    agent = cluster.agent("-engine", "unbound").serving()
    assert agent.said("cannot listen on 0.0.0.0:9353") and cluster.by_cache()
    other.kill()
    other.wait()
    until(lambda: "nodecache" in curl(cluster, "http://127.0.0.1:9353/metrics"), 10, step=0.2)


def certificate(folder: Path) -> None:
    def openssl(line: str) -> None:
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)

    openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -subj /CN=ca -days 2")
    for name in ("server", "client"):
        openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        openssl(
            f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial"
            f" -out {name}.crt -days 2"
        )


def test_metrics_by_tls(cluster: Cluster) -> None:
    folder = cluster.folder
    certificate(folder)
    tls = ["-tls-enabled", "-tls-cert-file", f"{folder}/server.crt"]
    key = ["-tls-private-key-file", f"{folder}/server.key"]
    ca = [
        "-tls-client-ca-file",
        f"{folder}/ca.crt",
        "-tls-client-auth-type",
        "RequireAndVerifyClientCert",
    ]
    url = "https://127.0.0.1:9353/metrics"
    own = f"--cert {folder}/client.crt --key {folder}/client.key"

    agent = cluster.agent("-engine", "unbound", *tls, *key, ips=LOCAL).serving()
    assert "nodecache" in curl(cluster, url, "-k --tlsv1.3")
    assert curl(cluster, url, "-k --tls-max 1.2") == ""
    assert curl(cluster, "http://127.0.0.1:9353/metrics") == ""
    assert agent.stop() == 0
    agent = cluster.agent("-engine", "unbound", *tls, *key, *ca, ips=LOCAL).serving()
    assert curl(cluster, url, "-k") == ""
    assert "nodecache" in curl(cluster, url, f"-k {own}")
    assert agent.stop() == 0
    agent = cluster.agent("-engine", "unbound", *tls, "-tls-private-key-file", "/none", ips=LOCAL)
    agent.serving()
    assert agent.said("cannot listen") and curl(cluster, url, "-k") == ""


@pytest.mark.parametrize("legacy", [False, True], ids=["nft", "legacy"])
def test_processes_run_over_what_a_dead_agent_left(
    cluster: Cluster, tmp_path: Path, legacy: bool
) -> None:
    """Rules of both families from an older port and by a killed agent; a stranger's stays."""
    if legacy:
        for tool in ("iptables-legacy", "ip6tables-legacy"):
            cluster.on_node(f"{tool} -t nat -N KUBE-MARKER")
    tool = "iptables-legacy" if legacy else "iptables"
    add = [tool, "-t", "raw", "-A", "OUTPUT", "-s", "9.9.9.9", "-m", "comment", "--comment"]
    script = tmp_path / "count.py"
    script.write_text(
        "import json, subprocess\n"
        "from cni_hostport.host.nodecache_tools import Tools\n"
        "from cni_hostport.nodecache import flags, ruler, rules\n"
        f"p = flags.parse(['-localip', '{LOCAL},{LOCAL6}']).params\n"
        "tools = Tools('/dev/null')\n"
        "w = rules.RuleSet(p.local_ips, 53, 8080)\n"
        "ruler.choose('iptables', p.families, w, tools).ensure()\n"
        "b = ruler.choose('iptables', p.families, w, tools)\n"
        "found = []\n"
        "for call in (lambda: b.remove(1.0), b.ensure):\n"
        "    before = tools.processes; call(); found.append(tools.processes - before)\n"
        "b = ruler.choose('iptables', p.families, rules.RuleSet(p.local_ips, 54, 8080), tools)\n"
        f"subprocess.run([*{add!r}, 'not {rules.SKIP}'], check=True)\n"
        "b.remove(1.0)\n"
        "print(json.dumps([*found, b.present()]))\n"
    )
    for comment in (rules.SKIP, "another"):
        cluster.on_node(f'{" ".join(add)} "{comment}"')
    removal, setup, left = json.loads(cluster.on_node(f"{sys.executable} {script}"))
    print(f"\nprocesses over leftovers, {tool}: removal {removal}, set-up {setup}")
    assert setup <= 2
    if not legacy:
        assert removal <= 1 and removal + setup <= 3
    remaining = cluster.on_node(f"{tool}-save -t raw")
    assert f'"{rules.SKIP}"' not in remaining
    assert f'"not {rules.SKIP}"' in remaining and "another" in remaining
    assert left == 1, "the stranger's words hold ours"


@pytest.mark.parametrize("ips", [f"{LOCAL},{SERVICE}", f"{LOCAL},{LOCAL6}"])
@pytest.mark.parametrize("backend", ["iptables", "nftables"])
def test_processes_run(cluster: Cluster, ips: str, backend: str, tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text(
        "import json\n"
        "from cni_hostport.host.nodecache_tools import Tools\n"
        "from cni_hostport.nodecache import flags, ruler, rules\n"
        f"p = flags.parse(['-localip', {ips!r}]).params\n"
        "tools = Tools('/dev/null')\n"
        f"b = ruler.choose({backend!r}, p.families, rules.RuleSet(p.local_ips, 53, 8080), tools)\n"
        "found = []\n"
        "for call in (b.ensure, b.ensure, b.ensure, lambda: b.remove(1.0)):\n"
        "    before = tools.processes; call(); found.append(tools.processes - before)\n"
        "print(json.dumps([*found, b.present()]))\n"
    )
    setup, check, again, teardown, left = json.loads(cluster.on_node(f"{sys.executable} {script}"))
    print(
        f"\nprocesses, {backend}, {ips}: set-up {setup}, check {check} then {again},"
        f" teardown {teardown}"
    )
    assert max(setup, check, again, teardown) <= 3 and left == 0 and again == 0


def test_accepthealth_opens_the_health_port_only_when_asked(cluster: Cluster) -> None:
    for chain in ("INPUT", "OUTPUT"):
        cluster.on_node(f"iptables -A {chain} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
    cluster.on_node("iptables -P INPUT DROP")
    agent = cluster.agent("-engine", "unbound")
    time.sleep(5)
    assert curl(cluster, f"http://{LOCAL}:8080/health") == ""
    assert cluster.by_cluster()  # nobody of the node itself could ask: the rules do not stay
    assert agent.stop() == 0
    assert cluster.rules() == []
    agent = cluster.agent("-engine", "unbound", "-accepthealth").serving()
    time.sleep(1)
    assert curl(cluster, f"http://{LOCAL}:8080/health") == "OK"
    assert cluster.by_cache() and cluster.by_cache(where=cluster.node)
    assert cluster.by_cache(where=cluster.node, tcp=True)
    assert not agent.said("deaf") and len(cluster.rules()) == 40
    assert agent.stop() == 0
    assert cluster.rules() == []


def test_a_port_in_use_is_told_with_its_owner(cluster: Cluster) -> None:
    blocker = cluster.spawn(
        cluster.node,
        [sys.executable, "-c", "import socket, time;"
         "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM);"
         "s.bind(('0.0.0.0', 53)); time.sleep(60)"],
    )  # fmt: skip
    time.sleep(0.3)
    agent = cluster.agent("-engine", "unbound")
    until(lambda: agent.said("port 53/udp"), 10)
    text = agent.log.read_text()
    assert re.search(r"port 53/udp on every address is in use by process python", text), text
    assert cluster.rules() == [] and cluster.by_cluster()
    blocker.kill()
    blocker.wait()
    agent.serving(20)


def test_command_line_errors_end_with_status_1(cluster: Cluster) -> None:
    agent = cluster.agent("-health-port", "x")
    assert agent.process.wait(10) == 1
    assert agent.said('invalid value "x" for flag -health-port')
    agent = cluster.agent("-engine", "coredns", "-enginepath", "/nonexistent")
    assert agent.process.wait(10) == 1
    assert agent.said("-enginepath") and agent.said("/nonexistent")


def test_slow_upstream_does_not_look_like_a_dead_server(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    with cluster.load("slow%.example", "hot.cluster.local", rate=20):
        time.sleep(2)
    assert not agent.said("deaf")
