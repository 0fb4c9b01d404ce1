"""Kernel settings and other programs' configuration files that bear on host ports.

Decides nothing; reads only. A file that cannot be read counts as not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from cni_hostport.host import commands, sysctl
from cni_hostport.host.confdirs import inside
from cni_hostport.model import Family

_SYSCTL_DIRS = ("/usr/lib/sysctl.d", "/usr/local/lib/sysctl.d", "/etc/sysctl.d", "/run/sysctl.d")
_CRIO = ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d")
_CONTAINERS = (
    "/usr/share/containers/containers.conf",
    "/etc/containers/containers.conf",
    "/etc/containers/containers.conf.d",
)
_NERDCTL = re.compile(r"nerdctl version v?(\d+)\.(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Line:
    """A setting where somebody wrote it. ``number`` from 1."""

    path: str
    number: int
    value: str

    def __str__(self) -> str:
        return f"{self.path} line {self.number}"


@dataclass(frozen=True, slots=True)
class Kernel:
    """Settings of the kernel in this net namespace; None: it has no such setting."""

    forward4: bool | None = None
    forward6: bool | None = None
    bridge4: bool | None = None
    bridge6: bool | None = None
    localnet_off: tuple[Line, ...] = ()
    release: tuple[int, int] = (0, 0)


def kernel() -> Kernel:
    """Read them. Never raises."""
    return Kernel(
        sysctl.ip_forward(Family.V4),
        sysctl.ip_forward(Family.V6),
        sysctl.bridge_nf_call(Family.V4),
        sysctl.bridge_nf_call(Family.V6),
        tuple(line for line in localnet_lines() if line.value == "0"),
        _release(),
    )


def _release() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", Path("/proc/sys/kernel/osrelease").read_text())
    return (int(found[1]), int(found[2])) if found else (0, 0)


def localnet_lines(root: Path = Path("/")) -> list[Line]:
    """Where sysctl files set route_localnet."""
    paths = [p for d in _SYSCTL_DIRS for p in _below(root, d, ".conf")]
    paths += ["/etc/sysctl.conf"]
    key = r"-?\s*net[./]ipv4[./]conf[./][^=\s]+[./]route_localnet\s*=\s*(\d+)"
    return [line for p in paths for line in _lines(root, p, key)]


def crio_mapping(root: Path = Path("/")) -> Line | None:
    """CRI-O's ``disable_hostport_mapping``, the last file wins; None: not said."""
    paths = [_CRIO[0], *_below(root, _CRIO[1], "")]
    found = [x for p in paths for x in _lines(root, p, r"disable_hostport_mapping\s*=\s*(\w+)")]
    return found[-1] if found else None


def crio_present(root: Path = Path("/")) -> bool:
    """Whether CRI-O is on the node: its socket, or its program."""
    socket = any(inside(root, p).exists() for p in ("/run/crio/crio.sock", "/var/run/crio.sock"))
    return socket or commands.find("crio") is not None


def podman(root: Path = Path("/")) -> dict[str, Line]:
    """containers.conf's settings that matter, by name; the last file wins."""
    paths = [p for c in _CONTAINERS[:2] for p in [c]] + _below(root, _CONTAINERS[2], ".conf")
    found: dict[str, Line] = {}
    for name in ("enable_port_reservation", "network_backend"):
        for path in paths:
            for line in _lines(root, path, rf'{name}\s*=\s*"?(\w+)"?'):
                found[name] = line
    return found


def nerdctl_version() -> tuple[int, int, int] | None:
    """Version of the node's nerdctl, None where there is none."""
    try:
        done = commands.run(["nerdctl", "--version"], None, 5.0)
    except commands.CommandError:
        return None
    found = _NERDCTL.search(done.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def mount_of(path: str) -> tuple[str, str]:
    """(mount point, file system type) of the mount that a path lies on; see proc(5)."""
    best = ("/", "")
    real = str(Path(path).resolve())
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        words = line.split()
        point = words[4].encode().decode("unicode_escape")
        kind = words[words.index("-") + 1]
        inside_it = real == point or real.startswith(point.rstrip("/") + "/")
        if inside_it and len(point) >= len(best[0]):
            best = (point, kind)
    return best


def _below(root: Path, folder: str, ending: str) -> list[str]:
    place = inside(root, folder)
    if not place.is_dir():
        return []
    return [f"{folder}/{p.name}" for p in sorted(place.iterdir()) if p.name.endswith(ending)]


def _lines(root: Path, path: str, pattern: str) -> list[Line]:
    try:
        text = inside(root, path).read_text(errors="replace")
    except OSError:
        return []
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(rf"\s*{pattern}", line)
        if match:
            found.append(Line(path, number, match[1]))
    return found
