"""Findings about the helper, its attachments and the installation. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cni_hostport.doctor.facts import Facts, Finding, HelperFacts, Place

VOLATILE = ("tmpfs", "ramfs", "rootfs")
_SHOWN = 5


def findings(facts: Facts) -> Iterator[Finding]:
    """Everything about what runs and lies here."""
    yield from _helper(facts)
    yield from _attachments(facts.helper)
    yield from _place(facts.place)


def _helper(facts: Facts) -> Iterator[Finding]:
    document = facts.helper.document
    if document is None:
        yield Finding(
            "no-helper",
            "info",
            f"no helper answers in {facts.place.run_dir}; the first plugin call starts one",
            "systemctl start cni-hostport" if facts.place.systemd else "cni-hostport helper &",
        )
        return
    if problem := document["helper"]["problem"]:
        yield Finding(
            "helper-problem",
            "error",
            f"the helper cannot do its work: {problem}",
            "cni-hostport check; its log says more (journalctl -u cni-hostport, or "
            f"{facts.place.run_dir}/helper.log)",
        )
    if facts.place.version and document["version"] != facts.place.version:
        yield Finding(
            "other-version",
            "warning",
            f"the helper that runs is {document['version']}, the program is {facts.place.version}",
            "cni-hostport install",
        )
    if facts.helper.breaking:
        repairs = document["repairs"]
        yield Finding(
            "keeps-breaking",
            "warning",
            f"{repairs['count']} repairs, the last a moment ago ({repairs['last']}): somebody "
            "keeps removing or resetting what host ports need",
            "journalctl -u cni-hostport | grep 'removed by' names the program (or "
            f"{facts.place.run_dir}/helper.log); make it touch its own tables and links only",
        )
    if document["queue"]:
        yield Finding(
            "queue",
            "warning",
            f"{document['queue']} DELs wait for the helper: it tried and could not do them",
            "cni-hostport doctor again in a minute; the helper's log names each",
        )


def _attachments(helper: HelperFacts) -> Iterator[Finding]:
    for entry in _first(helper.differences):
        missing = "; ".join(entry["missing"])
        yield Finding(
            "differs",
            "error",
            f"{_who(entry)} is not as it was made: {missing}",
            "cni-hostport check again in a minute: the helper mends by itself, and its log "
            "names who keeps removing it",
        )
    for entry in _first(helper.dead):
        yield Finding(
            "stale",
            "warning",
            f"{_who(entry)} has no network namespace any more and still has "
            f"{', '.join(entry['ports'])}: its runtime sent no DEL",
            "cni-hostport gc",
        )
    for entry in _first(helper.unjudged):
        yield Finding(
            "unjudged",
            "info",
            f"{_who(entry)}: whether its namespace still lives cannot be told (its caller had "
            "mounts of its own, or the kernel is older than 5.14); it is never reclaimed",
            "cni-hostport gc --dry-run",
        )
    for port in _first(helper.stray):
        yield Finding(
            "held-unmapped",
            "error",
            f"{port} is held and belongs to no attachment",
            "cni-hostport helper --replace",
        )
    yield from _waiting(helper)


def _waiting(helper: HelperFacts) -> Iterator[Finding]:
    mappings = helper.document["mappings"] if helper.document else ()
    for mapping in _first([m for m in mappings if m["held"] == "waiting"]):
        number = mapping["hostPort"]
        owner = helper.owners.get(number, "only connections or TIME_WAIT have it")
        yield Finding(
            "mapped-unheld",
            "warning",
            f"host port {number}/{mapping['protocol']} of {_who(mapping)} is mapped and not "
            f"reserved: {owner}",
            f"stop that process; the port is taken when free: cni-hostport status --port {number}",
        )


def _place(place: Place) -> Iterator[Finding]:
    point, kind = place.run_dir_mount
    if kind and kind not in VOLATILE:
        yield Finding(
            "run-dir-persistent",
            "warning",
            f"the run directory {place.run_dir} is on {point} ({kind}), which a reboot keeps: "
            "records would outlive the kernel's rules and the pods",
            "unset CNI_HOSTPORT_RUN_DIR, or mount a tmpfs there",
        )
    for name in _first(place.damaged):
        yield Finding(
            "damaged-record",
            "warning",
            f"{place.run_dir}/records/{name} cannot be read and was set aside: its pod's ports "
            "are not held",
            f"delete the pod, then rm {place.run_dir}/records/{name}",
        )
    for path, found, wanted in _first(place.labels):
        yield Finding(
            "selinux-label",
            "error",
            f"{path} has the SELinux label {found}, the policy says {wanted}: the runtime may "
            "not be allowed to run it",
            f"restorecon -R {path}",
        )
    if place.systemd and place.unit_enabled != "enabled":
        yield Finding(
            "unit-not-enabled",
            "warning",
            f"the unit cni-hostport is {place.unit_enabled or 'not installed'}: after a reboot "
            "the first plugin call starts a helper, and nothing keeps its sockets when it dies",
            "systemctl enable --now cni-hostport" if place.unit_enabled else "cni-hostport install",
        )
    if place.glibc_wanted and place.glibc and place.glibc_wanted > place.glibc:
        wanted, there = (".".join(map(str, v)) for v in (place.glibc_wanted, place.glibc))
        yield Finding(
            "glibc",
            "error",
            f"the installed bundle needs glibc {wanted}, this node has {there}: the plugin "
            "cannot be loaded",
            "build the bundle on a system as old as this node, or install with pip",
        )


def _first(items: Sequence[Any]) -> Sequence[Any]:
    """A few of many: the doctor names kinds of trouble, ``check`` and ``gc`` list all."""
    return items[:_SHOWN]


def _who(entry: Mapping[str, Any]) -> str:
    pod = "/".join(filter(None, (entry["namespace"], entry["pod"])))
    container = f"container {entry['containerID'][:12]} on {entry['network']}"
    return f"{pod} ({container})" if pod else container
