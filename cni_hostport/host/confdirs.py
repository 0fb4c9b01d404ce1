"""Where a node keeps network configurations and plugins, and what lies there.

Decides the usual places only; a file that cannot be read or decoded is given
with the reason, never skipped in silence. Changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cni_hostport import cni_conflist
from cni_hostport.cni_conflist import Conflist

CONF_DIRS = (
    "/etc/cni/net.d",
    "/var/lib/rancher/k3s/agent/etc/cni/net.d",
    "/var/lib/rancher/rke2/agent/etc/cni/net.d",
    "/var/snap/microk8s/current/args/cni-network",
)
K3S = "/var/lib/rancher/k3s"
K3S_BIN_DIRS = (f"{K3S}/data/cni", f"{K3S}/data/current/bin")
BIN_DIR = "/opt/cni/bin"
_ENDINGS = (".conf", ".conflist", ".json")


@dataclass(frozen=True, slots=True)
class ConfFile:
    """One file of a configuration folder; ``problem`` says why ``conflist`` is None."""

    path: str
    text: str = ""
    conflist: Conflist | None = None
    problem: str = ""


def inside(root: Path, path: str) -> Path:
    """A path of the node, where the node's file system is mounted at ``root``."""
    return root / path.lstrip("/")


def read(path: str, root: Path = Path("/")) -> ConfFile:
    """One file. Never raises."""
    try:
        # newline="": line ends stay as they are
        with inside(root, path).open(encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        return ConfFile(path, problem=str(error))
    try:
        return ConfFile(path, text, cni_conflist.read(text))
    except cni_conflist.NotAConflist as error:
        return ConfFile(path, text, problem=str(error))


def files(root: Path = Path("/"), folders: tuple[str, ...] = CONF_DIRS) -> list[ConfFile]:
    """Every configuration of the node, in the order in which runtimes look at them."""
    found = []
    for folder in folders:
        place = inside(root, folder)
        names = sorted(p.name for p in place.iterdir()) if place.is_dir() else []
        found += [read(f"{folder}/{n}", root) for n in names if n.endswith(_ENDINGS)]
    return found
