"""CNI calls in their order: what was read in, an answer out, under the one lock.

Everything here runs on the worker thread. ADDs that came at one moment may be done together,
in the places of the first of them (``adds.py``). Decides which
verb does what and what is answered; the manager does it. Never lets an
exception out: whatever goes wrong becomes a CNI error object.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cni_hostport import cni, shim
from cni_hostport.errors import (
    HostPortError,
    NetfilterFailed,
    PortInUse,
    StateDiffers,
    UnknownContainer,
)
from cni_hostport.helper import calllog
from cni_hostport.helper.adds import Adds, Done
from cni_hostport.helper.answer import Answer, Outcome, failure
from cni_hostport.helper.asked import Asked, CallRequest, read
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.slow import RETRIED, SlowBackends
from cni_hostport.host import queue
from cni_hostport.hostport.manager import HostPortManager

log = logging.getLogger(__name__)


class Core:
    """The verbs, on top of the manager."""

    def __init__(self, manager: HostPortManager, run_dir: Path, metrics: Metrics) -> None:
        self.manager = manager
        self._run_dir = run_dir
        self._metrics = metrics
        self._slow = SlowBackends()
        self.adds = Adds(manager, run_dir, self._slow)
        self.queue_kept = 0
        """Queued DELs that failed when they were last tried."""
        self.leftovers: Callable[[cni.Call], None] | None = None
        """Removes what portmap keeps for a container that we know nothing of."""

    def serve(self, several: Sequence[Asked]) -> list[Outcome]:
        """Serve the first of these calls, or as many of the first as can be served at once.

        At least one; in the order in which they came.
        """
        started = time.monotonic()
        if len(several) > 1 and (done := self._together(several)):
            seconds = time.monotonic() - started  # so long did each of them take
            return [
                self._outcome(asked, answer, undo, None, seconds)
                for asked, (answer, undo) in zip(several, done, strict=False)
            ]
        return [self._serve(several[0])]

    def handle(self, request: CallRequest) -> Outcome:
        """Read one call and serve it."""
        return self._serve(read(request))

    def _together(self, several: Sequence[Asked]) -> list[Done]:
        try:
            return self.adds.together(several)
        except Exception:  # one by one it shows whose fault it was
            log.exception("calls of one moment are served one by one")
            return []

    def _serve(self, asked: Asked) -> Outcome:
        started = time.monotonic()
        undo: Callable[[], None] | None = None
        error: HostPortError | None = None
        try:
            answer, undo = self._dispatch(asked)
        except HostPortError as failed:
            error = failed
        except Exception as failed:
            log.exception("internal error")
            error = HostPortError("internal error", f"{type(failed).__name__}: {failed}")
        if error is not None:
            answer = self._failed(error, asked.call, asked.request)
        return self._outcome(asked, answer, undo, error, time.monotonic() - started)

    def _outcome(
        self,
        asked: Asked,
        answer: Answer,
        undo: Callable[[], None] | None,
        error: HostPortError | None,
        seconds: float,
    ) -> Outcome:
        seconds += asked.seconds
        note = partial(self._note, asked.call, asked.request, error, seconds, idle=answer.idle)
        return Outcome(answer, undo, note)

    def _failed(self, error: HostPortError, call: cni.Call | None, request: CallRequest) -> Answer:
        """A failing DEL keeps bridge and IPAM from cleaning up: what can be retried is queued."""
        later = isinstance(error, RETRIED)
        if later and call is not None and call.command == "DEL":
            return self._postpone(error, request)
        version = call.cni_version if call is not None else cni.cni_version_of(request.stdin)
        return failure(error, version, calllog.asked(call, error))

    def _postpone(self, error: HostPortError, request: CallRequest) -> Answer:
        text = f"cni-hostport: DEL is queued and tried again: {error}\n"
        try:
            env = {os.fsencode(k): os.fsencode(v) for k, v in request.env.items()}
            queue.put(self._run_dir, env, request.stdin)
        except (queue.QueueError, OSError) as full:
            text = f"cni-hostport: DEL failed ({error}) and cannot be queued ({full})\n"
        return Answer(0, b"", text.encode())

    def _dispatch(self, asked: Asked) -> Done:
        call, request = asked.call, asked.request
        if call is None:
            raise asked.error or HostPortError("internal error", "no call")
        if call.command == "DEL":
            return self._delete(call), None
        if call.command == "ADD":
            return self.adds.one(asked)
        self.adds.check_home(request.own_netns)
        if call.command == "CHECK":
            return self._check(call), None
        if call.command == "GC":
            return self._gc(call, request), None
        return Answer(), None  # STATUS: the server has answered for the backends already

    def _delete(self, call: cni.Call) -> Answer:
        identity = call.identity
        assert identity is not None
        known = self.manager.registry.get(identity.key) is not None
        self._remove(call)
        self.adds.forget_queued(identity)
        return Answer(idle=not known)

    def _remove(self, call: cni.Call) -> None:
        identity = call.identity
        assert identity is not None
        self.adds.when.pop(identity.key, None)
        record = self.manager.registry.get(identity.key)
        with self._slow.patience(record.backend if record else "portmap"):
            if not self.manager.detach(identity.key) and self.leftovers is not None:
                self.leftovers(call)

    def _check(self, call: cni.Call) -> Answer:
        identity = call.identity
        assert identity is not None
        if self.manager.registry.get(identity.key) is None:
            if not cni.wants_mappings(call) or cni.all_are_skipped(call):
                return Answer(idle=True)
            raise UnknownContainer(
                f"container {identity.container_id} has no host ports on network "
                f"{identity.network}, interface {identity.ifname}",
                "its ADD was never answered, or a DEL came since",
            )
        missing = self.manager.check(cni.attachment_of(call))
        if missing:
            raise StateDiffers(
                f"{len(missing)} thing(s) missing for container {identity.container_id}",
                "; ".join(missing),
            )
        return Answer()

    def _gc(self, call: cni.Call, request: CallRequest) -> Answer:
        valid = cni.gc_of(call)
        if valid is None:
            return Answer()
        errors = self.manager.gc(call.network, valid | self.adds.since(_began(request)))
        if errors:
            raise NetfilterFailed(
                f"{len(errors)} attachment(s) of network {call.network} could not be removed",
                "; ".join(str(e) for e in errors),
            )
        return Answer()

    def drain_queue(self) -> int:
        """Work off DELs that no helper could take; returns how many were done."""
        done = kept = 0
        for entry in queue.entries(self._run_dir):
            env = {os.fsdecode(k): os.fsdecode(v) for k, v in entry.env.items()}
            try:
                call = cni.parse_call(env, entry.stdin)
                if call.command == "DEL":
                    self._remove(call)
            except RETRIED as error:
                kept += 1
                log.warning("queued DEL %s is kept: %s", entry.path.name, error)
                continue
            except HostPortError as error:
                log.warning("queued call %s is dropped: %s", entry.path.name, error)
            except Exception as error:
                kept += 1
                log.exception("queued DEL %s is kept: %s", entry.path.name, error)
                continue
            with contextlib.suppress(OSError):
                queue.remove(entry)
            done += 1
        self.queue_kept = kept
        return done

    def _note(
        self,
        call: cni.Call | None,
        request: CallRequest,
        error: HostPortError | None,
        seconds: float,
        *,
        idle: bool,
    ) -> None:
        verb = call.command if call else request.env.get("CNI_COMMAND", "?")
        self._metrics.call(verb, error.code if error else 0, seconds)
        if isinstance(error, PortInUse):
            self._metrics.conflict(error.owner)
        level = logging.INFO if error is None else logging.ERROR
        if idle:
            level = logging.DEBUG
        if not log.isEnabledFor(level):
            return
        fields = calllog.fields(call, verb, error, seconds, log.isEnabledFor(logging.DEBUG))
        log.log(level, "call", extra={"fields": fields})


def _began(request: CallRequest) -> float:
    """When the caller began, as its plugin call says, else when the request came."""
    try:
        return float(request.env[os.fsdecode(shim.BEGAN)])
    except (KeyError, ValueError):
        return request.arrived
