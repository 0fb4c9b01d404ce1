"""Counters of the helper, in Prometheus' terms. Names are a stable format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cni_hostport import __version__, shim
from cni_hostport.host import light

light.unexecuted("prometheus_client")

from prometheus_client.metrics import (  # noqa: E402
    Counter,
    Histogram,
    Info,
    disable_created_metrics,
)
from prometheus_client.metrics_core import GaugeMetricFamily, Metric  # noqa: E402
from prometheus_client.process_collector import ProcessCollector  # noqa: E402
from prometheus_client.registry import Collector, CollectorRegistry  # noqa: E402

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)


class Gauges(Protocol):
    """Where present values come from: (name, help, value) at the time of asking."""

    def gauges(self) -> Iterator[tuple[str, str, dict[str, str], float]]: ...


class _Present(Collector):
    def __init__(self, source: Gauges) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, text, labels, value in self._source.gauges():
            family = families.setdefault(name, GaugeMetricFamily(name, text, labels=tuple(labels)))
            family.add_metric(list(labels.values()), value)
        yield from families.values()


class Metrics:
    """What the helper counts. Thread-safe (prometheus_client locks each value)."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the series for nobody
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "cni_hostport_calls",
            "CNI calls answered, by verb and CNI error code (0: success)",
            ["verb", "code"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "cni_hostport_call_duration_seconds",
            "Time the helper took for a CNI call",
            ["verb"],
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._repairs = Counter(
            "cni_hostport_repairs",
            "Times something was found damaged and mended, by kind",
            ["kind"],
            registry=self._registry,
        )
        for kind in ("rules", "links"):  # from the start: a rate needs a beginning
            self._repairs.labels(kind)
        self._conflicts = Counter(
            "cni_hostport_conflicts",
            "ADDs refused because the host port is in use, by kind of owner",
            ["owner"],
            registry=self._registry,
        )
        for owner in ("attachment", "process"):
            self._conflicts.labels(owner)
        self._flows = Counter(
            "cni_hostport_conntrack_deletes",
            "Deletions of stale UDP flows asked of the kernel (one may end several flows)",
            registry=self._registry,
        )
        Info("cni_hostport_build", "Version of the helper", registry=self._registry).info(
            {"version": __version__, "protocol": str(shim.PROTOCOL)}
        )
        ProcessCollector(registry=self._registry)
        self.repairs = 0
        self._of_calls: dict[tuple[str, int], tuple[Counter, Histogram]] = {}

    def call(self, verb: str, code: int, seconds: float) -> None:
        """Count one answered call."""
        known = verb if verb in ("ADD", "DEL", "CHECK", "GC", "STATUS") else "other"
        children = self._of_calls.get((known, code))
        if children is None:  # finding a child by its labels costs more than counting
            children = (self._calls.labels(known, str(code)), self._seconds.labels(known))
            self._of_calls[known, code] = children
        children[0].inc()
        children[1].observe(seconds)

    def conflict(self, owner: str) -> None:
        """Count one ADD refused by code 101."""
        self._conflicts.labels(owner).inc()

    def flows_dropped(self, count: int) -> None:
        """Count deletions of UDP flows."""
        self._flows.inc(count)

    def repair(self, kind: str) -> None:
        """Count one repair."""
        self.repairs += 1
        self._repairs.labels(kind).inc()

    def watch(self, source: Gauges) -> None:
        """Add present values to what ``text`` shows."""
        self._registry.register(_Present(source))

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        from prometheus_client.exposition import generate_latest  # brings HTTP and TLS along

        return generate_latest(self._registry)
