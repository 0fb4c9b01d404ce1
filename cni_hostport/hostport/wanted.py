"""Which elements are wanted, and by whom: the nftables backend's memory. Pure.

An element's owner is its comment. Several owners may want the same place (a
network's neighbours); the kernel then holds the element of the first. Kept
small: at ten thousand attachments every object here counts forty thousand
times, so a place with one owner has no container of its own. A place with
ten thousand owners costs no more to join or leave than one with two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cni_hostport.model import Family
from cni_hostport.netfilter.elements import Element

Place = tuple[Family, str, bytes]
Owners = Element | dict[str, Element]
"""Whoever wants a place: one element, or several by their comments, the kernel's first."""


class Wanted:
    """Elements by owner and by place."""

    def __init__(self) -> None:
        self._by_owner: dict[str, tuple[Element, ...]] = {}
        self._by_set: dict[tuple[Family, str], dict[bytes, Owners]] = {}

    def owners(self) -> Iterator[str]:
        """Everybody who wants something."""
        return iter(self._by_owner)

    def of_owner(self, owner: str) -> tuple[Element, ...]:
        """What one owner wants."""
        return self._by_owner.get(owner, ())

    def of_set(self, family: Family, name: str) -> dict[bytes, Owners]:
        """What one set should hold, by key."""
        return self._by_set.get((family, name), {})

    def at(self, place: Place) -> Owners | None:
        """Whoever wants a place."""
        keys = self._by_set.get((place[0], place[1]))
        return None if keys is None else keys.get(place[2])

    def first_at(self, place: Place) -> Element | None:
        """The element that the kernel should hold at a place."""
        found = self.at(place)
        return None if found is None else first(found)

    def replace(self, owner: str, elements: Iterable[Element]) -> None:
        """Make this what the owner wants; nothing: forget it. Where it was first it stays so."""
        before, wanted = self._by_owner.pop(owner, ()), tuple(elements)
        both = frozenset(before).intersection(wanted) if before and wanted else ()
        for element in before:
            if element not in both:
                self._leave(element, owner)
        if wanted:
            self._by_owner[owner] = wanted
        for element in wanted:
            if element in both:
                continue
            keys = self._by_set.setdefault((element.family, element.set), {})
            there = keys.get(element.key)
            if there is None:
                keys[element.key] = element
            elif isinstance(there, dict):
                there[owner] = element
            else:
                keys[element.key] = {there.comment: there, owner: element}

    def put_first(self, found: Element) -> None:
        """The kernel's element bears this owner's name: its leaving is what replaces it."""
        owners = self.at(found.place)
        if isinstance(owners, dict) and first(owners).comment != found.comment:
            mine = owners.pop(found.comment)
            rest = dict(owners)
            owners.clear()
            owners[found.comment] = mine
            owners.update(rest)

    def _leave(self, element: Element, owner: str) -> None:
        keys = self.of_set(element.family, element.set)
        there = keys.get(element.key)
        if isinstance(there, dict):
            there.pop(owner, None)
            if len(there) == 1:
                keys[element.key] = first(there)
        elif there is not None and there.comment == owner:
            del keys[element.key]


def first(owners: Owners) -> Element:
    """The element that the kernel should hold."""
    return next(iter(owners.values())) if isinstance(owners, dict) else owners


def is_owner(owners: Owners, comment: str) -> bool:
    """Whether whoever bears that comment is one of them."""
    return comment in owners if isinstance(owners, dict) else owners.comment == comment
