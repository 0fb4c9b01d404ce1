"""DEL as runtimes really send it, with and without a helper, and in order with what follows."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.chain import Json
from lab.contract import MISSING, Caller, conf, env_of, ports, succeeded
from lab.node import NODE4, wait_for
from lab.rivals import Rival
from lab.stage import RUN_DIR, TYPE, Backend, Stage, mapping

PORT = 8080
GOOD = conf(**ports(mapping(PORT, 80), mapping(PORT, 80, "udp")))

# What runtimes leave out (facts of containerd, nerdctl, podman, CRI-O), and what else may happen.
FORMS: dict[str, tuple[Json, dict[str, str | None]]] = {
    "as ADD": ({}, {}),
    "containerd, remove": ({"prevResult": MISSING}, {"CNI_NETNS": ""}),
    "containerd, after a failed ADD": ({"prevResult": MISSING}, {}),
    "nerdctl, before every ADD": ({"prevResult": MISSING}, {"CNI_NETNS": "", "CNI_ARGS": ""}),
    "libcni, an unreadable cache": ({"prevResult": MISSING, "runtimeConfig": MISSING}, {}),
    "an old configuration": ({"prevResult": MISSING, "cniVersion": "0.3.1"}, {}),
    "no version": ({"prevResult": MISSING, "cniVersion": MISSING}, {}),
    "no variable more than needed": ({}, {"CNI_NETNS": None, "CNI_ARGS": None}),
    "a namespace that is gone": ({}, {"CNI_NETNS": "/var/run/netns/gone"}),
    "a plain file as namespace": ({}, {"CNI_NETNS": "/etc/hostname"}),
    "other mappings": (ports(mapping(9999, 1, "sctp", "::1")), {}),
    "no mappings": ({"runtimeConfig": {"portMappings": []}}, {}),
    "mappings that are nonsense": ({"runtimeConfig": {"portMappings": "x"}}, {}),
    "a runtimeConfig that is nonsense": ({"runtimeConfig": [5]}, {}),
    "a prevResult that is nonsense": ({"prevResult": "x"}, {}),
    "a prevResult of another version": ({"prevResult": {"cniVersion": "0.2.0"}}, {}),
    "options that are nonsense": ({"snat": 7, "backend": "none", "reservePorts": []}, {}),
    "another type": ({"type": "portmap"}, {}),
}


def form(kind: str) -> tuple[Json, dict[str, str | None]]:
    change, env = FORMS[kind]
    changed = {**GOOD, **change}
    return {key: value for key, value in changed.items() if value is not MISSING}, env


@pytest.fixture(scope="module")
def shared(backend: Backend) -> Iterator[Caller]:
    """One node and helper for forms of DEL."""
    stage = Stage(backend)
    yield Caller(stage)
    stage.close()


@pytest.fixture
def call(stage: Stage) -> Caller:
    """A fresh node without a helper."""
    return Caller(stage)


def free(call: Caller) -> bool:
    """Nothing holds the port, and no rule of ours names it."""
    rules = call.stage.node.ruleset() + call.stage.node.output("iptables-legacy-save")
    node = call.stage.node
    return (
        str(PORT) not in rules
        and Rival("0.0.0.0", "plain", "tcp").wins(node, PORT)
        and Rival("0.0.0.0", "plain", "udp").wins(node, PORT)
    )


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_takes_everything_away(shared: Caller, kind: str) -> None:
    """P8: before any ADD, after it, and again."""
    document, env = form(kind)
    for expected in ("before ADD", "after ADD", "again"):
        if expected == "after ADD":
            succeeded(shared.verb("ADD", GOOD), silent=False)
            assert not free(shared)
        reply = shared.verb("DEL", document, **env)
        succeeded(reply)
        assert reply.stderr == b"", expected
        assert free(shared), expected
    assert shared.stage.records() == {}


# -- without a helper -----------------------------------------------------------------------------


def spoil(call: Caller) -> None:
    """No helper runs, and none can be started: its lock is held by somebody else."""
    for pid in call.stage.node.helpers():
        os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not call.stage.node.helpers())
    folder = call.stage.node.path(RUN_DIR)
    folder.mkdir(mode=0o700, exist_ok=True)
    call.stage.node.popen("flock", "-w", "5", f"{RUN_DIR}/helper.lock", "sleep", "1000")
    assert wait_for(lambda: ["sleep", "1000"] in call.stage.node.processes().values())


def mend(call: Caller) -> None:
    """A helper can be started again; the last that was tried may become one by itself."""
    for pid, argv in call.stage.node.processes().items():
        if "1000" in argv:
            os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: call.stage.node.processes().keys() <= set(call.stage.node.helpers()))


def queue(call: Caller) -> list[Path]:
    folder = call.stage.node.path(f"{RUN_DIR}/queue")
    return sorted(folder.iterdir()) if folder.exists() else []


def queued(call: Caller, document: Json = GOOD, **env: str | None) -> None:
    """A DEL that succeeds in time, says so on stderr, and waits in the queue."""
    before = len(queue(call))
    reply = call.verb("DEL", document, **env)
    succeeded(reply)
    assert reply.seconds < 5.4, reply
    assert b"queued" in reply.stderr
    assert len(queue(call)) == before + 1


def test_queued_dels_are_done_by_the_next_helper(call: Caller) -> None:
    """Several forms at once: each succeeds in time and waits in a file of its own."""
    kinds = ("as ADD", "containerd, remove", "mappings that are nonsense", "no version")
    for number, _ in enumerate(kinds):
        document = conf(**ports(mapping(PORT + number, 80), mapping(PORT + number, 80, "udp")))
        succeeded(call.verb("ADD", document, CNI_CONTAINERID=f"c{number}"), silent=False)
    spoil(call)
    begin = time.monotonic()
    processes = []
    for number, kind in enumerate(kinds):
        document, env = form(kind)
        process = call.start(env_of("DEL", **{"CNI_CONTAINERID": f"c{number}", **env}))
        assert process.stdin is not None
        process.stdin.write(json.dumps(call.document(document)).encode())
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    for process in processes:
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (0, b"")
        assert b"queued" in err
    assert time.monotonic() - begin < 6
    assert len(queue(call)) == len(kinds)
    mend(call)
    call.warm()
    assert wait_for(lambda: not queue(call))
    assert wait_for(lambda: free(call))
    assert call.stage.records() == {}


def test_a_queued_del_is_done_even_after_the_rules_were_flushed(call: Caller) -> None:
    succeeded(call.verb("ADD", GOOD), silent=False)
    spoil(call)
    queued(call)
    call.stage.node.run("nft", "flush", "ruleset")
    mend(call)
    call.warm()
    assert wait_for(lambda: not queue(call), 8)
    assert wait_for(lambda: free(call))


def test_an_add_after_a_queued_del_stays(call: Caller) -> None:
    """The ADD starts the helper: it must not lose its ports to the DEL before it."""
    succeeded(call.verb("ADD", GOOD), silent=False)
    spoil(call)
    queued(call)
    queued(call, conf(**ports(mapping(1, 1))), CNI_CONTAINERID="another")
    mend(call)
    other = conf(**ports(mapping(8081, 80)))
    succeeded(call.verb("ADD", other), silent=False)
    assert queue(call) == []
    succeeded(call.verb("CHECK", other))
    time.sleep(1.2)
    succeeded(call.verb("CHECK", other))
    assert free(call)
    succeeded(call.verb("DEL", other))


def test_an_entry_is_noticed_while_a_helper_runs(call: Caller) -> None:
    """As where a DEL gave up on a helper that was stopped for a while."""
    succeeded(call.verb("ADD", GOOD), silent=False)
    succeeded(call.verb("ADD", conf(**ports(mapping(8081, 80))), CNI_CONTAINERID="b"), silent=False)
    (helper,) = call.stage.node.helpers()
    os.kill(helper, signal.SIGSTOP)
    try:
        queued(call)
        queued(call, form("containerd, remove")[0], CNI_NETNS="")
    finally:
        os.kill(helper, signal.SIGCONT)
    assert wait_for(lambda: not queue(call), 3)
    assert free(call)
    assert call.stage.node.helpers() == [helper]
    assert len(call.stage.records()) == 1


def test_a_newer_add_wins_over_a_del_that_gave_up(call: Caller) -> None:
    """DEL timed out on a stopped helper; the ADD after it is answered last and stays."""
    succeeded(call.verb("ADD", GOOD), silent=False)
    (helper,) = call.stage.node.helpers()
    os.kill(helper, signal.SIGSTOP)
    queued(call)
    again = call.start(env_of("ADD"))
    assert again.stdin is not None
    again.stdin.write(json.dumps(call.document(GOOD)).encode())
    again.stdin.close()
    again.stdin = None
    time.sleep(0.3)
    os.kill(helper, signal.SIGCONT)
    out, _ = again.communicate(timeout=30)
    assert again.returncode == 0, out
    time.sleep(1.2)
    succeeded(call.verb("CHECK", GOOD))
    assert queue(call) == []
    succeeded(call.verb("DEL", GOOD))


def test_damaged_entries_are_kept_and_stop_nothing(call: Caller) -> None:
    succeeded(call.verb("ADD", GOOD), silent=False)
    spoil(call)
    queued(call)
    folder = call.stage.node.path(f"{RUN_DIR}/queue")
    noise: dict[str, bytes] = {
        "00000000000000000001-1-aaaaaaaaaaaaaaaa.json": b"",
        "00000000000000000002-1-aaaaaaaaaaaaaaaa.json": b'{"env":{},"stdin":"e30="}',
        "00000000000000000003-1-aaaaaaaaaaaaaaaa.json": b"\xff\xfe",
        "stranger": b"x",
    }
    for name, content in noise.items():
        (folder / name).write_bytes(content)
    mend(call)
    call.warm()
    assert wait_for(lambda: free(call))
    left = {file.name for file in queue(call)}
    assert "stranger" in left
    assert not [name for name in left if name.endswith(".json")]


def test_del_of_a_real_pod_in_the_runtimes_order(stage: Stage) -> None:
    """The last plugin is asked first: its queued DEL lets bridge and IPAM give the address back."""
    pod = stage.pod("web", [mapping(PORT, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    call = Caller(stage)
    spoil(call)
    stage.remove(pod)
    leases: list[Any] = list(stage.node.path("/var/lib/cni/networks/podnet").glob("10.*"))
    assert leases == []
    mend(call)
    again = stage.pod("web", [mapping(PORT, 80)])
    assert stage.ask(NODE4, PORT).server == "web"
    assert len(stage.records()) == 1
    stage.remove(again)
    assert stage.call("GC", conf("GC", name="podnet", type=TYPE)).status == 0
