"""The command line as a whole: help that teaches, exit statuses, completions, the manual."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cni_hostport.cli.main import COMMANDS, _exists
from tests.calls import run_directory

ROOT = Path(__file__).parents[3]
OURS = [name for name in COMMANDS if name != "node-cache"]
CLIENTS = ("status", "check", "gc", "metrics", "ping")


def run(*argv, **env):
    """The program with these arguments, in a run directory where no helper is."""
    with run_directory() as path:
        environment = {
            "PATH": "/usr/sbin:/usr/bin",
            "CNI_HOSTPORT_RUN_DIR": os.fsdecode(path),
            **env,
        }
        return subprocess.run(
            [sys.executable, "-I", "-m", "cni_hostport", *argv],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )


def test_every_command_exists():
    assert [name for name in OURS if not _exists(name)] == []


@pytest.mark.parametrize("command", OURS)
def test_help_teaches(command):
    done = run(command, "--help", COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: cni-hostport {command} ")
    assert re.search(r"^exit status: 0 ", done.stdout, re.MULTILINE)
    examples = done.stdout.partition("\nexample")[2]
    assert f"cni-hostport {command}" in examples
    assert max(map(len, done.stdout.splitlines())) <= 100
    for option in re.findall(r"^  (--[a-z-]+)", done.stdout, re.MULTILINE):
        text = done.stdout.split(f"\n  {option}", 1)[1].split("\n  -")[0]
        assert len(text.split()) > 1, f"{option} has no explanation"


def test_the_overview():
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in OURS:
        assert re.search(rf"^  {command} +\w", done.stdout, re.MULTILINE)
    assert "exit status: 0 well, 1 differences or failure, 2 usage, 3 no helper" in done.stdout
    bare = run()
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", done.stdout)
    assert run("help").stdout == done.stdout


@pytest.mark.parametrize("command", CLIENTS)
def test_without_a_helper_the_status_is_three_with_advice(command):
    done = run(command)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("cni-hostport: no helper answers in ")
    assert "started by the first plugin call" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", OURS)
def test_a_wrong_command_line_is_two(command):
    for argv in ((command, "--nonsense"), (command, "surplus")):
        done = run(*argv)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"usage: cni-hostport {command}" in done.stderr
        assert argv[1] in done.stderr


def test_no_such_command():
    done = run("statsu")
    assert done.returncode == 2
    assert "no command 'statsu'" in done.stderr
    assert "  status " in done.stderr


def test_failure_is_one():
    done = run("install", "--replace-portmap", "--root", "/nonexistent", "--dry-run")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    done = run("uninstall", "--prefix", "/nonexistent")
    assert done.returncode == 1
    assert "lists no installation" in done.stderr


@pytest.mark.parametrize("flag", ["--version", "-V", "version"])
def test_version(flag):
    done = run(flag)
    assert done.returncode == 0
    assert re.match(r"cni-hostport \d+\.\d+\.\d+\n", done.stdout)


def test_manual_and_completions_are_what_the_program_says():
    done = subprocess.run(
        [sys.executable, ROOT / "packaging/manual.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin"},
    )
    assert done.returncode == 0, done.stderr


def complete(*words):
    """What bash offers after these words."""
    script = f"""
        source {ROOT}/packaging/completion/cni-hostport.bash
        COMP_WORDS=(cni-hostport {" ".join(f"'{w}'" for w in words)})
        COMP_CWORD={len(words)}
        _cni_hostport
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-ec", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes():
    assert complete("st") == ["status"]
    assert set(complete("")) >= set(COMMANDS)
    assert complete("status", "--po") == ["--port", "--pod"]
    assert complete("status", "--sort", "p") == ["port", "pod"]
    assert complete("helper", "--log-format", "") == ["text", "json"]
    assert complete("install", "--conflist", "/etc/hostnam") == ["/etc/hostname"]
    assert complete("status", "--port", "") == []
    assert complete("nonsense", "") == []
