"""What a process loads, and which way imports go."""

import os
import subprocess
import sys

import pytest

from tests import standin
from tests.calls import PROGRAM, ROOT, SHIM, cni_env, run_directory


def _loaded(argv, env):
    """Names of the modules that a command loads (``-X importtime`` tells on stderr)."""
    argv = [argv[0], "-X", "importtime", *argv[1:]]
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, env=env, check=False, timeout=30
    )
    lines = done.stderr.decode().splitlines()
    return {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}


@pytest.fixture
def run_dir():
    with run_directory() as path:
        yield path


@pytest.fixture(scope="module")
def at_start():
    """What Python itself loads before it runs a line of ours."""
    return _loaded([sys.executable, "-I", "-S", "-c", "pass"], {})


def test_version_loads_nothing(run_dir, at_start):
    assert _loaded(SHIM, cni_env(run_dir, "VERSION")) == at_start


def test_an_answered_call_loads_the_socket_module_alone(run_dir, at_start):
    server = standin.Server(run_dir).start()
    loaded = _loaded(SHIM, cni_env(run_dir, "ADD"))
    server.close()
    assert server.requests == 1
    assert loaded - at_start == {"_socket"}


def test_the_slow_path_stays_light(run_dir):
    loaded = _loaded((*PROGRAM, "call", "--after=refused"), cni_env(run_dir, "ADD"))
    assert "cni_hostport.host.startup" in loaded
    heavy = {"pydantic", "asyncio", "argparse", "logging", "socket", "subprocess", "dataclasses"}
    assert not loaded & heavy


def test_imports_go_one_way():
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
