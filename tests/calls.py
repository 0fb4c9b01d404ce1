"""Running plugin calls as a runtime does, for tests."""

import atexit
import base64
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SHIM = (sys.executable, "-I", "-S", f"{ROOT}/cni_hostport/shim.py")
PROGRAM = (sys.executable, "-I", f"{ROOT}/tests/standin_program.py")
LAUNCHER = f"{ROOT}/build/launcher"
FRONTS = ("python", "launcher")
"""What a call may meet first: the Python plugin, or the launcher with that plugin beside it."""
CONF = {"cniVersion": "1.0.0", "name": "net", "type": "cni-hostport"}


@dataclass(frozen=True)
class Outcome:
    status: int
    out: bytes
    err: bytes
    seconds: float

    @property
    def json(self):
        return json.loads(self.out)


def cni_env(run_dir, command, **more):
    env = {
        "CNI_COMMAND": command,
        "CNI_CONTAINERID": "ctr-1",
        "CNI_NETNS": "/proc/self/ns/net",
        "CNI_IFNAME": "eth0",
        "CNI_PATH": "/opt/cni/bin",
        "CNI_HOSTPORT_RUN_DIR": os.fsdecode(run_dir),
        "PATH": "/usr/sbin:/usr/bin",
    }
    return {k: v for k, v in (env | more).items() if v is not None}


_front = FRONTS[0]


@contextlib.contextmanager
def behind(front):
    """Within, SHIM and PROGRAM run behind that front."""
    global _front
    _front = front
    try:
        yield
    finally:
        _front = FRONTS[0]


def fronted(argv):
    """The command line, with the launcher in the place of the Python plugin where it is in front."""
    argv = tuple(argv)
    for plugin in (SHIM, PROGRAM) if _front == "launcher" else ():
        for at in range(len(argv)):
            if argv[at : at + len(plugin)] == plugin:
                return (*argv[:at], _launcher_before(plugin), *argv[at + len(plugin) :])
    return argv


@functools.cache
def _launcher_before(plugin):
    folder = tempfile.mkdtemp(prefix="chp-front-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, True)
    shutil.copy(LAUNCHER, f"{folder}/cni-hostport")
    with open(f"{folder}/cni-hostport-python", "w") as file:
        file.write(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, plugin))} "$@"\n')
    os.chmod(f"{folder}/cni-hostport-python", 0o755)
    return f"{folder}/cni-hostport"


def put_launcher_in(bundle):
    """What build.sh --launcher does to a bundle."""
    os.rename(f"{bundle}/cni-hostport", f"{bundle}/cni-hostport-python")
    shutil.copy(LAUNCHER, f"{bundle}/cni-hostport")


def call(run_dir, command, stdin=None, argv=SHIM, env=None, timeout=60, **popen):
    """One call; ``stdin`` defaults to a small configuration, ``env`` adds and (None) removes."""
    data = json.dumps(CONF).encode() if stdin is None else stdin
    start = time.monotonic()
    done = subprocess.run(
        fronted(argv),
        input=data,
        env=cni_env(run_dir, command, **(env or {})),
        capture_output=True,
        timeout=timeout,
        check=False,
        **popen,
    )
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - start)


def body_of(outcome):
    return base64.b64decode(outcome.json["body"])


@contextlib.contextmanager
def run_directory():
    """A short private run directory; ends every helper that was started for it."""
    path = tempfile.mkdtemp(prefix="chp-", dir="/tmp")
    try:
        yield path
    finally:
        for pid in helpers_of(path):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(path, ignore_errors=True)


def helpers_of(run_dir):
    """Pids of the helpers whose run directory this is."""
    wanted = b"CNI_HOSTPORT_RUN_DIR=" + os.fsencode(run_dir)
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and b"helper" in _entries(name, "cmdline"):
                entries = _entries(name, "environ")
                if any(e == wanted or e.startswith(wanted + b"/") for e in entries):
                    found.append(int(name))
        except OSError:
            continue
    # a child that has not yet become its program looks like its parent, and is none
    return [pid for pid in found if _parent(pid) not in found]


def _parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _entries(pid, name):
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read().split(b"\0")


def started(run_dir):
    """Pids of the stand-ins that were started for a run directory, in order."""
    try:
        with open(f"{run_dir}/starts") as file:
            return [int(line) for line in file]
    except FileNotFoundError:
        return []
