"""The iptables backend beside others: chains of earlier managers, parallel writers, busy tools."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from lab.chain import Reply
from lab.node import NODE4, NODE6, wait_for
from lab.stage import RUN_DIR, TOOLS, TYPE, Backend, Pod, Stage, mapping

PORT = 8080
FLAVOURS = ("iptables-nft", "iptables-legacy")


@pytest.fixture(params=FLAVOURS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    made = Stage(Backend.parse(request.param))
    try:
        yield made
    finally:
        made.close()


def tool(stage: Stage, name: str) -> str:
    """``iptables-save`` and the like of the stage's flavour."""
    family, _, kind = name.partition("-")
    return "-".join(filter(None, (family, stage.backend.flavour, kind)))


def saved(stage: Stage, family: str = "iptables") -> str:
    return stage.node.output(tool(stage, f"{family}-save"))


def restore(stage: Stage, text: str, family: str = "iptables") -> None:
    stage.node.run(tool(stage, f"{family}-restore"), "--noflush", data=text.encode())


def status(stage: Stage) -> dict[str, object]:
    done = stage.node.run(stage.runtime.binary(TYPE), "status", "--json", env=stage.runtime.env)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def ours(text: str) -> list[str]:
    """Lines that only our own helper can have written."""
    return re.findall(r"^.*(?:HOSTPORT-MANAGER|cni-hostport).*$", text, re.MULTILINE)


def gone(stage: Stage) -> bool:
    return not ours(saved(stage)) and not ours(saved(stage, "ip6tables"))


CRIO = """*nat
:KUBE-HOSTPORTS - [0:0]
:KUBE-HP-STALESTALESTALES - [0:0]
-A PREROUTING -m comment --comment "kube hostport portals" -m addrtype --dst-type LOCAL -j KUBE-HOSTPORTS
-A OUTPUT -m comment --comment "kube hostport portals" -m addrtype --dst-type LOCAL -j KUBE-HOSTPORTS
-A KUBE-HOSTPORTS -p tcp -m comment --comment "old_ns hostport 8080" -m tcp --dport 8080 -j KUBE-HP-STALESTALESTALES
-A KUBE-HP-STALESTALESTALES -p tcp -m comment --comment "old_ns hostport 8080" -m tcp -j DNAT --to-destination 10.244.99.99:80
COMMIT
"""


