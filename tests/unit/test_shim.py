"""The plugin call against a stand-in helper, and the slow path that starts one."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_hostport import shim
from cni_hostport.cli import call as call_command
from cni_hostport.host import queue
from cni_hostport.model import AttachmentID
from tests import standin
from tests.calls import (
    CONF,
    FRONTS,
    LAUNCHER,
    PROGRAM,
    ROOT,
    SHIM,
    behind,
    body_of,
    call,
    cni_env,
    fronted,
    run_directory,
    started,
)

ENV_KEYS = st.binary(min_size=1, max_size=30).filter(lambda b: b"\0" not in b and b"=" not in b)
ENV_VALUES = st.binary(max_size=60).filter(lambda b: b"\0" not in b)


@pytest.fixture(params=FRONTS)
def run_dir(request):
    """Every call is made through the Python plugin and through the launcher."""
    if request.param == "launcher" and not os.path.exists(LAUNCHER):
        pytest.skip("no build/launcher: ./build.sh test compiles it")
    with behind(request.param), run_directory() as path:
        yield path


@pytest.fixture
def server(run_dir):
    server = standin.Server(run_dir).start()
    yield server
    server.close()


# Frames


@given(st.dictionaries(ENV_KEYS, ENV_VALUES), st.binary(max_size=300), st.integers(0, 3))
def test_a_request_comes_back_as_it_was(env, body, flags):
    frame = shim.pack_request(shim.KIND_CALL, flags, env, body)
    head = shim.parse_request_header(frame[: shim.HEADER_SIZE])
    block = frame[shim.HEADER_SIZE : shim.HEADER_SIZE + head[3]]
    assert head == (shim.PROTOCOL, b"C", flags, len(block), len(body))
    assert shim.parse_env(block) == env
    assert frame.endswith(body)


@given(st.integers(0, 255), st.binary(max_size=100), st.binary(max_size=100))
def test_an_answer_comes_back_as_it_was(status, out, err):
    frame = shim.pack_response(status, out, err)
    head = shim.parse_response_header(frame[: shim.HEADER_SIZE])
    assert head == (shim.PROTOCOL, status, len(out), len(err))
    assert frame[shim.HEADER_SIZE :] == out + err


def test_the_frame_is_what_is_written_down():
    frame = shim.pack_request(b"O", 0, {}, b"{}")
    assert frame == b"CHP\x01O\0\0\0" + b"\0\0\0\0" + b"\0\0\0\x02" + b"{}"
    assert shim.pack_response(1, b"ab", b"c") == b"CHP\x01\x01\0\0\0\0\0\0\x02\0\0\0\x01abc"


@pytest.mark.parametrize("protocol", [shim.PROTOCOL - 1, shim.PROTOCOL, shim.PROTOCOL + 1])
def test_neighbouring_protocols_are_understood(protocol):
    assert shim.parse_response_header(b"CHP" + bytes((protocol, 7)) + b"\0" * 11) == (
        protocol,
        7,
        0,
        0,
    )


@pytest.mark.parametrize("head", [b"", b"CHP\x01", b"HTTP/1.1 200 OK\r", b"CHP\x05" + b"\0" * 12])
def test_foreign_frames_are_refused(head):
    with pytest.raises(shim.ForeignProtocol):
        shim.parse_response_header(head)
    with pytest.raises(shim.ForeignProtocol):
        shim.parse_request_header(head)


def test_the_launcher_speaks_the_same_protocol():
    with open(f"{ROOT}/packaging/launcher.c") as file:
        text = file.read()
    assert f"PROTOCOL = {shim.PROTOCOL}," in text
    assert f"HEADER = {shim.HEADER_SIZE}," in text
    assert f"MAX_STDIN = {shim.MAX_STDIN >> 20} << 20," in text
    assert f'"{shim.RUN_DIR.decode()}"' in text
    assert f'"/{shim.SOCKET_NAME.decode()}"' in text
    assert len(text.splitlines()) <= 150


# Answers without a helper


@pytest.mark.parametrize("argv", [SHIM, PROGRAM, (*PROGRAM[:2], "-m", "cni_hostport")])
def test_version_is_a_constant_and_reads_no_stdin(run_dir, argv):
    reader, writer = os.pipe()  # never closed: who reads it waits for ever
    argv = [part for part in argv if part != PROGRAM[-1] or argv == PROGRAM]
    env = cni_env(run_dir, "VERSION")
    done = subprocess.run(
        fronted(argv), stdin=reader, env=env, capture_output=True, timeout=10, check=True
    )
    os.close(reader)
    os.close(writer)
    assert json.loads(done.stdout) == {
        "cniVersion": "1.1.0",
        "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    }
    assert done.stderr == b""
    assert not os.listdir(run_dir)


@pytest.mark.parametrize("command", ["", None])
def test_a_bare_call_says_what_it_is(run_dir, command):
    outcome = call(run_dir, command)
    assert (outcome.status, outcome.out) == (0, b"")
    lines = outcome.err.decode().splitlines()
    assert lines[0].startswith("cni-hostport")
    assert (
        lines[1]
        == "CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0"
    )


def test_arguments_go_to_the_commands(run_dir):
    done = subprocess.run(fronted((*SHIM, "version")), env={}, capture_output=True, check=True)
    assert done.stdout.startswith(b"cni-hostport ")
    done = subprocess.run(fronted((*SHIM, "nonsense")), env={}, capture_output=True, check=False)
    assert done.returncode == 2


# Calls that a helper answers


def test_a_call_carries_environment_stdin_and_descriptors(run_dir, server):
    outcome = call(run_dir, "ADD", b"\0raw \xff", env={"CNI_ARGS": "A=1;B=\udcff", "SECRET": "no"})
    facts = outcome.json
    assert outcome.status == 0
    assert body_of(outcome) == b"\0raw \xff"
    assert facts["env"] == {
        key: value
        for key, value in cni_env(run_dir, "ADD", CNI_ARGS="A=1;B=\udcff").items()
        if key.startswith("CNI_")
    }
    netns = os.stat("/proc/self/ns/net").st_ino
    assert facts["flags"] == shim.FLAG_OWN_NETNS | shim.FLAG_POD_NETNS
    assert facts["inodes"] == [netns, netns]


@pytest.mark.parametrize("netns", [None, "", "/does/not/exist"])
def test_a_netns_that_cannot_be_opened_is_left_out(run_dir, server, netns):
    facts = call(run_dir, "DEL", env={"CNI_NETNS": netns}).json
    assert facts["flags"] == shim.FLAG_OWN_NETNS
    assert len(facts["inodes"]) == 1


def test_a_netns_that_is_a_fifo_blocks_nobody(run_dir, server):
    fifo = f"{run_dir}/fifo"
    os.mkfifo(fifo)
    assert call(run_dir, "ADD", env={"CNI_NETNS": fifo}).status == 0


@pytest.mark.parametrize("size", [0, 1, 65536, 65537, 5 << 20, shim.MAX_STDIN])
def test_stdin_of_any_size_arrives_whole(run_dir, server, size):
    assert call(run_dir, "ADD", b"x" * size).json["size"] == size


def test_of_too_much_stdin_one_byte_more_is_sent(run_dir, server):
    reader, writer = os.pipe()
    process = subprocess.Popen(
        fronted(SHIM), stdin=reader, stdout=subprocess.PIPE, env=cni_env(run_dir, "ADD")
    )
    os.close(reader)
    with pytest.raises(BrokenPipeError), os.fdopen(writer, "wb") as pipe:
        pipe.write(b"x" * (shim.MAX_STDIN + (1 << 20)))
    out, _ = process.communicate(timeout=30)
    assert json.loads(out)["size"] == shim.MAX_STDIN + 1


def test_a_caller_that_pauses_is_waited_for(run_dir, server):
    process = subprocess.Popen(
        fronted(SHIM), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=cni_env(run_dir, "STATUS")
    )
    process.stdin.write(b"one ")
    process.stdin.flush()
    time.sleep(0.7)  # longer than STATUS may take: that limit is the helper's
    out, _ = process.communicate(b"two", timeout=10)
    assert (process.returncode, json.loads(out)["size"]) == (0, 7)


def test_status_stdout_and_stderr_are_the_helpers(run_dir):
    server = standin.Server(run_dir, lambda _: shim.pack_response(3, b"out", b"err")).start()
    outcome = call(run_dir, "CHECK")
    server.close()
    assert (outcome.status, outcome.out, outcome.err) == (3, b"out", b"err")


def test_a_large_answer_arrives_whole(run_dir):
    text = b"0123456789" * 300_000
    server = standin.Server(run_dir, lambda _: shim.pack_response(0, text, text)).start()
    outcome = call(run_dir, "ADD")
    server.close()
    assert (outcome.out, outcome.err) == (text, text)


def test_an_answer_in_single_bytes_is_put_together(run_dir):
    listener = _listen(run_dir)
    process = _popen(run_dir, "ADD")
    connection, _ = listener.accept()
    for byte in shim.pack_response(0, b"slowly", b""):
        connection.sendall(bytes((byte,)))
        time.sleep(0.001)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, b"slowly")


def test_an_early_answer_and_a_reset_are_read_to_the_end(run_dir):
    """A helper that refuses a call reads no further and closes; what it said still counts."""
    listener = _listen(run_dir)
    process = _popen(run_dir, "ADD", b"x" * (8 << 20))
    connection, _ = listener.accept()
    connection.recv(100)
    connection.sendall(shim.pack_response(1, b"refused", b""))
    connection.close()  # unread bytes: the peer sees a reset
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (1, b"refused")


def test_a_run_dir_longer_than_a_socket_path_works(run_dir):
    long = f"{run_dir}/{'d' * 120}"
    server = standin.Server(long).start()
    outcome = call(long, "ADD")
    server.close()
    assert outcome.status == 0


# Broken surroundings


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("argv", [SHIM, PROGRAM])
def test_closed_standard_descriptors(run_dir, server, closed, argv):
    redirect = " ".join(f"{n}{'<' if n == 0 else '>'}&-" for n in closed)
    script = f'"$@" {redirect}'
    outcome = call(run_dir, "ADD", argv=("/bin/sh", "-c", script, "sh", *argv))
    assert outcome.status == 0
    assert server.requests == 1
    if 1 not in closed:
        assert outcome.json["size"] == (0 if 0 in closed else len(json.dumps(CONF)))


def test_a_reader_that_left_is_an_error_and_no_hang(run_dir, server):
    reader, writer = os.pipe()
    os.close(reader)
    process = subprocess.Popen(
        fronted(SHIM), stdin=subprocess.DEVNULL, stdout=writer, env=cni_env(run_dir, "ADD")
    )
    os.close(writer)
    assert process.wait(timeout=10) == 1


def test_a_non_blocking_stdout_gets_everything(run_dir):
    text = b"0123456789" * 100_000
    server = standin.Server(run_dir, lambda _: shim.pack_response(0, text, b"")).start()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    process = subprocess.Popen(
        fronted(SHIM), stdin=subprocess.DEVNULL, stdout=writer, env=cni_env(run_dir, "ADD")
    )
    os.close(writer)
    time.sleep(0.2)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == text
    assert process.wait(timeout=10) == 0
    server.close()


def test_stdin_that_cannot_be_read_is_empty(run_dir, server):
    unreadable = os.open("/dev/null", os.O_WRONLY)
    process = subprocess.Popen(
        fronted(SHIM), stdin=unreadable, stdout=subprocess.PIPE, env=cni_env(run_dir, "ADD")
    )
    os.close(unreadable)
    out, _ = process.communicate(timeout=10)
    assert json.loads(out)["size"] == 0


@pytest.mark.parametrize(
    "env",
    [
        {"PYTHONHOME": "/nonexistent", "PYTHONPATH": "/nonexistent", "PYTHONVERBOSE": "1"},
        {"LC_ALL": "xx_YY.nonsense", "LANG": "C"},
        {"LD_LIBRARY_PATH": "/opt/containerd/lib:"},
        {"PATH": None, "HOME": None},
    ],
)
def test_hostile_environments(run_dir, server, env):
    outcome = call(run_dir, "ADD", env=env)
    assert (outcome.status, outcome.err) == (0, b"")


def test_without_proc_only_the_own_namespace_is_missing(run_dir, server):
    script = 'mount -t tmpfs none /proc && exec "$@"'
    argv = ("unshare", "-m", "/bin/sh", "-c", script, "sh", *SHIM)
    facts = call(run_dir, "ADD", argv=argv, env={"CNI_NETNS": None}).json
    assert facts["flags"] == 0


# Helpers that do not answer


def test_limits_leave_room_under_what_is_promised():
    assert shim.DEFAULT_LIMIT < 30
    assert shim.LIMITS[b"DEL"] < 5
    assert shim.LIMITS[b"STATUS"] < 0.5
    assert call_command.LIMITS[b"DEL"] < 5
    assert call_command.LIMITS[b"STATUS"] < 2
    assert call_command.START_LIMIT <= 10


def test_a_stopped_helper_costs_status_half_a_second(run_dir):
    _listen(run_dir, keep=True)
    outcome = call(run_dir, "STATUS")
    assert (outcome.status, outcome.json["code"]) == (1, 50)
    assert outcome.seconds < 5


def test_a_full_queue_of_a_stopped_helper_costs_no_more(run_dir):
    _listen(run_dir, backlog=0, keep=True)
    filler = socket.socket(socket.AF_UNIX)
    filler.connect(f"{run_dir}/helper.sock")
    outcome = call(run_dir, "STATUS")
    assert (outcome.status, outcome.json["code"]) == (1, 50)
    assert outcome.seconds < 5


def test_a_stopped_helper_lets_del_succeed_and_queues_it(run_dir):
    listener = _listen(run_dir)
    outcome = call(run_dir, "DEL")
    assert (outcome.status, outcome.out) == (0, b"")
    assert outcome.seconds < 10
    (entry,) = queue.entries(_path(run_dir))
    assert entry.env[b"CNI_COMMAND"] == b"DEL"
    assert json.loads(entry.stdin) == CONF
    listener.close()


def test_a_timed_out_add_is_not_sent_again(run_dir):
    """The limit is shortened in the copy that runs; the behaviour after it is the same."""
    listener = _listen(run_dir)
    listener.settimeout(2)
    source = "import sys; from cni_hostport import shim; shim.DEFAULT_LIMIT = 0.5; shim.main()"
    outcome = call(run_dir, "ADD", argv=(*SHIM[:2], "-c", source))
    assert (outcome.status, outcome.json["code"]) == (1, 11)
    assert outcome.json["cniVersion"] == "1.0.0"
    assert "did not answer in time" in outcome.json["msg"]
    listener.accept()
    with pytest.raises(TimeoutError):
        listener.accept()
    assert not os.path.exists(f"{run_dir}/queue")


@pytest.mark.parametrize(("command", "code"), [("ADD", 11), ("GC", 11), ("STATUS", 50)])
def test_a_helper_of_another_age_is_named(run_dir, command, code):
    answer = b"CHP\x09" + b"\0" * 12
    server = standin.Server(run_dir, lambda _: answer).start()
    outcome = call(run_dir, command)
    server.close()
    assert (outcome.status, outcome.json["code"]) == (1, code)
    assert "protocol" in outcome.json["msg"]
    assert "--replace" in outcome.json["details"]


# The slow path: a helper is started


def test_the_first_call_starts_a_helper_that_shares_nothing(run_dir):
    held = os.open("/dev/zero", os.O_RDONLY)
    os.set_inheritable(held, True)
    start = time.monotonic()
    outcome = call(
        run_dir,
        "ADD",
        argv=PROGRAM,
        env={
            "LD_LIBRARY_PATH": "/opt/containerd/lib:",
            "PYTHONPATH": "/nonexistent",
            "NOTIFY_SOCKET": "/run/notify",
            "LISTEN_FDS": "1",
            "PATH": "/opt/nowhere:relative::/tmp:/usr/bin",
            "CNI_HOSTPORT_EXTRA": "kept",
        },
        pass_fds=(held,),
        umask=0,
        preexec_fn=_hostile_signals,
    )
    os.close(held)
    assert outcome.status == 0, outcome
    assert time.monotonic() - start < 10  # stdout and stderr came to their end with the call
    assert body_of(outcome) == json.dumps(CONF).encode()
    facts = outcome.json["self"]
    assert facts["sid"] == facts["pid"] == started(run_dir)[0]
    assert facts["cwd"] == "/"
    assert facts["umask"] == 0o077
    assert facts["stdio"] == ["/dev/null", "/dev/null", f"{run_dir}/helper.log"]
    assert facts["inherited"] == [0, 1, 2]
    assert facts["blocked"] == 0
    pythons = {signal.SIGPIPE, signal.SIGXFSZ}
    assert {n for n in range(1, 32) if facts["ignored"] >> (n - 1) & 1} == pythons
    assert facts["environ"] == {
        "CNI_HOSTPORT_RUN_DIR": run_dir,
        "CNI_HOSTPORT_EXTRA": "kept",
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    assert os.stat(f"{run_dir}/helper.log").st_mode & 0o777 == 0o600


def test_the_next_call_finds_it(run_dir):
    first = call(run_dir, "ADD", argv=PROGRAM)
    second = call(run_dir, "CHECK")
    assert first.json["self"]["pid"] == second.json["self"]["pid"]
    assert len(started(run_dir)) == 1


def test_a_run_dir_is_made_for_root_alone(run_dir):
    new = f"{run_dir}/deep/run"
    assert call(new, "ADD", argv=PROGRAM, umask=0).status == 0
    assert os.stat(new).st_mode & 0o7777 == 0o700


def test_calls_at_once_start_one_helper(run_dir):
    env = {"CNI_HOSTPORT_STANDIN": "slow0.3"}
    processes = [_popen(run_dir, "ADD", argv=PROGRAM, env=env) for _ in range(6)]
    outcomes = [process.communicate(timeout=30)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 6
    assert len({json.loads(out)["self"]["pid"] for out in outcomes}) == 1
    assert len(started(run_dir)) == 1


def test_status_starts_a_helper(run_dir):
    outcome = call(run_dir, "STATUS", argv=PROGRAM)
    assert outcome.status == 0


def test_status_waits_no_longer_for_one_that_is_slow(run_dir):
    outcome = call(run_dir, "STATUS", argv=PROGRAM, env={"CNI_HOSTPORT_STANDIN": "slow20"})
    assert (outcome.status, outcome.json["code"]) == (1, 50)
    assert outcome.seconds < 8


@pytest.mark.parametrize(("command", "code"), [("ADD", 11), ("CHECK", 11), ("STATUS", 50)])
def test_a_helper_that_dies_is_noticed_and_its_last_words_told(run_dir, command, code):
    with_a_record(run_dir)
    outcome = call(run_dir, command, argv=PROGRAM, env={"CNI_HOSTPORT_STANDIN": "die"})
    assert (outcome.status, outcome.json["code"]) == (1, code)
    assert "status 3: stand-in: cannot live" in outcome.json["msg"]
    assert f"{run_dir}/helper.log" in outcome.json["details"]
    assert outcome.seconds < 8


def with_a_record(run_dir):
    """Something to do: without it a DEL or CHECK needs no helper."""
    os.makedirs(f"{run_dir}/records")
    open(f"{run_dir}/records/aaaaaaaaaaaaaaaa.json", "w").close()


def test_del_is_queued_where_no_helper_lives(run_dir):
    with_a_record(run_dir)
    outcome = call(run_dir, "DEL", argv=PROGRAM, env={"CNI_HOSTPORT_STANDIN": "die"})
    assert (outcome.status, outcome.out) == (0, b"")
    assert len(outcome.err.splitlines()) == 1
    assert [e.stdin for e in queue.entries(_path(run_dir))] == [json.dumps(CONF).encode()]


@pytest.mark.parametrize("kind", ["file", "link", "open to all"])
def test_a_run_dir_that_is_not_safe_is_refused_and_del_succeeds(run_dir, kind):
    bad = f"{run_dir}/bad"
    if kind == "file":
        open(bad, "w").close()
    elif kind == "link":
        os.symlink("/tmp", bad)
    else:
        os.mkdir(bad)
        os.chmod(bad, 0o777)
    outcome = call(bad, "ADD")
    assert (outcome.status, outcome.json["code"]) == (1, 11)
    assert bad in outcome.json["msg"]
    outcome = call(bad, "DEL")
    assert (outcome.status, outcome.out) == (0, b"")
    assert b"not queued" in outcome.err
    for words in (b"not found", b"no such file or directory"):
        assert words not in outcome.err.lower()


def test_a_helper_that_died_on_the_call_is_replaced(run_dir):
    listener = _listen(run_dir)
    process = _popen(run_dir, "ADD", argv=PROGRAM)
    connection, _ = listener.accept()
    connection.recv(10)
    listener.close()
    connection.close()
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert json.loads(out)["self"]["pid"] == started(run_dir)[0]


def test_a_helper_that_dies_on_every_call_is_an_error(run_dir):
    outcome = call(run_dir, "ADD", argv=PROGRAM, env={"CNI_HOSTPORT_STANDIN": "once"})
    assert (outcome.status, outcome.json["code"]) == (1, 11)
    assert len(started(run_dir)) == 1


@pytest.mark.parametrize("works", [True, False])
def test_under_systemd_a_helper_gets_a_scope_of_its_own(run_dir, works):
    """A stand-in for systemd-run; where the real one fails a plain start has to do."""
    fake = f"{run_dir}/systemd-run"
    words = 'shift 4; exec "$@"' if works else "echo no bus >&2; exit 1"
    with open(fake, "w") as file:
        file.write(f'#!/bin/sh\necho "$@" > {run_dir}/arguments\n{words}\n')
    os.chmod(fake, 0o755)
    source = (
        "import sys; from cni_hostport import shim; from cni_hostport.host import startup;"
        f" startup._SYSTEMD = '/'; startup._SYSTEMD_RUN = ({fake!r},);"
        f" shim.program = lambda: {list(PROGRAM)!r};"
        " from cni_hostport.cli.main import main; main(['call', '--after=refused'])"
    )
    outcome = call(run_dir, "ADD", argv=(PROGRAM[0], "-I", "-c", source))
    assert outcome.status == 0, outcome
    with open(f"{run_dir}/arguments") as file:
        words = file.read().split()
    assert words == ["--scope", "--quiet", "--collect", "--", *PROGRAM, "helper"]
    assert outcome.json["self"]["pid"] == started(run_dir)[0]


def test_a_helper_that_met_another_is_no_failure(run_dir):
    """It says that one runs and leaves with 0; the call waits for that one to listen."""
    lock = os.open(f"{run_dir}/helper.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = _popen(run_dir, "ADD", argv=PROGRAM)
    while not started(run_dir):
        time.sleep(0.01)
    os.close(lock)  # it goes without ever having listened
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0, out
    assert 1 <= len(started(run_dir)) <= 3


def test_a_stale_socket_file_blocks_no_start(run_dir):
    _listen(run_dir).close()
    assert call(run_dir, "ADD", argv=PROGRAM).status == 0


def test_a_deleted_working_directory_blocks_no_start(run_dir):
    script = f'mkdir {run_dir}/gone && cd {run_dir}/gone && rmdir {run_dir}/gone && exec "$@"'
    assert call(run_dir, "ADD", argv=("/bin/sh", "-c", script, "sh", *PROGRAM)).status == 0


def test_without_its_own_program_it_still_answers(run_dir):
    source = (
        "import sys; from cni_hostport import shim;"
        " shim.program = lambda: ['/nonexistent']; shim.main()"
    )
    argv = (*SHIM[:2], "-c", source)
    assert call(run_dir, "ADD", argv=argv).json["code"] == 11
    assert call(run_dir, "STATUS", argv=argv).json["code"] == 50
    outcome = call(run_dir, "DEL", argv=argv)
    assert (outcome.status, outcome.out) == (0, b"")
    assert outcome.err


# The queue


def _path(run_dir):
    from pathlib import Path

    return Path(run_dir)


def _env(container, ifname="eth0"):
    return {b"CNI_COMMAND": b"DEL", b"CNI_CONTAINERID": container, b"CNI_IFNAME": ifname.encode()}


def test_queue_keeps_order_and_bytes(tmp_path):
    bodies = [b"\0\xff", b"", b'{"name":"net"}']
    for number, body in enumerate(bodies):
        queue.put(tmp_path, _env(b"c\xff%d" % number), body)
    found = list(queue.entries(tmp_path))
    assert [entry.stdin for entry in found] == bodies
    assert [entry.env[b"CNI_CONTAINERID"] for entry in found] == [b"c\xff0", b"c\xff1", b"c\xff2"]
    queue.remove(found[0])
    queue.remove(found[0])
    assert len(queue.names(tmp_path)) == 2


def test_queue_cancels_the_entries_of_one_attachment(tmp_path):
    for container in (b"a", b"b", b"a"):
        queue.put(tmp_path, _env(container), b'{"name":"net"}')
    assert queue.cancel(tmp_path, "net", "a", "eth0") == 2
    assert queue.cancel(tmp_path, "other", "b", "eth0") == 0
    assert [entry.env[b"CNI_CONTAINERID"] for entry in queue.entries(tmp_path)] == [b"b"]


@pytest.mark.parametrize(
    "body", [b'{"NAME":"net"}', b'{"name":"x","Name":"net"}', b'{"name":"net","x":"\xff"}']
)
def test_queue_reads_the_network_as_the_call_is_read(tmp_path, body):
    queue.put(tmp_path, _env(b"a"), body)
    assert queue.cancel(tmp_path, "net", "a", "eth0") == 1


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=15))
def test_queue_and_model_agree_about_keys(network, container, ifname):
    identity = AttachmentID(network=network, container_id=container, ifname=ifname)
    assert queue.attachment_key(network, container, ifname) == identity.key


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"env":[],"stdin":""}', b'{"env":{}}'])
def test_queue_sets_damaged_entries_aside(tmp_path, content):
    path = queue.put(tmp_path, _env(b"a"), b"")
    path.write_bytes(content)
    queue.put(tmp_path, _env(b"b"), b"")
    assert [entry.env[b"CNI_CONTAINERID"] for entry in queue.entries(tmp_path)] == [b"b"]
    assert path.with_name(path.name + ".damaged").read_bytes() == content
    assert len(queue.names(tmp_path)) == 1


def test_queue_is_bounded_and_holds_nothing_half_written(tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "MAX_ENTRIES", 2)
    queue.put(tmp_path, _env(b"a"), b"")
    queue.put(tmp_path, _env(b"b"), b"")
    with pytest.raises(queue.QueueError, match="full"):
        queue.put(tmp_path, _env(b"c"), b"")
    assert sorted(os.listdir(tmp_path / "queue")) == queue.names(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "queue").iterdir()} == {0o600}


def _hostile_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)


LISTENERS = []


def _listen(run_dir, backlog=16, keep=False):
    """A helper that is stopped: it listens and does nothing."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"{run_dir}/helper.sock")
    listener.listen(backlog)
    if keep:
        LISTENERS.append(listener)
    return listener


def _popen(run_dir, command, stdin=None, argv=SHIM, env=None):
    data = json.dumps(CONF).encode() if stdin is None else stdin
    memory = os.memfd_create("conf")
    os.write(memory, data)
    os.lseek(memory, 0, 0)
    process = subprocess.Popen(
        fronted(argv),
        stdin=memory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cni_env(run_dir, command, **(env or {})),
    )
    os.close(memory)
    return process
