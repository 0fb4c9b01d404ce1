"""The bundle as a runtime meets it: copied anywhere, started from anything."""

import base64
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import time

import pytest

from tests import standin
from tests.calls import (
    FRONTS,
    LAUNCHER,
    ROOT,
    body_of,
    call,
    cni_env,
    helpers_of,
    put_launcher_in,
    run_directory,
)

BUNDLE = os.path.join(ROOT, "dist", "cni-hostport")
BY_PYINSTALLER = os.path.join(ROOT, "build", "work", "cni-hostport", "cni-hostport")
CONF = json.dumps({"cniVersion": "1.1.0", "name": "net", "type": "cni-hostport"}).encode()
ALONE = ("unshare", "--net")  # a helper that is started for real gets a node of its own
GONE = 'mkdir "$0/gone" && cd "$0/gone" && rmdir "$0/gone" && exec "$@"'


@pytest.fixture
def run_dir():
    with run_directory() as path:
        yield path


@pytest.fixture(scope="module", params=[*FRONTS, "pyinstaller"])
def folder(request, tmp_path_factory):
    """A copy at a path with a space and other letters; with every plugin executable there is."""
    if request.param == "launcher" and not os.path.exists(LAUNCHER):
        pytest.skip("no build/launcher: ./build.sh test compiles it")
    copy = str(tmp_path_factory.mktemp("elsewhere") / "an öther place")
    shutil.copytree(BUNDLE, copy, symlinks=True)
    if os.path.exists(f"{copy}/cni-hostport-python"):  # built with --launcher
        os.replace(f"{copy}/cni-hostport-python", f"{copy}/cni-hostport")
    if request.param == "launcher":
        put_launcher_in(copy)
    if request.param == "pyinstaller":
        shutil.copy(BY_PYINSTALLER, f"{copy}/cni-hostport")
        for library in pathlib.Path(BY_PYINSTALLER).parent.glob("libpython*.so*"):
            shutil.copy(library, f"{copy}/_internal")
    return copy


@pytest.fixture(scope="module")
def bundle(folder, tmp_path_factory):
    """The executable behind two links, one of them relative."""
    home = tmp_path_factory.mktemp("links")
    os.symlink(f"{folder}/cni-hostport", home / "first")
    os.mkdir(home / "bin")
    os.symlink("../first", home / "bin" / "cni-hostport")
    return str(home / "bin" / "cni-hostport")


@pytest.fixture
def server(run_dir):
    server = standin.Server(run_dir).start()
    yield server
    server.close()


def test_version_with_an_empty_environment(bundle):
    done = subprocess.run(
        [bundle], env={"CNI_COMMAND": "VERSION"}, capture_output=True, check=True, cwd="/"
    )
    assert json.loads(done.stdout)["supportedVersions"][-1] == "1.1.0"
    assert done.stderr == b""


def test_a_bare_call(bundle):
    done = subprocess.run([bundle], env={}, capture_output=True, check=True)
    assert done.stdout == b""
    assert b"CNI protocol versions supported: 0.1.0, " in done.stderr


def test_arguments_reach_the_other_executable(bundle):
    done = subprocess.run([bundle, "version", "--json"], env={}, capture_output=True, check=True)
    assert json.loads(done.stdout)["protocol"] == 1


def test_found_by_path_and_with_any_first_argument(bundle):
    env = {"CNI_COMMAND": "VERSION", "PATH": os.path.dirname(bundle)}
    subprocess.run(["/usr/bin/env", "cni-hostport"], env=env, capture_output=True, check=True)
    done = subprocess.run(["nonsense"], executable=bundle, env=env, capture_output=True, check=True)
    assert done.stdout


def test_a_call(bundle, run_dir, server):
    outcome = call(run_dir, "ADD", CONF, argv=(bundle,))
    assert (outcome.status, outcome.err) == (0, b"")
    assert body_of(outcome) == CONF
    assert outcome.json["flags"] == 3


