"""The addresses that the agent answers HTTP on.

Decides which: its own metrics always, and what the Corefile's health and
prometheus lines name where the DNS server is not CoreDNS. An address that
cannot be had is logged and tried again, never fatal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cni_hostport.host import nodecache_http as http
from cni_hostport.nodecache.flags import Params
from cni_hostport.nodecache.goflags import split_address
from cni_hostport.nodecache.metrics import Metrics
from cni_hostport.nodecache.unbound import Endpoints

log = logging.getLogger(__name__)
# Seconds after which an address that was taken is tried again.
RETRY = 5.0


class Listeners:
    """Every listener by its address. ``ready`` says whether the DNS server answers."""

    def __init__(self, params: Params, metrics: Metrics, ready: Callable[[], bool]) -> None:
        self._params = params
        self._metrics = metrics
        self._ready = ready
        self._open: dict[str, http.Listener] = {}
        self._wanted: dict[str, dict[str, http.Answer]] = {}
        self._told: set[str] = set()
        self._retry_at = 0.0
        self._tls = ""

    def start_metrics(self) -> None:
        """Begin with the agent's own metrics."""
        address = self._params.metrics_address
        if address:
            self._wanted[address] = {"/metrics": self._metrics.page}
            if self._params.tls.enabled:
                self._tls = address
        self._open_wanted()

    def serve(self, endpoints: Endpoints) -> None:
        """Answer on the addresses of a Corefile's lines, and on no older ones."""
        wanted: dict[str, dict[str, http.Answer]] = {}
        for address in endpoints.prometheus:
            wanted.setdefault(address, {})["/metrics"] = self._metrics.page
        for address in endpoints.health:
            full = address if split_address(address) else f"{address}:8080"
            wanted.setdefault(full, {}).update({"/health": _alive, "/ready": self._readiness})
        own = self._params.metrics_address
        if own:
            wanted[own] = {**wanted.get(own, {}), "/metrics": self._metrics.page}
        for address in [a for a in self._open if a not in wanted]:
            self._open.pop(address).close()
        self._wanted = wanted
        self._open_wanted()

    def retry(self, now: float) -> None:
        """Try again what could not be had; ``now`` in seconds."""
        if now >= self._retry_at:
            self._retry_at = now + RETRY
            self._open_wanted()

    def _open_wanted(self) -> None:
        for address, answers in self._wanted.items():
            if address in self._open:
                continue
            place = split_address(address)
            try:
                if place is None:
                    raise OSError(f"{address} is no address")
                tls = http.tls_context(self._tls_files()) if address == self._tls else None
                self._open[address] = http.Listener(*place, answers, tls)
            except OSError as error:
                if address not in self._told:
                    log.error("cannot listen on %s: %s", address, error)
                self._told.add(address)
            else:
                self._told.discard(address)

    def _tls_files(self) -> http.TLSFiles:
        tls = self._params.tls
        return http.TLSFiles(
            tls.cert_file, tls.key_file, tls.client_ca_file, tls.client_auth, tls.min_version
        )

    def _readiness(self) -> tuple[int, str, bytes]:
        if self._ready():
            return 200, "text/plain; charset=utf-8", b"OK"
        return 503, "text/plain; charset=utf-8", b"the DNS server does not answer"


def _alive() -> tuple[int, str, bytes]:
    return 200, "text/plain; charset=utf-8", b"OK"
