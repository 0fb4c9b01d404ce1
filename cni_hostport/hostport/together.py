"""Attachments of one moment, step by step side by side: one transaction for all of them.

A step done ten times in a row costs two thirds of what it costs between the other steps,
and the kernel is asked once. Decides which ADDs may go together: those that are new and do
not concern each other in any way. All of them succeed, or nothing was done and each is to
be attached by itself, which then finds out whose fault it was.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cni_hostport.errors import HostPortError
from cni_hostport.hostport import answering
from cni_hostport.hostport.adding import Adding, Wish
from cni_hostport.hostport.following import Following
from cni_hostport.model import Attachment, Family, Protocol

log = logging.getLogger(__name__)


def _takes_long(attachment: Attachment) -> bool:
    """Whether its flows have to be looked for in a dump (ARCHITECTURE.md, kernel facts)."""
    return any(c.family is Family.V6 and c.protocol is Protocol.UDP for c in attachment.claims())


class Together(Adding, Following):
    """ADDs of one moment."""

    def apart(self, wishes: Sequence[Wish]) -> int:
        """How many of the first may go together: at least one, in the order in which they came.

        Each is new, none wants what another attachment has or wants, none is of a container
        that another of them is of (those leave ports to each other), all have one backend.
        None has UDP in IPv6: all would wait for each one's flows.
        """
        ports: set[object] = set()
        containers: set[str] = set()
        for count, wish in enumerate(wishes):
            attachment = wish.attachment
            claims = {(c.port, c.protocol) for c in attachment.claims()}
            container = attachment.identity.container_id
            if (
                not claims
                or _takes_long(attachment)
                or wish.backend != wishes[0].backend
                or container in containers
                or not claims.isdisjoint(ports)
                or self.registry.get(attachment.key) is not None
                or self.registry.conflicts(attachment)
            ):
                return max(count, 1)
            ports |= claims
            containers.add(container)
        return len(wishes)

    def attach_together(self, wishes: Sequence[Wish]) -> bool:
        """Make all their host ports work; False: not possible, and nothing was done.

        They have to be ``apart``. Never raises HostPortError.
        """
        try:
            node = self.follow_addresses()
            for wish in wishes:
                answering.check_host_ips(wish.attachment, node, must_be_local=wish.must_be_local)
            self._put(wishes)
        except HostPortError as error:
            log.debug("%d attachments one by one: %s", len(wishes), error)
            return False
        return True
