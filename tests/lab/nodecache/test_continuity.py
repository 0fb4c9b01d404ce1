"""200 questions a second from a pod, through everything that is planned and much that is not.

The figures are printed: pytest -s shows them.
"""

import os
import signal
import time

import pytest

from lab.nodecache.cluster import LOCAL, LOCAL6, SERVICE6, Agent, Cluster, until

pytestmark = pytest.mark.lab
FROM_SOURCE = True
BACKENDS = pytest.mark.parametrize("backend", ["iptables", "nftables"])


def started(cluster: Cluster, backend: str) -> Agent:
    return cluster.agent("-engine", "unbound", "-backend", backend)


def settle(cluster: Cluster) -> None:
    time.sleep(1)


@BACKENDS
def test_start(cluster: Cluster, backend: str) -> None:
    with cluster.load() as load:
        started(cluster, backend).serving()
        settle(cluster)
    print(f"\nstart, {backend}: {load}")
    assert load.gap <= 0.2 and load.by()["cache"] > 50 and load.by()["cluster"] > 50


@BACKENDS
def test_term(cluster: Cluster, backend: str) -> None:
    agent = started(cluster, backend).serving()
    with cluster.load() as load:
        assert agent.stop() == 0
        settle(cluster)
    print(f"\nTERM, {backend}: {load}")
    assert load.gap <= 0.2 and load.by()["cache"] > 20 and load.by()["cluster"] > 50


@BACKENDS
def test_upgrade(cluster: Cluster, backend: str) -> None:
    agent = started(cluster, backend).serving()
    with cluster.load() as load:
        assert agent.stop() == 0
        started(cluster, backend).serving()
        settle(cluster)
    print(f"\nupgrade, {backend}: {load}")
    assert load.gap <= 0.2 and load.by()["cache"] > 100


def test_upgrade_with_both_running(cluster: Cluster) -> None:
    agent = started(cluster, "iptables").serving()
    with cluster.load() as load:
        new = started(cluster, "iptables")
        until(lambda: new.said("waiting for its end"))
        assert agent.stop() == 0
        new.serving()
        settle(cluster)
    print(f"\nupgrade, new one started first: {load}")
    assert load.gap <= 0.2


@BACKENDS
def test_server_crash(cluster: Cluster, backend: str) -> None:
    agent = started(cluster, backend).serving()
    with cluster.load() as load:
        for round_ in range(2, 4):
            os.kill(cluster.servers()[0], signal.SIGKILL)
            until(lambda n=round_: agent.log.read_text().count("-> serving") >= n)  # type: ignore[misc]
            settle(cluster)
    print(f"\nserver killed twice, {backend}: {load}")
    assert load.gap <= 0.2


def test_server_hangs(cluster: Cluster) -> None:
    agent = started(cluster, "iptables").serving()
    with cluster.load() as load:
        (pid,) = cluster.servers()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: agent.said("-> deaf"))
        settle(cluster)
        os.kill(pid, signal.SIGCONT)
        until(lambda: agent.log.read_text().count("-> serving") == 2)
        settle(cluster)
    print(f"\nserver stopped (SIGSTOP) for a second: {load}")
    assert load.gap <= 0.7


@BACKENDS
def test_agent_killed(cluster: Cluster, backend: str) -> None:
    agent = started(cluster, backend).serving()
    with cluster.load() as load:
        agent.kill()
        settle(cluster)
        second = started(cluster, backend)
        until(lambda: second.said("taking over"))
        settle(cluster)
    print(f"\nagent killed, next one takes over, {backend}: {load}")
    assert load.gap <= 1.0


@BACKENDS
def test_agent_and_server_killed(cluster: Cluster, backend: str) -> None:
    agent = started(cluster, backend).serving()
    with cluster.load() as load:
        agent.kill()
        os.kill(cluster.servers()[0], signal.SIGKILL)
        settle(cluster)
        started(cluster, backend).serving()
        settle(cluster)
    print(f"\nagent and server killed, next start, {backend}: {load}")
    assert load.gap <= 1.0 and load.by()["cluster"] > 100


def test_upgrade_over_ipv6(cluster: Cluster) -> None:
    cluster.write_template(cluster.template.read_text())
    ips = f"{LOCAL},{LOCAL6},{SERVICE6}"
    agent = cluster.agent("-engine", "unbound", ips=ips).serving()
    with cluster.load(server=SERVICE6) as load:
        assert agent.stop() == 0
        cluster.agent("-engine", "unbound", ips=ips).serving()
        settle(cluster)
    print(f"\nupgrade, IPv6: {load}")
    assert load.gap <= 0.2 and load.by()["cache"] > 100


def test_reload(cluster: Cluster) -> None:
    agent = started(cluster, "iptables").serving()
    with cluster.load() as load:
        for number in range(5):
            cluster.resolv.write_text(
                "nameserver 10.244.2.2\n" * (1 + number % 2) + f"nameserver 10.244.9.{number}\n"
            )
            until(lambda n=number: agent.log.read_text().count("configuration written") >= n + 2)  # type: ignore[misc]
            time.sleep(0.5)
    print(f"\nfive reloads: {load}")
    assert load.gap <= 0.2
    assert not agent.said("deaf")