@pytest.mark.parametrize(
    "env",
    [
        {"LD_LIBRARY_PATH": "/opt/containerd/lib:", "LD_LIBRARY_PATH_ORIG": "/nonexistent"},
        {"PYTHONHOME": "/nonexistent", "PYTHONPATH": "/nonexistent", "PYTHONVERBOSE": "1"},
        {"LC_ALL": "xx_YY.nonsense", "LANG": None},
        {"PATH": None, "HOME": None, "TMPDIR": "/nonexistent"},
    ],
)
def test_hostile_environments(bundle, run_dir, server, env):
    outcome = call(run_dir, "ADD", CONF, argv=(bundle,), env=env)
    assert (outcome.status, outcome.err) == (0, b"")


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_descriptors(bundle, run_dir, server, closed):
    argv = ("/bin/sh", "-c", f'"$@" {closed}', "sh", bundle)
    assert call(run_dir, "ADD", CONF, argv=argv).status == 0
    assert server.requests == 1


def test_a_deleted_working_directory(bundle, run_dir, server):
    assert call(run_dir, "ADD", CONF, argv=("/bin/sh", "-c", GONE, run_dir, bundle)).status == 0


def test_without_proc(folder, run_dir, server):
    real = os.path.join(folder, "cni-hostport")  # links are resolved through /proc
    argv = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh", real)
    assert call(run_dir, "ADD", CONF, argv=argv).status == 0


def test_a_reader_that_left(bundle, run_dir, server):
    reader, writer = os.pipe()
    os.close(reader)
    env = cni_env(run_dir, "ADD")
    process = subprocess.Popen([bundle], stdin=subprocess.DEVNULL, stdout=writer, env=env)
    os.close(writer)
    assert process.wait(timeout=10) == 1


def test_an_answer_that_finds_no_room_is_no_success(bundle, run_dir, server, tmp_path):
    """A limit on file sizes is an error of write(), never the end by SIGXFSZ."""
    for command, status in (("ADD", 1), ("DEL", 1)):
        with open(tmp_path / "out", "wb") as out:
            process = subprocess.Popen(
                [bundle],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.DEVNULL,
                env=cni_env(run_dir, command),
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
            )
            assert process.wait(timeout=10) == status


def test_a_closed_stdin_where_there_is_no_dev_null(folder, run_dir, server):
    real = os.path.join(folder, "cni-hostport")
    script = 'mount -t tmpfs none /dev && exec "$@" <&- 2>&-'
    outcome = call(run_dir, "ADD", argv=("unshare", "-m", "sh", "-c", script, "sh", real))
    assert outcome.status == 0
    assert body_of(outcome) == b""


def test_a_stdin_that_does_not_block_is_waited_for(bundle, run_dir, server):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    process = subprocess.Popen(
        [bundle], stdin=reader, stdout=subprocess.PIPE, env=cni_env(run_dir, "ADD")
    )
    os.close(reader)
    time.sleep(0.3)
    os.write(writer, CONF)
    os.close(writer)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    assert base64.b64decode(json.loads(out)["body"]) == CONF


def test_without_memory_an_add_is_an_error_object_and_a_del_is_well(run_dir, server):
    plugin = _plugin_of(BUNDLE)
    for command, status in (("ADD", 1), ("DEL", 0)):
        done = subprocess.run(
            [plugin],
            input=b" " * (12 << 20),
            capture_output=True,
            check=False,
            env=cni_env(run_dir, command),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (24 << 20, 24 << 20)),
        )
        assert done.returncode == status, done
        if command == "ADD":
            assert json.loads(done.stdout)["code"] == 11


