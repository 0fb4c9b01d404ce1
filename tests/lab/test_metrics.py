"""Metrics, health and logs of a real helper; a container's hand-over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.node import wait_for
from lab.rivals import squatter
from lab.stage import RUN_DIR, TOOLS, TYPE, Stage, mapping
from lab.test_status import cli


def samples(text: str) -> dict[str, float]:
    """Samples by name{labels}, checked by Prometheus' own parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(s.labels.items()))
            found[f"{s.name}{{{labels}}}" if labels else s.name] = s.value
    return found


def http(stage: Stage, request: bytes, port: int = 9477) -> bytes:
    with stage.node.within(), socket.socket() as sock:
        sock.settimeout(10)
        sock.connect(("127.0.0.1", port))
        sock.sendall(request)
        parts = []
        while part := sock.recv(65536):
            parts.append(part)
        return b"".join(parts)


def get(stage: Stage, path: str) -> tuple[int, str]:
    answer = http(stage, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def start_helper(stage: Stage, *argv: str, **env: str) -> subprocess.Popen[bytes]:
    """A helper of ours in the foreground, when it serves; stderr in /run/helper.err."""
    with stage.node.path("/run/helper.err").open("ab") as log:
        return stage.node.popen(
            f"{TOOLS}/{TYPE}",
            "helper",
            *argv,
            stderr=log.fileno(),
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env},
        )


def test_what_happened_is_counted(stage: Stage) -> None:
    pod = stage.pod("web", [mapping(8080, 80), mapping(8080, 80, "udp"), mapping(9000, 90, "sctp")])
    stage.refused("two", [mapping(8080, 80)])
    with squatter(stage.node, "0.0.0.0", 8081):
        stage.refused("three", [mapping(8081, 80)])
    stage.node.run("nft", "flush", "ruleset")
    assert wait_for(lambda: "hostport-manager" in stage.node.ruleset())
    found = samples(cli(stage, "metrics").stdout)
    assert found["cni_hostport_attachments{network=podnet}"] == 1
    for protocol in ("tcp", "udp", "sctp"):
        for family in ("ipv4", "ipv6"):
            label = f"{{family={family},network=podnet,protocol={protocol}}}"
            assert found["cni_hostport_mappings" + label] == 1
    assert found["cni_hostport_held_ports"] == 4, "SCTP has no sockets"
    assert found["cni_hostport_conflicts_total{owner=attachment}"] == 1
    assert found["cni_hostport_conflicts_total{owner=process}"] == 1
    assert found["cni_hostport_calls_total{code=101,verb=ADD}"] == 2
    assert found["cni_hostport_call_duration_seconds_count{verb=ADD}"] == 3
    assert found["cni_hostport_repairs_total{kind=rules}"] >= 1
    assert found["cni_hostport_conntrack_deletes_total"] >= 1
    assert found["cni_hostport_healthy"] == 1
    assert abs(found["cni_hostport_last_reconcile_timestamp_seconds"] - time.time()) < 60
    assert found[f"cni_hostport_backend_info{{backend={stage.backend.name},family=ipv4}}"] == 1
    stage.remove(pod)


def test_http_waits_for_a_taken_address_and_serves_pods_meanwhile(stage: Stage) -> None:
    with squatter(stage.node, "127.0.0.1", 9477):
        helper = start_helper(stage, "--listen-metrics", "127.0.0.1:9477")
        assert wait_for(lambda: cli(stage, "ping").returncode == 0, 10)
        stage.pod("web", [mapping(8080, 80)])
        assert "cannot listen on 127.0.0.1:9477 yet" in stage.node.output("cat", "/run/helper.err")

    def up() -> bool:
        try:
            return get(stage, "/healthz") == (200, "ok\n")
        except OSError:
            return False

    assert wait_for(up, 10, 0.2)
    status, text = get(stage, "/metrics")
    assert status == 200
    assert samples(text)["cni_hostport_attachments{network=podnet}"] == 1
    assert get(stage, "/metrics?x=1")[0] == 200
    assert get(stage, "/")[0] == 404
    assert http(stage, b"POST /metrics HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 405 ")
    assert http(stage, b"HEAD /metrics HTTP/1.1\r\n\r\n").endswith(b"\r\n\r\n")
    long = b"a" * 9000
    for nonsense in (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\xff\xfe\r\n\r\n",
        b"GET /" + long + b" HTTP/1.1\r\n\r\n",
    ):
        http(stage, nonsense)
    assert get(stage, "/healthz")[0] == 200
    helper.send_signal(signal.SIGTERM)
    assert helper.wait(10) == 0


