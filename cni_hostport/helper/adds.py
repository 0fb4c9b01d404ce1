"""ADD: what is asked of the node for it, one by one or several of one moment together.

Decides what an ADD needs besides the manager (the backend, the namespace's cookie), what is
answered and how it is undone. Runs on the worker thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from cni_hostport import cni
from cni_hostport.errors import BadEnvironment, HostPortError, TryAgain
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.asked import Asked, CallRequest, attachment_in
from cni_hostport.helper.backends import Working, choose
from cni_hostport.helper.slow import SlowBackends
from cni_hostport.host import netns, queue
from cni_hostport.hostport.adding import Wish
from cni_hostport.hostport.manager import HostPortManager
from cni_hostport.hostport.record import Record
from cni_hostport.model import Attachment, AttachmentID

log = logging.getLogger(__name__)

AT_ONCE = 16
"""ADDs that are done together at most: the first is answered with the last."""

Done = tuple[Answer, Callable[[], None] | None]
"""What is answered to an ADD, and what takes it back."""


class Adds:
    """ADDs, on top of the manager."""

    def __init__(self, manager: HostPortManager, run_dir: Path, slow: SlowBackends) -> None:
        self._manager = manager
        self._run_dir = run_dir
        self._slow = slow
        self.home = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        """This helper's own net namespace."""
        self.when: dict[str, float] = {}
        """When each attachment's last ADD was done, seconds of the monotonic clock."""
        self.working: Working | None = None
        """Backends that work here; all of the manager's if None."""

    def one(self, asked: Asked) -> Done:
        """Serve one ADD. Raises whatever makes it fail."""
        wish = self._wish(asked)
        self._still_wanted(asked)
        before = self._manager.registry.get(wish.attachment.key)
        changed = self._manager.attach(
            wish.attachment,
            backend=wish.backend,
            netns_cookie=wish.netns_cookie,
            must_be_local=wish.must_be_local,
        )
        return self._done(asked, wish, before, changed=changed)

    def together(self, several: Sequence[Asked]) -> list[Done]:
        """Serve as many of the first as can be served at once; empty: none, nothing was done."""
        wishes = self._wishes(several[:AT_ONCE])
        count = self._manager.apart(wishes) if len(wishes) > 1 else 0
        if count < 2:
            return []
        for asked in several[:count]:
            asked.alone = True  # if it works this is the last that is heard of it
        if not self._manager.attach_together(wishes[:count]):
            return []
        return [
            self._done(asked, wish, None, changed=True)
            for asked, wish in zip(several, wishes[:count], strict=False)
        ]

    def _wishes(self, several: Sequence[Asked]) -> list[Wish]:
        """What the first of them ask for, up to one that is no ADD or has to fail."""
        wishes = []
        for asked in several:
            if asked.attachment is None or asked.alone:
                break
            try:
                wish = self._wish(asked)
                self._still_wanted(asked)
            except HostPortError:  # raised again where it is served alone
                break
            wishes.append(wish)
        return wishes

    def _wish(self, asked: Asked) -> Wish:
        if asked.wish is None:
            self.check_home(asked.request.own_netns)
            attachment = attachment_in(asked)
            assert asked.call is not None
            available = self._manager.backends if self.working is None else self.working
            asked.wish = Wish(
                attachment,
                choose(attachment.options, available),
                self._cookie(attachment, asked.request),
                cni.from_annotation(asked.call),
            )
        return asked.wish

    @staticmethod
    def _still_wanted(asked: Asked) -> None:
        if not asked.request.alive():
            raise TryAgain("the caller went away before its ADD was begun")

    def check_home(self, own_netns: int) -> None:
        """A helper belongs to one net namespace: its sockets and rules are there.

        ``own_netns`` is the caller's (-1: not passed). Raises BadEnvironment (code 4).
        """
        if own_netns >= 0 and not netns.same_namespace(own_netns, self.home):
            raise BadEnvironment(
                "the helper of this run directory serves another network namespace",
                f"give this one a CNI_HOSTPORT_RUN_DIR of its own (now {self._run_dir})",
            )

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
            return netns.cookie(here, self.home) if same else None
        finally:
            os.close(here)

    def _done(self, asked: Asked, wish: Wish, before: Record | None, *, changed: bool) -> Done:
        attachment = wish.attachment
        self._slow.forget(wish.backend)
        # an older DEL still in the queue must not take away what was just added
        self.forget_queued(attachment.identity)
        self.when[attachment.key] = time.monotonic()
        _log_skipped(attachment)
        if not changed:
            return Answer(0, asked.result, idle=not attachment.claims()), None

        def undo() -> None:
            if before is None:
                self._manager.detach(attachment.key)
            else:
                self._manager.attach(
                    before.attachment, backend=before.backend, netns_cookie=before.netns_cookie
                )

        return Answer(0, asked.result), undo

    def forget_queued(self, identity: AttachmentID) -> None:
        """Drop its DELs from the queue; never raises: the ADD or DEL is done by then."""
        try:
            if queue.names(self._run_dir):
                queue.cancel(
                    self._run_dir, identity.network, identity.container_id, identity.ifname
                )
        except OSError as error:
            log.error("a queued DEL of %s may come yet: %s", identity, error)

    def since(self, moment: float) -> frozenset[tuple[str, str]]:
        """Attachments whose ADD was under way then: no list that was made before holds them.

        As (container ID, interface name). ``moment``: seconds of the monotonic clock.
        """
        known = [r.attachment for r in self._manager.registry if r.key in self.when]
        self.when = {a.key: self.when[a.key] for a in known}
        recent = [a.identity for a in known if self.when[a.key] >= moment]
        return frozenset((i.container_id, i.ifname) for i in recent)


def _log_skipped(attachment: Attachment) -> None:
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
