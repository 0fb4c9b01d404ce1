"""``status``, ``check`` and ``gc`` of the real program on a real node."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema

from lab.chain import Json
from lab.node import CLIENT4, NODE4, NODE6
from lab.rivals import squatter
from lab.stage import TOOLS, TYPE, Stage, mapping

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/status.schema.json").read_text())


def cli(stage: Stage, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the program on the node."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **env}
    done = stage.node.run(f"{TOOLS}/{TYPE}", *argv, check=False, env=environment)
    return subprocess.CompletedProcess(
        done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
    )


def status(stage: Stage, *argv: str) -> Json:
    """``status --json``, held against its schema."""
    done = cli(stage, "status", "--json", *argv)
    assert done.returncode == 0, done.stderr
    document: Json = json.loads(done.stdout)
    jsonschema.validate(document, SCHEMA)
    return document


@contextlib.contextmanager
def connections(stage: Stage, addresses: list[tuple[str, int]]) -> Iterator[None]:
    """Connections of the external client that stay open."""
    with contextlib.ExitStack() as stack:
        for host, port in addresses:
            with stage.node.within("client"):
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                sock = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.settimeout(5)
            sock.connect((host, port))
        yield


def test_no_helper_is_three_with_advice(stage: Stage) -> None:
    for command in ("status", "check", "gc"):
        done = cli(stage, command)
        assert done.returncode == 3, command
        assert "no helper answers in /run/cni-hostport" in done.stderr
        assert "first plugin call" in done.stderr
        assert "Traceback" not in done.stderr
    with squatter(stage.node, "0.0.0.0", 8080) as process:
        done = cli(stage, "status", "--port", "8080")
        assert done.returncode == 3
        assert f"(pid {process.pid}) listens on 0.0.0.0:8080/tcp" in done.stdout
    assert not stage.node.processes(), "asking starts nothing"


def test_status_of_pods_with_their_connections(stage: Stage) -> None:
    stage.pod("web", [mapping(8080, 80), mapping(8081, 80), mapping(8080, 80, "udp")])
    two = [(NODE4, 8080), (NODE6, 8080), (NODE4, 8081)]
    with connections(stage, two):
        found = status(stage)
    assert [(m["hostPort"], m["protocol"], m["connections"]) for m in found["mappings"]] == [
        (8080, "tcp", 2),
        (8080, "udp", 0),
        (8081, "tcp", 1),
    ]
    assert all(m["held"] == "yes" and m["pod"] == "web" for m in found["mappings"])
    assert found["helper"]["pid"] in stage.node.helpers()
    assert found["backend"] == {"ip": stage.backend.name, "ip6": stage.backend.name}


def test_who_has_the_port(stage: Stage) -> None:
    stage.pod("web", [mapping(8080, 80)])
    with squatter(stage.node, "0.0.0.0", 9090), squatter(stage.node, "::", 9090, "udp"):
        pod = cli(stage, "status", "--port", "8080")
        host = cli(stage, "status", "--port", "9090")
        found = status(stage, "--port", "9090")
    assert "shop/web" in pod.stdout
    assert "process" not in pod.stdout, "the helper's own sockets are no outsiders"
    assert "no host ports" in host.stdout
    assert "listens on 0.0.0.0:9090/tcp" in host.stdout
    assert "listens on [::]:9090/udp" in host.stdout
    assert {(o["protocol"], o["process"]) for o in found["others"]} >= {("tcp", "squatter")}
    assert status(stage, "--port", "8080")["others"] == []


def test_a_pipe_that_closes_and_a_narrow_terminal(stage: Stage) -> None:
    stage.pod("web", [mapping(p, 80) for p in range(8000, 8060)])
    shell = f"{TOOLS}/{TYPE} status | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = stage.node.run("bash", "-c", shell)
    assert done.stderr == b""
    assert b"Traceback" not in done.stdout
    reader, writer = os.pipe()
    os.close(reader)
    closed = stage.node.popen(
        f"{TOOLS}/{TYPE}", "status", "--json", stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (closed.communicate(timeout=20)[1], closed.returncode) == (b"", 1)
    table = cli(stage, "status", COLUMNS="40").stdout.split("\n\n")[1]
    assert max(map(len, table.splitlines())) <= 40


def test_check_and_gc(stage: Stage) -> None:
    web, dead = stage.pod("web", [mapping(8080, 80)]), stage.pod("dead", [mapping(8081, 80)])
    fine = cli(stage, "check")
    assert (fine.returncode, fine.stdout) == (0, "2 attachments checked, 0 with differences\n")
    assert json.loads(cli(stage, "gc", "--json").stdout)["removed"] == []
    assert dead.server is not None
    dead.server.close()
    stage.node.delete_netns("dead")
    shown = cli(stage, "gc", "--dry-run")
    assert shown.returncode == 0
    assert "would remove shop/dead" in shown.stdout
    assert "8081/tcp" in shown.stdout
    assert len(status(stage)["mappings"]) == 2
    assert "removed shop/dead" in cli(stage, "gc").stdout
    assert [m["pod"] for m in status(stage)["mappings"]] == ["web"]
    assert stage.ask(NODE4, 8080).source == CLIENT4
    assert web.ip4
