"""What operators' commands may ask of the helper, by name.

Reads run on the event loop; what touches the kernel or changes something is a
job of the worker.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from cni_hostport.errors import HostPortError
from cni_hostport.helper.answer import Answer
from cni_hostport.helper.parts import Helper
from cni_hostport.hostport.record import Record

Operation = Callable[[Mapping[str, object]], Answer]


def reads(helper: Helper) -> dict[str, Operation]:
    """Operations that never wait."""
    return {
        "ping": lambda _: Answer(0, b"{}\n"),
        "status": lambda _: as_json(helper.status.document()),
        "metrics": lambda _: Answer(0, helper.metrics.text()),
    }


def pages(helper: Helper) -> dict[str, Callable[[], tuple[int, bytes]]]:
    """What is shown over HTTP where that is asked for."""

    def health() -> tuple[int, bytes]:
        problem = helper.reconciler.problem
        return (503, f"{problem}\n".encode()) if problem else (200, b"ok\n")

    return {"/metrics": lambda: (200, helper.metrics.text()), "/healthz": health}


def jobs(helper: Helper) -> dict[str, Operation]:
    """Operations that take their turn behind the calls."""
    return {
        "check": lambda _: as_json(check(helper)),
        "gc": lambda wish: as_json(gc(helper, dry_run=bool(wish.get("dryRun")))),
        "stray": lambda _: as_json({"ports": stray(helper)}),
        "leave": lambda wish: as_json(leave(helper, wish)),
    }


def as_json(document: object) -> Answer:
    """A document as one line of JSON."""
    return Answer(0, json.dumps(document).encode() + b"\n")


def check(helper: Helper) -> dict[str, object]:
    """Every attachment compared with the kernel, as CHECK does."""
    manager = helper.manager
    found = []
    records = list(manager.registry)
    for record in records:
        missing = manager.check_record(record)
        if missing:
            found.append({**describe(record), "missing": missing})
    return {"checked": len(records), "differences": found}


def gc(helper: Helper, *, dry_run: bool) -> dict[str, object]:
    """Attachments whose network namespace is gone, removed unless only asked for."""
    removed, failed = [], []
    for record in helper.manager.dead():
        entry = describe(record)
        try:
            if not dry_run:
                helper.manager.detach(record.key)
            removed.append(entry)
        except HostPortError as error:
            failed.append({**entry, "error": str(error)})
    unknown = [describe(r) for r in helper.manager.registry if r.netns_cookie is None]
    return {"dryRun": dry_run, "removed": removed, "failed": failed, "unknown": unknown}


def stray(helper: Helper) -> list[str]:
    """Ports held for attachments that nobody knows."""
    manager = helper.manager
    return [str(p) for k, p, _ in manager.holds.items() if manager.registry.get(k) is None]


def leave(helper: Helper, wish: Mapping[str, object]) -> dict[str, object]:
    """Prepare to be uninstalled: the dead go, with ``force`` all go, then the shared rules."""
    manager = helper.manager
    if not wish.get("dryRun"):
        gc(helper, dry_run=False)
        for record in list(manager.registry) if wish.get("force") else ():
            manager.detach(record.key)
        for backend in manager.backends.values():
            backend.retire()
    dead = {r.key for r in manager.dead()}
    return {"left": [describe(r) for r in manager.registry if r.key not in dead]}


def describe(record: Record) -> dict[str, object]:
    """Who an attachment is, for a list."""
    attachment, identity = record.attachment, record.attachment.identity
    return {
        "network": identity.network,
        "containerID": identity.container_id,
        "ifname": identity.ifname,
        "namespace": attachment.pod.namespace,
        "pod": attachment.pod.name,
        "ports": [str(m) for m in attachment.mappings],
        "netns": attachment.netns,
    }
