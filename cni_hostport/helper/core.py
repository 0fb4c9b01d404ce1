"""One CNI call after another: bytes in, an answer out, under the one lock.

Everything here runs on the worker thread, in order of arrival. Decides which
verb does what and what is answered; the manager does it. Never lets an
exception out: whatever goes wrong becomes a CNI error object.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cni_hostport import cni, shim
from cni_hostport.errors import (
    BadEnvironment,
    HostPortError,
    NetfilterFailed,
    PortInUse,
    StateDiffers,
    TryAgain,
    UnknownContainer,
)
from cni_hostport.helper import calllog
from cni_hostport.helper.answer import Answer, Outcome, failure
from cni_hostport.helper.backends import Working, choose
from cni_hostport.helper.metrics import Metrics
from cni_hostport.helper.slow import RETRIED, SlowBackends
from cni_hostport.host import netns, queue
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.model import Attachment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A CNI call as it came: environment, stdin, and descriptors (-1: not passed).

    ``alive`` tells whether the caller still waits; ``arrived`` is monotonic seconds.
    """

    env: Mapping[str, str]
    stdin: bytes
    own_netns: int = -1
    pod_netns: int = -1
    alive: Callable[[], bool] = lambda: True
    arrived: float = 0.0


class Core:
    """The verbs, on top of the manager."""

    def __init__(self, manager: HostPortManager, run_dir: Path, metrics: Metrics) -> None:
        self.manager = manager
        self._run_dir = run_dir
        self._metrics = metrics
        self._home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        self._added: dict[str, float] = {}
        """When each attachment's last ADD was done, seconds of the monotonic clock."""
        self._slow = SlowBackends()
        self.queue_kept = 0
        """Queued DELs that failed when they were last tried."""
        self.leftovers: Callable[[cni.Call], None] | None = None
        """Removes what portmap keeps for a container that we know nothing of."""
        self.working: Working | None = None
        """Backends that work here; all of the manager's if None."""

    def handle(self, request: CallRequest) -> Outcome:
        """Serve one call."""
        started = time.monotonic()
        call: cni.Call | None = None
        undo: Callable[[], None] | None = None
        try:
            call = cni.parse_call(request.env, request.stdin, self._same_netns(request))
            answer, undo = self._dispatch(call, request)
            error: HostPortError | None = None
        except HostPortError as failed:
            error = failed
        except Exception as failed:
            log.exception("internal error")
            error = HostPortError("internal error", f"{type(failed).__name__}: {failed}")
        if error is not None:
            answer = self._failed(error, call, request)
        seconds = time.monotonic() - started
        note = partial(self._note, call, request, error, seconds, idle=answer.idle)
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

    def _same_netns(self, request: CallRequest) -> bool:
        if request.own_netns < 0 or request.pod_netns < 0:
            return False
        return netns.same_namespace(request.own_netns, request.pod_netns)

    def check_home(self, own_netns: int) -> None:
        """A helper belongs to one net namespace: its sockets and rules are there.

        ``own_netns`` is the caller's (-1: not passed). Raises BadEnvironment (code 4).
        """
        if own_netns >= 0 and not netns.same_namespace(own_netns, self._home):
            raise BadEnvironment(
                "the helper of this run directory serves another network namespace",
                f"give this one a CNI_HOSTPORT_RUN_DIR of its own (now {self._run_dir})",
            )

    def _dispatch(
        self, call: cni.Call, request: CallRequest
    ) -> tuple[Answer, Callable[[], None] | None]:
        if call.command == "DEL":
            return self._delete(call), None
        self.check_home(request.own_netns)
        if call.command == "ADD":
            return self._add(call, request)
        if call.command == "CHECK":
            return self._check(call), None
        if call.command == "GC":
            return self._gc(call, request), None
        return Answer(), None  # STATUS: the server has answered for the backends already

    def _add(
        self, call: cni.Call, request: CallRequest
    ) -> tuple[Answer, Callable[[], None] | None]:
        attachment = cni.attachment_of(call)
        out = cni.result_bytes(call)
        available = self.manager.backends if self.working is None else self.working
        backend = choose(attachment.options, available)
        if not request.alive():
            raise TryAgain("the caller went away before its ADD was begun")
        before = self.manager.registry.get(attachment.key)
        changed = self.manager.attach(
            attachment,
            backend=backend,
            netns_cookie=self._cookie(attachment, request),
            must_be_local=cni.from_annotation(call),
        )
        self._slow.forget(backend)
        self._forget_queued(attachment)
        self._added[attachment.key] = time.monotonic()
        self._log_skipped(attachment)
        if not changed:
            return Answer(0, out, idle=not attachment.claims()), None

        def undo() -> None:
            if before is None:
                self.manager.detach(attachment.key)
            else:
                self.manager.attach(
                    before.attachment, backend=before.backend, netns_cookie=before.netns_cookie
                )

        return Answer(0, out), undo

    def _cookie(self, attachment: Attachment, request: CallRequest) -> int | None:
        """The pod namespace's cookie, if its path means the same to us as to the caller."""
        if request.pod_netns < 0 or not attachment.netns or not attachment.claims():
            return None
        try:
            here = os.open(attachment.netns, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            same = netns.same_namespace(here, request.pod_netns)
            return netns.cookie(here, self._home) if same else None
        finally:
            os.close(here)

    def _log_skipped(self, attachment: Attachment) -> None:
        if attachment.options.mark_masq_bit is not None:
            log.info("markMasqBit is not needed: what to masquerade is known without a mark")
        families = set(attachment.families())
        for mapping in attachment.mappings:
            if not any(mapping.applies_to(f) for f in families):
                log.warning(
                    "mapping %s of %s is skipped: the pod has no address of that family",
                    mapping,
                    attachment.describe(),
                )

    def _delete(self, call: cni.Call) -> Answer:
        identity = call.identity
        assert identity is not None
        known = self.manager.registry.get(identity.key) is not None
        self._remove(call)
        if queue.names(self._run_dir):
            queue.cancel(self._run_dir, identity.network, identity.container_id, identity.ifname)
        return Answer(idle=not known)

    def _remove(self, call: cni.Call) -> None:
        identity = call.identity
        assert identity is not None
        self._added.pop(identity.key, None)
        record = self.manager.registry.get(identity.key)
        with self._slow.patience(record.backend if record else "portmap"):
            if not self.manager.detach(identity.key) and self.leftovers is not None:
                self.leftovers(call)

    def _forget_queued(self, attachment: Attachment) -> None:
        """An older DEL still in the queue must not take away what was just added."""
        identity = attachment.identity
        if queue.names(self._run_dir):
            queue.cancel(self._run_dir, identity.network, identity.container_id, identity.ifname)

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
        errors = self.manager.gc(call.network, valid | self._added_since(_began(request)))
        if errors:
            raise NetfilterFailed(
                f"{len(errors)} attachment(s) of network {call.network} could not be removed",
                "; ".join(str(e) for e in errors),
            )
        return Answer()

    def _added_since(self, moment: float) -> frozenset[tuple[str, str]]:
        """Attachments whose ADD was under way then: no list that was made before holds them."""
        known = [r.attachment for r in self.manager.registry if r.key in self._added]
        self._added = {a.key: self._added[a.key] for a in known}
        recent = [a.identity for a in known if self._added[a.key] >= moment]
        return frozenset((i.container_id, i.ifname) for i in recent)

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
