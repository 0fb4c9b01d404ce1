"""Tools run with a clean environment, to an end, and with their own words kept."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from pathlib import Path

import pytest

from cni_hostport.errors import NetfilterFailed, TryAgain
from cni_hostport.host import commands, nftcmd


def _tool(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return str(path)


def test_a_tool_gets_path_and_lang_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH", "NOTIFY_SOCKET", "LISTEN_FDS", "HOME", "LC_ALL"):
        monkeypatch.setenv(name, "x")
    found = commands.run(["/usr/bin/env"]).check().stdout.splitlines()
    assert sorted(line.partition("=")[0] for line in found) == ["LANG", "PATH"]
    assert "LANG=C.UTF-8" in found


def test_a_tool_inherits_no_descriptor() -> None:
    reader, writer = os.pipe()
    try:
        os.set_inheritable(writer, True)
        found = commands.run(["/bin/ls", "/proc/self/fd"]).stdout.split()
    finally:
        os.close(reader)
        os.close(writer)
    assert set(found) <= {"0", "1", "2", "3"}


def test_stdin_is_what_was_given_or_empty() -> None:
    assert commands.run(["cat"], "text \udcff").stdout == "text \udcff"
    assert commands.run(["cat"], b"bytes").stdout == "bytes"
    assert commands.run(["cat"]).stdout == ""


def test_a_large_exchange_does_not_block() -> None:
    text = "x" * 3_000_000
    assert commands.run(["cat"], text).stdout == text


def test_a_status_is_a_value_and_an_error_on_demand(tmp_path: Path) -> None:
    tool = _tool(tmp_path, "tool", "echo why >&2; exit 3")
    result = commands.run([tool, "a b"])
    assert (result.rc, result.stderr) == (3, "why\n")
    with pytest.raises(commands.CommandFailed) as caught:
        result.check()
    assert str(caught.value) == f"{tool} 'a b': exit status 3: why"


def test_a_killed_tool_shows_its_signal(tmp_path: Path) -> None:
    assert commands.run([_tool(tmp_path, "tool", "kill -9 $$")]).rc == 137


def test_a_missing_tool_says_so() -> None:
    with pytest.raises(commands.CommandMissing, match="is not installed"):
        commands.run(["no-such-tool-anywhere"])
    with pytest.raises(commands.CommandMissing, match="cannot be executed"):
        commands.run(["/no/such/tool"])
    assert commands.find("no-such-tool-anywhere") is None


def test_a_timeout_ends_the_tool_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tool = _tool(tmp_path, "tool", f"sleep 30 & echo $! > {pid_file}; wait")
    start = time.monotonic()
    with pytest.raises(commands.CommandTimeout, match=r"killed after 0\.5 s"):
        commands.run([tool], timeout=0.5)
    assert time.monotonic() - start < 5
    child = int(pid_file.read_text())
    state = Path(f"/proc/{child}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_child_that_left_the_group_cannot_hold_us_up(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    tool = _tool(tmp_path, "tool", f"setsid sh -c 'echo $$ > {pid_file}; exec sleep 20' & wait")
    start = time.monotonic()
    try:
        with pytest.raises(commands.CommandTimeout):
            commands.run([tool], timeout=0.5)
        assert time.monotonic() - start < 5
    finally:
        os.kill(int(pid_file.read_text()), 9)


def test_no_descriptors_left_is_a_passing_condition() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as held:
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:  # gaps below the limit as well
                held.callback(os.close, os.dup(2))
        with pytest.raises(TryAgain, match="Too many open files"):
            nftcmd.load("")


def _safe(folder: Path) -> bool:
    return str(folder.resolve()) in commands.safe_path(str(folder)).split(":")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root owns folders that pass")
def test_only_folders_that_root_alone_writes_come_before_the_standard_six(tmp_path: Path) -> None:
    good, bad, owned = (tmp_path / n for n in ("good", "bad", "owned"))
    for folder in (good, bad, owned):
        folder.mkdir(mode=0o755)
    bad.chmod(0o777)
    os.chown(owned, 65534, 65534)
    inside = bad / "inside"
    inside.mkdir(mode=0o755)
    link = tmp_path / "link"
    link.symlink_to(good)
    assert _safe(good)
    assert not _safe(bad)
    assert not _safe(owned)
    assert not _safe(inside)
    assert str(link) not in commands.safe_path(str(link))
    assert _safe(link)


@pytest.mark.parametrize("path", ["", "relative", ".", "/nowhere/at/all", "::", "/etc/passwd"])
def test_a_useless_path_leaves_the_standard_six(path: str) -> None:
    assert commands.safe_path(path).split(":") == list(commands.STANDARD_PATH)


@pytest.mark.skipif(os.geteuid() != 0, reason="a fake tool must be root's")
def test_nfts_own_words_reach_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _tool(tmp_path, "nft", "cat >/dev/null; echo 'Error: syntax error, line 3' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NetfilterFailed) as caught:
        nftcmd.load("table ip x")
    assert caught.value.code == 102
    assert caught.value.details == "Error: syntax error, line 3"


def test_a_missing_nft_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "find", lambda name: None)
    with pytest.raises(NetfilterFailed, match="install the package nftables"):
        nftcmd.load("")
    assert nftcmd.version() is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a fake tool must be root's")
@pytest.mark.parametrize(
    ("text", "expected"),
    [("nftables v1.0.6 (Lester Gooch #5)", (1, 0, 6)), ("nftables v1.1", (1, 1, 0)), ("?", None)],
)
def test_nfts_version_is_read(
    text: str,
    expected: tuple[int, int, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _tool(tmp_path, "nft", f"echo '{text}'")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nftcmd.version() == expected
