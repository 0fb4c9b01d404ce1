"""What happens when something dies, hangs, or is undone by others."""

import json
import os
import signal
import sys
import time

import pytest

from cni_hostport.nodecache import orphan, rules
from lab.nodecache.cluster import LOCAL, SERVICE, Agent, Cluster, sh, until

pytestmark = pytest.mark.lab
FROM_SOURCE = True


@pytest.fixture(params=["iptables", "nftables"])
def agent(cluster: Cluster, request: pytest.FixtureRequest) -> Agent:
    return cluster.agent("-engine", "unbound", "-backend", request.param).serving()


def clear(cluster: Cluster) -> tuple[list[str], float]:
    """What the helper does about twice a second: the links concerned, and seconds it took."""
    script = cluster.folder / "clear.py"
    script.write_text(
        "import json, time\n"
        "from cni_hostport.nodecache import orphan\n"
        "begin = time.monotonic()\n"
        f"found = orphan.clear({str(cluster.folder / 'run')!r})\n"
        "print(json.dumps([found, time.monotonic() - begin]))\n"
    )
    links, took = json.loads(sh(f"ip netns exec {cluster.node} {sys.executable} {script}"))
    return links, took


def no_rules(cluster: Cluster) -> bool:
    return cluster.rules() == []


def test_a_dead_server_takes_the_rules_with_it(cluster: Cluster, agent: Agent) -> None:
    (pid,) = cluster.servers()
    os.kill(pid, signal.SIGKILL)
    took = until(lambda: agent.said("serving -> waiting"), 0.5, step=0.002)
    print(f"rules away {took * 1000:.0f} ms after the server was killed")
    until(lambda: agent.log.read_text().count("-> serving") == 2, 10)
    assert cluster.by_cache()
    assert len(cluster.servers()) == 1
    assert agent.metric('cni_hostport_nodecache_fallbacks_total{reason="exited"}') == 1
    assert agent.metric("cni_hostport_nodecache_server_restarts_total") == 1


def test_a_deaf_server_loses_the_rules_until_it_answers(cluster: Cluster, agent: Agent) -> None:
    (pid,) = cluster.servers()
    os.kill(pid, signal.SIGSTOP)
    took = until(lambda: agent.said("serving -> deaf"), 2, step=0.002)
    print(f"rules away {took * 1000:.0f} ms after the server was stopped")
    assert no_rules(cluster)
    assert took < 0.5, took
    assert cluster.by_cluster()
    assert cluster.by_cluster(where=cluster.node)
    time.sleep(1)
    assert no_rules(cluster)
    os.kill(pid, signal.SIGCONT)
    until(lambda: not no_rules(cluster), 3)
    assert cluster.by_cache()
    assert cluster.servers() == [pid]


def test_agent_and_server_killed_pods_fall_back_by_themselves(
    cluster: Cluster, agent: Agent
) -> None:
    (pid,) = cluster.servers()
    agent.process.kill()
    os.kill(pid, signal.SIGKILL)
    agent.process.wait()
    assert not no_rules(cluster)
    assert cluster.by_cluster()
    assert cluster.by_cluster(tcp=True)
    # Programs of the node itself need somebody who clears up: the helper.
    assert not cluster.dig("x.cluster.local", where=cluster.node)
    links, took = clear(cluster)
    print(f"\ncleared up in {took * 1000:.0f} ms")
    assert links == ["nodelocaldns"] and took < 0.5
    assert no_rules(cluster)
    assert cluster.by_cluster(where=cluster.node)
    cluster.agent("-engine", "unbound").serving()
    assert cluster.by_cache(where=cluster.node)


def test_a_killed_agents_server_goes_on_and_is_taken_over(cluster: Cluster, agent: Agent) -> None:
    servers = cluster.servers()
    agent.kill()
    assert cluster.by_cache()
    assert clear(cluster)[0] == []
    backend = "nftables" if "nftables" in agent.process.args else "iptables"  # type: ignore[operator]
    second = cluster.agent("-engine", "unbound", "-backend", backend)
    until(lambda: second.said("taking over unbound"), 15)
    time.sleep(1)
    assert cluster.servers() == servers
    assert cluster.by_cache()
    assert not second.said("serving -> deaf")
    assert second.stop() == 0
    until(lambda: not cluster.servers())
    assert no_rules(cluster) and not cluster.has_link()


