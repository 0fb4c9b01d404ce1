"""Bad surroundings: no disk, no descriptors, damaged files, rude clients, hostile words.

Every scene has a node of its own kind of trouble; what was promised before the
trouble still holds in it, and everything works again once it is over.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cni_hostport import shim
from cni_hostport.host import queue
from lab.node import SAFE_PATH, wait_for
from lab.source import ROOT, RUN_DIR, LabPod, SourceNode, audit, busy, mapping

FROM_SOURCE = True
POOL = range(20000, 20008)
WEB = (mapping(20000), mapping(20000, 80, "udp"))
OTHER = (mapping(20004), mapping(20005, 53, "udp"))
SHIM = str(ROOT / "cni_hostport/shim.py")
QUICK = (
    "import sys; sys.path.insert(0, {root!r}); from cni_hostport import shim; "
    "shim.DEFAULT_LIMIT = 1.5; shim.LIMITS[b'DEL'] = 1.0; shim.main()"
)


@pytest.fixture(scope="module")
def node() -> Iterator[SourceNode]:
    made = SourceNode()
    try:
        for name in ("a", "b", "c"):
            made.pod(name)
        yield made
    finally:
        made.close()


def reset(lab: SourceNode) -> None:
    """No helper of either kind, no rule, no flag, no run directory, no pod but a, b, c."""
    if lab.pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(lab.pid, signal.SIGKILL)
        lab.ended()
    lab.end_others()
    lab.node.run("umount", "-l", RUN_DIR, check=False)
    for name in ("", "/elsewhere", "/elsewhere-real", "/unsafe", "/squat", "/trap"):
        shutil.rmtree(lab.node.path(f"/run{name}" if name else RUN_DIR), ignore_errors=True)
    lab.node.nft("flush ruleset")
    lab.node.sysctl("net/ipv4/conf/cni0/route_localnet", "0")
    for port in lab.hairpins():
        lab.node.run("bridge", "link", "set", "dev", port, "hairpin", "off")
    for name in [n for n in lab.pods if n not in "abc"]:
        del lab.pods[name]
    lab.node.path("/run/stderr").write_text("")


@pytest.fixture
def lab(node: SourceNode) -> Iterator[SourceNode]:
    """A helper with a fresh run directory; all that it leaves is cleared away."""
    reset(node)
    node.start()
    yield node
    reset(node)


def a(lab: SourceNode) -> LabPod:
    return lab.pods["a"]


def b(lab: SourceNode) -> LabPod:
    return lab.pods["b"]


def plugin(
    lab: SourceNode, verb: str, pod: LabPod | None, mappings: tuple[object, ...] = (), *,
    quick: bool = False, umask: int = 0o022, run_dir: str = RUN_DIR, cni_path: str = "/opt/cni/bin",
    path: str = SAFE_PATH,
) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
    """A call by a process of the plugin, from source."""
    env = {k.decode(): v.decode() for k, v in lab.env_of(verb, pod).items()}
    env |= {"PATH": path, "CNI_HOSTPORT_RUN_DIR": run_dir, "CNI_PATH": cni_path}
    config = {"cniVersion": "1.1.0", "name": "podnet", "type": "cni-hostport",
              "runtimeConfig": {"portMappings": list(mappings)}}  # fmt: skip
    if pod is not None:
        config["prevResult"] = pod.result()
    command = ["-c", QUICK.format(root=str(ROOT))] if quick else [SHIM]
    words = " ".join(f"'{w}'" for w in (sys.executable, "-I", "-S"))
    script = f'umask {umask:04o}; exec {words} "$@"'
    # by absolute path: PATH is part of what is tried here
    return lab.node.run("/bin/sh", "-c", script, "sh", *command, env=env, check=False,
                        data=json.dumps(config).encode())  # fmt: skip


# -- disk ---------------------------------------------------------------------------------------


@pytest.fixture
def small(node: SourceNode) -> Iterator[SourceNode]:
    """The run directory on a file system of 256 KiB."""
    reset(node)
    node.node.run("mkdir", "-p", RUN_DIR)
    node.node.run("mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", RUN_DIR)
    node.start()
    yield node
    reset(node)


def fill(lab: SourceNode) -> Path:
    ballast = lab.node.path(f"{RUN_DIR}/ballast")
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


def read_only(lab: SourceNode) -> None:
    """From now on, though the helper has files of it open for writing."""
    lab.node.run("mount", "--bind", RUN_DIR, RUN_DIR)
    lab.node.run("mount", "-o", "remount,bind,ro", RUN_DIR)


def test_a_full_disk(small: SourceNode) -> None:
    lab = small
    assert lab.add(a(lab), *WEB).ok
    ballast = fill(lab)
    for pod in (a(lab), b(lab)):  # a replacement and a new one
        reply = lab.add(pod, *OTHER)
        assert (reply.code, "record" in reply.error["msg"]) == (5, True), reply
        for words in ("No space left", "*:20004/tcp", pod.name, "nothing was changed", "doctor"):
            assert words in reply.error["details"], reply
        assert audit(lab, {"a": WEB}, POOL) == []
    assert lab.delete(a(lab)).ok
    assert audit(lab, {}, POOL) == []
    fill(lab)
    lab.restart()  # its lock, its log and its socket want room too
    assert audit(lab, {}, POOL) == []
    lab.kill()
    fill(lab)
    done = plugin(lab, "DEL", a(lab))
    assert done.returncode == 0, done
    ballast.unlink()
    if not lab.node.path(f"{RUN_DIR}/helper.sock").exists() or not lab.operate("ping", 0.5).ok:
        lab.start()
    assert lab.add(b(lab), *OTHER).ok
    assert lab.delete(b(lab)).ok


def test_a_run_directory_turned_read_only(small: SourceNode) -> None:
    lab = small
    assert lab.add(a(lab), *WEB).ok
    read_only(lab)
    assert lab.add(b(lab), *OTHER).code == 5
    assert audit(lab, {"a": WEB}, POOL) == []
    reply = lab.delete(a(lab))
    assert (reply.status, b"cannot be queued" in reply.err) == (0, True), reply
    assert lab.elements() == {} or not any(
        a(lab).key in s.values() for s in lab.elements().values()
    )
    assert lab.free({("tcp", "0.0.0.0", 20000)})
    lab.node.run("umount", "-l", RUN_DIR)
    assert lab.delete(a(lab)).ok
    assert audit(lab, {}, POOL) == []
    assert lab.add(a(lab), *WEB).ok
    assert audit(lab, {"a": WEB}, POOL) == []
    assert lab.delete(a(lab)).ok


def test_a_helper_starts_on_a_read_only_directory_with_records(small: SourceNode) -> None:
    lab = small
    assert lab.add(a(lab), *WEB).ok
    record = lab.node.path(f"{RUN_DIR}/records/{a(lab).key}.json")
    (record.parent / "aaaaaaaaaaaaaaaa.json").write_text("{")
    (record.parent / "bbbbbbbbbbbbbbbb.adding").write_text("{")
    read_only(lab)
    pid = lab.pid
    os.kill(pid, signal.SIGKILL)
    lab.ended()
    lab.start(wait=False)
    time.sleep(0.5)
    lab.node.run("umount", "-l", RUN_DIR)
    if lab.died(0):  # it cannot listen there; the next one can
        lab.start()
    assert wait_for(lambda: lab.operate("ping", 0.5).ok, 5.0)
    assert lab.call("CHECK", a(lab), WEB).ok
    assert lab.delete(a(lab)).ok


def test_a_vanished_run_directory_is_made_again(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    for thing in ("", "/helper.sock", "/records", "/helper.lock"):
        target = lab.node.path(RUN_DIR + thing)
        shutil.rmtree(target) if target.is_dir() else target.unlink()
        begin = time.monotonic()
        if thing == "/records":
            lab.node.path(f"{RUN_DIR}/helper.sock").unlink()  # nothing watches the folder alone
        assert wait_for(lambda: lab.operate("ping", 0.5).ok, 3.0)
        assert wait_for(lambda: lab.node.path(f"{RUN_DIR}/helper.lock").exists(), 3.0)
        print(f"without {thing or 'run directory'}: back after {time.monotonic() - begin:.2f} s")
        assert audit(lab, {"a": WEB}, POOL) == []
        modes(lab)
    lab.restart()
    assert audit(lab, {"a": WEB}, POOL) == []


def test_a_call_on_a_vanished_run_directory_waits_for_its_helper(lab: SourceNode) -> None:
    """No second helper may come up beside it: they would take each other's rules away."""
    assert lab.add(a(lab), *WEB).ok
    shutil.rmtree(lab.node.path(RUN_DIR))
    done = plugin(lab, "ADD", b(lab), OTHER)
    assert done.returncode == 0, done
    assert audit(lab, {"a": WEB, "b": OTHER}, POOL) == []
    assert lab.delete(b(lab)).ok


