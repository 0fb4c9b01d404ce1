"""What ``status`` shows: the helper's memory as JSON. The format is stable.

Reads only; runs on the event loop while the worker may be busy, so it copies
before it looks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cni_hostport import __version__, shim
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.nodecachestate import node_cache
from cni_hostport.helper.reconcile import Reconciler
from cni_hostport.host import ownnetns, queue
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.hostport.record import Record
from cni_hostport.model import Family, PortMapping, Protocol, ReservePorts


class Status:
    """Present state of manager, reconciler and queue."""

    def __init__(
        self, manager: HostPortManager, reconciler: Reconciler, metrics: Metrics, run_dir: Path
    ) -> None:
        self._manager = manager
        self._reconciler = reconciler
        self._metrics = metrics
        self._run_dir = run_dir
        self._started = _since_boot()
        self._netns = ownnetns.cookie()
        self._instance = os.environ.get("CNI_HOSTPORT_INSTANCE", "")
        self.warnings: Callable[[], list[str]] = list
        """What other managers of host ports do on this node."""
        self.backends: Callable[[], Iterable[str]] = lambda: manager.backends
        """Backends that new attachments may get."""

    def document(self) -> dict[str, Any]:
        """Everything ``status --json`` prints but connections, which the command counts."""
        last = self._reconciler.last
        return {
            "version": __version__,
            "helper": {
                "pid": os.getpid(),
                "uptime": round(_since_boot() - self._started, 3),
                "protocol": shim.PROTOCOL,
                "runDir": str(self._run_dir),
                "problem": self._reconciler.problem,
                "netns": self._netns,
                "instance": self._instance,
            },
            "backend": {
                name: self._backend(f) for name, f in (("ip", Family.V4), ("ip6", Family.V6))
            },
            "mappings": [m for r in self._manager.registry for m in self._mappings(r)],
            "repairs": {
                "count": self._metrics.repairs,
                "lastTime": last.when or None,
                "last": last.what,
            },
            "warnings": self.warnings(),
            "queue": len(queue.names(self._run_dir)),
            "nodeCache": node_cache(self._run_dir),
        }

    def _backend(self, family: Family) -> str:
        """The backend in use for a family; before the first attachment those that work here."""
        records = list(self._manager.registry)
        used: set[str] = {r.backend for r in records if r.attachment.address(family)}
        return ",".join(sorted(used or self.backends())) or "none"

    def _mappings(self, record: Record) -> Iterator[dict[str, Any]]:
        attachment, identity = record.attachment, record.attachment.identity
        for mapping in attachment.mappings:
            families = [f for f in attachment.families() if attachment.maps(mapping, f)]
            targets = [
                (a.ip, mapping.container_port) for f in families if (a := attachment.address(f))
            ]
            yield {
                "network": identity.network,
                "containerID": identity.container_id,
                "ifname": identity.ifname,
                "namespace": attachment.pod.namespace,
                "pod": attachment.pod.name,
                "hostIP": "" if mapping.host_ip is None else str(mapping.host_ip),
                "hostPort": mapping.host_port,
                "protocol": str(mapping.protocol),
                "targets": [f"[{ip}]:{p}" if ip.version == 6 else f"{ip}:{p}" for ip, p in targets],
                "held": self._held(record, mapping),
                "connections": None,
            }

    def _held(self, record: Record, mapping: PortMapping) -> str:
        """``yes``, ``no`` (by choice), ``waiting`` (busy, taken when free), ``skipped``,
        ``yielded`` (to another network of the same container).
        """
        attachment = record.attachment
        asked = [f for f in attachment.families() if mapping.applies_to(f)]
        claims = [mapping.host_port_of(f) for f in asked if attachment.maps(mapping, f)]
        if not claims:
            return "yielded" if asked else "skipped"
        no = attachment.options.reserve_ports is ReservePorts.NO
        if no or mapping.protocol is Protocol.SCTP:
            return "no"
        waiting = self._manager.holds.waiting(record.key)
        mine = [h for h in waiting if any(c.overlaps(h) for c in claims)]
        return "waiting" if mine else "yes"

    def gauges(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """Present values for the metrics."""
        records = list(self._manager.registry)
        per: dict[tuple[str, str, str], int] = {}
        networks: dict[str, int] = {}
        for record in records:
            network = record.attachment.identity.network
            networks[network] = networks.get(network, 0) + 1
            for claim in record.attachment.claims():
                label = (network, str(claim.protocol), _family_label(claim.family))
                per[label] = per.get(label, 0) + 1
        for network, count in networks.items():
            text = "Attachments with host ports"
            yield "cni_hostport_attachments", text, {"network": network}, count
        for (network, protocol, family), count in per.items():
            labels = {"network": network, "protocol": protocol, "family": family}
            yield "cni_hostport_mappings", "Host ports mapped", labels, count
        held = sum(len(self._manager.holds.held(r.key)) for r in records)
        waiting = sum(len(self._manager.holds.waiting(r.key)) for r in records)
        yield "cni_hostport_held_ports", "Sockets that reserve host ports", {}, held
        yield "cni_hostport_unheld_ports", "Host ports mapped and not yet held", {}, waiting
        length = len(queue.names(self._run_dir))
        yield "cni_hostport_queue_length", "DELs queued for the helper", {}, length
        look = self._reconciler.last_look
        for each in Family:
            labels = {"family": _family_label(each), "backend": self._backend(each)}
            yield "cni_hostport_backend_info", "Rule backend in use, by family", labels, 1
        well = float(not self._reconciler.problem)
        yield "cni_hostport_healthy", "1 if rules can be made and repaired, else 0", {}, well
        text = "Time of the last comparison with the kernel, seconds since the epoch"
        yield "cni_hostport_last_reconcile_timestamp_seconds", text, {}, look


def _since_boot() -> float:
    """Seconds, sleep included; no adjustment of the clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _family_label(family: Family) -> str:
    return f"ipv{int(family)}"
