"""What the packaged unit leaves the helper is enough for all it does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.node import NODE4, wait_for
from lab.rivals import squatter
from lab.stage import BUNDLE, RUN_DIR, Backend, Stage, mapping
from lab.test_status import cli

UNIT = (Path(__file__).parents[2] / "packaging/cni-hostport.service").read_text()
CAPABILITIES = [
    word.removeprefix("CAP_").lower()
    for line in re.findall(r"^CapabilityBoundingSet=(.*)$", UNIT, re.MULTILINE)
    for word in line.split()
]


@pytest.mark.parametrize("backend", ["nftables", "iptables-nft", "iptables-legacy"])
def test_the_units_capabilities_are_enough(backend: str) -> None:
    """Maps, holds a low port, names an owner, repairs, sets flags and takes them back."""
    stage = Stage(Backend.parse(backend))
    try:
        few = ["--bounding-set", f"-all,{','.join(f'+{c}' for c in CAPABILITIES)}"]
        words = ["setpriv", "--no-new-privs", *few, str(BUNDLE), "helper", "--replace"]
        helper = stage.node.popen(*words, env={"PATH": "/run/tools:/usr/sbin:/usr/bin:/sbin:/bin"})
        assert wait_for(lambda: stage.node.path(f"{RUN_DIR}/helper.sock").exists(), 10)
        bounded = Path(f"/proc/{helper.pid}/status").read_text()
        mask = int(re.findall(r"CapBnd:\s*(\w+)", bounded)[0], 16)
        assert 5 < mask.bit_count() <= len(CAPABILITIES)
        web = stage.pod("web", [mapping(80, 80), mapping(8080, 80, "udp")])
        assert stage.ask(NODE4, 80).server == "web"
        assert stage.ask("127.0.0.1", 80, at=None).server == "web"
        with squatter(stage.node, "0.0.0.0", 9090) as process:
            assert f"(pid {process.pid})" in str(stage.refused("two", [mapping(9090, 80)]))
        stage.node.run("nft", "flush", "ruleset")
        if backend == "iptables-legacy":
            stage.node.run("iptables-legacy", "-t", "nat", "-F")
        assert wait_for(lambda: cli(stage, "check").returncode == 0, 40)
        assert stage.ask(NODE4, 80).server == "web"
        stage.remove(web)
        assert stage.node.helpers() == [helper.pid]
        assert stage.records() == {}
    finally:
        stage.close()
