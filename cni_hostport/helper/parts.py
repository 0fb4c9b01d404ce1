"""Everything one helper has, put together, and how it comes back after a start.

Order of a start: records and sockets, the queue, comparison with the kernel.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from cni_hostport.errors import HostPortError
from cni_hostport.helper import handover
from cni_hostport.helper.backends import Working
from cni_hostport.helper.core import Core
from cni_hostport.helper.fdstore import FdStore
from cni_hostport.helper.iptools import IptablesTools
from cni_hostport.helper.machine import KernelMachine, KernelOpener
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.others import Others
from cni_hostport.helper.reconcile import Reconciler
from cni_hostport.helper.status import Status
from cni_hostport.helper.worker import Worker
from cni_hostport.host import commands, nftcmd
from cni_hostport.host.nfevents import NftEvents
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.host.records import RecordStore
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.forward import ForwardRules, WithForward
from cni_hostport.hostport.holds import Holder
from cni_hostport.hostport.iptables import IptablesBackend
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.hostport.nftables import NftablesBackend
from cni_hostport.hostport.record import Record
from cni_hostport.netfilter import nftrules

log = logging.getLogger(__name__)

_TOOLS = ("nft", *(f"iptables{kind}-restore" for kind in ("", "-nft", "-legacy")))


class Helper:
    """Everything one helper has, put together."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.store = RecordStore(run_dir / "records")
        self.metrics = Metrics()
        self.machine = KernelMachine(self.metrics.flows_dropped)
        self.nft = Nftables()
        self.iptools = IptablesTools()
        self.nftables = NftablesBackend(self.nft, nftcmd.load)
        self.iptables = IptablesBackend(self.iptools)
        forward = ForwardRules(self.iptools)
        backends: dict[str, Backend] = {
            "nftables": WithForward(self.nftables, forward),
            "iptables": WithForward(self.iptables, forward),
        }
        self.working = Working({"nftables": self._try_nftables, "iptables": self.iptools.probe})
        self.manager = HostPortManager(KernelOpener(), backends, self.machine, self.store)
        self.core = Core(self.manager, run_dir, self.metrics)
        self.reconciler = Reconciler(self.manager, self.metrics)
        self.others = Others(self.manager, self.machine, self.iptools)
        self.core.adds.working, self.core.leftovers = self.working, self.others.leftovers
        self.reconciler.also = (self.working.look, self.others.look)
        self.status = Status(self.manager, self.reconciler, self.metrics, run_dir)
        self.status.warnings = self.others.warnings
        self.status.backends = self.working.known
        self.metrics.watch(self.status)
        self.events = NftEvents(own=self.nft.portid)
        self.worker = Worker()
        self.store_of_fds = FdStore()
        self.manager.holds.watch(self._keep)

    def _keep(self, key: str, holders: list[Holder]) -> None:
        self.store_of_fds.keep(key, [h.fileno() for h in holders])

    def adopt(self, holders: list[tuple[str, socket.socket]]) -> None:
        """Take sockets over before records are restored; what no record wants is closed."""
        for key, holder in holders:
            port = handover.port_of(holder)
            if port is None:
                holder.close()
            else:
                self.manager.holds.adopt(key, port, holder)

    def restore(self) -> None:
        """Records in, sockets open, queue worked off, kernel mended."""
        records = []
        for key, content in self.store.load():
            record = _parse(key, content)
            if record is None:
                kept = self.store.set_aside(key)
                log.warning("record %s cannot be read and is set aside as %s", key, kept)
            else:
                records.append(record)
        self.manager.restore(records)
        for key in set(self.manager.holds.keys()) - {r.key for r in records}:
            self.manager.holds.release(key)
        for key, content in list(self.store.unanswered()):
            record = _parse(key, content)
            if record is not None:
                self.manager.undo_unanswered(record)
            with contextlib.suppress(OSError):
                self.store.discard(key)
        for key in self.manager.holds.keys():  # noqa: SIM118
            if ports := self.manager.holds.waiting(key):
                log.warning("not held, busy: %s", ", ".join(sorted(map(str, ports))))
        self.core.drain_queue()
        mends: list[Callable[[], object]] = [b.repair for b in self.manager.backends.values()]
        for mend in (*mends, self.manager.refresh_links):
            try:
                mend()
            except (OSError, HostPortError) as error:
                self.reconciler.problem = str(error)
                log.error("not everything can be restored: %s", error)
        self.others.look()

    def _try_nftables(self) -> None:
        """Raises NetfilterFailed where nft or the kernel cannot do it."""
        if not self.nftables.installed:
            nftcmd.load(nftrules.probe_text())

    def problem(self, backend: str = "auto") -> str:
        """Why ADD cannot be served with that backend; empty if it can.

        Asks no tool and waits for nobody. What keeps one backend from repair is no
        trouble of networks that the other serves.
        """
        if not any(commands.find(tool) for tool in _TOOLS):
            return "neither nft nor iptables is installed: install nftables or iptables"
        broken = self.reconciler.broken
        usable = {backend} if backend != "auto" else set(self.working.known())
        if broken and usable - broken:
            return self.working.problem()
        return self.working.problem() or self.reconciler.problem


def _parse(key: str, content: bytes) -> Record | None:
    try:
        record = Record.model_validate_json(content)
    except ValidationError:
        return None
    return record if record.key == key else None