def test_both_killed_then_a_new_start_is_clean(cluster: Cluster, agent: Agent) -> None:
    (pid,) = cluster.servers()
    agent.kill()
    os.kill(pid, signal.SIGKILL)
    second = cluster.agent("-engine", "unbound").serving()
    assert len(cluster.rules()) == 24
    assert len(cluster.servers()) == 1
    assert second.stop() == 0
    assert no_rules(cluster) and not cluster.has_link()


def test_a_start_that_fails_clears_up_as_well(cluster: Cluster, agent: Agent) -> None:
    """A bad flag or an unset variable, again and again: nobody may be left without DNS."""
    for flags, words in (
        (("-engine", "unbound", "-upstreamsvc", "gone"), "GONE_SERVICE_HOST"),
        (("-engine", "bind9"), "flag -engine"),
    ):
        (pid,) = cluster.servers()
        agent.kill()
        failing = cluster.agent(*flags)
        assert failing.process.wait(10) == 1 and failing.said(words), failing.log.read_text()
        assert not no_rules(cluster) and cluster.by_cache(), "the old server answers"
        os.kill(pid, signal.SIGKILL)
        failing = cluster.agent(*flags)
        assert failing.process.wait(10) == 1
        assert no_rules(cluster) and cluster.by_cluster(where=cluster.node)
        agent = cluster.agent("-engine", "unbound").serving()
    assert agent.stop() == 0
    assert no_rules(cluster) and not cluster.has_link()