def test_without_the_second_executable_it_still_answers(folder, run_dir, tmp_path):
    shutil.copytree(folder, tmp_path / "half", symlinks=True)
    os.unlink(tmp_path / "half" / "cni-hostport-helper")
    half = (str(tmp_path / "half" / "cni-hostport"),)
    assert call(run_dir, "ADD", CONF, argv=half).json["code"] == 11
    assert call(run_dir, "DEL", CONF, argv=half).status == 0
    done = subprocess.run([*half, "status"], env={}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().endswith("/half/cni-hostport-helper: No such file or directory\n")


def test_a_launcher_alone_still_answers(run_dir, tmp_path):
    if not os.path.exists(LAUNCHER):
        pytest.skip("no build/launcher: ./build.sh test compiles it")
    shutil.copy(LAUNCHER, tmp_path / "cni-hostport")
    alone = (str(tmp_path / "cni-hostport"),)
    assert call(run_dir, "ADD", CONF, argv=alone).json["code"] == 11
    assert call(run_dir, "DEL", CONF, argv=alone).status == 0


def test_the_call_that_starts_the_helper(bundle, run_dir, tmp_path):
    """From a directory that is gone, with a PATH that has nft alone and hostile variables."""
    os.symlink(shutil.which("nft"), tmp_path / "nft")
    held = os.open("/dev/zero", os.O_RDONLY)
    process = subprocess.Popen(
        [*ALONE, "/bin/sh", "-c", 'cd /proc/self/fd && exec "$@"', "sh", bundle],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=cni_env(
            run_dir,
            "GC",
            LD_LIBRARY_PATH="/opt/containerd/lib:",
            PYTHONPATH="/nonexistent",
            NOTIFY_SOCKET="/nonexistent",
            PATH=f"{tmp_path}:/usr/bin:/bin",
        ),
        pass_fds=(held,),
        umask=0,
    )
    os.close(held)
    process.stdin.write(CONF)
    process.stdin.close()
    status = process.wait(timeout=40)
    ended = time.monotonic()
    out, err = process.stdout.read(), process.stderr.read()
    assert time.monotonic() - ended < 1  # nobody else holds the pipes
    assert (status, out, err) == (0, b"", b"")
    (helper,) = helpers_of(run_dir)
    links = [os.readlink(f"/proc/{helper}/fd/{number}") for number in range(3)]
    assert links == ["/dev/null", "/dev/null", f"{run_dir}/helper.log"]
    opened = [_readlink(f"/proc/{helper}/fd/{n}") for n in os.listdir(f"/proc/{helper}/fd")]
    assert "/dev/zero" not in opened
    assert os.readlink(f"/proc/{helper}/cwd") == "/"
    assert os.getsid(helper) == helper
    with open(f"/proc/{helper}/environ", "rb") as file:
        names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0") if entry}
    front = {b"LD_LIBRARY_PATH", b"PYTHONHOME", b"PYTHONPATH"}
    front |= {b"PYTHONCOERCECLOCALE", b"PYTHONUTF8"}
    assert names - front == {b"CNI_HOSTPORT_RUN_DIR", b"LANG", b"PATH"}
    assert os.stat(f"{run_dir}/helper.log").st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LD_LIBRARY_PATH": "/opt/containerd/lib:", "LD_LIBRARY_PATH_ORIG": "/nonexistent"},
        {"PYTHONHOME": "/nonexistent", "PYTHONPATH": "/nonexistent", "PYTHONVERBOSE": "1"},
        {"PYTHONINSPECT": "1", "PYTHONSTARTUP": "/nonexistent", "PYTHONMALLOC": "nonsense"},
        {"LC_ALL": "xx_YY.nonsense"},
        {"LANG": "C", "LC_CTYPE": "POSIX"},
    ],
)
def test_the_helper_executable_in_hostile_environments(folder, env):
    """From a working directory that holds modules by Python's own names."""
    argv = [f"{folder}/cni-hostport-helper", "version", "--json"]
    done = subprocess.run(argv, env=env, capture_output=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout)["protocol"] == 1
    assert done.stderr == b""


def test_the_helper_executable_behind_links_and_without_proc(folder, tmp_path):
    os.symlink(f"{folder}/cni-hostport-helper", tmp_path / "linked")
    done = subprocess.run([tmp_path / "linked", "version"], env={}, capture_output=True, check=True)
    assert done.stdout.startswith(b"cni-hostport ")
    script = 'mount -t tmpfs none /proc && exec "$@"'
    argv = ["unshare", "-m", "sh", "-c", script, "sh", f"{folder}/cni-hostport-helper", "version"]
    assert subprocess.run(argv, capture_output=True, check=True).stdout == done.stdout


def test_the_helper_executable_hands_on_every_argument(folder):
    helper = f"{folder}/cni-hostport-helper"
    for argument in ("--nonsense", "", "ö a", "-c", "-m"):
        done = subprocess.run([helper, argument], env={}, capture_output=True, check=False)
        assert done.returncode == 2, done
        assert done.stdout == b""


