"""Everything the doctor knows about a node, as values. Gathered by ``cli/doctor.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cni_hostport.host.confdirs import ConfFile
from cni_hostport.host.ruleset import Ruleset
from cni_hostport.host.settings import Kernel, Line

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be (or good to know), and the command that mends it."""

    id: str
    level: Level
    text: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Others:
    """Other programs that have to do with host ports here."""

    crio: bool = False
    crio_mapping: Line | None = None
    podman: bool = False
    podman_conf: Mapping[str, Line] = field(default_factory=dict)
    nerdctl: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class HelperFacts:
    """What the running helper says; ``document`` None: none runs.

    ``differences`` as ``check`` gives them, ``dead`` and ``unjudged`` as ``gc`` does,
    ``stray`` ports held for no attachment, ``owners`` who has a port that waits;
    ``breaking``: repairs were many, the last of them a moment ago.
    """

    document: Mapping[str, Any] | None = None
    differences: Sequence[Mapping[str, Any]] = ()
    dead: Sequence[Mapping[str, Any]] = ()
    unjudged: Sequence[Mapping[str, Any]] = ()
    stray: Sequence[str] = ()
    owners: Mapping[int, str] = field(default_factory=dict)
    breaking: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The installation: files, folders, labels, service."""

    run_dir: str = "/run/cni-hostport"
    run_dir_mount: tuple[str, str] = ("/run", "tmpfs")
    damaged: Sequence[str] = ()
    plugins: Mapping[str, str] = field(default_factory=dict)
    """State of the plugin by folder: ``ok``, ``missing``, ``dangling``, ``not executable``."""
    labels: Sequence[tuple[str, str, str]] = ()
    systemd: bool = False
    unit_enabled: str = ""
    version: str = ""
    glibc_wanted: tuple[int, int] | None = None
    glibc: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """All of it."""

    rules: Ruleset = field(default_factory=Ruleset)
    kernel: Kernel = field(default_factory=Kernel)
    conflists: Sequence[ConfFile] = ()
    others: Others = field(default_factory=Others)
    helper: HelperFacts = field(default_factory=HelperFacts)
    place: Place = field(default_factory=Place)
    conflicts: Sequence[str] = ()