def test_skipteardown_leaves_everything_working(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound", "-skipteardown").serving()
    assert agent.stop() == 0
    assert len(cluster.rules()) == 24 and cluster.has_link()
    assert cluster.by_cache()
    second = cluster.agent("-engine", "unbound")
    until(lambda: second.said("taking over"), 15)
    assert second.stop() == 0
    assert no_rules(cluster)


def test_a_second_agent_waits_and_touches_nothing(cluster: Cluster, agent: Agent) -> None:
    second = cluster.agent("-engine", "unbound")
    until(lambda: second.said("waiting for its end"), 10)
    time.sleep(0.5)
    assert cluster.by_cache() and len(cluster.servers()) == 1
    assert second.stop() == 0
    assert cluster.by_cache()
    third = cluster.agent("-engine", "unbound")
    until(lambda: third.said("waiting for its end"), 10)
    assert agent.stop() == 0
    third.serving()
    assert cluster.by_cache()


def test_signals(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    agent.process.send_signal(signal.SIGHUP)
    agent.process.send_signal(signal.SIGUSR2)
    agent.process.send_signal(signal.SIGUSR1)
    until(lambda: agent.log.read_text().count("configuration written") >= 2)
    assert agent.process.poll() is None and cluster.by_cache()
    assert agent.stop(signal.SIGINT) == 0
    assert no_rules(cluster) and not cluster.has_link()


def test_an_accept_slipped_above_is_undone(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    cluster.on_node("iptables -t raw -I PREROUTING -p udp --dport 53 -j ACCEPT")
    until(lambda: agent.said("raw PREROUTING: misplaced"), 3)
    assert cluster.by_cache()
    first = cluster.on_node("iptables -t raw -S PREROUTING 1")
    assert rules.SKIP in first
    assert agent.metric('cni_hostport_nodecache_repairs_total{what="rules"}') == 1


def test_flush_duplicates_and_strangers(cluster: Cluster) -> None:
    stranger = f"-d {SERVICE} -p udp --dport 53 -j NOTRACK"
    agent = cluster.agent("-engine", "unbound").serving()
    cluster.on_node(f"iptables -t raw -A PREROUTING {stranger}")
    (mine,) = [r for r in cluster.rules() if "PREROUTING" in r and LOCAL in r and "udp" in r]
    for _ in range(3):
        cluster.on_node("iptables -t raw " + mine.replace("-A", "-A", 1))
    until(lambda: agent.said("doubled"), 5)
    until(lambda: len(cluster.rules()) == 24, 5)
    cluster.on_node("iptables -t filter -F INPUT")
    until(lambda: len(cluster.rules()) == 24, 8)
    assert agent.stop() == 0
    assert no_rules(cluster)
    assert SERVICE in cluster.on_node("iptables -t raw -S PREROUTING")


def test_rules_of_an_older_configuration_are_swept(cluster: Cluster) -> None:
    old = cluster.agent("-engine", "unbound", "-skipteardown", "-health-port", "8081").serving()
    assert old.stop() == 0
    cluster.on_node(
        f'ip6tables -t raw -A OUTPUT -s fd00::77 -m comment --comment "{rules.SKIP}" -j NOTRACK'
    )
    cluster.on_node(
        "iptables-legacy -t raw -A OUTPUT -s 9.9.9.9 -j NOTRACK"
        f' -m comment --comment "{rules.SKIP}"'
    )
    new = cluster.agent("-engine", "unbound", ips=LOCAL).serving()
    assert len(cluster.rules()) == 12
    assert not any(SERVICE in r or "8081" in r for r in cluster.rules())
    assert cluster.rules("ip6tables") == [] and cluster.rules("iptables-legacy") == []
    assert SERVICE not in sh(f"ip -n {cluster.node} -br addr show nodelocaldns")
    assert new.stop() == 0


def test_link_and_addresses_come_back(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    sh(f"ip -n {cluster.node} addr del {LOCAL}/32 dev nodelocaldns")
    until(lambda: LOCAL in sh(f"ip -n {cluster.node} addr show nodelocaldns"), 3)
    sh(f"ip -n {cluster.node} link del nodelocaldns")
    until(cluster.has_link, 5)
    until(cluster.by_cache, 5)
    assert agent.metric('cni_hostport_nodecache_repairs_total{what="link"}') == 2


def test_a_link_of_another_kind_is_left_alone(cluster: Cluster) -> None:
    sh(f"ip -n {cluster.node} link add nodelocaldns type bridge")
    agent = cluster.agent("-engine", "unbound")
    assert agent.process.wait(10) == 1
    assert agent.said("nodelocaldns exists and is bridge, not ifb")
    assert cluster.has_link() and no_rules(cluster)
    assert cluster.by_cluster()


def test_a_kernel_without_dummy_is_told_so(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound", "-interfacekind", "dummy")
    assert agent.process.wait(10) == 1
    assert agent.said("-interfacekind")
    assert not cluster.servers() and not cluster.has_link()


def test_teardown_is_bounded_while_the_lock_is_held(cluster: Cluster) -> None:
    cluster.on_node("iptables-legacy -t nat -N KUBE-MARKER")
    agent = cluster.agent("-engine", "unbound").serving()
    assert len(cluster.rules("iptables-legacy")) == 24
    lock = cluster.folder / "xtables.lock"
    holder = cluster.spawn(cluster.node, ["flock", "/run/xtables.lock", "sleep", "60"])
    cluster.spawn(cluster.node, ["flock", str(lock), "sleep", "60"])
    time.sleep(0.3)
    begin = time.monotonic()
    assert agent.stop() == 0, agent.log.read_text()
    assert time.monotonic() - begin < 6
    holder.kill()
    for process in cluster.processes[-2:]:
        process.kill()
    sh(f"pkill -P {holder.pid}", check=False)
    assert [
        r for r in cluster.on_node("iptables-legacy-save -t raw").splitlines() if rules.SKIP in r
    ] == []
    assert not cluster.has_link()


def test_the_orphans_folder_may_be_missing() -> None:
    assert orphan.clear("/nonexistent") == ()


def test_the_helper_clears_up_within_a_second(cluster: Cluster) -> None:
    agent = cluster.agent("-engine", "unbound").serving()
    cluster.spawn(
        cluster.node,
        [sys.executable, "-m", "cni_hostport", "helper"],
        env=os.environ | cluster.environment,
        stderr=(cluster.folder / "helper.log").open("w"),
    )
    until(lambda: (cluster.folder / "run" / "helper.sock").exists(), 15)
    time.sleep(1.5)
    assert len(cluster.rules()) == 24 and cluster.by_cache()
    agent.process.kill()
    os.kill(cluster.servers()[0], signal.SIGKILL)
    took = until(lambda: no_rules(cluster), 5)
    print(f"\nthe helper cleared up within {took * 1000:.0f} ms")
    assert took < 1.3, (cluster.folder / "helper.log").read_text()
    assert cluster.by_cluster(where=cluster.node)
