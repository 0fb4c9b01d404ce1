"""GC and STATUS: what goes, what stays, and how long an answer may take."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lab.chain import Json
from lab.contract import MISSING, Caller, conf, env_of, failed, ports, succeeded
from lab.node import wait_for
from lab.stage import RUN_DIR, Stage, mapping

NEW, OLD = "cni.dev/valid-attachments", "cni.dev/attachments"


@pytest.fixture
def call(stage: Stage) -> Caller:
    """A fresh node without a helper."""
    return Caller(stage)


def add(call: Caller, container: str, port: int, network: str = "net1", link: str = "eth0") -> None:
    document = conf(name=network, **ports(mapping(port, 80), mapping(port, 80, "udp")))
    document["prevResult"]["interfaces"][1]["name"] = link
    reply = call.verb("ADD", document, CNI_CONTAINERID=container, CNI_IFNAME=link)
    succeeded(reply, silent=False)


def gc(call: Caller, network: str = "net1", **keys: Any) -> Any:
    return call.verb("GC", conf("GC", name=network, **keys))


def alive(call: Caller) -> set[str]:
    """Who has ports, as ``status`` says; the kernel's rules must say the same."""
    mappings = json.loads(call.stage.node.output(call.binary, "status", "--json"))["mappings"]
    rules = call.stage.node.ruleset() + call.stage.node.output("iptables-legacy-save")
    for each in mappings:
        assert str(each["hostPort"]) in rules
    found = {f"{m['network']}/{m['containerID']}/{m['ifname']}" for m in mappings}
    assert len(found) == len(call.stage.records())
    return found


def entry(container: str, link: str = "eth0", **more: Any) -> Json:
    return {"containerID": container, "ifname": link, **more}


# -- GC -------------------------------------------------------------------------------------------

LISTS: dict[str, tuple[Json, set[str]]] = {
    "one of them": ({NEW: [entry("a")]}, {"a"}),
    "both": ({NEW: [entry("a"), entry("b")]}, {"a", "b"}),
    "none": ({NEW: []}, set()),
    "null": ({NEW: None}, set()),
    "the older key": ({OLD: [entry("b")]}, {"b"}),
    "the older key, null": ({OLD: None}, set()),
    "the newer key counts": ({NEW: [entry("a")], OLD: []}, {"a"}),
    "the newer key counts, null": ({NEW: None, OLD: [entry("a")]}, set()),
    "keys in any case": ({NEW: [{"CONTAINERID": "a", "IfName": "eth0"}]}, {"a"}),
    "unknown keys and repeats": ({NEW: [entry("a", x=1)] * 3, "x": 1}, {"a"}),
    "another interface": ({NEW: [entry("a", "eth1"), entry("b")]}, {"b"}),
    "strangers": ({NEW: [entry("z"), entry("y" * 300)]}, set()),
    "no list": ({}, {"a", "b"}),
}


@pytest.fixture(scope="module")
def shared(backend: Any) -> Iterator[Caller]:
    """One node for GCs that only differ in their list."""
    stage = Stage(backend)
    yield Caller(stage)
    stage.close()


@pytest.mark.parametrize("kind", LISTS)
def test_what_the_list_does_not_name_goes(shared: Caller, kind: str) -> None:
    """P11; ``c`` is on another network with the same container ID as ``a``."""
    keys, left = LISTS[kind]
    add(shared, "a", 8001)
    add(shared, "b", 8002)
    add(shared, "a", 8003, network="net2")
    succeeded(gc(shared, **keys))
    assert alive(shared) == {f"net1/{name}/eth0" for name in left} | {"net2/a/eth0"}
    succeeded(gc(shared, **keys))
    for network in ("net1", "net2"):
        succeeded(gc(shared, network, **{NEW: []}))
    assert alive(shared) == set()


NO_LISTS: list[Any] = [
    *({}, "a", 5, True, [None], ["a"], [[]], [{}], [{"containerID": "a"}], [{"ifname": "eth0"}]),
    *([entry("a"), entry("")], [entry("a", "")], [entry("a"), {"containerID": 5, "ifname": "x"}]),
    [{"containerID": "a", "ifname": None}],
]


