"""The queue of DELs that no helper could take, as files in ``RUN_DIR/queue``.

Decides what an entry looks like and in which order entries are worked off. It
never runs one (the helper does), never holds more than ``MAX_ENTRIES``, and
never deletes what it cannot read: a damaged entry is set aside under another
name. Writers and the helper need no common lock: an entry appears by rename.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES = 4096
MAX_BYTES = 32 << 20
_SUFFIX = ".json"
_DAMAGED = ".damaged"
_ESCAPE = "surrogateescape"


@dataclass(frozen=True, slots=True)
class Entry:
    """One queued call: the CNI environment and stdin it came with."""

    path: Path
    key: str
    env: Mapping[bytes, bytes]
    stdin: bytes


class QueueError(Exception):
    """The queue cannot take the call; the text says why."""


def attachment_key(network: str, container_id: str, ifname: str) -> str:
    """What ``model.AttachmentID.key`` is, for a process that must not load pydantic."""
    import hashlib  # brings libcrypto along; needed only where a call is really queued

    text = "\0".join((network, container_id, ifname))
    digest = hashlib.sha256(text.encode("utf-8", _ESCAPE)).digest()
    return base64.b32encode(digest).decode("ascii")[:16].lower()


def put(run_dir: Path, env: Mapping[bytes, bytes], stdin: bytes) -> Path:
    """Queue one call and return its file. Raises QueueError.

    The name sorts by the time since boot, which no clock adjustment moves.
    """
    folder = run_dir / "queue"
    key = attachment_key(
        _network_of(stdin),
        env.get(b"CNI_CONTAINERID", b"").decode("utf-8", _ESCAPE),
        env.get(b"CNI_IFNAME", b"").decode("utf-8", _ESCAPE),
    )
    content = {
        "env": {k.decode("utf-8", _ESCAPE): v.decode("utf-8", _ESCAPE) for k, v in env.items()},
        "stdin": base64.b64encode(stdin).decode("ascii"),
    }
    stamp = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    name = f"{stamp:020d}-{os.getpid()}-{key}{_SUFFIX}"
    try:
        _make_folder(folder)
        if len(os.listdir(folder)) >= MAX_ENTRIES:
            raise QueueError(f"the queue {folder} is full: {MAX_ENTRIES} calls wait in it")
        return _write(folder, name, json.dumps(content).encode("ascii"))
    except OSError as error:
        raise QueueError(f"the queue {folder} cannot be written: {error.strerror}") from error


def names(run_dir: Path) -> list[str]:
    """File names of the waiting entries, oldest first; cheap enough to ask every second."""
    try:
        found = os.listdir(f"{run_dir}/queue")
    except OSError:
        return []
    return sorted(name for name in found if name.endswith(_SUFFIX) and name[0].isdigit())


def entries(run_dir: Path) -> Iterator[Entry]:
    """The waiting entries, oldest first; what cannot be read is set aside."""
    for name in names(run_dir):
        path = run_dir / "queue" / name
        try:
            yield _read(path)
        except OSError:
            continue  # cancelled meanwhile, or no descriptor free: nothing wrong with the entry
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            with contextlib.suppress(OSError):
                path.rename(path.with_name(name + _DAMAGED))


def remove(entry: Entry) -> None:
    """Take a done entry out. Raises OSError, except where it is gone already."""
    entry.path.unlink(missing_ok=True)


def cancel(run_dir: Path, network: str, container_id: str, ifname: str) -> int:
    """Take out every entry of that attachment; returns how many there were."""
    waiting = names(run_dir)
    if not waiting:
        return 0
    ending = f"-{attachment_key(network, container_id, ifname)}{_SUFFIX}"
    mine = [name for name in waiting if name.endswith(ending)]
    for name in mine:
        (run_dir / "queue" / name).unlink(missing_ok=True)
    return len(mine)


def _network_of(stdin: bytes) -> str:
    """As ``cni.py`` reads it: keys in any case, the last one counts."""
    try:
        config = json.loads(stdin.decode("utf-8", "replace"))
        name = [config[key] for key in config if key.casefold() == "name"][-1]
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def _make_folder(folder: Path) -> None:
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise QueueError(f"{folder} is no folder")


def _write(folder: Path, name: str, content: bytes) -> Path:
    temporary = folder / f".{name}"
    path = folder / name
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(temporary, "wb", opener=lambda path, _: os.open(path, flags, 0o600)) as file:
            file.write(content)
        temporary.rename(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return path


def _read(path: Path) -> Entry:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ValueError("too long for an entry")
    loaded = json.loads(content)
    env = {k.encode("utf-8", _ESCAPE): v.encode("utf-8", _ESCAPE) for k, v in loaded["env"].items()}
    stdin = base64.b64decode(loaded["stdin"], validate=True)
    return Entry(path, path.name.removesuffix(_SUFFIX).rpartition("-")[2], env, stdin)
