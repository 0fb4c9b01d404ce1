"""A successor takes the helper's place: no port is free for an instant, no call fails."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.contract import Caller, conf, env_of, ports
from lab.node import NODE4, wait_for
from lab.rivals import rivals
from lab.stage import BUNDLE, RUN_DIR, Stage, mapping

PORT = 8080
REPLACEMENTS = 20


class Competitor(threading.Thread):
    """Tries to have a port, in every style, until told to stop."""

    def __init__(self, stage: Stage, port: int) -> None:
        super().__init__()
        self._stage, self._port = stage, port
        self._who = rivals("0.0.0.0", NODE4, "::")
        self.done = threading.Event()
        self.tries, self.won = 0, set[str]()

    def run(self) -> None:
        while not self.done.is_set():
            for rival in self._who:
                self.tries += 1
                if rival.wins(self._stage.node, self._port):
                    self.won.add(str(rival))


class Traffic(threading.Thread):
    """ADD and DEL of attachments of its own, one after the other, until told to stop."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._call = Caller(stage)
        self.done = threading.Event()
        self.calls, self.failed = 0, list[str]()

    def run(self) -> None:
        number = 0
        while not self.done.is_set():
            number += 1
            entry = {"hostPort": 20000 + number % 100, "containerPort": 80, "protocol": "tcp"}
            for verb in ("ADD", "DEL"):
                env = env_of(verb, CNI_CONTAINERID=f"busy-{number}")
                reply = self._call(env, conf(verb, **ports(entry)))
                self.calls += 1
                if reply.status or reply.stderr:
                    self.failed.append(f"{verb} {number}: {reply.stdout!r} {reply.stderr!r}")


def replace(stage: Stage) -> subprocess.Popen[bytes]:
    """Start a successor and wait until it is the only helper."""
    started = stage.node.popen(str(BUNDLE), "helper", "--replace")
    # the executable under that pid is the plugin until it becomes the helper
    assert wait_for(lambda: len(stage.node.helpers()) == 1 and _owner(stage) == started.pid, 30)
    return started


def _owner(stage: Stage) -> int:
    text = stage.node.run("cat", f"{RUN_DIR}/helper.lock", check=False).stdout
    return int(text or 0)  # no pid namespace of its own: the number is ours as well


def test_twenty_replacements_leave_no_port_free_and_fail_no_call(stage: Stage) -> None:
    pod = stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
    rival, traffic = Competitor(stage, PORT), Traffic(stage)
    successors = []
    rival.start()
    traffic.start()
    try:
        for _ in range(REPLACEMENTS):
            successors.append(replace(stage))
            assert stage.ask(NODE4, PORT).server == "web"
    finally:
        for thread in (rival, traffic):
            thread.done.set()
            thread.join()
    for old in successors[:-1]:
        assert old.wait(10) == 0
    print(f"\n{REPLACEMENTS} replacements, {rival.tries} attempts, {traffic.calls} calls")
    assert rival.won == set()
    assert traffic.failed == []
    assert rival.tries > 100
    pod.network.check(pod.at)
    assert stage.call("DEL", stage.config(pod), pod.at).status == 0


def test_a_stopped_helper_is_replaced(stage: Stage) -> None:
    """It hands nothing over and heeds no TERM; the port is back with the successor."""
    stage.pod("web", [mapping(PORT, 80)])
    (old,) = stage.node.helpers()
    os.kill(old, signal.SIGSTOP)
    started = stage.node.popen(str(BUNDLE), "helper", "--replace")
    assert wait_for(lambda: stage.node.helpers() == [started.pid], 60, 0.1)
    assert wait_for(lambda: _owner(stage) == started.pid, 10)
    assert stage.ask(NODE4, PORT).server == "web"
    (mapped,) = json.loads(stage.node.output(str(BUNDLE), "status", "--json"))["mappings"]
    assert mapped["held"] == "yes"


class Manager:
    """systemd's side of the descriptor store (sd_notify(3), FDSTORE), as far as a helper sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(path))
        self._sock.settimeout(10)
        self.kept: dict[str, list[int]] = {}
        self.polled = list[str]()

    def take(self, until: str) -> None:
        """Read messages up to one that holds this text."""
        while True:
            data, ancillary, _, _ = self._sock.recvmsg(
                4096, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC
            )
            fields = dict(line.split("=", 1) for line in data.decode().splitlines())
            fds = array.array("i")
            for _, _, payload in ancillary:
                fds.frombytes(payload)
            name = fields.get("FDNAME", "")
            if "FDSTOREREMOVE" in fields:
                for old in self.kept.pop(name, []):
                    os.close(old)
            if "FDSTORE" in fields:
                self.kept.setdefault(name, []).extend(fds)
                self.polled.append(fields.get("FDPOLL", "1"))
            if until in data.decode():
                return

    def close(self) -> None:
        self._sock.close()
        for fds in self.kept.values():
            for fd in fds:
                os.close(fd)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(tmp_path / "notify")
    yield made
    made.close()


_WITH_STORE = """
import json, os, sys
names = json.loads(sys.argv[1])
env = dict(os.environ, LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(names)),
           LISTEN_FDNAMES=":".join(names))
os.execve(sys.argv[2], sys.argv[2:], env)
"""


def test_the_service_managers_store_keeps_sockets_while_no_helper_runs(
    stage: Stage, manager: Manager
) -> None:
    env = {"PATH": "/usr/sbin:/usr/bin", "NOTIFY_SOCKET": str(manager.path)}
    first = stage.node.popen(str(BUNDLE), "helper", env=env)
    manager.take("READY=1")
    pod = stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
    (key,) = stage.records()
    key = key.partition(".")[0]
    while len(manager.kept.get(key, [])) < 4:
        manager.take("FDSTORE=1")
    assert set(manager.polled) == {"0"}  # a bound socket polls as hung up
    first.kill()
    first.wait(10)
    who = rivals("0.0.0.0", NODE4, "::")
    assert not [str(r) for r in who if r.wins(stage.node, PORT)]
    names = [name for name, fds in manager.kept.items() for _ in fds]
    held = [fd for fds in manager.kept.values() for fd in fds]
    _start_with(stage, env, names, held)
    manager.take("READY=1")
    for fds in manager.kept.values():
        for fd in fds:
            os.close(fd)
    manager.kept.clear()
    assert not [str(r) for r in who if r.wins(stage.node, PORT)]
    pod.network.check(pod.at)
    assert stage.ask(NODE4, PORT).server == "web"
    assert stage.call("DEL", stage.config(pod), pod.at).status == 0
    manager.take("FDSTOREREMOVE")
    assert manager.kept == {}
    assert [r for r in who if r.wins(stage.node, PORT)] == who


def _start_with(stage: Stage, env: dict[str, str], names: list[str], held: list[int]) -> None:
    """Start a helper as systemd does: descriptors from 3 on, and their names."""

    def place() -> None:
        copies = [os.dup(fd) for fd in held]
        top = max([*copies, 3 + len(held)]) + 1
        high = [os.dup2(fd, top + number, inheritable=False) for number, fd in enumerate(copies)]
        for number, fd in enumerate(high):
            os.dup2(fd, 3 + number)

    argv = ["/usr/bin/python3", "-I", "-c", _WITH_STORE, json.dumps(names), str(BUNDLE), "helper"]
    stage.node.popen(*argv, env=env, preexec_fn=place, close_fds=False)