@pytest.mark.parametrize("value", NO_LISTS, ids=range(len(NO_LISTS)))
@pytest.mark.parametrize("key", [NEW, OLD])
def test_what_is_no_list_removes_nothing(shared: Caller, key: str, value: Any) -> None:
    add(shared, "a", 8001)
    before = shared.stage.snapshot()
    failed(gc(shared, **{key: value}), 7, names=key)
    assert shared.stage.snapshot() == before
    succeeded(shared.verb("DEL", CNI_CONTAINERID="a"))


def test_interfaces_of_one_container_are_told_apart(call: Caller) -> None:
    for port, link in ((8001, "eth0"), (8002, "eth1"), (8003, "net1")):
        add(call, "a", port, link=link)
    succeeded(gc(call, **{NEW: [entry("a", "eth1")]}))
    assert alive(call) == {"net1/a/eth1"}


def test_an_add_under_way_is_spared(call: Caller) -> None:
    """Both wait for a stopped helper: the list cannot know what was not answered yet."""
    add(call, "old", 8001)
    (helper,) = call.stage.node.helpers()
    os.kill(helper, signal.SIGSTOP)
    try:
        adding = call.start(env_of("ADD", CNI_CONTAINERID="new"))
        feed(adding, call.document(conf(**ports(mapping(8002, 80)))))
        time.sleep(0.3)
        collecting = call.start(env_of("GC"))
        feed(collecting, conf("GC", **{NEW: []}))
        time.sleep(0.3)
    finally:
        os.kill(helper, signal.SIGCONT)
    assert adding.wait(timeout=20) == 0
    assert collecting.wait(timeout=20) == 0
    assert alive(call) == {"net1/new/eth0"}
    succeeded(gc(call, **{NEW: []}))
    assert alive(call) == set()


def feed(process: Any, document: Json) -> None:
    process.stdin.write(json.dumps(document).encode())
    process.stdin.close()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda file: file.write_bytes(b""),
    "noise": lambda file: file.write_bytes(b"\xff\0{"),
    "no record": lambda file: file.write_text("{}"),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "gone": lambda file: file.unlink(),
    "a dangling link": lambda file: (file.unlink(), file.symlink_to("/nowhere")),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_records_stop_nothing(call: Caller, kind: str, restart: bool) -> None:
    add(call, "a", 8001)
    (record,) = call.stage.records()
    add(call, "b", 8002)
    folder = call.stage.node.path(f"{RUN_DIR}/records")
    if restart:
        os.kill(call.stage.node.helpers()[0], signal.SIGKILL)
        assert wait_for(lambda: not call.stage.node.helpers())
    DAMAGE[kind](folder / record)
    succeeded(gc(call, **{NEW: [entry("b")]}))
    assert alive_in_memory(call) == {"b"}
    rules = call.stage.node.ruleset() + call.stage.node.output("iptables-legacy-save")
    assert "8001" not in rules
    add(call, "a", 8001)
    succeeded(call.verb("DEL", CNI_CONTAINERID="a"))
    succeeded(gc(call, **{NEW: []}))
    assert alive_in_memory(call) == set()


def alive_in_memory(call: Caller) -> set[str]:
    """Containers of ``status``, whatever lies in the folder of records."""
    text = call.stage.node.output(call.binary, "status", "--json")
    return {m["containerID"] for m in json.loads(text)["mappings"]}


def test_gc_on_a_fresh_node_and_of_an_unknown_network(call: Caller) -> None:
    succeeded(gc(call, **{NEW: []}))
    add(call, "a", 8001)
    succeeded(gc(call, "net9", **{NEW: []}))
    succeeded(gc(call, "net9", **{NEW: MISSING}))
    assert alive(call) == {"net1/a/eth0"}


# -- STATUS ---------------------------------------------------------------------------------------

UP, START = 0.5, 2.0
SLACK = 0.4
"""Seconds that a loaded machine may add to an answer; the limits themselves are the plugin's."""


def status(call: Caller, limit: float, *codes: int, names: str = "") -> None:
    reply = call.verb("STATUS", conf("STATUS"))
    assert reply.seconds < limit + SLACK, reply
    if codes:
        failed(reply, *codes, names=names)
    else:
        succeeded(reply)
    assert reply.stderr == b""


def test_status_starts_a_helper_and_then_finds_it(call: Caller) -> None:
    reply = call.verb("STATUS", conf("STATUS"))
    assert reply.seconds < START + SLACK, reply
    if reply.status:  # the machine is slower than the limit, which holds all the same
        failed(reply, 50, names="did not come up in time")
    helper = call.warm()
    for _ in range(3):
        status(call, UP)
    assert call.stage.node.helpers() == [helper]


