"""What an installation consists of: steps that are each atomic and can be repeated. Pure.

A step says in words what it does; ``cli/apply.py`` does it. Paths are the
node's own, wherever its file system is mounted.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyBundle:
    """The bundle's folder, under a name of its own: no running program's files change."""

    source: str
    target: str

    def __str__(self) -> str:
        return f"copy the bundle {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Link:
    """A symbolic link, exchanged in one step."""

    path: str
    target: str
    before: str | None = None

    def __str__(self) -> str:
        was = f" (was {self.before})" if self.before else ""
        return f"link {self.path} -> {self.target}{was}"


@dataclass(frozen=True, slots=True)
class Write:
    """A file with this content; ``backup`` names a copy that is kept beside it first."""

    path: str
    before: str | None
    after: str
    backup: str = ""

    def __str__(self) -> str:
        copy = f", the one before kept as {self.backup}" if self.backup else ""
        return f"write {self.path}{copy}"

    def diff(self) -> str:
        """What changes, as ``diff -u`` shows it."""
        before = [] if self.before is None else self.before.splitlines(keepends=True)
        after = self.after.splitlines(keepends=True)
        old = "/dev/null" if self.before is None else self.path
        lines = difflib.unified_diff(before, after, old, self.path, n=2)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass(frozen=True, slots=True)
class Remove:
    """A file or link."""

    path: str

    def __str__(self) -> str:
        return f"remove {self.path}"


@dataclass(frozen=True, slots=True)
class RemoveFolder:
    """A folder with all that is in it."""

    path: str

    def __str__(self) -> str:
        return f"remove the folder {self.path}"


@dataclass(frozen=True, slots=True)
class Labels:
    """SELinux labels as the node's policy has them."""

    paths: tuple[str, ...]

    def __str__(self) -> str:
        return f"run restorecon -R {' '.join(self.paths)}"


@dataclass(frozen=True, slots=True)
class Systemctl:
    """A verb of the service manager; ``may_fail`` where a failure changes nothing for us."""

    words: tuple[str, ...]
    may_fail: bool = False

    def __str__(self) -> str:
        return f"run systemctl {' '.join(self.words)}"


@dataclass(frozen=True, slots=True)
class ReplaceHelper:
    """A helper of this program takes over from the running one; no port is free meanwhile."""

    program: str

    def __str__(self) -> str:
        return f"run {self.program} helper --replace"


@dataclass(frozen=True, slots=True)
class EndHelper:
    """The running helper, if any, and its run directory."""

    run_dir: str

    def __str__(self) -> str:
        return f"end the helper and remove {self.run_dir}"


Step = (
    CopyBundle
    | Link
    | Write
    | Remove
    | RemoveFolder
    | Labels
    | Systemctl
    | ReplaceHelper
    | EndHelper
)