def test_the_helper_executable_with_closed_descriptors(folder):
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        argv = ["/bin/sh", "-c", f'"$1" version {closed}', "sh", f"{folder}/cni-hostport-helper"]
        done = subprocess.run(argv, env={}, capture_output=True, check=True)
        assert done.stderr == b""


@pytest.mark.parametrize("name", ["a:b", "a;b", "a${LIB}b"])
def test_a_path_that_no_bundle_runs_from_is_named(tmp_path, name):
    copy = tmp_path / name
    shutil.copytree(BUNDLE, copy, symlinks=True)
    done = subprocess.run(
        [copy / "cni-hostport-helper", "version"], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, b"")
    wanted = f"cni-hostport-helper: {copy}: no bundle runs from a path with : or ; or $\n"
    assert done.stderr.decode() == wanted


def test_it_is_not_installed_to_such_a_path():
    argv = [f"{BUNDLE}/cni-hostport-helper", "install", "--prefix", "/opt/a:b", "--dry-run"]
    done = subprocess.run(argv, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"--prefix '/opt/a:b': no bundle runs from a path with : or ; or $" in done.stderr


def test_calls_at_once_start_one_helper(bundle, run_dir):
    script = (
        'for n in 1 2 3 4; do "$0" < "$1" & pids="$pids $!"; done;'
        " for p in $pids; do wait $p || exit 1; done"
    )
    with open(f"{run_dir}/conf", "wb") as file:
        file.write(CONF)
    argv = (*ALONE, "/bin/sh", "-c", script, bundle, f"{run_dir}/conf")
    assert call(run_dir, "GC", argv=argv, env={"CNI_NETNS": None}).status == 0
    assert len(helpers_of(run_dir)) == 1


def test_a_killed_helper_is_replaced_by_the_next_call(bundle, run_dir):
    # One shell makes both calls, since the net namespace must outlive the first helper.
    with open(f"{run_dir}/conf", "wb") as file:
        file.write(CONF)
    script = 'read a; "$0" < "$1"; echo $?; read b; "$0" < "$1"; echo $?'
    shell = subprocess.Popen(
        [*ALONE, "/bin/sh", "-c", script, bundle, f"{run_dir}/conf"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=cni_env(run_dir, "GC"),
    )
    _say(shell)
    assert shell.stdout.readline() == b"0\n"
    (first,) = helpers_of(run_dir)
    os.kill(first, signal.SIGKILL)
    _say(shell)
    assert shell.stdout.readline() == b"0\n"
    shell.communicate(timeout=10)
    assert len(set(helpers_of(run_dir)) - {first}) == 1


def test_what_the_bundle_holds():
    internal = os.path.join(BUNDLE, "_internal")
    start_up = os.path.join(internal, "base_library.zip")
    assert os.path.isdir(start_up)
    assert len(os.listdir(start_up)) < 15
    with open(os.path.join(internal, "LICENSES.txt")) as file:
        text = file.read()
    packages = ("pydantic ", "pydantic_core ", "pyroute2 ", "prometheus_client ", "Python", "glibc")
    for package in packages:
        assert f"\n{package}" in text


def test_the_plugin_executable_needs_nothing_beside_it(tmp_path):
    """Not even a C library; nor does it know where it was built."""
    plugin = shutil.copy(_plugin_of(BUNDLE), tmp_path / "plugin")
    argv = (shutil.which("chroot"), str(tmp_path), "/plugin")
    done = subprocess.run(argv, env={"CNI_COMMAND": "VERSION"}, capture_output=True, check=True)
    assert json.loads(done.stdout)["cniVersion"] == "1.1.0"
    done = subprocess.run([*argv, "status"], env={}, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.endswith(b"/cni-hostport-helper: No such file or directory\n")
    assert ROOT.encode() not in plugin.read_bytes()


def _plugin_of(folder):
    """The Python plugin, also where the launcher stands in front of it."""
    behind = os.path.join(folder, "cni-hostport-python")
    return behind if os.path.exists(behind) else os.path.join(folder, "cni-hostport")


def _say(shell):
    shell.stdin.write(b"\n")
    shell.stdin.flush()


def _readlink(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""
