"""Calls with nothing to do: they run no process, write no file and start no helper for it."""

from __future__ import annotations

from lab.stage import RUN_DIR, TYPE, Stage, mapping

PORT = 8080
MAPPINGS = [mapping(PORT, 80), mapping(PORT, 80, "udp")]


def spy(stage: Stage) -> None:
    """Tools found first on PATH that note each of their calls in /run/spy.log."""
    for tool in (
        "nft",
        "iptables",
        "iptables-restore",
        "iptables-save",
        "ip6tables",
        "ip6tables-restore",
        "ip6tables-save",
        "conntrack",
        "ip",
        "sysctl",
    ):
        real = stage.node.output("sh", "-c", f"command -v {tool}").strip()
        file = stage.node.path(f"/run/tools/{tool}")
        file.unlink(missing_ok=True)
        file.write_text(f'#!/bin/sh\necho "{tool} $*" >> /run/spy.log\nexec {real} "$@"\n')
        file.chmod(0o755)


def test_nothing_runs_and_nothing_is_written_without_mappings_or_record(stage: Stage) -> None:
    spy(stage)
    pod = stage.pod("web", MAPPINGS)
    bare = stage.attachment("bare", [])
    config = pod.network.config(pod.network.entry(TYPE), bare, pod.at.result)
    log = stage.node.path("/run/spy.log")
    assert log.exists(), "the spies are used"
    log.unlink()
    before, files = stage.snapshot(), tree(stage)
    lines = stage.node.path(f"{RUN_DIR}/helper.log").read_text()
    for verb in ("ADD", "CHECK", "DEL", "DEL"):
        assert stage.call(verb, config, bare).status == 0
    assert stage.node.path(f"{RUN_DIR}/helper.log").read_text() == lines
    unknown = stage.attachment("unknown", MAPPINGS)
    assert stage.call("DEL", stage.config(pod), unknown).status == 0
    assert stage.call("CHECK", stage.config(pod), unknown).code == 3
    assert not log.exists(), log.read_text()
    assert tree(stage) == files
    assert stage.snapshot() == before


def tree(stage: Stage) -> dict[str, int]:
    """Every file below the run directory except logs, with its modification time."""
    root = stage.node.path(RUN_DIR)
    return {
        str(file.relative_to(root)): file.stat().st_mtime_ns
        for file in root.rglob("*")
        if not file.name.endswith((".log", ".lock"))
    }


def test_del_on_a_fresh_node_makes_nothing(stage: Stage) -> None:
    at = stage.attachment("web", MAPPINGS)
    config = {"name": "podnet", "cniVersion": "1.0.0", **stage.entry()}
    reply = stage.call("DEL", config, at)
    assert (reply.status, reply.stdout) == (0, b"")
    assert stage.node.ruleset() == ""
    assert stage.records() == {}


def test_with_nothing_to_do_no_helper_is_started(stage: Stage) -> None:
    """A DEL of what was never added, a CHECK without mappings: not even a run directory."""
    network = stage.network()
    entry = network.entry(TYPE)
    result = {"cniVersion": "1.0.0", "ips": [{"address": "10.244.7.9/24"}]}
    mapped, bare = stage.attachment("web", MAPPINGS), stage.attachment("bare", [])
    for verb, at in (("DEL", mapped), ("DEL", bare), ("CHECK", bare)):
        reply = stage.call(verb, network.config(entry, at, result), at)
        assert (reply.status, reply.stdout, reply.stderr) == (0, b"", b"")
    assert not stage.node.path(RUN_DIR).exists()
    assert stage.node.helpers() == []
    # one with mappings and no record is an error only a helper words
    assert stage.call("CHECK", network.config(entry, mapped, result), mapped).code == 3


def test_version_and_bare_call_start_nothing(stage: Stage) -> None:
    reply = stage.call("VERSION", b"{{{ not JSON")
    assert reply.json["supportedVersions"][0] == "0.1.0"
    assert reply.json["supportedVersions"][-1] == "1.1.0"
    bare = stage.call("", b"")
    assert (bare.status, bare.stdout) == (0, b"")
    assert b"1.1.0" in bare.stderr
    assert not stage.node.processes()
    assert not stage.node.path(RUN_DIR).exists()
