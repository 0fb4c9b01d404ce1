"""iptables-save and -restore through tools of our own: flavours, locks, hangs, words."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from cni_hostport.errors import NetfilterFailed, TryAgain
from cni_hostport.host import commands, iptables
from cni_hostport.model import Family

PLAIN = dict.fromkeys(Family, None)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of PATH."""
    tmp_path.chmod(0o755)
    monkeypatch.setattr(commands, "STANDARD_PATH", ())
    monkeypatch.setenv("PATH", f"{tmp_path}")
    for name in ("iptables-nft", "ip6tables-nft", "iptables-legacy"):
        for kind in ("save", "restore"):
            tool(tmp_path, f"{name}-{kind}", f"echo {name}")
    return tmp_path


def tool(folder: Path, name: str, script: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/sh\nPATH=/usr/bin:/bin\n{script}\n")
    file.chmod(0o755)


def nft() -> iptables.Iptables:
    found = iptables.find("nft", PLAIN)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("version", "flavour"),
    [("iptables v1.8.9 (nf_tables)", "nft"), ("iptables v1.8.9 (legacy)", "legacy"),
     ("iptables v1.6.1", "legacy"), ("what?", None)],
)  # fmt: skip
def test_flavour_of_the_plain_tool(tools: Path, version: str, flavour: str | None) -> None:
    tool(tools, "iptables", f"echo '{version}'")
    assert iptables.flavour_of_path() == flavour
    assert iptables.flavour_of_path(Family.V6) is None


def test_plain_names_are_preferred_where_they_are_of_the_flavour(tools: Path) -> None:
    for kind in ("save", "restore"):
        tool(tools, f"iptables-{kind}", "echo plain")
    found = iptables.find("legacy", {Family.V4: "legacy", Family.V6: None})
    assert found is not None
    assert found.save(Family.V4) == "plain\n"
    assert not found.has(Family.V6)
    assert nft().save(Family.V4) == "iptables-nft\n"
    assert nft().save(Family.V6) == "ip6tables-nft\n"
    with pytest.raises(NetfilterFailed, match="ip6tables"):
        found.restore(Family.V6, "")


def test_no_tools_at_all(tools: Path) -> None:
    for file in tools.iterdir():
        file.unlink()
    assert iptables.find("nft", PLAIN) is None
    assert iptables.flavour_of_path() is None


def test_a_restore_gets_the_text_and_touches_nothing_else(tools: Path) -> None:
    tool(tools, "iptables-nft-restore", f'echo "$*" > {tools}/args; cat > {tools}/text')
    nft().restore(Family.V4, "*nat\nCOMMIT\n")
    assert (tools / "text").read_text() == "*nat\nCOMMIT\n"
    assert (tools / "args").read_text() == "-w 5 --noflush --counters\n"


def test_a_busy_lock_is_waited_for_inside_a_bound(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool(tools, "iptables-nft-restore",
         f"echo x >> {tools}/count; [ $(wc -l < {tools}/count) -gt 2 ] || exit 4")  # fmt: skip
    nft().restore(Family.V4, "")
    assert (tools / "count").read_text() == "x\n" * 3
    monkeypatch.setattr(iptables, "BOUND", 0.3)
    tool(tools, "iptables-nft-restore", "echo held by somebody >&2; exit 4")
    started = time.monotonic()
    with pytest.raises(TryAgain, match="held by somebody"):
        nft().restore(Family.V4, "")
    assert time.monotonic() - started < 3


@pytest.mark.parametrize(
    ("script", "words"),
    [("echo bad rule >&2; exit 2", "bad rule"), ("exit 1", "exit status 1"),
     ("echo 'line 4: CHAIN_DEL failed (Device or resource busy): chain X' >&2; exit 4", "CHAIN_DEL")],
)  # fmt: skip
def test_a_refusal_is_told_in_the_tools_words(tools: Path, script: str, words: str) -> None:
    tool(tools, "iptables-nft-restore", script)
    with pytest.raises(NetfilterFailed, match=words):
        nft().restore(Family.V4, "")


def test_a_tool_that_hangs_is_told_apart(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iptables, "BOUND", 0.3)
    tool(tools, "iptables-nft-restore", "sleep 30")
    with pytest.raises(iptables.NotAnswered) as caught:
        nft().restore(Family.V4, "")
    assert caught.value.code == 102
    tool(tools, "iptables-nft-save", "sleep 30")
    with pytest.raises(iptables.NotAnswered):
        nft().save(Family.V4)


def test_only_nft_has_a_generation(tools: Path) -> None:
    assert isinstance(nft().generation(), int)
    legacy = iptables.find("legacy", PLAIN)
    assert legacy is not None
    assert legacy.generation() is None