def test_a_stale_mapping_of_an_earlier_manager_loses_and_is_reported(stage: Stage) -> None:
    restore(stage, CRIO)
    before = saved(stage)
    pod = stage.pod("web", [mapping(PORT, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    assert saved(stage).count('"kube hostport portals"') == 2
    assert wait_for(lambda: "KUBE-HP-STALESTALESTALES" in str(status(stage)["warnings"]))
    stage.remove(pod)
    assert wait_for(lambda: gone(stage), timeout=45, step=0.5)

    def rules(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith("-")]

    assert rules(saved(stage)) == rules(before)


def test_a_stale_mapping_wins_over_nftables_and_the_reported_command_ends_that(
    stage: Stage,
) -> None:
    restore(stage, CRIO)
    stage.pod("web", [mapping(PORT, 80)], network=stage.network(backend="nftables"))
    assert not stage.ask(NODE4, PORT, timeout=0.3).ok
    (warning,) = status(stage)["warnings"]  # type: ignore[misc]
    assert "wins" in warning
    command = warning.rpartition("If its pod is gone: ")[2]
    stage.node.run("sh", "-c", command)
    assert stage.ask(NODE4, PORT).server == "web"


def test_parallel_writers_lose_nothing_and_double_nothing(stage: Stage) -> None:
    """As many restores of somebody else as fit, while twenty pods come and go."""
    stage.pod("web", [mapping(PORT, 80)])
    stop = threading.Event()
    written: list[int] = []

    def write(number: int) -> None:
        turn = 0
        while not stop.is_set():
            chain = f"KUBE-SVC-{number}-{turn}"
            restore(stage, f"*nat\n:{chain} - [0:0]\n-A PREROUTING -j {chain}\nCOMMIT\n")
            written.append(number)
            turn += 1

    threads = [threading.Thread(target=write, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    network, pods = stage.network(), []
    for number in range(10):
        at = stage.attachment(f"pod{number}", [mapping(9000 + number, 80)])
        network.add(at)
        pods.append(at)
        if number % 3 == 2:
            network.delete(pods.pop(0))
    stop.set()
    for thread in threads:
        thread.join()
    text = saved(stage)
    assert len(re.findall(r"^-A PREROUTING -j KUBE-SVC-", text, re.MULTILINE)) == len(written)
    jumps = re.findall(r"^-A KUBE-HOSTPORTS .*--dport (\d+)", text, re.MULTILINE)
    assert sorted(map(int, jumps)) == [PORT, *range(9003, 9010)]
    assert text.count('"kube hostport portals"') == 2
    assert stage.ask(NODE4, PORT).server == "web"


def test_flavour_is_where_kube_proxys_chains_are(stage: Stage) -> None:
    other = "legacy" if stage.backend.flavour == "nft" else "nft"
    stage.node.run(f"iptables-{other}", "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
    stage.pod("web", [mapping(PORT, 80)])
    assert ours(stage.node.output(f"iptables-{other}-save"))
    assert not ours(saved(stage))
    assert stage.ask(NODE4, PORT).server == "web"


# -- tools that do not work -----------------------------------------------------------------------


def fake(stage: Stage, name: str, script: str) -> None:
    """A tool found first on PATH."""
    file = stage.node.path(f"{TOOLS}/{name}")
    file.unlink(missing_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def real(stage: Stage, name: str) -> None:
    file = stage.node.path(f"{TOOLS}/{name}")
    file.unlink()
    file.symlink_to(f"/usr/sbin/{tool(stage, name)}")


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 4", 11), ("sleep 100", 102), ("echo no such thing >&2; exit 2", 102)],
)
def test_a_tool_that_fails_or_hangs_ends_in_a_clear_error(
    stage: Stage, script: str, code: int
) -> None:
    stage.pod("web", [mapping(PORT, 80)])
    before = stage.records()
    fake(stage, "iptables-restore", script)
    started = time.monotonic()
    error = stage.refused("rival", [mapping(9000, 80)])
    assert error.code == code, error.text
    assert "iptables-restore" in error.text
    assert time.monotonic() - started < 25
    assert stage.records() == before
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE6, PORT).server == "web"
    real(stage, "iptables-restore")
    stage.pod("third", [mapping(9000, 80)])
    assert stage.ask(NODE4, 9000).server == "third"
    assert stage.ask(NODE4, PORT).server == "web"


def test_a_hanging_tool_does_not_hold_up_other_backends(stage: Stage) -> None:
    """DELs that wait for iptables are tried again, not all the time: nftables' pods go on."""
    pods = [stage.pod(f"pod{n}", [mapping(8000 + n, 80)], serve=False) for n in range(3)]
    other = stage.network("other", backend="nftables")
    stage.pod("first", [mapping(7000, 80)], network=other)
    fake(stage, "iptables-restore", "sleep 100")
    for pod in pods:
        assert stage.call("DEL", stage.config(pod), pod.at).status == 0
    for number in range(1, 4):
        started = time.monotonic()
        stage.pod(f"more{number}", [mapping(7000 + number, 80)], network=other)
        assert time.monotonic() - started < 20
        assert stage.ask(NODE4, 7000 + number).server == f"more{number}"
    real(stage, "iptables-restore")
    queue = stage.node.path(f"{RUN_DIR}/queue")
    assert wait_for(lambda: not list(queue.iterdir()), timeout=60, step=0.2)
    assert wait_for(lambda: "KUBE-HP-" not in saved(stage), timeout=10, step=0.2)


def test_status_is_about_the_backend_of_its_network(stage: Stage) -> None:
    stage.pod("one", [mapping(8000, 80)], serve=False)
    stage.pod("two", [mapping(8001, 80)], network=stage.network("b", backend="nftables"))
    fake(stage, "iptables-restore", "exit 1")
    stage.node.run(tool(stage, "iptables"), "-t", "nat", "-F", "PREROUTING")

    def code(backend: str) -> int:
        config = {**stage.entry(backend=backend), "name": "x", "cniVersion": "1.1.0"}
        return stage.call("STATUS", config).code

    assert wait_for(lambda: code("iptables") == 50, timeout=40, step=0.2)
    assert [code(name) for name in ("nftables", "auto", "iptables")] == [0, 0, 50]
    real(stage, "iptables-restore")
    assert wait_for(lambda: code("iptables") == 0, timeout=40, step=0.2)


def test_a_held_lock_is_waited_for_and_then_told() -> None:
    stage = Stage(Backend.parse("iptables-legacy"))
    try:
        stage.pod("web", [mapping(PORT, 80)])
        with stage.node.path("/run/xtables.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            release = threading.Timer(3, lambda: fcntl.flock(lock, fcntl.LOCK_UN))
            release.start()
            stage.pod("patient", [mapping(9000, 80)])
            release.join()
            fcntl.flock(lock, fcntl.LOCK_EX)
            started = time.monotonic()
            error = stage.refused("rival", [mapping(9001, 80)])
            assert error.code == 11, error.text
            assert "lock" in error.text
            assert time.monotonic() - started < 25
            assert stage.ask(NODE4, PORT).server == "web"
        stage.pod("third", [mapping(9001, 80)])
        assert stage.ask(NODE4, 9001).server == "third"
    finally:
        stage.close()


def test_a_missing_mark_chain_hurts_only_who_asked_for_it(stage: Stage) -> None:
    stage.pod("web", [mapping(PORT, 80)])
    marked = stage.network(externalSetMarkChain="KUBE-MARK-MASQ")
    error = stage.refused("marked", [mapping(9000, 80)], network=marked)
    assert error.code == 102
    assert "KUBE-MARK-MASQ" in error.text or "refused" in error.text
    for family in ("iptables", "ip6tables"):
        restore(
            stage,
            "*nat\n:KUBE-MARK-MASQ - [0:0]\n-A KUBE-MARK-MASQ -j MARK --or-mark 0x4000\n"
            "-A POSTROUTING -m mark --mark 0x4000/0x4000 -j MASQUERADE\nCOMMIT\n",
            family,
        )
    stage.pod("marked", [mapping(9000, 80)], network=marked)
    for at in ("client", "marked", None):
        assert stage.ask(NODE4, 9000, at=at).server == "marked"
    assert stage.ask("127.0.0.1", 9000, at=None).server == "marked"
    assert stage.ask(NODE4, PORT).server == "web"


_WITHOUT = """
mkdir /run/sbin /run/real
mount --bind /usr/sbin /run/real
for f in /run/real/*; do
  case $(basename $f) in $1*) ;; *) ln -s $f /run/sbin/$(basename $f) ;; esac
done
rm -f /run/tools/$1*
mount --bind /run/sbin /usr/sbin
"""


def test_a_missing_ip6tables_only_matters_to_ipv6(stage: Stage) -> None:
    stage.node.run("sh", "-ec", _WITHOUT, "sh", "ip6tables")
    v4 = stage.pod("web", [mapping(PORT, 80)], network=stage.network("v4only", dual=False))
    assert stage.ask(NODE4, PORT).server == "web"
    error = stage.refused("dual", [mapping(9000, 80)])
    assert error.code == 102
    assert "ip6tables" in error.text
    assert "9000" not in stage.node.output(tool(stage, "iptables-save"))
    stage.pod("hostip", [mapping(9000, 80, "tcp", NODE4)])
    assert stage.ask(NODE4, 9000).server == "hostip"
    assert stage.call("CHECK", stage.config(v4), v4.at).status == 0
    stage.remove(v4)


@pytest.mark.parametrize("name", ['a"b', "-j DROP", "x" * 300, "\\", "a'b`c", "ü" * 130])
def test_names_of_pods_change_nothing_but_the_comment(stage: Stage, name: str) -> None:
    at = stage.attachment("web", [mapping(PORT, 80)])
    at.args = f"IgnoreUnknown=1;K8S_POD_NAMESPACE={name};K8S_POD_NAME={name}"
    network = stage.network()
    network.add(at)
    stage.servers.serve("web", [("tcp", 80)], netns="web")
    assert stage.ask(NODE4, PORT).server == "web"
    config = network.config(network.entry(TYPE), at, at.result)
    assert stage.call("CHECK", config, at).status == 0
    text = saved(stage)
    assert len(re.findall(r"^-A KUBE-HOSTPORTS ", text, re.MULTILINE)) == 1
    assert "-j DROP" not in re.sub(r'"(?:[^"\\]|\\.)*"', "", text).replace("-i lo", "").replace(
        "-A PREROUTING -d 127.0.0.0/8 !  -m comment --comment  -j DROP", ""
    )
    network.delete(at)
    assert "KUBE-HP-" not in saved(stage)


# -- damage ---------------------------------------------------------------------------------------


def check(stage: Stage, pod: Pod) -> Reply:
    return stage.call("CHECK", stage.config(pod), pod.at)


@pytest.mark.parametrize("damage", [
    ["-t", "nat", "-F"], ["-t", "nat", "-F", "PREROUTING"], ["-t", "nat", "-F", "KUBE-HOSTPORTS"],
    ["-t", "filter", "-F"], ["-t", "raw", "-F"], ["-t", "nat", "-F", "POSTROUTING"],
], ids=" ".join)  # fmt: skip
def test_flushed_rules_are_told_by_check_and_come_back(stage: Stage, damage: list[str]) -> None:
    pod = stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
    whole = saved(stage)
    stage.node.run(tool(stage, "iptables"), *damage)
    if stage.backend.flavour == "legacy":  # no events: the next look is seconds away
        told = check(stage, pod).code == 103
        # or a look at the interval came between the two
        assert told or sorted(lines(saved(stage))) == sorted(lines(whole))
        (helper,) = stage.node.helpers()
        stage.node.run("kill", "-9", str(helper))
        assert wait_for(lambda: not stage.node.helpers())
        assert check(stage, pod).status == 0
    assert wait_for(lambda: sorted(lines(saved(stage))) == sorted(lines(whole)), timeout=1)
    for at in ("client", "web", None):
        assert stage.ask(NODE4, PORT, at=at).server == "web"
    assert check(stage, pod).status == 0


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("-")]


def test_traffic_is_right_within_half_a_second_of_a_flush() -> None:
    stage = Stage(Backend.parse("iptables-nft"))
    try:
        stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
        for _ in range(2):
            stage.node.run("nft", "flush", "ruleset")
            assert wait_for(lambda: stage.ask(NODE4, PORT, timeout=0.1).ok, timeout=0.6)
            assert wait_for(lambda: stage.ask(NODE6, PORT, "udp", timeout=0.1).ok, timeout=0.6)
    finally:
        stage.close()


# -- one backend after the other ------------------------------------------------------------------


class Asking(threading.Thread):
    """New connections without pause; the failures are kept."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage
        self.stop = threading.Event()
        self.count = 0
        self.failures: list[object] = []

    def run(self) -> None:
        while not self.stop.is_set():
            for protocol in ("tcp", "udp"):
                answer = self._stage.ask(NODE4, PORT, protocol, timeout=0.5)  # type: ignore[arg-type]
                self.count += 1
                if not answer.ok:
                    self.failures.append(answer)


@pytest.mark.parametrize("first", ["iptables", "nftables"])
def test_a_live_attachment_changes_its_backend_without_a_gap(stage: Stage, first: str) -> None:
    second = {"iptables": "nftables", "nftables": "iptables"}[first]
    mappings = [mapping(PORT, 80), mapping(PORT, 80, "udp")]
    pod = stage.pod("web", mappings, network=stage.network(backend=first))
    asking = Asking(stage)
    asking.start()
    time.sleep(0.2)
    for name in (second, first, second):
        config = {**stage.config(pod), "backend": name}
        assert stage.call("ADD", config, pod.at).status == 0
        time.sleep(0.2)
    asking.stop.set()
    asking.join()
    assert asking.count > 20
    assert asking.failures == []
    has_nft = "hostport-manager" in stage.node.ruleset()
    assert ("KUBE-HP-" in saved(stage)) == (second == "iptables")
    assert has_nft or second == "iptables"
    stage.remove(pod)
    assert wait_for(lambda: gone(stage), timeout=45, step=0.5)
    assert wait_for(lambda: "hostport-manager" not in stage.node.ruleset(), timeout=45, step=0.5)
    assert "KUBE-HOSTPORTS" not in saved(stage)


def test_rules_follow_the_flavour_that_kube_proxy_chose_meanwhile(stage: Stage) -> None:
    other = "legacy" if stage.backend.flavour == "nft" else "nft"
    stage.pod("web", [mapping(PORT, 80)])
    assert ours(saved(stage))
    stage.node.run(f"iptables-{other}", "-t", "mangle", "-N", "KUBE-KUBELET-CANARY")
    (helper,) = stage.node.helpers()
    stage.node.run("kill", "-9", str(helper))
    assert wait_for(lambda: not stage.node.helpers())
    stage.pod("next", [mapping(9000, 80)])
    assert ours(stage.node.output(f"iptables-{other}-save"))
    assert not ours(saved(stage))
    assert stage.ask(NODE4, PORT).server == "web"


# -- which backend --------------------------------------------------------------------------------


def break_tool(stage: Stage, *names: str) -> None:
    """The tools are there and do not work, under every name."""
    for name in names:
        stage.node.run("mount", "--bind", "/bin/false", f"/usr/sbin/{name}")


def test_auto_takes_iptables_where_nft_does_not_work() -> None:
    stage = Stage(Backend.parse("iptables-nft"))
    try:
        break_tool(stage, "nft")
        pod = stage.pod("web", [mapping(PORT, 80)], network=stage.network(backend="auto"))
        assert stage.ask(NODE4, PORT).server == "web"
        assert "KUBE-HP-" in saved(stage)
        assert status(stage)["backend"] == {"ip": "iptables", "ip6": "iptables"}
        error = stage.refused(
            "rival", [mapping(9000, 80)], network=stage.network(backend="nftables")
        )
        assert error.code == 7
        assert (
            stage.call("STATUS", {**stage.entry(), "name": "x", "cniVersion": "1.1.0"}).status == 0
        )
        stage.remove(pod)
    finally:
        stage.close()


def test_attachments_of_nftables_live_on_where_nft_has_gone() -> None:
    """The helper comes back without nft: rules that are whole serve, and go with their pods."""
    stage = Stage(Backend.parse("nftables"))
    try:
        network = stage.network(backend="auto")
        pods = [stage.pod(f"pod{n}", [mapping(8000 + n, 80)], network=network) for n in range(3)]
        (helper,) = stage.node.helpers()
        stage.node.run("kill", "-9", str(helper))
        assert wait_for(lambda: not stage.node.helpers())
        break_tool(stage, "nft")
        late = stage.pod("late", [mapping(9000, 80)], network=network)
        assert stage.ask(NODE4, 9000).server == "late"
        reply = stage.call("STATUS", {**stage.entry(), "name": "x", "cniVersion": "1.1.0"})
        assert reply.status == 0, reply
        stage.remove(pods[0])
        assert stage.ask(NODE4, 8000).refused_at_once()
        for pod in pods[1:]:
            assert stage.ask(NODE4, int(pod.at.capability_args["portMappings"][0]["hostPort"])).ok
            assert stage.call("CHECK", stage.config(pod), pod.at).status == 0
        stage.node.run("umount", "-l", "/usr/sbin/nft")
        for pod in (*pods[1:], late):
            stage.remove(pod)
        assert wait_for(lambda: "hostport-manager" not in stage.node.ruleset(), 45, 0.5)
    finally:
        stage.close()


def test_the_last_pod_takes_the_tables_along_where_nft_has_gone() -> None:
    stage = Stage(Backend.parse("nftables"))
    try:
        pod = stage.pod("web", [mapping(PORT, 80)])
        (helper,) = stage.node.helpers()
        stage.node.run("kill", "-9", str(helper))
        assert wait_for(lambda: not stage.node.helpers())
        stage.node.nft("delete chain ip hostport-manager guard")
        break_tool(stage, "nft")
        assert stage.call("DEL", stage.config(pod), pod.at).status == 0
        stage.node.run("umount", "-l", "/usr/sbin/nft")
        assert "hostport-manager" not in stage.node.ruleset()
    finally:
        stage.close()


def test_no_backend_at_all_is_a_clear_error() -> None:
    stage = Stage(Backend.parse("nftables"))
    try:
        break_tool(stage, "nft", "xtables-nft-multi", "xtables-legacy-multi")
        error = stage.refused("web", [mapping(PORT, 80)], network=stage.network(backend="auto"))
        assert error.code == 50
        reply = stage.call("STATUS", {**stage.entry(), "name": "x", "cniVersion": "1.1.0"})
        assert reply.code == 50, reply
        assert "nft" in reply.text
        assert "iptables" in reply.text
    finally:
        stage.close()


# -- conditions -----------------------------------------------------------------------------------


WRONG = {
    "nftables": (["ip", "sadr", "10.0.0.0/8"], "syntax error"),
    "iptables": (["--sauce", "10.0.0.0/8"], "unknown option"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("first", [True, False], ids=["first pod", "later pod"])
def test_wrong_conditions_are_refused_in_the_tools_own_words(
    stage: Stage, name: str, first: bool
) -> None:
    words, text = WRONG[name]
    if not first:
        stage.pod("web", [mapping(PORT, 80)], network=stage.network(backend=name))
        time.sleep(0.3)
    before = (
        ours(saved(stage)),
        stage.records(),
        stage.node.run("nft", "list", "table", "ip", "hostport-manager", check=False).stdout,
    )
    network = stage.network(backend=name, conditionsV4=words)
    error = stage.refused("bad", [mapping(9000, 80)], network=network)
    assert text in error.text.lower(), error.text
    assert before == (
        ours(saved(stage)),
        stage.records(),
        stage.node.run("nft", "list", "table", "ip", "hostport-manager", check=False).stdout,
    )
    stage.pod("good", [mapping(9000, 80)], network=stage.network(backend=name))
    assert stage.ask(NODE4, 9000).server == "good"


def test_conditions_may_list_addresses(stage: Stage) -> None:
    """iptables makes a rule of each: none may look like damage."""
    words = ["-s", "192.0.2.0/24,203.0.113.0/24", "-d", f"{NODE4},198.51.100.1"]
    pod = stage.pod("web", [mapping(PORT, 80)], network=stage.network(conditionsV4=words))
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.ask(NODE4, PORT, at="other").refused_at_once()
    assert saved(stage).count("-A KUBE-HOSTPORTS") == 4
    assert check(stage, pod).status == 0
    (helper,) = stage.node.helpers()
    stage.node.run("kill", "-9", str(helper))
    assert wait_for(lambda: not stage.node.helpers())
    assert check(stage, pod).status == 0
    assert status(stage)["repairs"]["count"] == 0  # type: ignore[index]
    stage.remove(pod)
    assert "KUBE-HP-" not in saved(stage)


def test_profiles_of_conditions_come_and_go_with_their_users() -> None:
    stage = Stage(Backend.parse("nftables"))
    try:
        near = stage.network("near", conditionsV4=["ip", "saddr", "192.0.2.0/24"])
        far = stage.network(
            "far", conditionsV4=["ip", "saddr", "198.51.100.0/24", "tcp", "sport", ">=", "1"]
        )
        one = stage.pod("one", [mapping(8001, 80), mapping(8004, 80, "tcp", NODE4)], network=near)
        two = stage.pod("two", [mapping(8002, 80)], network=near)
        three = stage.pod("three", [mapping(8003, 80)], network=far)
        assert stage.node.ruleset().count("chain profile_") == 2
        for port, name in ((8001, "one"), (8002, "two"), (8004, "one")):
            assert stage.ask(NODE4, port).server == name
            assert stage.ask(NODE4, port, at="other").refused_at_once()
        stage.node.run("nft", "flush", "ruleset")
        assert wait_for(lambda: stage.ask(NODE4, 8001, timeout=0.1).ok, timeout=0.6)
        assert stage.ask(NODE4, 8003, at="other").server == "three"
        for pod in (one, three):
            stage.remove(pod)
        assert stage.node.ruleset().count("chain profile_") == 1
        (helper,) = stage.node.helpers()
        stage.node.run("kill", "-9", str(helper))
        assert stage.ask(NODE4, 8002).server == "two"
        stage.remove(two)
        assert stage.node.ruleset().count("profile_") == 0
    finally:
        stage.close()


def test_no_stray_processes(stage: Stage) -> None:
    """Twenty quick ADD and DEL leave one helper and no tool behind."""
    network = stage.network()
    at = stage.attachment("web", [mapping(PORT, 80)])
    for _ in range(5):
        network.add(at)
        network.delete(at)
    assert wait_for(lambda: len(stage.node.processes()) == 1)
    assert isinstance(stage.node.run("true"), subprocess.CompletedProcess)
