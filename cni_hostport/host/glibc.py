"""Whether a bundle can be loaded on a node: C library wanted, C library there.

Decides by the version names in the ELF files' own strings, before a loader
fails with words that nobody understands. Runs nothing.
"""

from __future__ import annotations

import re
from pathlib import Path

Version = tuple[int, int]

_WANTED = re.compile(rb"\0GLIBC_2\.(\d+)(?:\.\d+)?(?=\0)")
_RELEASE = re.compile(rb"GNU C Library [^\n]*?release version 2\.(\d+)")
_PLACES = (
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "lib64",
    "usr/lib64",
    "lib",
    "usr/lib",
)


def floor(bundle: Path) -> Version | None:
    """The oldest glibc that every file of the bundle can be loaded with; None: it needs none."""
    wanted = 0
    for path in bundle.rglob("*"):
        if path.is_file() and not path.is_symlink() and _is_elf(path):
            wanted = max([wanted, *map(int, _WANTED.findall(path.read_bytes()))])
    return (2, wanted) if wanted else None


def of_node(root: Path = Path("/")) -> Version | None:
    """The node's glibc; None where there is none (musl) or it does not say."""
    for place in _PLACES:
        path = root / place / "libc.so.6"
        try:
            found = _RELEASE.search(path.read_bytes())
        except OSError:
            continue
        if found:
            return 2, int(found[1])
    return None


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"