def test_health_tells_the_problem(stage: Stage) -> None:
    start_helper(stage, "--listen-metrics", ":9477")
    assert wait_for(lambda: cli(stage, "ping").returncode == 0, 10)
    stage.pod("web", [mapping(8080, 80)])
    stage.node.run("cp", "/usr/sbin/nft", "/run/nft")
    stage.node.run("mount", "--bind", "/dev/null", "/usr/sbin/nft")
    stage.node.run("/run/nft", "flush", "ruleset")
    assert wait_for(lambda: get(stage, "/healthz")[0] == 503)
    assert "nft" in get(stage, "/healthz")[1]
    sick = cli(stage, "ping")
    assert sick.returncode == 1
    assert "nft" in sick.stderr


@pytest.mark.parametrize("bad", ["9477", "1.2.3.4:", "::1:9477", "127.0.0.1:0", "127.0.0.1:http"])
def test_an_address_that_is_none_is_a_usage_error(stage: Stage, bad: str) -> None:
    done = cli(stage, "helper", "--listen-metrics", bad)
    assert done.returncode == 2
    assert "--listen-metrics" in done.stderr


def lines(stage: Stage) -> list[str]:
    return stage.node.path(f"{RUN_DIR}/helper.log").read_text().splitlines()


def test_a_call_is_one_line_and_a_failing_one_tells_all(stage: Stage) -> None:
    stage.pod("web", [mapping(8080, 80)])
    stage.refused("two", [mapping(8080, 80), mapping(9999, 80)])
    (added,) = [x for x in lines(stage) if "verb=ADD" in x and "result=ok" in x]
    assert re.search(r"level=info msg=call .*network=podnet container=[0-9a-f]{64} ", added)
    (failed,) = [x for x in lines(stage) if "verb=ADD" in x and "level=error" in x]
    for word in ("pod=shop/two", "network=podnet", "code=101", "8080/tcp", "shop/web", "9999/tcp"):
        assert word in failed, word
    assert "\n" not in failed


def test_json_lines_and_levels(stage: Stage) -> None:
    helper = start_helper(stage, "--log-format", "json", "--log-level", "error")
    assert wait_for(lambda: cli(stage, "ping").returncode == 0, 10)
    stage.pod("web", [mapping(8080, 80)])
    stage.refused("two", [mapping(8080, 80)])
    found = [json.loads(x) for x in stage.node.output("cat", "/run/helper.err").splitlines()]
    assert [(x["level"], x["verb"], x["pod"], x["code"]) for x in found] == [
        ("error", "ADD", "shop/two", "101")
    ]
    assert "8080/tcp" in found[0]["result"]
    helper.terminate()
    helper.wait(10)


def _sockets_of(pid: int) -> list[str]:
    """Sockets that it has open; a starting program's other files come and go meanwhile."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(descriptor))
    return [name for name in found if "socket" in name]


def test_a_container_that_was_replaced_waits_and_holds_nothing(stage: Stage) -> None:
    """An upgrade of a DaemonSet: the new pod starts first, the old one must not come back."""
    old = start_helper(stage, "--replace", "--linger", CNI_HOSTPORT_INSTANCE="old")
    assert wait_for(lambda: cli(stage, "ping", "--instance", "old").returncode == 0, 10)
    stage.pod("web", [mapping(8080, 80)])
    other = cli(stage, "ping", "--instance", "new")
    assert other.returncode == 1
    assert "another instance: old" in other.stderr
    new = start_helper(stage, "--replace", "--linger", CNI_HOSTPORT_INSTANCE="new")
    assert wait_for(lambda: cli(stage, "ping", "--instance", "new").returncode == 0, 10)
    assert wait_for(lambda: len(stage.node.helpers()) == 1)
    assert old.poll() is None, "its container would be started anew"
    # nsenter became the helper: the same process id
    assert _sockets_of(old.pid) == []
    assert stage.ask("192.0.2.1", 8080).server == "web"
    old.send_signal(signal.SIGTERM)
    assert old.wait(5) == 0
    assert cli(stage, "ping", "--instance", "new").returncode == 0
    new.terminate()
    new.wait(10)
