"""CoreDNS as engine: up to the exec with a stand-in, and live where COREDNS names a binary."""

import os
import signal
import time

import pytest

from lab.nodecache.cluster import HERE, LOCAL, SERVICE, Agent, Cluster, until

pytestmark = pytest.mark.lab
FROM_SOURCE = True
STANDIN = str(HERE / "standin.py")


def started(cluster: Cluster, *flags: str) -> Agent:
    return cluster.agent("-engine", "coredns", "-enginepath", STANDIN, *flags)


def tell(cluster: Cluster, words: str) -> None:
    (cluster.folder / "standin").write_text(words)


def noted(cluster: Cluster) -> list[str]:
    path = cluster.folder / "standin.log"
    return path.read_text().splitlines() if path.exists() else []


def starts(cluster: Cluster) -> int:
    return sum(line.startswith("start") for line in noted(cluster))


def test_command_line_corefile_and_end(cluster: Cluster) -> None:
    agent = started(cluster, "-quiet", "-pidfile", str(cluster.folder / "pid")).serving()
    conf = cluster.folder / "Corefile"
    assert noted(cluster)[0].endswith(f"-conf {conf} -dns.port 53 -quiet")
    text = conf.read_text()
    assert f"bind {LOCAL} {SERVICE}" in text and "force_tcp" in text and "PILLAR" not in text
    until((cluster.folder / "pid").exists)
    assert int((cluster.folder / "pid").read_text()) > 1
    assert cluster.dig("x.cluster.local") == "10.9.9.9 7"
    assert agent.stop() == 0
    assert noted(cluster)[-1] == "term"
    assert not (cluster.folder / "pid").exists()
    assert cluster.rules() == [] and not cluster.has_link()


def test_a_server_that_never_answers_gets_no_rules(cluster: Cluster) -> None:
    tell(cluster, "deaf")
    agent = started(cluster)
    until(lambda: starts(cluster) == 1)
    time.sleep(4)
    assert cluster.rules() == [] and cluster.by_cluster()
    tell(cluster, "mute-query")
    time.sleep(1)
    assert cluster.rules() == []
    tell(cluster, "")
    agent.serving()
    assert cluster.dig("x.cluster.local") == "10.9.9.9 7"


def test_a_server_that_knows_no_status_question_is_asked_ordinary_ones(cluster: Cluster) -> None:
    tell(cluster, "mute-status")
    agent = started(cluster).serving()
    time.sleep(3)
    assert not agent.said("deaf") and len(cluster.rules()) == 24


def test_a_failing_server_is_started_again_ever_more_slowly(cluster: Cluster) -> None:
    tell(cluster, "exit")
    agent = started(cluster)
    until(lambda: starts(cluster) >= 2, 15)
    time.sleep(4)
    assert 3 <= starts(cluster) <= 5
    assert cluster.rules() == [] and cluster.by_cluster() and cluster.has_link()
    tell(cluster, "")
    agent.serving(20)


def test_deaf_then_answering(cluster: Cluster) -> None:
    agent = started(cluster).serving()
    tell(cluster, "deaf")
    took = until(lambda: agent.said("serving -> deaf"), 2, step=0.002)
    print(f"rules away {took * 1000:.0f} ms after the server went deaf")
    assert took < 0.5
    tell(cluster, "")
    until(lambda: agent.log.read_text().count("-> serving") == 2, 5)


def test_a_stubborn_server_is_killed_in_bounded_time(cluster: Cluster) -> None:
    agent = started(cluster).serving()
    tell(cluster, "stubborn")
    begin = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - begin < 14
    assert cluster.servers("standin.py") == [] and cluster.rules() == []


def test_reload_plugin_or_signal(cluster: Cluster) -> None:
    template = cluster.template.read_text()
    agent = started(cluster).serving()
    cluster.write_template("# one\n" + template)
    until(lambda: (cluster.folder / "Corefile").read_text().startswith("# one"), 5)
    time.sleep(0.5)
    assert not any("usr1" in line for line in noted(cluster))  # its reload plugin sees the file
    cluster.resolv.write_text("nameserver 10.244.2.2\n# changed\n")
    until(lambda: "usr1 # one" in noted(cluster), 5)  # that the plugin cannot see
    assert agent.stop() == 0


def test_reload_with_signal(cluster: Cluster) -> None:
    started(cluster, "-reloadwithsignal").serving()
    cluster.write_template("# two\n" + cluster.template.read_text())
    until(lambda: "usr1 # two" in noted(cluster), 5)


def test_term_while_the_corefile_changes(cluster: Cluster) -> None:
    agent = started(cluster, "-reloadwithsignal").serving()
    for number in range(20):
        cluster.write_template(f"# {number}\n" + cluster.template.read_text())
        agent.process.send_signal(signal.SIGUSR1)
        time.sleep(0.02)
    begin = time.monotonic()
    assert agent.stop() == 0
    assert time.monotonic() - begin < 5


# CoreDNS is in no package registry: this one is there for whoever has a binary.
if "COREDNS" in os.environ:

    def test_live(cluster: Cluster) -> None:
        agent = cluster.agent("-engine", "coredns", "-enginepath", os.environ["COREDNS"]).serving()
        assert cluster.by_cache() and cluster.by_cache(tcp=True)
        os.kill(cluster.servers("coredns")[0], signal.SIGKILL)
        until(lambda: agent.log.read_text().count("-> serving") == 2)
        assert cluster.by_cache()
        assert agent.stop() == 0
        assert cluster.rules() == [] and not cluster.has_link()
