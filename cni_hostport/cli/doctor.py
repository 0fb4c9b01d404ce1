"""``cni-hostport doctor``: can this node do it, and what stands in the way.

Gathers facts (``host/``) and prints what ``doctor/`` concludes. Changes nothing;
starts no helper.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cni_hostport import __version__, shim
from cni_hostport.cli import client, conflicts, outsiders, statusview, terminal
from cni_hostport.cli.options import parser
from cni_hostport.cni_json import clean
from cni_hostport.doctor import diagnosis
from cni_hostport.doctor.facts import Facts, Finding, HelperFacts, Others, Place
from cni_hostport.host import (
    cnicache,
    commands,
    confdirs,
    glibc,
    ruleset,
    selinux,
    settings,
    systemd,
)
from cni_hostport.installing import plan, unit

EPILOG = """\
Each finding says what was found, where, and the command that mends it. It looks at
nft and iptables, kernel settings, the FORWARD policy, conflists (with line numbers),
portmap's and CRI-O's own mappings, podman and nerdctl, the helper and its
attachments, the run directory, SELinux labels, the service and the C library.
Nothing is changed; our tables are tried in a network namespace that nobody sees.

exit status: 0 nothing is wrong, 1 something is, 2 usage

examples:
  cni-hostport doctor
  cni-hostport doctor --json | jq -r '.findings[] | select(.level == "error") | .mend'
"""

BREAKING_REPAIRS, BREAKING_SECONDS = 4, 120.0
"""So many repairs, the last so recent, are somebody's doing and no accident."""

_COLOURS = {"error": terminal.RED, "warning": terminal.YELLOW, "info": terminal.BOLD}


def main(argv: Sequence[str]) -> int:
    """Look, conclude, print."""
    it = parser("doctor", "Find out what stands in the way of host ports on this node.", EPILOG)
    it.add_argument("--json", action="store_true", help="as one JSON object")
    arguments = it.parse_args(argv)
    findings = diagnosis.diagnose(gather())
    well = diagnosis.healthy(findings)
    if arguments.json:
        print(json.dumps({"ok": well, "findings": [asdict(f) for f in findings]}, indent=2))
    else:
        print(show(findings))
    return 0 if well else 1


def show(findings: Sequence[Finding]) -> str:
    """Findings as people read them."""
    lines = []
    for finding in findings:
        level = terminal.paint(finding.level, _COLOURS[finding.level])
        lines.append(f"{level}: {clean(finding.text)}")
        lines += [f"    mend: {finding.mend}"] if finding.mend else []
    wrong = sum(f.level != "info" for f in findings)
    lines.append("nothing is wrong" if not wrong else f"{wrong} to mend")
    return "\n".join(lines)


def gather() -> Facts:
    """Everything there is to know, asked once."""
    return Facts(
        rules=ruleset.look(),
        kernel=settings.kernel(),
        conflists=confdirs.files(),
        others=_others(),
        helper=_helper(),
        place=_place(),
        conflicts=[line for line in _conflicts() if line.startswith("conflict:")],
    )


def _others() -> Others:
    return Others(
        crio=settings.crio_present(),
        crio_mapping=settings.crio_mapping(),
        podman=commands.find("podman") is not None,
        podman_conf=settings.podman(),
        nerdctl=settings.nerdctl_version(),
    )


def _conflicts() -> list[str]:
    return conflicts.lines() if conflicts.of_pods(cnicache.ports(), plan.PORTMAP) else []


def _helper() -> HelperFacts:
    try:
        document: dict[str, Any] = client.document("status")
        check, gc = client.document("check", 60.0), client.document("gc", 60.0, dryRun=True)
        stray = client.document("stray", 60.0)["ports"]
    except (client.NoHelper, OSError):
        return HelperFacts()
    repairs = document["repairs"]
    recent = abs(time.time() - (repairs["lastTime"] or 0)) < BREAKING_SECONDS
    waiting = {m["hostPort"] for m in document["mappings"] if m["held"] == "waiting"}
    owners = {}
    for port in sorted(waiting) if outsiders.same_namespace(document) else ():
        rows = outsiders.others(port, (), document["helper"]["pid"])
        if rows:
            owners[port] = "; ".join(map(statusview.outsider, rows))
    return HelperFacts(
        document,
        check["differences"],
        gc["removed"],
        gc["unknown"],
        stray,
        owners,
        recent and repairs["count"] >= BREAKING_REPAIRS,
    )


def _place() -> Place:
    run_dir = os.fsdecode(shim.run_dir())
    records = Path(run_dir) / "records"
    damaged = [p.name for p in records.glob("*.damaged")] if records.is_dir() else []
    folders = [confdirs.BIN_DIR, *(d for d in confdirs.K3S_BIN_DIRS if Path(d).is_dir())]
    plugins = {d: _state(Path(d) / plan.PLUGIN) for d in folders}
    installed = [str(Path(d) / plan.PLUGIN) for d, s in plugins.items() if s == "ok"]
    bundle = Path(installed[0]).resolve().parent if installed else None
    labelled = [*installed, *([str(bundle)] if bundle else [])]
    here = systemd.present()
    is_bundle = bundle is not None and (bundle / shim.HELPER).exists()
    return Place(
        run_dir=run_dir,
        run_dir_mount=settings.mount_of(run_dir),
        damaged=sorted(damaged),
        plugins=plugins,
        labels=selinux.wrong(labelled) if labelled and selinux.enabled() else (),
        systemd=here,
        unit_enabled=systemd.state("is-enabled", unit.NAME) if here else "",
        version=__version__,
        glibc_wanted=glibc.floor(bundle) if bundle and is_bundle else None,
        glibc=glibc.of_node(),
    )


def _state(path: Path) -> str:
    if not os.path.lexists(path):
        return "missing"
    if not path.exists():
        return "dangling"
    return "ok" if os.access(path, os.X_OK) else "not executable"
