"""Files of the local DNS cache: read whole, written atomically, one agent at a time.

Decides how a ConfigMap's folder is read (as kubelet mounts it: names that begin
with a dot apart, links followed), how a file is replaced, and how two agents on
one node find out about each other. Never interprets a content.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any


def read_folder(folder: str) -> dict[str, str]:
    """Content by name of a folder's files.

    Sub-folders and names with a leading dot are skipped; a link to a folder or
    an unreadable entry fails the whole. Raises OSError, UnicodeDecodeError.
    """
    root = Path(folder)
    if root.is_symlink() or not root.is_dir():
        raise NotADirectoryError(f"{folder} is no folder")
    found: dict[str, str] = {}
    for entry in sorted(root.iterdir()):
        if entry.name.startswith(".") or (entry.is_dir() and not entry.is_symlink()):
            continue
        found[entry.name] = entry.read_text(encoding="utf-8")
    return found


def signature(path: str) -> tuple[object, ...]:
    """What changes when a file, or a folder's content, does; never raises.

    Follows links, so that the swap of a ConfigMap's ``..data`` shows.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        return (error.errno,)
    own = (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
    try:
        names = sorted(os.listdir(path))
    except OSError:
        return own
    inner = [signature(str(Path(path, n))) for n in names if not n.startswith(".")]
    return (*own, *names, *inner)


def write_atomic(path: str, text: str) -> bool:
    """Replace a file by a new content, readers see the old or the new one.

    False where the content is the same already. Where the file cannot be
    renamed over (a single file mounted into a container) it is written in
    place. Raises OSError.
    """
    target = Path(path)
    try:
        if target.read_text(encoding="utf-8") == text:
            return False
    except (OSError, UnicodeDecodeError):
        pass
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        try:
            os.replace(temporary, target)
        except OSError:
            target.write_text(text, encoding="utf-8")
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return True


def read_state(path: str) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none or it is damaged."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_state(path: str, state: dict[str, Any]) -> None:
    """Write a JSON object. Raises OSError."""
    write_atomic(path, json.dumps(state, indent=1, sort_keys=True) + "\n")


class AgentLock:
    """One agent for each link name and net namespace, by a name that dies with its holder.

    An abstract unix socket: it needs no file, is seen by every process that
    shares the net namespace whatever it has mounted, and is free at once when
    the holder is killed.
    """

    def __init__(self, link: str) -> None:
        self._address = f"\0cni-hostport-node-cache-{link}"
        self._socket: socket.socket | None = None

    def take(self) -> bool:
        """Whether the name is ours now."""
        if self._socket is not None:
            return True
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            sock.bind(self._address)
        except OSError:
            sock.close()
            return False
        self._socket = sock
        return True

    def release(self) -> None:
        """Give the name back."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
