"""Hostile surroundings: whatever a runtime leaves around a call, it ends, in time and in words.

Every case runs twice, once where the call must start the helper and once where it
finds one. What must hold: the answer, the end of stdout and stderr within a second of
the call's own end, and no process left but one helper.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from lab.chain import Json
from lab.contract import Caller, conf, env_of, failed, ports, result_of, succeeded
from lab.node import SAFE_PATH, wait_for
from lab.stage import RUN_DIR, Stage, mapping

BODY = conf(**ports(mapping(8080, 80)))


@dataclass(frozen=True)
class Around:
    """What is around a call: variables, a shell that runs it as ``"$@"``, limits, the node."""

    env: dict[str, str] = field(default_factory=dict)
    path: str | None = SAFE_PATH
    shell: str = 'exec "$@"'
    files: int = 0
    before: str = ""


AROUND: dict[str, Around] = {
    "containerd's": Around(
        {
            "LD_LIBRARY_PATH": "/opt/containerd/lib:",
            "NOTIFY_SOCKET": "/run/systemd/notify",
            "INVOCATION_ID": "0" * 32,
            "JOURNAL_STREAM": "8:1",
            "LISTEN_FDS": "3",
            "LISTEN_PID": "1",
            "WATCHDOG_USEC": "1",
        },
        "/opt/containerd/bin:" + SAFE_PATH,
    ),
    "a virtual environment's": Around(
        {
            "PYTHONHOME": "/nowhere",
            "PYTHONPATH": "/nowhere:/tmp",
            "PYTHONSTARTUP": "/nowhere",
            "PYTHONINSPECT": "1",
            "PYTHONVERBOSE": "1",
            "PYTHONUTF8": "0",
            "PYTHONIOENCODING": "utf-16",
            "PYTHONPLATLIBDIR": "x",
            "PYTHONDEVMODE": "1",
            "VIRTUAL_ENV": "/nowhere",
        },
        "/nowhere/bin:.:" + SAFE_PATH,
    ),
    "another bundle's": Around(
        {"LD_LIBRARY_PATH": "/tmp/_MEI000000", "_MEIPASS2": "/tmp/_MEI000000", "TCL_LIBRARY": "/x"}
    ),
    "a bad locale": Around({"LC_ALL": "xx_YY.nonsense", "LANG": "C", "LANGUAGE": "zz"}),
    "nothing at all": Around({}, None),
    "an empty PATH": Around({}, ""),
    "tracing": Around({"TRACEPARENT": "00-" + "0" * 32, "BAGGAGE": "a=b", "XDG_RUNTIME_DIR": ""}),
    "bytes that are no text": Around({"ODD": "\udcff\udcfe", "CNI_ODD": "\udcff=\n"}),
    "a hundred kilobytes": Around({"LARGE": "x" * 100_000, "CNI_LARGE": "y" * 100_000}),
    "a deleted working directory": Around(
        {}, shell='mkdir /run/gone; cd /run/gone; rmdir /run/gone; exec "$@"'
    ),
    "umask 0": Around({}, shell='umask 0; exec "$@"'),
    "umask 777": Around({}, shell='umask 777; exec "$@"'),
    "ignored signals": Around({}, shell="trap '' PIPE CHLD HUP TERM INT QUIT; exec \"$@\""),
    "a read-only /tmp": Around(before="mount -t tmpfs -o ro none /tmp"),
    "a noexec /tmp": Around(before="mount -t tmpfs -o noexec none /tmp"),
    "no /tmp": Around({"TMPDIR": "/nowhere"}, before="mount -t tmpfs -o ro,mode=0 none /tmp"),
    "a read-only root": Around(before="mount -o remount,ro,bind / 2>/dev/null || true"),
    "a hidden /proc": Around(before="mount -t proc -o hidepid=2 none /proc"),
    "many descriptors": Around(
        {}, shell='exec 3</dev/null 4>/dev/null 9</etc/passwd 7>&1 8>&2; exec "$@"'
    ),
    "16 descriptors": Around({}, files=16),
}


@dataclass(frozen=True)
class End:
    """How a call ended; ``late`` is how long its pipes stayed open after it."""

    status: int
    out: bytes
    err: bytes
    seconds: float
    late: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def encoded(call: Caller, document: Json) -> bytes:
    """What goes into stdin."""
    return json.dumps(call.document(document)).encode()


def run(call: Caller, env: dict[str, str], around: Around, document: Json = BODY) -> End:
    """One call; waits for the end of its pipes, not for its helper."""
    path = {} if around.path is None else {"PATH": around.path}
    begin = time.monotonic()
    limits = f"ulimit -S -n {around.files}; " if around.files else ""
    inner = ["/bin/sh", "-c", limits + around.shell, "sh", call.binary]
    process = call.stage.node.popen(
        *inner,
        env={**path, **env, **around.env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return reap(process, encoded(call, document), begin)


def reap(process: subprocess.Popen[bytes], data: bytes, begin: float) -> End:
    """Feed a call and wait for the end of its pipes, and for its own end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(data)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    pipes = {p.fileno(): bytearray() for p in (process.stdout, process.stderr) if p}
    texts, ended, last = dict(pipes), 0.0, begin + 40
    while pipes:
        ready, _, _ = select.select(list(pipes), [], [], 0.02)
        for descriptor in ready:
            part = os.read(descriptor, 65536)
            pipes[descriptor] += part
            if not part:
                del pipes[descriptor]
        now = time.monotonic()
        assert now < last, "the pipes stay open"
        if not ended and process.poll() is not None:
            ended = now
    closed = time.monotonic()
    status = process.wait(timeout=10)
    out, err = (bytes(text) for text in texts.values())
    late = closed - ended if ended else 0.0
    return End(status, out, err, closed - begin, late)


