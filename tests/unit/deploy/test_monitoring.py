"""Dashboard, alerts and the list of metrics agree with what the helper serves."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cni_hostport.helper.metrics import Metrics
from cni_hostport.nodecache import metrics as cache
from tests.unit.deploy import promql

ROOT = Path(__file__).parents[3]
RULES = yaml.safe_load((ROOT / "deploy/prometheus-rules.yaml").read_text())
ALERTS = [rule for group in RULES["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
DOCUMENTED = re.findall(
    r"^\| `(\w+)` \| (\w+) \|([^|]*)\|", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE
)
PROMETHEUS_OWN = {"up"}


class Present:
    """Gauges as the helper gives them, one of each."""

    def gauges(self):
        source = (ROOT / "cni_hostport/helper/status.py").read_text()
        for name in sorted(set(re.findall(r'"(cni_hostport_\w+)"', source))):
            labels = dict.fromkeys(LABELS.get(name, ()), "x")
            yield name, "help", labels, 1.0


LABELS = {name: re.findall(r"`(\w+)`", labels) for name, _, labels in DOCUMENTED}


@pytest.fixture(scope="module")
def families():
    metrics = Metrics()
    metrics.watch(Present())
    metrics.call("ADD", 0, 0.002)
    metrics.repair("rules")
    metrics.conflict("process")
    metrics.flows_dropped(2)
    return list(text_string_to_metric_families(metrics.text().decode()))


@pytest.fixture(scope="module")
def served(families):
    agent = cache.Metrics(dict, lambda: 0.0).page()[2].decode()
    of_the_cache = text_string_to_metric_families(agent)
    return {s.name for f in (*families, *of_the_cache) for s in f.samples}


def _expressions():
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")


@pytest.mark.parametrize("expression", list(_expressions()))
def test_an_expression_parses_and_names_metrics_that_exist(expression, served):
    names = promql.metrics(expression)
    assert names
    assert names <= served | PROMETHEUS_OWN


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(x)",
        "sum(x[5m])",
        "x[5m]",
        "x{a=b}",
        'x{a="b"',
        "rate(x[5y])",
        "nosuch(x)",
        "sum by network (x)",
        "x >",
        'x{a=~"("}',
        "histogram_quantile(x, 1)",
        "1 2",
    ],
)
def test_the_check_refuses_what_prometheus_would(wrong):
    with pytest.raises((SyntaxError, re.error)):
        promql.metrics(wrong)


def test_documented_metrics_are_those_served(families):
    ours = [f for f in families if f.name.startswith("cni_hostport_")]
    found = set()
    for family in ours:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        kind = "gauge" if family.name.endswith("_info") else family.type
        labels = {k for s in family.samples for k in s.labels if k != "le"}
        found.add((name, kind, frozenset(labels)))
    assert found == {(n, kind, frozenset(LABELS[n])) for n, kind, _ in DOCUMENTED}


def test_counters_of_known_kinds_begin_with_zero():
    fresh = list(text_string_to_metric_families(Metrics().text().decode()))
    zeros = {tuple(s.labels.items()) for f in fresh for s in f.samples if s.value == 0}
    for label, values in (("kind", ("rules", "links")), ("owner", ("attachment", "process"))):
        assert {((label, v),) for v in values} <= zeros


def test_names_and_units_are_prometheus_ones(families):
    for family in families:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", family.name)
        assert family.documentation
        if "duration" in family.name:
            assert family.name.endswith("_seconds")
        if family.type == "counter":
            assert all(s.name.endswith("_total") for s in family.samples)


def test_alerts_say_what_to_do():
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
        for text in rule["annotations"].values():
            assert text.count("{{") == text.count("}}")


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    cells = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not mine & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= mine
    ids = [p["id"] for p in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
