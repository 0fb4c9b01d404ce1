"""Which steps lead from what is on a node to what is wanted there. Pure.

Order of an installation: the program, the link in the plugin folders, the
service, the running helper, and the conflists last, so that no conflist ever
names a plugin that is not there. Removal goes the other way round. A step whose
end is reached already is left out, so a second run does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cni_hostport import cni_conflist
from cni_hostport.installing import unit
from cni_hostport.installing.steps import (
    CopyBundle,
    EndHelper,
    Labels,
    Link,
    Remove,
    RemoveFolder,
    ReplaceHelper,
    Step,
    Systemctl,
    Write,
)

PLUGIN, PORTMAP = "cni-hostport", "portmap"
BACKUP = ".before-cni-hostport"
"""Ending of a conflist's copy: one that no runtime takes for a configuration."""

MANIFEST = "install.json"


class CannotInstall(Exception):
    """Why nothing was done; one sentence with what to do instead."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What ``install`` is asked for. ``bundle`` empty: link ``program`` instead of copying."""

    version: str
    bundle: str
    program: str
    prefix: str
    bin_dirs: tuple[str, ...]
    command: str
    service: bool
    conflists: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Present:
    """What the node has: bundle folders by name with their digest, links, files by path."""

    bundle_digest: str = ""
    folders: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str | None] = field(default_factory=dict)
    systemd: bool = False
    enabled: bool = False
    helper: bool = False
    selinux: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an installation left on the node, for its removal."""

    folder: str = ""
    previous: str = ""
    links: tuple[str, ...] = ()
    unit: str = ""
    conflists: tuple[str, ...] = ()

    def text(self) -> str:
        """As it is stored."""
        content = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(content, indent=2) + "\n"

    @classmethod
    def of(cls, text: str | None) -> Manifest:
        """From a stored text; an empty one from anything else."""
        try:
            content = json.loads(text or "{}")
            return cls(
                str(content.get("folder", "")),
                str(content.get("previous", "")),
                tuple(map(str, content.get("links", ()))),
                str(content.get("unit", "")),
                tuple(map(str, content.get("conflists", ()))),
            )
        except (ValueError, AttributeError, TypeError):
            return cls()


def folder_name(version: str, digest: str, present: Mapping[str, str]) -> str:
    """The bundle's folder: the version; with a digest where another build has that name."""
    if present.get(version, digest) == digest:
        return version
    return f"{version}+{digest[:8]}"


def install(wanted: Wanted, present: Present) -> list[Step]:
    """Steps of an installation or an upgrade. Raises CannotInstall with nothing done."""
    edits = [s for path in wanted.conflists if (s := edit(path, present.files.get(path)))]
    steps: list[Step] = []
    folder, program = "", wanted.program
    if wanted.bundle:
        name = folder_name(wanted.version, present.bundle_digest, present.folders)
        folder = f"{wanted.prefix}/{name}"
        program = f"{folder}/{PLUGIN}"
        if name not in present.folders:
            steps.append(CopyBundle(wanted.bundle, folder))
    links = _links(wanted, present, program)
    steps += [s for s in links if s.before != s.target]
    if steps and present.selinux:
        steps.append(Labels((*((folder,) if folder else ()), *(s.path for s in links))))
    steps += _service(wanted, present, program, bool(steps))
    steps += edits
    manifest_path = f"{wanted.prefix}/{MANIFEST}"
    before = present.files.get(manifest_path)
    old = Manifest.of(before)
    manifest = Manifest(
        folder,
        old.previous if old.folder == folder else old.folder,
        tuple(dict.fromkeys([*old.links, *(s.path for s in links)])),
        f"{unit.FOLDER}/{unit.NAME}" if wanted.service and present.systemd else old.unit,
        tuple(dict.fromkeys([*old.conflists, *(e.path for e in edits)])),
    )
    if before != manifest.text():
        steps.append(Write(manifest_path, before, manifest.text()))
    return steps + _surplus(wanted, present, manifest)


def _links(wanted: Wanted, present: Present, program: str) -> list[Link]:
    paths = [f"{d}/{PLUGIN}" for d in wanted.bin_dirs]
    command = wanted.command
    there = present.links.get(command, wanted.prefix) or ""  # None: a file of somebody else's
    if command and there.startswith(wanted.prefix):
        paths.append(command)
    return [Link(p, program, present.links.get(p)) for p in paths]


