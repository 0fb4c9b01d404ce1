"""firewalld beside us: start, reload and complete reload; ports work afterwards."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from lab.node import NODE4, NODE6, wait_for
from lab.stage import Backend, Stage, mapping

PORT = 8080
BACKENDS = ("nftables", "iptables-nft", "iptables-legacy")
_BUS = """
mkdir -p /run/dbus /run/firewalld
dbus-uuidgen --ensure 2>/dev/null || true
exec dbus-daemon --system --nofork --nopidfile
"""


@pytest.fixture(params=BACKENDS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    if not (
        os.access("/usr/sbin/firewalld", os.X_OK) and os.access("/usr/bin/dbus-daemon", os.X_OK)
    ):
        pytest.skip("firewalld or dbus is not installed")
    made = Stage(Backend.parse(request.param))
    try:
        yield made
    finally:
        made.close()


def firewalld(stage: Stage) -> list[subprocess.Popen[bytes]]:
    """firewalld with a system bus of the node's own; everything in the trusted zone."""
    node = stage.node
    node.run(
        "sh",
        "-c",
        "mkdir -p /run/fw && cp -r /etc/firewalld/. /run/fw/ 2>/dev/null; "
        "mount --bind /run/fw /etc/firewalld; mkdir -p /run/log && mount --bind /run/log /var/log",
    )
    bus = node.popen("sh", "-c", _BUS)
    assert wait_for(lambda: node.path("/run/dbus/system_bus_socket").exists())
    daemon = node.popen("firewalld", "--nofork", "--nopid", "--log-target", "console")

    def running() -> bool:
        return b"running" in node.run("firewall-cmd", "--state", check=False).stdout

    assert wait_for(running, timeout=30, step=0.3)
    return [daemon, bus]


def works(stage: Stage, timeout: float) -> None:
    for target, protocol in ((NODE4, "tcp"), (NODE6, "tcp"), (NODE4, "udp")):
        assert wait_for(
            lambda t=target, p=protocol: stage.ask(t, PORT, p, timeout=0.2).server == "web",
            timeout=timeout,
        ), (target, protocol)
    assert stage.ask("127.0.0.1", PORT, at=None).server == "web"
    assert stage.ask(NODE4, PORT, at="web").server == "web"


def test_ports_work_after_start_reload_and_complete_reload(stage: Stage) -> None:
    stage.pod("web", [mapping(PORT, 80), mapping(PORT, 80, "udp")])
    works(stage, 0.5)
    processes = firewalld(stage)
    try:
        time.sleep(0.5)
        works(stage, 3)
        for verb in ("--reload", "--complete-reload", "--reload"):
            stage.node.run("firewall-cmd", verb)
            works(stage, 3)
        stage.pod("late", [mapping(9000, 80)])
        assert stage.ask(NODE4, 9000).server == "late"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    works(stage, 3)
