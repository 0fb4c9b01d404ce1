"""``status --json`` is a stable format: every field, its type, and nothing more."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from unit.hostport.world import Helper, Somebody, World, pod, port

from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.reconcile import Reconciler
from cni_hostport.helper.status import Status

MAPPING = {
    "network": str, "containerID": str, "ifname": str, "namespace": str, "pod": str,
    "hostIP": str, "hostPort": int, "protocol": str, "targets": [str], "held": str,
    "connections": object,  # counted by the command, not by the helper
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "version": str,
    "helper": {"pid": int, "uptime": float, "protocol": int},
    "backend": {"ip": str, "ip6": str},
    "mappings": [MAPPING],
    "repairs": {"count": int},
    "queue": int,
    "nodeCache": type(None),
}


def follows(value: object, schema: object, exact: bool = False) -> bool:
    """Whether a document has these fields and types; ``exact``: and no others."""
    if isinstance(schema, dict):
        assert isinstance(value, dict)
        assert value.keys() >= schema.keys(), schema.keys() - value.keys()
        assert not exact or value.keys() == schema.keys()
        return all(follows(value[k], s, exact) for k, s in schema.items())
    if isinstance(schema, list):
        assert isinstance(value, list)
        return all(follows(v, schema[0], True) for v in value)
    assert isinstance(schema, type)
    return isinstance(value, schema)


def document(world: World, run_dir: Path, *pods: Any) -> tuple[dict[str, Any], Metrics]:
    helper = Helper(world)
    for one in pods:
        helper.manager.attach(one)
    metrics = Metrics()
    status = Status(helper.manager, Reconciler(helper.manager, metrics), metrics, run_dir)
    metrics.watch(status)
    return json.loads(json.dumps(status.document())), metrics


def test_an_empty_node(tmp_path: Path) -> None:
    found, metrics = document(World(), tmp_path)
    assert follows(found, SCHEMA)
    assert found["mappings"] == []
    assert b"cni_hostport_held_ports 0.0" in metrics.text()


def test_mappings_and_what_is_held_of_them(tmp_path: Path) -> None:
    world = World()
    world.strangers[port("0.0.0.0:81")] = Somebody("nginx")
    found, metrics = document(
        world,
        tmp_path,
        pod("web", "80:80", "192.0.2.1:53:53/udp", "90:90/sctp"),
        pod("try", "81:80", reserve_ports="try"),
        pod("no", "82:80", reserve_ports="no"),
        pod("v4", "[2001:db8::1]:84:80", "85:80", ips=("10.1.0.9/16",)),
    )
    assert follows(found, SCHEMA)
    rows = {(m["pod"], m["hostPort"]): m for m in found["mappings"]}
    assert {k: m["held"] for k, m in rows.items()} == {
        ("web", 80): "yes", ("web", 53): "yes", ("web", 90): "no", ("try", 81): "waiting",
        ("no", 82): "no", ("v4", 84): "skipped", ("v4", 85): "yes",
    }  # fmt: skip
    assert rows["web", 80]["targets"] == ["10.1.0.2:80", "[fd00::2]:80"]
    assert (rows["web", 53]["hostIP"], rows["web", 80]["hostIP"]) == ("192.0.2.1", "")
    text = metrics.text()
    assert b"cni_hostport_unheld_ports 1.0" in text
    assert b'cni_hostport_attachments{network="net"} 4.0' in text


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    """Labels and documents hold what a network or pod is called, as text."""
    evil = 'a"} 1\ncni_hostport_fake{x="'
    found, metrics = document(World(), tmp_path, pod("web", "80:80", network=evil))
    assert found["mappings"][0]["network"] == evil
    assert b"\ncni_hostport_fake" not in metrics.text()


def test_a_clock_that_jumps_moves_no_uptime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, metrics = Helper(World()), Metrics()
    made = Status(helper.manager, Reconciler(helper.manager, metrics), metrics, tmp_path)
    for jump in (-1e6, 1e6):
        now = time.time() + jump
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert 0 <= made.document()["helper"]["uptime"] < 60
