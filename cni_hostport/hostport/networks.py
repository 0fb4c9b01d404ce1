"""What the attachments of one network share in nftables, and why it outlives them: pure.

An element of ``neighbours`` has ``NETWORK`` as its first owner (unless an earlier version
made it) and stays for a while when the last attachment that wants it goes. The kernel copies
a whole interval set for each change of one element in it, up to twenty times the cost of any
other: a pod that restarts would pay that twice, and so would the others whenever the first of
them goes.

The kernel refuses ranges that overlap, so of a link's networks of which one lies in the other
(an operator has changed the mask) the wider one serves all. What nobody needs must never be in
the way of what somebody does.
"""

from __future__ import annotations

from collections.abc import Iterable

from cni_hostport.hostport.wanted import Wanted
from cni_hostport.model import Family
from cni_hostport.netfilter.elements import Element
from cni_hostport.netfilter.nftrules import NEIGHBOURS

NETWORK = "network"
"""The owner, and so the comment, of each shared element."""

Changes = dict[str, tuple[Element, ...]]


def with_networks(changes: Changes, now: Wanted) -> Changes:
    """The same changes, and before them what ``NETWORK`` then wants where it lacks something.

    The kernel copies the set anyhow then: what nobody needs goes with it. Attachments in a
    narrower network than another on their link want the wider one's element instead.
    """
    asked = {
        element._replace(comment=NETWORK)
        for elements in changes.values()
        for element in elements
        if element.set == NEIGHBOURS
    }
    shared = now.of_owner(NETWORK)
    if asked.issubset(shared):
        return changes
    needed = still_needed(now)
    widest = _widest((*needed, *asked))
    moved = {o: now.of_owner(o) for e in needed if e not in widest for o in _owners(e, now)}
    moved.pop(NETWORK, None)
    return {
        NETWORK: tuple([e for e in shared if e in widest] + [e for e in widest if e not in shared]),
        **{owner: _widened(elements, widest) for owner, elements in (moved | changes).items()},
    }


def still_needed(now: Wanted) -> tuple[Element, ...]:
    """What ``NETWORK`` wants of which some attachment has need."""
    return tuple([e for e in now.of_owner(NETWORK) if now.at(e.place) != e])


def _owners(element: Element, now: Wanted) -> Iterable[str]:
    there = now.at(element.place)
    return there if isinstance(there, dict) else ()


def _widest(ranges: Iterable[Element]) -> list[Element]:
    """Those that lie in no other. Networks are disjoint, or one lies in the other."""
    found: list[Element] = []
    for one in sorted(set(ranges), key=lambda e: (e.family, e.key, _upside_down(e.key_end))):
        if not found or not _lies_in(one, found[-1]):
            found.append(one)
    return found


def _upside_down(key: bytes | None) -> bytes:
    return bytes(255 - byte for byte in key or b"")


def _lies_in(one: Element, other: Element) -> bool:
    size = 4 if one.family is Family.V4 else 16
    return (
        (one.family, one.key[:-size]) == (other.family, other.key[:-size])
        and other.key <= one.key
        and (one.key_end or one.key) <= (other.key_end or other.key)
    )


def _widened(elements: tuple[Element, ...], widest: list[Element]) -> tuple[Element, ...]:
    """The same with each range as wide as it is in the kernel."""
    return tuple(dict.fromkeys(e if e.set != NEIGHBOURS else _wide(e, widest) for e in elements))


def _wide(element: Element, widest: list[Element]) -> Element:
    wide = next((w for w in widest if _lies_in(element, w)), element)
    return wide._replace(comment=element.comment)
