"""What the attachments of one network share in nftables, and why it outlives them: pure.

An element of ``neighbours`` has ``NETWORK`` as its first owner (unless an earlier version
made it) and stays for a while when the last attachment that wants it goes. The kernel copies
a whole interval set for each change of one element in it, up to twenty times the cost of any
other: a pod that restarts would pay that twice, and so would the others whenever the first of
them goes. What nobody needs must never be in the way of what somebody does: the kernel
refuses ranges that overlap.
"""

from __future__ import annotations

from cni_hostport.hostport.wanted import Wanted
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nftrules import NEIGHBOURS

NETWORK = "network"
"""The owner, and so the comment, of each shared element."""

Changes = dict[str, tuple[Element, ...]]


def with_networks(changes: Changes, now: Wanted) -> Changes:
    """The same changes, and before them what ``NETWORK`` then wants where it lacks something.

    The kernel copies the set anyhow then: what nobody needs goes with it.
    """
    asked = dict.fromkeys(
        element._replace(comment=NETWORK)
        for elements in changes.values()
        for element in elements
        if element.set == NEIGHBOURS
    )
    new = [e for e in asked if _is_free(e, now)]
    if not new:
        return changes
    kept = [e for e in now.of_owner(NETWORK) if e in asked or now.at(e.place) != e]
    return {NETWORK: (*kept, *new), **changes}


def _is_free(element: Element, now: Wanted) -> bool:
    """Whether nobody wants its place, or only ``NETWORK`` does, and for another range."""
    there = now.at(element.place)
    if there is None:
        return True
    return isinstance(there, Element) and there.comment == NETWORK and there != element


def still_needed(now: Wanted) -> tuple[Element, ...]:
    """What ``NETWORK`` wants of which some attachment has need."""
    return tuple([e for e in now.of_owner(NETWORK) if now.at(e.place) != e])