def test_another_run_directory_gets_no_helper_of_its_own(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    done = plugin(lab, "ADD", b(lab), OTHER, run_dir="/run/elsewhere")
    assert done.returncode == 1
    assert json.loads(done.stdout)["code"] == 11
    assert "CNI_HOSTPORT_RUN_DIR" in done.stdout.decode()
    assert audit(lab, {"a": WEB}, POOL) == []


# -- descriptors --------------------------------------------------------------------------------


def test_no_descriptors_left(lab: SourceNode) -> None:
    lab.kill()
    lab.setenv("CHP_NOFILE", "512")
    try:
        lab.start()
        kept, refused = [], None
        for number in range(200):
            pod = lab.pod(f"p{number}", wired=False)
            reply = lab.add(pod, mapping(21000 + 2 * number), mapping(21001 + 2 * number))
            if not reply.ok:
                refused = reply
                break
            kept.append(pod)
        assert refused is not None
        assert refused.code == 11
        assert "LimitNOFILE" in refused.error["details"]
        print(f"{len(kept)} pods with 4 sockets each in 512 descriptors, then code 11")
        assert len(lab.records()) == len(kept)
        assert lab.status()["helper"]
        assert lab.call("STATUS", None).ok
        with contextlib.ExitStack() as clients:  # and the reserve goes to callers
            for _ in range(100):
                clients.enter_context(lab.connect())
            assert lab.delete(kept[0]).ok
        assert lab.add(lab.pod("last", wired=False), mapping(30000), mapping(30001)).ok
        lab.kill()
        lab.setenv("CHP_NOFILE", "300")  # fewer than the records want: never fatal
        lab.start()
        assert lab.operate("ping").ok
        held = sum(m["held"] == "yes" for m in lab.status()["mappings"])
        waiting = sum(m["held"] == "waiting" for m in lab.status()["mappings"])
        assert held > 0
        assert waiting > 0
        assert len(lab.records()) == len(kept)
        assert lab.gc().ok
        assert lab.records() == set()
    finally:
        lab.setenv("CHP_NOFILE", "0")


def test_a_storm_of_clients_beyond_the_descriptors(lab: SourceNode) -> None:
    lab.kill()
    lab.setenv("CHP_NOFILE", "128")
    try:
        lab.start()
        socks = []
        for _ in range(200):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(2)
            sock.connect(os.fspath(lab.node.path(f"{RUN_DIR}/helper.sock")))
            socks.append(sock)
        time.sleep(0.3)
        used = cpu(lab)
        time.sleep(0.5)
        assert cpu(lab) - used < 0.25  # it does not spin
        for sock in socks:
            sock.close()
        assert wait_for(lambda: lab.operate("ping", 1.0).ok, 3.0)
        assert lab.add(a(lab), *WEB).ok
    finally:
        lab.setenv("CHP_NOFILE", "0")


def cpu(lab: SourceNode) -> float:
    fields = Path(f"/proc/{lab.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- records ------------------------------------------------------------------------------------


def test_damaged_and_foreign_records_are_set_aside(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    assert lab.add(b(lab), *OTHER).ok
    lab.kill()
    folder = lab.node.path(f"{RUN_DIR}/records")
    good = (folder / f"{a(lab).key}.json").read_bytes()
    foreign = {
        "aaaaaaaaaaaaaaaa": b"", "aaaaaaaaaaaaaaab": good[: len(good) // 2],
        "aaaaaaaaaaaaaaac": b"[]", "aaaaaaaaaaaaaaad": b"\xff\xfe\0",
        "aaaaaaaaaaaaaaae": good,  # somebody else's name
        "aaaaaaaaaaaaaaaf": good.replace(b'"version":1', b'"version":2'),
        "aaaaaaaaaaaaaaag": b"[" * 100_000,
        "aaaaaaaaaaaaaaah": good.replace(b'"host_port":20000', b'"host_port":99999'),
    }  # fmt: skip
    for key, content in foreign.items():
        (folder / f"{key}.json").write_bytes(content)
    (folder / "aaaaaaaaaaaaaaai.json").mkdir()
    (folder / "aaaaaaaaaaaaaaaj.json").symlink_to("/etc/passwd")
    os.mkfifo(folder / "aaaaaaaaaaaaaaak.json")
    (folder / "README").write_text("not one of ours")
    (folder / "aaaaaaaaaaaaaaam.adding").write_text("{")
    # and one of the good ones is truncated: its attachment is lost, the other is not
    (folder / f"{b(lab).key}.json").write_bytes(good[:100])
    lab.node.run("bridge", "link", "set", "dev", f"v{b(lab).number}", "hairpin", "off")
    lab.start()
    left = lab.records()
    assert {n for n in left if n.endswith(".json")} == {f"{a(lab).key}.json"}
    damaged = {n.partition(".")[0] for n in left if n.endswith(".damaged")}
    keys = {*foreign, b(lab).key, *(f"aaaaaaaaaaaaaaa{c}" for c in "ijk")}
    assert damaged == keys
    assert not any(n.endswith(".adding") for n in left)
    assert (folder / "README").exists()
    assert lab.stderr().count("cannot be read and is set aside") >= len(foreign)
    for name in damaged:
        target = folder / f"{name}.damaged"
        shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
    (folder / "README").unlink()
    assert audit(lab, {"a": WEB}, POOL) == []
    assert lab.add(b(lab), *OTHER).ok  # its runtime may ask again
    assert audit(lab, {"a": WEB, "b": OTHER}, POOL) == []


def test_damaged_queue_entries_are_set_aside(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    folder = lab.node.path(f"{RUN_DIR}/queue")
    folder.mkdir()
    stamp = f"{1:020d}"
    for number, content in enumerate((b"", b"{}", b"[", b"\xff", b'{"env": 1, "stdin": ""}',
                                      b'{"env": {}, "stdin": "!"}', b"[" * 100_000)):  # fmt: skip
        (folder / f"{stamp}-{number}-aaaaaaaaaaaaaaaa.json").write_bytes(content)
    os.mkfifo(folder / f"{stamp}-99-aaaaaaaaaaaaaaaa.json")
    hostile = {"env": {"CNI_COMMAND": "ADD"}, "stdin": ""}
    (folder / f"{stamp}-98-aaaaaaaaaaaaaaaa.json").write_text(json.dumps(hostile))
    queue.put(lab.node.path(RUN_DIR), lab.env_of("DEL", a(lab)),
              b'{"cniVersion":"1.1.0","name":"podnet","type":"cni-hostport"}')  # fmt: skip
    assert wait_for(lambda: lab.records() == set(), 2.0)
    assert wait_for(lambda: not any(n.endswith(".json") for n in lab.queued()), 2.0), lab.queued()
    shutil.rmtree(folder)
    assert audit(lab, {}, POOL) == []


# -- helpers ------------------------------------------------------------------------------------


def test_a_second_helper_leaves_at_once(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    for _ in range(2):
        done = lab.node.run(sys.executable, "-I", "-m", "cni_hostport", "helper",
                            env={"PATH": SAFE_PATH}, check=False)  # fmt: skip
        assert (done.returncode, b"running already" in done.stderr) == (0, True), done
    assert audit(lab, {"a": WEB}, POOL) == []


def test_a_stale_socket_or_lock_never_blocks_a_start(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    lab.kill()
    folder = lab.node.path(RUN_DIR)
    (folder / "helper.lock").write_text("1")
    (folder / "helper.new").write_text("left over")
    lab.start()
    lab.kill()
    (folder / "helper.sock").unlink()
    (folder / "helper.sock").write_text("no socket")
    lab.start()
    assert audit(lab, {"a": WEB}, POOL) == []


def test_a_lock_that_outlives_its_helper_for_an_instant_is_waited_for(lab: SourceNode) -> None:
    """A helper killed while it starts a tool: the tool has the lock until its exec."""
    assert lab.add(a(lab), *WEB).ok
    lab.kill()
    lock = os.open(lab.node.path(RUN_DIR) / "helper.lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    timer = threading.Timer(0.05, os.close, (lock,))
    timer.start()
    lab.start()
    timer.join()
    assert audit(lab, {"a": WEB}, POOL) == []


def test_a_stopped_helper_holds_nobody_up(lab: SourceNode) -> None:
    assert lab.add(a(lab), *WEB).ok
    assert lab.add(b(lab), *OTHER).ok
    os.kill(lab.pid, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            begin = time.monotonic()
            add = pool.submit(plugin, lab, "ADD", lab.pods["c"], (mapping(20006),), quick=True)
            delete = pool.submit(plugin, lab, "DEL", a(lab), quick=True)
            status = plugin(lab, "STATUS", None)
            assert time.monotonic() - begin < 2.0
            assert json.loads(status.stdout)["code"] == 50
            assert json.loads(add.result().stdout)["code"] == 11
            assert delete.result().returncode == 0
            assert b"queued" in delete.result().stderr
            assert time.monotonic() - begin < 5.0
            lone = time.monotonic()
            plugin(lab, "STATUS", None)
            print(f"STATUS of a stopped helper: {time.monotonic() - lone:.2f} s in all")
        assert len(lab.queued()) == 1
    finally:
        os.kill(lab.pid, signal.SIGCONT)
    assert wait_for(lambda: lab.queued() == [], 2.0)
    # the ADD that nobody waited for was undone, or never begun
    assert wait_for(lambda: audit(lab, {"b": OTHER}, POOL) == [], 2.0), audit(
        lab, {"b": OTHER}, POOL
    )


def test_a_queued_delete_that_fails_is_tried_again(lab: SourceNode) -> None:
    """nft is missing for a while, and the tables are gone: DEL cannot be done yet."""
    assert lab.add(a(lab), *WEB).ok
    os.kill(lab.pid, signal.SIGSTOP)
    lab.node.nft("flush ruleset")
    lab.node.nft("add table ip hostport-manager { flags dormant; }")
    os.kill(lab.pid, signal.SIGCONT)
    assert lab.delete(a(lab)).status == 0
    assert wait_for(lambda: audit(lab, {}, POOL) == [], 12.0, 0.1)


def test_a_thousand_attachments_at_the_start(lab: SourceNode) -> None:
    for number in range(1000):
        pod = LabPod(f"p{number}", 2)
        lab.pods[pod.name] = pod
        assert lab.add(pod, mapping(30000 + number)).ok
    times = []
    for _ in range(3):
        times.append(lab.restart())
    assert lab.status()["helper"]["uptime"] < 60
    assert len(lab.status()["mappings"]) == 1000
    held = lab.free({("tcp", "0.0.0.0", 30000 + n) for n in range(1000)})
    assert held == set()
    print(f"1,000 attachments: first answer after {', '.join(f'{t:.2f}' for t in times)} s")
    assert min(times) <= 2.0 * busy()
    begin = time.monotonic()
    assert lab.gc().ok
    print(f"GC of 1,000: {time.monotonic() - begin:.2f} s")
    assert lab.records() == set()


def test_the_queue_has_a_bound_and_is_worked_off(lab: SourceNode) -> None:
    lab.kill()
    run_dir = lab.node.path(RUN_DIR)
    stdin = b'{"cniVersion":"1.1.0","name":"podnet","type":"cni-hostport"}'
    env = lab.env_of("DEL", a(lab))
    first = queue.put(run_dir, {**env, b"CNI_CONTAINERID": b"c0"}, stdin)
    text = first.read_text()
    for number in range(1, queue.MAX_ENTRIES):
        name = first.name.replace("-", f"-{number}", 1)
        first.with_name(name).write_text(text.replace('"c0"', f'"c{number}"'))
    with pytest.raises(queue.QueueError, match="full: 4096 calls wait in it"):
        queue.put(run_dir, env, stdin)
    assert len(lab.queued()) == queue.MAX_ENTRIES
    seconds = lab.start()
    print(f"{queue.MAX_ENTRIES} queued DELs: first answer after {seconds:.2f} s")
    assert lab.queued() == []


# -- safety of the folder and the socket --------------------------------------------------------


def modes(lab: SourceNode) -> None:
    """Nobody but root can read or write anything of ours."""
    folder = lab.node.path(RUN_DIR)
    found = {p: p.lstat() for p in (folder, *folder.rglob("*"))}
    for path, status in found.items():
        assert status.st_uid == 0, path
        assert status.st_mode & 0o077 == 0, f"{path} {stat.filemode(status.st_mode)}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "helper.sock").stat().st_mode) == 0o600


def test_modes_do_not_depend_on_the_callers_umask(lab: SourceNode) -> None:
    lab.kill()
    shutil.rmtree(lab.node.path(RUN_DIR))
    done = plugin(lab, "ADD", a(lab), WEB, umask=0)
    assert done.returncode == 0, done
    queue.put(lab.node.path(RUN_DIR), lab.env_of("DEL", b(lab)), b"{}")
    modes(lab)
    (helper,) = (p for p, words in lab.node.processes().items() if "cni_hostport" in words)
    status = Path(f"/proc/{helper}/status").read_text()
    assert "Umask:\t0077" in status
    assert os.readlink(f"/proc/{helper}/cwd") == "/"
    os.kill(helper, signal.SIGKILL)
    assert wait_for(lambda: not Path(f"/proc/{helper}").exists())


def test_a_readable_run_directory_is_closed(lab: SourceNode) -> None:
    lab.kill()
    lab.node.path(RUN_DIR).chmod(0o755)
    assert plugin(lab, "STATUS", None).returncode == 0
    modes(lab)
    for pid, words in lab.node.processes().items():
        if "cni_hostport" in words:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("trouble", ["link", "owner", "writable", "file", "relative"])
def test_an_unsafe_run_directory_is_refused(lab: SourceNode, trouble: str) -> None:
    lab.kill()
    place = "/run/unsafe"
    folder = lab.node.path(place)
    if trouble == "link":
        lab.node.path("/run/elsewhere-real").mkdir(mode=0o700, exist_ok=True)
        folder.symlink_to("/run/elsewhere-real")
    elif trouble == "file":
        folder.write_text("")
    elif trouble != "relative":
        folder.mkdir(mode=0o777 if trouble == "writable" else 0o700)
        if trouble == "owner":
            os.chown(folder, 65534, 65534)
        else:
            folder.chmod(0o777)
    given = "run/unsafe" if trouble == "relative" else place
    done = plugin(lab, "ADD", a(lab), WEB, run_dir=given)
    assert json.loads(done.stdout)["code"] == 11, done
    assert "run directory" in json.loads(done.stdout)["msg"]
    gone = plugin(lab, "DEL", a(lab), run_dir=given)
    assert gone.returncode == 0
    assert b"not queued" in gone.stderr
    assert not any("cni_hostport" in words for words in lab.node.processes().values())
    folder.unlink() if folder.is_symlink() or folder.is_file() else shutil.rmtree(
        folder, ignore_errors=True
    )


SQUATTER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()
print("bound", flush=True)
s.settimeout(20)
c, _ = s.accept()
data = c.recvmsg(65536, 1000)
print(len(data[0]), len(data[1]), flush=True)
"""


def test_a_squatted_socket_gets_neither_call_nor_descriptors(lab: SourceNode) -> None:
    lab.kill()
    folder = lab.node.path("/run/squat")
    folder.mkdir()
    folder.chmod(0o777)
    with lab.node.popen("/usr/bin/python3", "-I", "-S", "-c", SQUATTER, "/run/squat/helper.sock",
                        stdout=subprocess.PIPE) as squatter:  # fmt: skip
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"bound\n"
        done = plugin(lab, "ADD", a(lab), WEB, run_dir="/run/squat")
        assert json.loads(done.stdout)["code"] == 11
        assert squatter.stdout.readline() == b"0 0\n"
    shutil.rmtree(folder)


STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
try: s.sendall(bytes.fromhex(sys.argv[2]))
except OSError: pass
try: print(len(s.recv(1000)))
except ConnectionError: print(0)
"""


def test_only_root_is_served(lab: SourceNode) -> None:
    folder = lab.node.path(RUN_DIR)
    denied = lab.node.run("/usr/bin/python3", "-I", "-S", "-c", STRANGER, f"{RUN_DIR}/helper.sock",
                          "00", check=False)  # fmt: skip
    assert b"PermissionError" in denied.stderr
    folder.chmod(0o755)
    (folder / "helper.sock").chmod(0o666)
    frame = shim.pack_request(shim.KIND_OPERATOR, 0, {}, b'{"op":"status"}')
    done = lab.node.run("/usr/bin/python3", "-I", "-S", "-c", STRANGER, f"{RUN_DIR}/helper.sock",
                        frame.hex())  # fmt: skip
    assert done.stdout == b"0\n"
    assert "uid 65534 is not served" in lab.stderr()
    assert lab.operate("ping").ok
    folder.chmod(0o700)


# -- rude clients -------------------------------------------------------------------------------


def test_idle_slow_and_half_clients_block_nobody(lab: SourceNode) -> None:
    frame, _ = lab.request("ADD", b(lab), OTHER)
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(lab.connect()) for _ in range(200)]
        for number, sock in enumerate(idle[:100]):
            sock.sendall(frame[: number + 1])
        stop = threading.Event()

        def trickle() -> None:
            with lab.connect() as slow:
                for at in range(len(frame)):
                    if stop.wait(0.02):
                        return
                    slow.sendall(frame[at : at + 1])

        threads = [threading.Thread(target=trickle) for _ in range(5)]
        for thread in threads:
            thread.start()
        times = []
        for _ in range(20):
            times.append(lab.add(a(lab), *WEB).seconds)
            times.append(lab.operate("status").seconds)
            assert lab.delete(a(lab)).ok
        stop.set()
        for thread in threads:
            thread.join()
    print(f"beside 200 idle and 5 slow clients: slowest call {max(times) * 1000:.0f} ms")
    assert sorted(times)[len(times) // 2] < 0.2
    assert audit(lab, {}, POOL) == []


def test_more_clients_than_there_is_room_for(lab: SourceNode) -> None:
    """The oldest that says nothing makes room; one that waits for an answer never does."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(lab.connect()) for _ in range(600)]
        assert lab.operate("ping").ok
        idle[0].settimeout(2)
        assert idle[0].recv(1) == b""
        assert lab.add(a(lab), *WEB).ok
    assert lab.delete(a(lab)).ok


def test_requests_that_are_too_large_or_nonsense(lab: SourceNode) -> None:
    large = b'{"cniVersion":"1.1.0","name":"podnet","x":"' + bytes(b"a" * shim.MAX_STDIN)
    reply = lab.send(
        shim.pack_request(b"C", 0, lab.env_of("ADD", a(lab)), large[: shim.MAX_STDIN + 1])
    )
    assert reply.status == 1
    assert reply.code in (5, 6)
    for frame in (
        b"GET / HTTP/1.0\r\n\r\n" + bytes(100), b"CHP\x01C\0\0\0" + b"\xff" * 8,
        b"CHP\x63C\0\0\0" + bytes(8), os.urandom(1000),
    ):  # fmt: skip
        assert lab.send(frame).status is None
    for body in (b"", b"{}", b"[]", b"null", b'{"op":[]}', b'{"op":"nothing"}', b"[" * 200_000,
                 b'{"op":null}', b"\xff"):  # fmt: skip
        reply = lab.send(shim.pack_request(shim.KIND_OPERATOR, 0, {}, body))
        assert reply.status == 2, body
    before = lab.descriptors()
    for _ in range(50):
        with lab.connect() as sock:
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(10)]
            socket.send_fds(sock, [b"CHP\x01C"], fds)
            for fd in fds:
                os.close(fd)
    assert wait_for(lambda: lab.descriptors() <= before, 2.0)
    assert lab.operate("ping").ok


# -- words --------------------------------------------------------------------------------------

EVIL = (
    "'; touch /run/pwned; '", "$(touch /run/pwned)", "`touch /run/pwned`", "a\nflush ruleset\n",
    '"; flush ruleset; #', "../../../etc/shadow", "a\0b", "\u202e\u2028\x1b[2J", "%n%s{0}{x}",
    "} ; add rule ip hostport-manager input drop ; {", "x" * 5000, "-oops", "\udcff",
)  # fmt: skip


@pytest.mark.parametrize("word", EVIL)
def test_hostile_words_never_become_syntax(lab: SourceNode, word: str) -> None:
    assert lab.add(b(lab), *OTHER).ok
    rules = _rules(lab)
    pod = a(lab)
    before = {p.name for p in lab.node.path("/run").iterdir()}
    env = lab.env_of("ADD", pod)
    raw = word.encode("utf-8", "surrogateescape")
    good = {"cniVersion": "1.1.0", "name": "podnet", "type": "cni-hostport",
            "prevResult": pod.result(), "runtimeConfig": {"portMappings": list(WEB)}}  # fmt: skip
    result = pod.result()
    result["interfaces"][0]["name"] = result["interfaces"][1]["name"] = word
    configs = [
        good,
        {**good, "name": word},
        {**good, "prevResult": result},
        {**good, "backend": word},
        {**good, "conditionsV4": [word]},
        {**good, "excludeInterfaces": [word]},
        {**good, "externalSetMarkChain": word},
        {**good, "runtimeConfig": {"portMappings": [{**WEB[0], "hostIP": word}]}},
        {**good, "runtimeConfig": {"portMappings": [{**WEB[0], "protocol": word}]}},
        {**good, "portMappingsAnnotation": word},
    ]
    args = raw.replace(b"\0", b"")
    envs = [
        {**env, b"CNI_ARGS": b"K8S_POD_NAMESPACE=%s;K8S_POD_NAME=%s" % (args, args)},
        {**env, b"CNI_CONTAINERID": args}, {**env, b"CNI_IFNAME": args},
        {**env, b"CNI_NETNS": args}, {**env, b"CNI_COMMAND": args}, {**env, b"CNI_PATH": args},
    ]  # fmt: skip
    calls = [(env, config) for config in configs] + [(e, good) for e in envs]
    for number, (environ, config) in enumerate(calls):
        data = json.dumps(config).encode()
        for verb in (b"ADD", b"CHECK", b"GC", b"DEL"):
            if environ.get(b"CNI_COMMAND") != args:
                environ = {**environ, b"CNI_COMMAND": verb}
            reply = lab.send(shim.pack_request(b"C", 0, environ, data))
            assert reply.status in (0, 1), (number, verb)
            if reply.status:
                text = reply.error
                assert text["code"] != 999, text
                assert len(reply.out) < 20_000
        lab.gc(b(lab))
    assert not lab.node.path("/run/pwned").exists()
    assert {p.name for p in lab.node.path("/run").iterdir()} == before
    assert _rules(lab) == rules
    lab.gc(b(lab))
    for network in (word,):
        lab.send(shim.pack_request(b"C", 0, {**env, b"CNI_COMMAND": b"GC"}, json.dumps(
            {**good, "name": network, "cni.dev/valid-attachments": []}).encode()))  # fmt: skip
    assert audit(lab, {"b": OTHER}, POOL) == []
    for line in lab.stderr().splitlines():
        assert line.startswith(("time=", "level=")), line


def _rules(lab: SourceNode) -> list[str]:
    text = lab.node.output("nft", "-s", "-t", "list", "ruleset")
    return [line for line in text.splitlines() if "elements" not in line]


def test_nothing_is_executed_from_where_others_write(lab: SourceNode) -> None:
    """Neither CNI_PATH nor a PATH that anybody may write to leads to a program."""
    lab.kill()
    shutil.rmtree(lab.node.path(RUN_DIR))
    trap = lab.node.path("/run/trap")
    trap.mkdir()
    for name in ("nft", "iptables", "python3", "cni-hostport", "cni-hostport-helper", "sh", "ip",
                 "portmap", "bridge"):  # fmt: skip
        (trap / name).write_text("#!/bin/sh\necho $0 $@ >> /run/caught\n")
        (trap / name).chmod(0o755)
    trap.chmod(0o777)
    for verb in ("ADD", "CHECK", "STATUS", "GC", "DEL"):
        done = plugin(lab, verb, None if verb in ("STATUS", "GC") else a(lab), WEB,
                      cni_path="/run/trap", path=f"/run/trap:{SAFE_PATH}")  # fmt: skip
        assert done.returncode == 0, done
    assert not lab.node.path("/run/caught").exists()
    for pid, words in lab.node.processes().items():
        if "cni_hostport" in words:
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"/run/trap" not in environ
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(trap)