def _service(wanted: Wanted, present: Present, program: str, changed: bool) -> list[Step]:
    """The unit where systemd runs, else a hand-over from the helper that runs already."""
    if wanted.service and present.systemd:
        path = f"{unit.FOLDER}/{unit.NAME}"
        text = unit.text(f"{wanted.bin_dirs[0]}/{PLUGIN}")
        steps: list[Step] = []
        if present.files.get(path) != text:
            steps += [Write(path, present.files.get(path), text), Systemctl(("daemon-reload",))]
        if not present.enabled:
            steps.append(Systemctl(("enable", unit.NAME)))
        if steps or changed or not present.helper:
            steps.append(Systemctl(("restart", unit.NAME)))
        return steps
    if present.helper and changed:
        return [ReplaceHelper(program)]
    return []


def _surplus(wanted: Wanted, present: Present, manifest: Manifest) -> list[Step]:
    """Older bundles; the one before this stays, since calls under way still run it."""
    keep = {manifest.folder, manifest.previous}
    paths = [f"{wanted.prefix}/{name}" for name in present.folders]
    return [RemoveFolder(p) for p in paths if manifest.folder and p not in keep]


def edit(path: str, text: str | None) -> Write | None:
    """Exchange portmap for this plugin in one conflist; None where that is done already."""
    if text is None:
        raise CannotInstall(f"{path} cannot be read; name a conflist of this node")
    try:
        found = cni_conflist.read(text)
    except cni_conflist.NotAConflist as error:
        raise CannotInstall(f"{path} is no network configuration: {error}") from None
    ours, theirs = found.of_type(PLUGIN), found.of_type(PORTMAP)
    if ours and theirs:
        raise CannotInstall(
            f"{path} names both: {PLUGIN} in line {ours[0].line}, {PORTMAP} in line "
            f"{theirs[0].line}; take one of them out"
        )
    if len(ours) + len(theirs) > 1:
        raise CannotInstall(f"{path} names {(ours or theirs)[0].type} more than once")
    if not ours and not theirs:
        raise CannotInstall(
            f"{path} names no {PORTMAP}; add this after the plugin that gives the address: "
            f'{{ "type": "{PLUGIN}", "capabilities": {{ "portMappings": true }} }}'
        )
    if ours:
        return None
    return Write(path, text, cni_conflist.retype(text, PORTMAP, PLUGIN), path + BACKUP)


def uninstall(
    manifest: Manifest,
    files: Mapping[str, str | None],
    prefix: str,
    run_dir: str,
    *,
    systemd: bool,
    give_back_only: bool = False,
) -> list[Step]:
    """Steps back; with ``give_back_only`` the conflists alone, since pods still need the rest."""
    steps: list[Step] = []
    for path in manifest.conflists:
        steps += _give_back(path, files.get(path), files.get(path + BACKUP))
    if give_back_only:
        return steps
    if manifest.unit:
        if systemd:
            steps.append(Systemctl(("disable", "--now", unit.NAME), may_fail=True))
        steps.append(Remove(manifest.unit))
        if systemd:
            steps.append(Systemctl(("daemon-reload",)))
    steps.append(EndHelper(run_dir))
    steps += [Remove(path) for path in manifest.links]
    steps.append(RemoveFolder(prefix))
    return steps


def _give_back(path: str, now: str | None, backup: str | None) -> list[Step]:
    """Steps to portmap's conflist as it was; where somebody edited it since, the one word only."""
    if now is None:
        return []
    try:
        untouched = backup is not None and cni_conflist.retype(backup, PORTMAP, PLUGIN) == now
        after = cni_conflist.retype(now, PLUGIN, PORTMAP)
    except cni_conflist.NotAConflist:
        return []
    if untouched and backup is not None:
        return [Write(path, now, backup), Remove(path + BACKUP)]
    return [Write(path, now, after)] if after != now else []


def summary(steps: Sequence[Step]) -> str:
    """The steps as ``--dry-run`` prints them, with what changes in files."""
    lines = []
    for step in steps:
        lines.append(f"would {step}" if not isinstance(step, Write) else f"would {step}:")
        if isinstance(step, Write):
            lines.append(step.diff())
    return "\n".join(lines)
