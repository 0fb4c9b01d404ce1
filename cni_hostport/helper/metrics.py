"""Counters of the helper, in Prometheus' terms. Names are a stable format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cni_hostport.host import light

light.unexecuted("prometheus_client")

from prometheus_client.metrics import Counter, Histogram  # noqa: E402
from prometheus_client.metrics_core import GaugeMetricFamily, Metric  # noqa: E402
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
        self.repairs = 0

    def call(self, verb: str, code: int, seconds: float) -> None:
        """Count one answered call."""
        known = verb if verb in ("ADD", "DEL", "CHECK", "GC", "STATUS") else "other"
        self._calls.labels(known, str(code)).inc()
        self._seconds.labels(known).observe(seconds)

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
