"""The linters are tests: one command tells whether a change may land."""

import os
import subprocess
import sys

import pytest

from tests.calls import ROOT

BIN = os.path.dirname(sys.executable)


@pytest.mark.parametrize(
    "command", [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)], ids=" ".join
)
def test_clean(command):
    done = subprocess.run(
        [os.path.join(BIN, command[0]), *command[1:]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["build.sh", ".ci/run"])
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", os.path.join(ROOT, script)], check=True)
