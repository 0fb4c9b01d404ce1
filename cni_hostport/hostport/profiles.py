"""Which nftables profiles (sets of conditions) are wanted, and by whom: memory, pure.

Decides which are missing and which are too many; the text is
``netfilter/nftprofiles.py``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from cni_hostport.hostport.nftplan import attachment_profiles
from cni_hostport.hostport.placed import Placed
from cni_hostport.model import Family
from cni_hostport.netfilter import nftprofiles
from cni_hostport.netfilter.nftprofiles import Profile

_ByOwner = dict[str, frozenset[Profile]]


def _has_conditions(placed: Placed | None) -> bool:
    options = placed.attachment.options if placed is not None else None
    return options is not None and bool(options.conditions_v4 or options.conditions_v6)


class Profiles:
    """Profiles by attachment, and those believed to be in the kernel."""

    def __init__(self) -> None:
        self._by_owner: _ByOwner = {}
        self._users: Counter[Profile] = Counter()
        self._loaded: frozenset[Profile] = frozenset()

    @property
    def wanted(self) -> frozenset[Profile]:
        """Every profile that somebody wants; few, whatever the number of attachments."""
        return frozenset(self._users)

    @property
    def missing(self) -> frozenset[Profile]:
        """Wanted and not in the kernel."""
        return self.wanted - self._loaded if self._by_owner else frozenset()

    @property
    def surplus(self) -> frozenset[Profile]:
        """In the kernel and wanted by nobody."""
        return self._loaded - self.wanted if self._loaded else frozenset()

    def ask(self, changes: Mapping[str, Placed | None]) -> _ByOwner:
        """Take in what attachments want now; returns what they wanted before."""
        if not self._by_owner and not any(map(_has_conditions, changes.values())):
            return {}  # as on most nodes
        before = {key: self._by_owner.get(key, frozenset()) for key in changes}
        empty: frozenset[Profile] = frozenset()
        self.put_back({k: attachment_profiles(p) if p else empty for k, p in changes.items()})
        return before

    def put_back(self, owners: Mapping[str, frozenset[Profile]]) -> None:
        """Make this what those attachments want."""
        for key, profiles in owners.items():
            before = self._by_owner.get(key, frozenset())
            self._users.update(profiles - before)
            for gone in before - profiles:
                self._users[gone] -= 1
                if not self._users[gone]:
                    del self._users[gone]
            if profiles:
                self._by_owner[key] = profiles
            else:
                self._by_owner.pop(key, None)

    def text(self, chains: Mapping[Family, Iterable[str]]) -> str:
        """Text that makes the wanted profiles, and removes others among these chains."""
        wanted = self.wanted
        out = nftprofiles.profiles_text(wanted)
        for family, names in chains.items():
            tags = {tag for name in names if (tag := nftprofiles.tag_of_chain(name))}
            mine = {p.tag for p in wanted if p.family is family}
            out += nftprofiles.removal_text(family, tags - mine)
        return out

    def loaded(self) -> None:
        """The kernel holds what is wanted."""
        self._loaded = self.wanted

    def gone(self) -> None:
        """The kernel holds none."""
        self._loaded = frozenset()
