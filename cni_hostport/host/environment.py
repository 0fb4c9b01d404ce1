"""What of a caller's environment the helper and the programs it runs may see.

Decides by allowlist: the project's own variables, one locale, and a PATH of
directories that only root may write. Everything else stays behind
(LD_LIBRARY_PATH of containerd and of the bundle, PYTHON*, NOTIFY_SOCKET,
LISTEN_*): it must never reach nft, iptables or a helper.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping

STANDARD_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LONGEST_PATH = 4096
_BOOT_LOADER = (b"_PYI_", b"LD_LIBRARY_PATH", b"PYTHON")


def clean_environment(environ: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """The environment of a helper that this caller starts."""
    own = {key: value for key, value in environ.items() if key.startswith(b"CNI_HOSTPORT_")}
    path = safe_path(os.fsdecode(environ.get(b"PATH", b"")))
    return own | {b"LANG": b"C.UTF-8", b"PATH": os.fsencode(path)}


def drop_boot_loader_names(environ: MutableMapping[bytes, bytes]) -> None:
    """Take out what the bundle's front or boot loader put in, before any program is run."""
    for key in [key for key in environ if key.startswith(_BOOT_LOADER)]:
        del environ[key]


def safe_path(path: str) -> str:
    """Absolute existing directories of ``path`` that only root may write, then the standard six."""
    standard = STANDARD_PATH.split(":")
    chosen: list[str] = []
    for entry in path[:_LONGEST_PATH].split(":"):
        if entry not in chosen and entry not in standard and only_root_writes(entry):
            chosen.append(entry)
    return ":".join(chosen + standard)


def only_root_writes(directory: str) -> bool:
    """Whether nobody but root can put a file there, or another directory in its place."""
    if not directory.startswith("/"):
        return False
    here = os.path.realpath(directory)
    try:
        status = os.stat(here)
        good = stat.S_ISDIR(status.st_mode) and _is_roots(status)
        while good and here != "/":
            here = os.path.dirname(here)
            status = os.stat(here)
            # In a sticky directory (/tmp) nobody can rename or remove what root owns.
            sticky = bool(status.st_mode & stat.S_ISVTX) and status.st_uid == 0
            good = sticky or _is_roots(status)
    except OSError:
        return False
    return good


def _is_roots(status: os.stat_result) -> bool:
    group_writes = status.st_mode & stat.S_IWGRP and status.st_gid != 0
    return status.st_uid == 0 and not group_writes and not status.st_mode & stat.S_IWOTH