def well(end: End) -> None:
    assert end.status == 0, end
    assert end.json == result_of("1.1.0")
    assert end.err == b""
    assert end.late < 1.0, end


@pytest.fixture
def call(stage: Stage) -> Caller:
    """A fresh node without a helper."""
    return Caller(stage)


def one_helper(call: Caller) -> int:
    """The only process of the node; its descriptors and environment are its own."""
    node = call.stage.node
    assert wait_for(lambda: len(node.processes()) == 1), node.processes()
    (helper,) = node.helpers()
    for number in range(3):
        target = os.readlink(f"/proc/{helper}/fd/{number}")
        assert not target.startswith("pipe:"), target
    assert os.readlink(f"/proc/{helper}/cwd") == "/"
    assert os.getpgid(helper) == os.getsid(helper)
    return helper


@pytest.mark.parametrize("kind", AROUND)
def test_surroundings(call: Caller, kind: str) -> None:
    around = AROUND[kind]
    if around.before:
        call.stage.node.run("sh", "-c", around.before)
    well(run(call, env_of("ADD"), around))
    helper = one_helper(call)
    folder = call.stage.node.path(RUN_DIR)
    for path in (folder, folder / "helper.sock", *folder.glob("records/*")):
        assert path.stat().st_mode & 0o077 == 0, path
    well(run(call, env_of("ADD"), around))
    assert run(call, env_of("CHECK"), around).status == 0
    assert run(call, env_of("STATUS"), around, conf("STATUS")).status == 0
    end = run(call, env_of("DEL"), around)
    assert (end.status, end.out, end.err) == (0, b"", b""), end
    assert one_helper(call) == helper
    succeeded(call.verb("GC", conf("GC", **{"cni.dev/valid-attachments": []})))


@pytest.mark.parametrize("files", [4, 5, 6, 8, 12])
def test_hardly_any_descriptors(call: Caller, files: int) -> None:
    """It works, or says "try again"; DEL never fails; nothing hangs."""
    around = Around(files=files)
    for verb in ("ADD", "DEL", "DEL", "ADD", "DEL"):
        end = run(call, env_of(verb), around)
        assert end.late < 1.0
        if verb == "DEL":
            assert (end.status, end.out) == (0, b""), end
        elif end.status:
            assert end.json["code"] == 11, end
    succeeded(call.verb("ADD", BODY), silent=False)
    succeeded(call.verb("DEL"))
    one_helper(call)


CLOSED: dict[str, str] = {
    "stdin": '"$@" <&-',
    "stderr": '"$@" 2>&-',
    "stdin and stderr": '"$@" <&- 2>&-',
    "all": '"$@" <&- >&- 2>&-',
}


@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("verb", ["ADD", "DEL", "VERSION", "STATUS"])
def test_closed_descriptors(call: Caller, kind: str, verb: str) -> None:
    """No socket of the plugin's may take the number of a closed one."""
    around = Around(shell=CLOSED[kind])
    if verb == "STATUS":
        call.warm()
    for _ in range(2):
        end = run(call, env_of(verb), around)
        assert end.late < 1.0
        assert end.err == b""
        if verb == "VERSION":
            assert end.status == 0
            assert kind == "all" or end.json["cniVersion"] == "1.1.0"
        elif "stdin" in kind or kind == "all":
            assert end.status == 1
            assert kind == "all" or end.json["code"] == 6
        else:
            assert end.status == 0, end
    if verb == "ADD" and kind == "stderr":
        succeeded(call.verb("DEL"))


