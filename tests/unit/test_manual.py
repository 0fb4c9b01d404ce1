"""The man page and the completions say what the program says, and work."""

import re
import subprocess

import pytest

from cni_hostport.cli.main import COMMANDS
from cni_hostport.nodecache.flags import FLAGS
from tests.calls import ROOT
from tests.unit.test_docs import manual

BASH = f"{ROOT}/packaging/completion/cni-hostport.bash"


@pytest.mark.parametrize("path", list(manual.everything()), ids=lambda path: path.name)
def test_it_is_up_to_date(path):
    assert path.read_text() == manual.everything()[path], "run packaging/manual.py"


def test_the_man_page_has_every_command_and_no_stray_request():
    text = manual.roff(manual.parsers())
    for command in COMMANDS:
        assert f".SS cni\\-hostport {command}\n".replace("node-cache", "node\\-cache") in text
    assert not re.search(r"\\&\.[A-Z]{2}", text)


def complete(*words):
    script = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _cni_hostport;'
        ' printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", BASH, "cni-hostport", *words],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("sta",), {"status"}),
        (("",), {*COMMANDS, "--help", "--version"}),
        (("status", "--s"), {"--sort"}),
        (("status", "--sort", ""), {"port", "pod", "network", "held", "connections"}),
        (("status", "--pod", ""), set()),
        (("helper", "--log-format", "j"), {"json"}),
        (("node-cache", "-engine", ""), {"auto", "coredns", "unbound", "none"}),
        (("node-cache", "-localip", "1.2.3.4", "-enginep"), {"-enginepath"}),
        (("nothing", ""), set()),
    ],
)
def test_bash_completes(words, found):
    assert complete(*words) == found


def test_every_flag_of_node_cache_is_completed():
    assert complete("node-cache", "-") == {"-help", *(f"-{flag.name}" for flag in FLAGS)}
    zsh = (manual.ROOT / "packaging/completion/_cni-hostport").read_text()
    for flag in FLAGS:
        assert f"'-{flag.name}[" in zsh
