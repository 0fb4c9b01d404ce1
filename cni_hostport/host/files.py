"""Files and folders put in place whole or not at all.

Decides how: a temporary name in the same folder, fsync, rename, fsync of the
folder. Never leaves a half-written file under a final name, and never writes
into a file or folder that a running program may be reading.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

_MARK = ".cni-hostport-new"


def write(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace or make a file; keeps owner and (``mode`` None) mode of the one before.

    A link is followed: what it points at is replaced. Raises OSError.
    """
    path = Path(os.path.realpath(path))
    before = path.stat() if path.exists() else None
    wanted = mode if mode is not None else stat.S_IMODE(before.st_mode) if before else 0o644
    temporary = _temporary(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), wanted)
            if before is not None:
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def link(path: Path, target: str) -> None:
    """Make ``path`` a symbolic link to ``target`` in one step. Raises OSError."""
    temporary = _temporary(path)
    temporary.symlink_to(target)
    try:
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove(path: Path) -> None:
    """Remove a file or link; fine if there is none."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
        sync_folder(path.parent)


def copy_folder(source: Path, target: Path) -> None:
    """A copy of a folder under its final name, complete or not there. Raises OSError.

    Everything in it becomes root's and is writable by its owner alone.
    """
    temporary = _temporary(target)
    shutil.copytree(source, temporary, symlinks=True)
    try:
        for path in (temporary, *temporary.rglob("*")):
            if path.is_symlink():
                continue
            path.chmod((path.stat().st_mode | 0o444 | (0o111 if path.is_dir() else 0)) & 0o755)
            os.chown(path, os.geteuid(), os.getegid())
            _sync(path)
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder: it loses its final name first. Fine if there is none."""
    if not path.exists():
        return
    temporary = _temporary(path)
    path.rename(temporary)
    shutil.rmtree(temporary)
    sync_folder(path.parent)


def digest(folder: Path) -> str:
    """A number for names, contents and executability of everything in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(str(path.relative_to(folder)).encode() + b"\0")
        if path.is_symlink():
            total.update(b"l" + os.fsencode(os.readlink(path)))
        elif path.is_file():
            total.update(b"x" if path.stat().st_mode & 0o100 else b"f")
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def sweep(folder: Path) -> None:
    """Remove what an interrupted run left under a temporary name."""
    for path in leftovers(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def leftovers(folder: Path) -> Iterator[Path]:
    """Temporary names of ours in a folder."""
    if folder.is_dir():
        yield from [p for p in folder.iterdir() if _MARK in p.name]


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _temporary(path: Path) -> Path:
    """A name beside ``path`` that no runtime takes for a configuration (those end in .conf…)."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    name = path.parent / f".{path.name}{_MARK}-{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        name.unlink()
    return name