@pytest.mark.parametrize("first", [True, False], ids=["starts the helper", "finds one"])
def test_a_reader_that_left(call: Caller, first: bool) -> None:
    """P14: a result that could not be handed over is no success, and leaves nothing."""
    if not first:
        call.warm()
    process = call.start(env_of("ADD"))
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, err = process.communicate(encoded(call, BODY), timeout=40)
    assert process.returncode == 1
    assert b"Traceback" not in err
    one_helper(call)
    succeeded(call.verb("DEL"))
    assert call.stage.records() == {}


def test_a_writer_that_never_ends(call: Caller) -> None:
    """stdin stays open: the plugin waits for it, as the library does, and dies with its runtime."""
    call.warm()
    process = call.start(env_of("ADD"))
    assert process.stdin is not None
    process.stdin.write(encoded(call, BODY))
    process.stdin.flush()
    time.sleep(0.3)
    assert process.poll() is None
    process.kill()
    process.communicate(timeout=5)
    assert call.stage.records() == {}
    one_helper(call)


def test_sixteen_calls_at_once_start_one_helper(call: Caller) -> None:
    begin = time.monotonic()
    processes = []
    for number in range(16):
        process = call.start(env_of("ADD", CNI_CONTAINERID=f"c{number}"))
        assert process.stdin is not None
        process.stdin.write(encoded(call, conf(**ports(mapping(9000 + number, 80)))))
        process.stdin.close()
        process.stdin = None
        processes.append(process)
    for process in processes:
        out, err = process.communicate(timeout=40)
        assert (process.returncode, err) == (0, b""), out
    assert time.monotonic() - begin < 30
    one_helper(call)
    succeeded(call.verb("GC", conf("GC", **{"cni.dev/valid-attachments": []})))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["TERM", "KILL"])
@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.2])
def test_a_call_that_is_killed(call: Caller, number: signal.Signals, delay: float) -> None:
    """P15: at any moment of the call that starts the helper; then DEL cleans up."""
    process = call.start(env_of("ADD"))
    assert process.stdin is not None
    process.stdin.write(encoded(call, BODY))
    process.stdin.close()
    process.stdin = None
    time.sleep(delay)
    process.send_signal(number)  # to the plugin alone, as a runtime does
    process.communicate(timeout=10)
    succeeded(call.verb("DEL"))
    node = call.stage.node  # killed early it had started nothing, and DEL found nothing to do
    assert wait_for(lambda: list(node.processes()) == node.helpers()[:1])
    assert wait_for(lambda: call.stage.records() == {})
    succeeded(call.verb("ADD", BODY), silent=False)
    succeeded(call.verb("CHECK", BODY))
    succeeded(call.verb("DEL"))


# -- a run directory that cannot be used ----------------------------------------------------------

BAD_RUN: dict[str, Callable[[Stage], Sequence[str]]] = {
    "a file": lambda _: ("sh", "-c", f"echo > {RUN_DIR}"),
    "a read-only file system": lambda _: (
        *("sh", "-c", f"mkdir -m 700 {RUN_DIR}; mount -t tmpfs -o ro,mode=700 none {RUN_DIR}"),
    ),
    "a full file system": lambda _: (
        "sh",
        "-c",
        f"mkdir {RUN_DIR}; mount -t tmpfs -o size=4k,nr_inodes=2,mode=700 none {RUN_DIR};"
        f" echo x > {RUN_DIR}/x",
    ),
}


@pytest.mark.parametrize("kind", BAD_RUN)
def test_a_run_directory_that_cannot_be_used(call: Caller, kind: str) -> None:
    call.stage.node.run(*BAD_RUN[kind](call.stage))
    reply = call.verb("ADD", BODY)
    failed(reply, 11)
    reply = call.verb("DEL")
    succeeded(reply)
    assert reply.seconds < 5
    assert not reply.stderr or reply.stderr.startswith(b"cni-hostport: ")
    lowered = reply.stderr.lower()
    assert b"not found" not in lowered
    assert b"no such file or directory" not in lowered
    failed(call.verb("STATUS", conf("STATUS")), 50)
    assert call.stage.node.processes() == {}
