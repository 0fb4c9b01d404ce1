"""The helper process from start to end: take over, mend, serve, leave.

Order at start: the lock (one helper a run directory), records and sockets,
the queue, comparison with the kernel, and only then the socket, so that the
first answer already describes what is.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import resource
import signal
import socket
import sys
from pathlib import Path

from pydantic import ValidationError

from cni_hostport.errors import HostPortError
from cni_hostport.helper import log as logs
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.core import Core
from cni_hostport.helper.iptools import IptablesTools
from cni_hostport.helper.machine import KernelMachine, KernelOpener
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.reconcile import INTERVAL, RETIRE_AFTER, Reconciler
from cni_hostport.helper.server import Server, listen
from cni_hostport.helper.status import Status
from cni_hostport.helper.worker import Worker
from cni_hostport.host import nftcmd
from cni_hostport.host.nfevents import NftEvents
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.host.records import RecordStore
from cni_hostport.hostport.backend import Backend
from cni_hostport.hostport.iptables import IptablesBackend
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.hostport.nftables import NftablesBackend
from cni_hostport.hostport.record import Record

log = logging.getLogger(__name__)

QUEUE_INTERVAL = 0.5
"""Seconds between looks at the queue folder; an entry is noticed within one second."""


def take_lock(run_dir: Path) -> int | None:
    """The lock a helper holds for life; None if another has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(run_dir / "helper.lock", flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def raise_descriptor_limit() -> None:
    """Every held port is a descriptor: use all the hard limit gives."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Helper:
    """Everything one helper has, put together."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.store = RecordStore(run_dir / "records")
        self.machine = KernelMachine()
        self.nft = Nftables()
        self.metrics = Metrics()
        self.iptools = IptablesTools()
        backends: dict[str, Backend] = {
            "nftables": NftablesBackend(self.nft, nftcmd.load),
            "iptables": IptablesBackend(self.iptools),
        }
        self.manager = HostPortManager(KernelOpener(), backends, self.machine, self.store)
        self.core = Core(self.manager, run_dir, self.metrics)
        self.reconciler = Reconciler(self.manager, self.metrics)
        self.status = Status(self.manager, self.reconciler, self.metrics, run_dir)
        self.metrics.watch(self.status)
        self.events = NftEvents()
        self.worker = Worker()

    def restore(self) -> None:
        """Records in, sockets open, queue worked off, kernel mended."""
        records = []
        for key, content in self.store.load():
            record = _parse(key, content)
            if record is None:
                kept = self.store.set_aside(key)
                log.warning("record %s cannot be read and is set aside as %s", key, kept.name)
            else:
                records.append(record)
        self.manager.restore(records)
        for key, content in list(self.store.unanswered()):
            record = _parse(key, content)
            if record is not None and self.manager.registry.get(key) is None:
                self.manager.undo_unanswered(record)
            self.store.discard(key)
        for key in self.manager.holds.keys():  # noqa: SIM118
            if ports := self.manager.holds.waiting(key):
                log.warning("not held, busy: %s", ", ".join(sorted(map(str, ports))))
        self.core.drain_queue()
        for backend in self.manager.backends.values():
            try:
                backend.repair()
            except (OSError, HostPortError) as error:
                self.reconciler.problem = str(error)
                log.error("rules cannot be restored: %s", error)

    def problem(self) -> str:
        """Why ADD cannot be served now; empty if it can."""
        if nftcmd.version() is None:
            return "nft is not installed: install the package nftables"
        return self.reconciler.problem


def _parse(key: str, content: bytes) -> Record | None:
    try:
        record = Record.model_validate_json(content)
    except ValidationError:
        return None
    return record if record.key == key else None


class Loop:
    """The event loop's side: events, timers, signals."""

    def __init__(self, helper: Helper, sock: socket.socket) -> None:
        self._helper = helper
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._look_due = False
        self._queue_stamp = 0
        operations = {
            "ping": lambda _: Answer(0, b"{}"),
            "status": lambda _: _json(helper.status.document()),
            "metrics": lambda _: Answer(0, helper.metrics.text()),
        }
        self._server = Server(sock, helper.core, helper.worker, operations, helper.problem)

    async def run(self) -> None:
        """Serve until a signal says to end."""
        loop, helper = self._loop, self._helper
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._ended.set)
        loop.add_reader(helper.events.fileno(), self._netfilter_event)
        loop.add_reader(helper.machine.events.fileno(), self._address_event)
        helper.worker.start()
        self._server.start()
        self._every_interval()
        self._watch_queue()
        _notify(b"READY=1")
        await self._ended.wait()
        log.info("ending: rules stay, sockets close")
        self._server.stop()
        helper.worker.stop(5.0)

    def _netfilter_event(self) -> None:
        event = self._helper.events.read()
        own = {self._helper.nft.portid}
        if event.overflow or (event.ours and event.foreign(own)):
            self._look("a change of our tables", ", ".join(event.culprits(own)))

    def _address_event(self) -> None:
        # The worker reads the events themselves; until it has, do not ask again. Every pod
        # brings some of no interest, so this is a look at addresses and at nothing else.
        self._loop.remove_reader(self._helper.machine.events.fileno())

        def job() -> None:
            self._helper.reconciler.follow()
            self._loop.call_soon_threadsafe(self._listen_again)

        self._helper.worker.submit(job)

    def _listen_again(self) -> None:
        self._loop.add_reader(self._helper.machine.events.fileno(), self._address_event)

    def _look(self, why: str, culprit: str = "") -> None:
        if self._look_due:
            return
        self._look_due = True
        delay = self._helper.reconciler.delay()
        self._loop.call_later(delay, self._submit_look, why, culprit)

    def _submit_look(self, why: str, culprit: str) -> None:
        self._look_due = False
        self._helper.worker.submit(lambda: self._helper.reconciler.look(why, culprit))

    def _every_interval(self) -> None:
        self._look("interval")
        wait = RETIRE_AFTER if self._helper.reconciler.wants_retire else INTERVAL
        self._loop.call_later(wait, self._every_interval)

    def _watch_queue(self) -> None:
        try:
            stamp = (self._helper.run_dir / "queue").stat().st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._queue_stamp:
            self._queue_stamp = stamp
            self._helper.worker.submit(lambda: _ignore(self._helper.core.drain_queue()))
        self._loop.call_later(QUEUE_INTERVAL, self._watch_queue)


def _ignore(_: object) -> None:
    return None


def _json(document: object) -> Answer:
    return Answer(0, json.dumps(document).encode() + b"\n")


def _notify(state: bytes) -> None:
    """Tell systemd (sd_notify(3)); nothing where it does not ask."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    name = "\0" + address[1:] if address.startswith("@") else address
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(state, name)


def serve(run_dir: Path, style: str, level: str) -> int:
    """Be the helper of this run directory; 0 also when another one is."""
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.set_up(run_dir, style, level)
    lock = take_lock(run_dir)
    if lock is None:
        sys.stderr.write("cni-hostport: a helper is running already\n")
        return 0
    raise_descriptor_limit()
    helper = Helper(run_dir)
    helper.restore()
    sock = listen(run_dir / "helper.sock")
    log.info("serving %d attachments", len(helper.manager.registry))

    async def main() -> None:
        await Loop(helper, sock).run()

    asyncio.run(main())
    return 0
