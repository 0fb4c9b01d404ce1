"""Which elements are wanted, and by whom: the nftables backend's memory. Pure.

An element's owner is its comment. Several owners may want the same place (a
network's neighbours); the kernel then holds the element of the first. Kept
small: at ten thousand attachments every object here counts forty thousand
times, so a place with one owner has no container of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cni_hostport.model import Family
from cni_hostport.netfilter.elements import Element

Place = tuple[Family, str, bytes]
_Owners = Element | tuple[Element, ...]


class Wanted:
    """Elements by owner and by place."""

    def __init__(self) -> None:
        self._by_owner: dict[str, tuple[Element, ...]] = {}
        self._by_set: dict[tuple[Family, str], dict[bytes, _Owners]] = {}

    def owners(self) -> Iterator[str]:
        """Everybody who wants something."""
        return iter(self._by_owner)

    def of_owner(self, owner: str) -> tuple[Element, ...]:
        """What one owner wants."""
        return self._by_owner.get(owner, ())

    def of_set(self, family: Family, name: str) -> dict[bytes, _Owners]:
        """What one set should hold, by key; ``owners_of`` reads a value."""
        return self._by_set.get((family, name), {})

    def at(self, place: Place) -> tuple[Element, ...]:
        """The owners' elements at a place, the one in the kernel first."""
        found = self.of_set(place[0], place[1]).get(place[2])
        return () if found is None else owners_of(found)

    def replace(self, owner: str, elements: Iterable[Element]) -> None:
        """Make this what the owner wants; nothing: forget it."""
        for element in self._by_owner.pop(owner, ()):
            self._leave(element, owner)
        wanted = tuple(elements)
        if wanted:
            self._by_owner[owner] = wanted
        for element in wanted:
            keys = self._by_set.setdefault((element.family, element.set), {})
            there = keys.get(element.key)
            keys[element.key] = element if there is None else (*owners_of(there), element)

    def put_first(self, found: Element) -> None:
        """The kernel's element bears this owner's name: its leaving is what replaces it."""
        owners = self.at(found.place)
        if len(owners) > 1 and owners[0].comment != found.comment:
            ordered = sorted(owners, key=lambda e: e.comment != found.comment)
            self.of_set(found.family, found.set)[found.key] = tuple(ordered)

    def _leave(self, element: Element, owner: str) -> None:
        keys = self.of_set(element.family, element.set)
        there = keys.get(element.key)
        rest = tuple(e for e in owners_of(there) if e.comment != owner) if there else ()
        if not rest:
            keys.pop(element.key, None)
        else:
            keys[element.key] = rest[0] if len(rest) == 1 else rest


def owners_of(value: _Owners) -> tuple[Element, ...]:
    """The elements of a place, one or more."""
    return (value,) if isinstance(value, Element) else value
