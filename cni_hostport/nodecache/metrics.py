"""The agent's metrics: upstream's counter by its name, and ours.

Decides names, labels and meaning. Every label value exists from the start with
0, so that a rate over a counter has a beginning. The server's own numbers are
asked for at scrape time through a function that was given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

# by module: a process in which the helper's metrics came first has no package to import from
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics import Counter, Gauge, disable_created_metrics
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector, CollectorRegistry

SETUP_ERRORS = ("iptables", "iptables_lock", "interface_add", "interface_check", "configmap")
FALLBACKS = ("exited", "silent", "stopped")
# unbound's statistics, and under which name we show them.
_SERVER = {
    "total.num.queries": ("queries", "Questions the DNS server got"),
    "total.num.cachehits": ("cache_hits", "Questions answered from the cache"),
    "total.num.cachemiss": ("cache_misses", "Questions that needed an upstream"),
    "total.num.prefetch": ("cache_prefetches", "Cached answers renewed before their end"),
    "total.num.expired": ("cache_expired_served", "Answers given after their end"),
}


class _ServerNumbers(Collector):
    def __init__(self, ask: Callable[[], Mapping[str, float]]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        numbers = self._ask()
        for key, (name, text) in _SERVER.items():
            if key in numbers:
                yield CounterMetricFamily(f"cni_hostport_nodecache_{name}", text, numbers[key])


class Metrics:
    """All metrics in a registry of their own."""

    def __init__(
        self,
        server_numbers: Callable[[], Mapping[str, float]],
        rules_present: Callable[[], float],
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self.setup_errors = Counter(
            "coredns_nodecache_setup_errors",
            "The number of errors during periodic network setup for node-cache",
            ["errortype"],
            registry=self.registry,
        )
        self.fallbacks = self._counter("fallbacks", "Times the rules went away", "reason")
        self.repairs = self._counter("repairs", "Times something of ours was put right", "what")
        self.fallen_back = 0
        self.restarts = self._counter("server_restarts", "Starts of the DNS server after the first")
        self.reloads = self._counter("reloads", "Configurations handed to the DNS server")
        self.up = Gauge(
            "cni_hostport_nodecache_server_up",
            "Whether the DNS server answers",
            registry=self.registry,
        )
        rules = Gauge(
            "cni_hostport_nodecache_rules",
            "Packet filter rules of ours that stand",
            registry=self.registry,
        )
        rules.set_function(rules_present)
        for kind in SETUP_ERRORS:
            self.setup_errors.labels(kind)
        for reason in FALLBACKS:
            self.fallbacks.labels(reason)
        for what in ("rules", "link"):
            self.repairs.labels(what)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(_ServerNumbers(server_numbers))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"cni_hostport_nodecache_{name}", text, labels, registry=self.registry)

    def fallback(self, reason: str) -> None:
        """Count that the rules went away."""
        self.fallbacks.labels(reason).inc()
        self.fallen_back += 1

    def error(self, kind: str) -> None:
        """Count a setup error of upstream's kinds."""
        self.setup_errors.labels(kind).inc()

    def page(self) -> tuple[int, str, bytes]:
        """The answer to a scrape."""
        return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)
