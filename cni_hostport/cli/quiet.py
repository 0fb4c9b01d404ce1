"""A DEL or CHECK that has nothing to do, where no helper runs: answered without one.

Decides whether a call can be answered from what lies on disk and in the kernel,
without starting a process and without writing a byte. Where anything might have
to be done (a record, a queued call, mappings, rules that portmap left) it is
left to a helper.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from cni_hostport import cni
from cni_hostport.errors import HostPortError
from cni_hostport.host import iptables
from cni_hostport.host.nfnetlink import Nftables
from cni_hostport.hostport import portmap
from cni_hostport.model import Family


def answer(run_dir: str, env: Mapping[str, str], body: bytes) -> tuple[int, bytes, bytes] | None:
    """Exit status, stdout and stderr; None: a helper is needed."""
    if not _is_plain(run_dir) or _has(run_dir, "records") or _has(run_dir, "queue"):
        return None
    try:
        call = cni.parse_call(env, body, _same_netns(env.get("CNI_NETNS", "")))
    except HostPortError as error:
        return 1, cni.error_bytes(error, cni.cni_version_of(body)), b""
    if call.command == "CHECK" and not cni.wants_mappings(call):
        return 0, b"", b""
    if call.command == "DEL" and not _portmap_may_have_left_something():
        return 0, b"", b""
    return None


def _is_plain(run_dir: str) -> bool:
    """Whether the run directory is absent or as a helper makes it; else a helper complains."""
    if not run_dir.startswith("/"):
        return False
    try:
        status = os.lstat(run_dir)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == 0 and not status.st_mode & 0o022


def _has(run_dir: str, folder: str) -> bool:
    try:
        return bool(os.listdir(f"{run_dir}/{folder}"))
    except FileNotFoundError:
        return False
    except OSError:
        return True  # whatever it is, a helper says so


def _same_netns(path: str) -> bool:
    try:
        own, pod = os.stat("/proc/self/ns/net"), os.stat(path)
    except (OSError, ValueError):
        return False
    return (own.st_dev, own.st_ino) == (pod.st_dev, pod.st_ino)


def _portmap_may_have_left_something() -> bool:
    """Whether the kernel holds a chain or table of portmap's; asked without a process."""
    try:
        if any(iptables.legacy_tables(f) for f in Family):
            return True  # what is in them only iptables-legacy-save can tell
        nat = Nftables("nat")
        if any(name == portmap.TABLE for _, name in nat.tables()):
            return True
        return any(portmap.is_portmaps(chain.name for chain in nat.chains(f)) for f in Family)
    except OSError:
        return True