def test_status_of_a_stopped_helper(call: Caller) -> None:
    helper = call.warm()
    os.kill(helper, signal.SIGSTOP)
    try:
        for _ in range(3):
            status(call, UP, 50, names="helper")
    finally:
        os.kill(helper, signal.SIGCONT)
    status(call, UP)
    assert call.stage.node.helpers() == [helper]


def test_status_of_a_busy_helper(call: Caller) -> None:
    """A tool that takes long holds the worker up, not the answer."""
    tool = slow_tool(call)
    adding = call.start(env_of("ADD"))
    feed(adding, call.document(conf(**ports(mapping(8080, 80)))))
    assert wait_for(lambda: call.stage.node.path("/run/slow").exists(), 10)
    for _ in range(3):
        status(call, UP)
    assert adding.poll() is None
    call.stage.node.path("/run/go").touch()
    assert adding.wait(timeout=20) == 0
    tool.unlink()


def slow_tool(call: Caller) -> Path:
    """The backend's tool, first on PATH, waits for /run/go before it does anything."""
    name = "nft" if call.stage.backend.name == "nftables" else "iptables-restore"
    tool = call.stage.node.path(f"/run/tools/{name}")
    real = call.stage.node.output("sh", "-c", f"command -v {name}").strip()
    target = real if not real.startswith("/run/tools") else os.readlink(tool)
    wait = (
        'case "$*" in *-f*|*noflush*) touch /run/slow; while [ ! -e /run/go ]; do sleep 0.05; done'
    )
    tool.unlink(missing_ok=True)
    tool.write_text(f'#!/bin/sh\n{wait};; esac\nexec {target} "$@"\n')
    tool.chmod(0o755)
    # the helper takes PATH from the call that starts it
    call.warm(PATH=call.stage.runtime.env["PATH"])
    return tool


@pytest.mark.parametrize("kind", ["a file", "a link", "others may write", "not root's"])
def test_status_where_none_can_be_started(call: Caller, kind: str) -> None:
    folder = call.stage.node.path(RUN_DIR)
    if kind == "a file":
        folder.write_text("x")
    elif kind == "a link":
        folder.symlink_to("/run/lock")
    else:
        folder.mkdir(mode=0o700)
        if kind == "not root's":
            os.chown(folder, 65534, 65534)
        else:
            folder.chmod(0o777)
    status(call, START, 50, names=RUN_DIR)
    reply = call.verb("ADD", conf(**ports(mapping(8080, 80))))
    failed(reply, 11, names=RUN_DIR)
    succeeded(call.verb("DEL"))
    assert call.stage.node.helpers() == []


def test_status_where_no_backend_works(call: Caller) -> None:
    """Every tool is hidden below a file that cannot be executed."""
    node = call.stage.node
    call.warm()
    node.path("/run/empty").touch()
    hide = (
        "for f in /usr/sbin/nft /usr/sbin/xtables-nft-multi /usr/sbin/xtables-legacy-multi; do"
        " mount --bind /run/empty $f; done; rm -rf /run/tools/*tables*"
    )
    node.run("sh", "-ec", hide)
    status(call, UP, 50)
    for pid in node.helpers():
        os.kill(pid, signal.SIGKILL)
    assert wait_for(lambda: not node.helpers())
    status(call, START, 50)
    node.run("sh", "-ec", "umount -l /usr/sbin/nft /usr/sbin/xtables-*-multi")
    assert wait_for(lambda: call.verb("STATUS", conf("STATUS")).status == 0, 10)


def test_status_of_another_namespace(call: Caller) -> None:
    """A helper serves the namespace that it was started in and no other."""
    call.warm()
    call.stage.node.add_netns("elsewhere")
    node, env = call.stage.node, {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    for verb, code in (("STATUS", 50), ("ADD", 4), ("CHECK", 4), ("GC", 4)):
        done = node.run(
            call.binary,
            netns="elsewhere",
            check=False,
            data=json.dumps(conf(verb)).encode(),
            env=env | env_of(verb),
        )
        error = json.loads(done.stdout)
        assert (done.returncode, error["code"]) == (1, code), error
        assert "namespace" in error["msg"] + error["details"]
