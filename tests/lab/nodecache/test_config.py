"""Configuration that changes, is missing, or is wrong, while the agent runs."""

import json
import os
import sys
import time
from pathlib import Path

import pytest

from lab.nodecache.cluster import BACKEND, LOCAL, LOCAL6, SERVICE6, Cluster, until

pytestmark = pytest.mark.lab
FROM_SOURCE = True


def mount(folder: Path, data: dict[str, str]) -> None:
    """Content of a ConfigMap as kubelet puts it: a dated folder, and ``..data`` renamed over."""
    folder.mkdir(exist_ok=True)
    real = folder / f"..{time.monotonic_ns()}"
    real.mkdir()
    for name, text in data.items():
        (real / name).write_text(text)
    link = folder / "..data_tmp"
    link.symlink_to(real.name)
    os.rename(link, folder / "..data")
    for name in data:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    for entry in folder.iterdir():
        if not entry.name.startswith("..") and entry.name not in data:
            entry.unlink()


def test_stub_domains_come_change_and_go(cluster: Cluster) -> None:
    cluster.dnsd("10.244.2.2", 5353)
    mount(cluster.kubedns, {})
    agent = cluster.agent("-engine", "unbound").serving()
    assert cluster.dig("a.acme.local")
    mount(cluster.kubedns, {"stubDomains": json.dumps({"acme.local": [f"{BACKEND}:5353"]})})
    until(lambda: "acme.local:53 {" in (cluster.folder / "Corefile").read_text(), 5)
    time.sleep(0.5)
    assert cluster.dig("b.acme.local").startswith("10.1.2.3")
    mount(cluster.kubedns, {"stubDomains": "{", "Corefile": "x"})
    until(lambda: agent.said("stubDomains is no valid JSON"), 5)
    assert "acme.local:53 {" in (cluster.folder / "Corefile").read_text()
    assert agent.metric('coredns_nodecache_setup_errors_total{errortype="configmap"}') >= 1
    mount(cluster.kubedns, {"upstreamNameservers": json.dumps([f"{BACKEND}:5353"])})
    until(lambda: "acme.local" not in (cluster.folder / "Corefile").read_text(), 5)
    assert cluster.by_cache()


def test_configmap_and_template_that_come_late(cluster: Cluster) -> None:
    template = cluster.template.read_text()
    cluster.template.unlink()
    cluster.kubedns.mkdir()
    (cluster.kubedns / "stubDomains").write_text('{"acme.local": ["name.example"]}')
    agent = cluster.agent("-engine", "unbound")
    until(lambda: agent.said("cannot be read"))
    time.sleep(1)
    assert agent.process.poll() is None and cluster.has_link()
    assert cluster.rules() == [] and not cluster.servers()
    assert cluster.by_cluster()
    cluster.template.write_text(template)
    agent.serving()
    (cluster.kubedns / "stubDomains").write_text(f'{{"acme.local": ["{BACKEND}"]}}')
    until(lambda: "acme.local:53 {" in (cluster.folder / "Corefile").read_text(), 5)


def test_a_corefile_that_unbound_cannot_have_leaves_the_last_good_one(cluster: Cluster) -> None:
    template = cluster.template.read_text()
    agent = cluster.agent("-engine", "unbound").serving()
    cluster.write_template(template + "broken {\n")
    until(lambda: agent.said("a brace is not closed"), 5)
    cluster.write_template(template.replace("errors", "bufsize nonsense", 1))
    until(lambda: agent.said("unbound refuses"), 5)
    assert cluster.by_cache()
    cluster.write_template(template.replace(" 30\n", " 20\n"))
    until(lambda: cluster.dig(f"t{time.monotonic_ns()}.cluster.local").endswith(" 20"), 5)


def test_resolv_conf_that_changes_or_names_the_cache(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    cluster.resolv.write_text(f"nameserver {LOCAL}\nnameserver {BACKEND}\n")
    until(lambda: agent.said("it would loop"), 5)
    time.sleep(0.5)
    assert cluster.dig("outside.example").startswith("10.1.2.3")


def test_no_service_variable_is_an_error_not_nil(cluster: Cluster) -> None:
    del cluster.environment["KUBE_DNS_UPSTREAM_SERVICE_HOST"]
    agent = cluster.agent("-engine", "unbound")
    assert agent.process.wait(10) == 1
    assert agent.said("KUBE_DNS_UPSTREAM_SERVICE_HOST")
    assert not cluster.has_link() and not (cluster.folder / "Corefile").exists()


@pytest.mark.parametrize("backend", ["iptables", "nftables"])
def test_dual_stack(cluster: Cluster, backend: str) -> None:
    ips = f"{LOCAL},10.0.0.10,{LOCAL6},{SERVICE6}"
    agent = cluster.agent("-engine", "unbound", "-backend", backend, ips=ips).serving()
    for server in (LOCAL, "10.0.0.10", LOCAL6, SERVICE6):
        for tcp in (False, True):
            for where in (cluster.pod, cluster.node):
                assert cluster.by_cache(server, tcp=tcp, where=where), (server, tcp, where)
    if backend == "iptables":
        assert len(cluster.rules()) == len(cluster.rules("ip6tables")) == 24
    assert agent.stop() == 0
    assert cluster.rules() == [] and cluster.rules("ip6tables") == []
    assert cluster.by_cluster(SERVICE6)


def test_ipv6_only_runs_no_iptables(cluster: Cluster) -> None:
    cluster.write_template(cluster.template.read_text().replace("169.254.20.10", f"[{LOCAL6}]"))
    agent = cluster.agent("-engine", "unbound", ips=f"{LOCAL6},{SERVICE6}").serving()
    assert cluster.by_cache(SERVICE6) and cluster.by_cache(SERVICE6, where=cluster.node)
    assert len(cluster.rules("ip6tables")) == 24 and cluster.rules() == []
    assert agent.stop() == 0


def test_only_the_clusters_address(cluster: Cluster) -> None:
    """No address of the node's own: questions go to the cluster's DNS until the rules stand."""
    agent = cluster.agent("-engine", "unbound", ips="10.0.0.10").serving(20)
    time.sleep(1)
    assert cluster.by_cache() and not agent.said("deaf")


def test_an_engine_that_somebody_else_runs(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "none", ips=LOCAL)
    until(lambda: agent.said("-> starting"))
    time.sleep(1)
    assert cluster.rules() == []
    other = cluster.spawn(
        cluster.node,
        [sys.executable, str(Path(__file__).parent / "standin.py"), "-conf",
         str(cluster.folder / "Corefile"), "-dns.port", "53"],
        env=os.environ | cluster.environment,
    )  # fmt: skip
    agent.serving()
    assert cluster.dig("x.example", LOCAL) == "10.9.9.9 7"
    other.kill()
    until(lambda: agent.said("-> deaf"), 2)
    assert cluster.rules() == []
    assert agent.stop() == 0


def test_without_link_or_rules(cluster: Cluster) -> None:
    cluster.on_node(f"ip addr add {LOCAL}/32 dev lo")
    agent = cluster.agent(
        "-engine", "unbound", "-setupinterface=false", "--setupiptables=false", ips=LOCAL
    )
    agent.serving()
    assert not cluster.has_link() and cluster.rules() == []
    assert cluster.by_cache(LOCAL)
    assert agent.stop() == 0
    assert LOCAL in cluster.on_node("ip addr show dev lo")
