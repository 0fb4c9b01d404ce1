"""The benchmark runs and tells; what it measures is no test's business."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as xml

import pytest

from tests.calls import ROOT

sys.path.insert(0, ROOT)
from bench import budgets, plot, plugins, report

CALL = {"wall": 10.0, "cpu": 5.0, "helper": 1.0, "best": 9.0, "runs": 3}
FIGURES = {
    f"{prefix}/{name}/{verb}": dict(CALL)
    for prefix in ("others/0", "others/1000", "shape/1/single", "shape/20/dual")
    for name in ("ours", "launcher", "portmap-nft")
    for verb in ("ADD", "CHECK", "DEL")
} | {
    "start/python": dict(CALL),
    "start/ours/ADD": CALL | {"cpu": 5.5},
    "start/1000": 1.5,
    "memory/idle": 33.0,
    "memory/1000": 40.0,
    "repair/1": 0.05,
    "repair/1000": 0.1,
    "burst/ours/ADD": [CALL | {"failed": 0}],
    "burst/ours/same": [CALL | {"failed": 99}],
    **{f"connections/1000/ours/{place}": 5000.0 for place in ("one", "first", "last")},
    **{f"turns/1000/ours/{place}": 1.0 for place in ("first", "last")},
}


def test_every_promise_is_judged():
    rows = {row.what: row for row in budgets.judge(FIGURES)}
    assert rows["ADD / portmap nftables"].figure == 1.0
    assert not rows["ADD / portmap nftables"].holds
    assert rows["winners of one port asked 100 times"].holds
    assert rows["new connections/s, last of 1,000 mappings / the only one"].holds
    assert rows["helper's memory, idle"].holds
    assert all("portmap iptables" not in what for what in rows)  # not measured: no row


def test_a_report_and_a_drawing():
    rows = budgets.judge(FIGURES)
    text = report.text(FIGURES, rows, plugins.ALL, ["no such plugin"], {"kernel": "6"})
    assert "not measured: no such plugin" in text
    assert "does not hold" in text
    tree = xml.fromstring(plot.svg(FIGURES, plugins.ALL))
    assert len(tree.findall(".//{*}polyline")) == 9


def test_a_report_where_not_everybody_went_as_far():
    """Some get no ten thousand others in the time of a run."""
    places = ("one", "first", "last")
    few = {f"connections/1/{p.name}/{at}": 100.0 for p in plugins.ALL for at in places}
    many = {f"connections/1000/{p.name}/{at}": 90.0 for p in plugins.ALL[:3] for at in places}
    turns = {k.replace("connections", "turns"): 1.0 for k in few | many}
    text = report.text(few | many | turns, [], plugins.ALL, [], {})
    assert "| cni-hostport, iptables-nft | 100 | 100 (1.00 x) | 100 (1.00 x) | – | – |" in text
    assert "| 90 (1.00 x) | 90 (1.00 x) |" in text


def test_a_quick_run(tmp_path):
    if not os.path.exists(plugins.LAUNCHER):
        pytest.skip("no build/launcher: ./build.sh test compiles it")
    command = [sys.executable, "-m", "bench", "--quick", "--parts=start", f"--out={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "results.json").read_text())
    assert {"start/ours/ADD", "start/launcher/DEL"} <= set(found["figures"])
    assert "CPU of a plugin call (ADD)" in done.stdout
