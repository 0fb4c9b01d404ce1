"""Steps of install and uninstall, from facts alone."""

from dataclasses import replace
from pathlib import Path

import pytest

from cni_hostport.installing import plan, unit
from cni_hostport.installing.plan import CannotInstall, Manifest, Present, Wanted
from cni_hostport.installing.steps import (
    CopyBundle,
    EndHelper,
    Link,
    Remove,
    RemoveFolder,
    ReplaceHelper,
    Systemctl,
    Write,
)

CONF = "/etc/cni/net.d/10-x.conflist"
TEXT = '{"plugins": [{"type": "bridge"}, {"type": "portmap", "snat": true}]}\n'
EDITED = TEXT.replace("portmap", "cni-hostport")
WANTED = Wanted(
    version="1.2.0",
    bundle="/src/bundle",
    program="",
    prefix="/opt/cni-hostport",
    bin_dirs=("/opt/cni/bin",),
    command="/usr/local/bin/cni-hostport",
    service=True,
    conflists=(CONF,),
)
FRESH = Present(bundle_digest="d" * 64, files={CONF: TEXT})
PROGRAM = "/opt/cni-hostport/1.2.0/cni-hostport"


def after(wanted, present, steps):
    """What the node has when the steps are done."""
    folders, links, files = dict(present.folders), dict(present.links), dict(present.files)
    enabled, helper = present.enabled, present.helper
    for step in steps:
        match step:
            case CopyBundle(_, target):
                folders[target.rpartition("/")[2]] = present.bundle_digest
            case RemoveFolder(path):
                folders.pop(path.rpartition("/")[2])
            case Link(path, target):
                links[path] = target
            case Write(path, before, text, backup):
                assert files.get(path) == before
                files[path] = text
                if backup:
                    files[backup] = before
            case Systemctl(("enable", _)):
                enabled = True
            case Systemctl(("restart", _)):
                helper = True
    return replace(
        present, folders=folders, links=links, files=files, enabled=enabled, helper=helper
    )


def test_a_fresh_node_without_systemd():
    steps = plan.install(WANTED, FRESH)
    assert [type(s) for s in steps] == [CopyBundle, Link, Link, Write, Write]
    assert steps[0] == CopyBundle("/src/bundle", "/opt/cni-hostport/1.2.0")
    assert steps[1] == Link("/opt/cni/bin/cni-hostport", PROGRAM)
    assert steps[3] == Write(CONF, TEXT, EDITED, CONF + ".before-cni-hostport")
    assert plan.install(WANTED, after(WANTED, FRESH, steps)) == []


def test_a_fresh_node_with_systemd():
    present = replace(FRESH, systemd=True)
    steps = plan.install(WANTED, present)
    words = [s.words[0] for s in steps if isinstance(s, Systemctl)]
    assert words == ["daemon-reload", "enable", "restart"]
    written = next(s for s in steps if isinstance(s, Write))
    assert written.path == "/etc/systemd/system/cni-hostport.service"
    assert "ExecStart=/opt/cni/bin/cni-hostport helper --replace\n" in written.after
    assert plan.install(WANTED, after(WANTED, present, steps)) == []


@pytest.mark.parametrize("systemd", [False, True])
def test_an_upgrade_replaces_the_helper_and_keeps_one_bundle(systemd):
    present = replace(FRESH, systemd=systemd)
    present = after(WANTED, present, plan.install(WANTED, present))
    present = replace(present, bundle_digest="e" * 64, helper=True)
    newer = replace(WANTED, version="1.3.0")
    steps = plan.install(newer, present)
    kinds = [type(s) for s in steps]
    assert RemoveFolder not in kinds, "calls under way still run the one before"
    if systemd:
        assert Systemctl(("restart", unit.NAME)) in steps
    else:
        assert ReplaceHelper("/opt/cni-hostport/1.3.0/cni-hostport") in steps
    present = after(newer, present, steps)
    assert plan.install(newer, present) == []
    newest = replace(WANTED, version="1.4.0")
    steps = plan.install(newest, replace(present, bundle_digest="f" * 64))
    assert RemoveFolder("/opt/cni-hostport/1.2.0") in steps
    assert RemoveFolder("/opt/cni-hostport/1.3.0") not in steps


def test_another_build_of_the_same_version_gets_a_folder_of_its_own():
    present = after(WANTED, FRESH, plan.install(WANTED, FRESH))
    steps = plan.install(WANTED, replace(present, bundle_digest="e" * 64))
    assert CopyBundle("/src/bundle", "/opt/cni-hostport/1.2.0+eeeeeeee") in steps


def test_somebody_elses_command_is_left_alone():
    present = replace(FRESH, links={WANTED.command: None})
    assert not [
        s for s in plan.install(WANTED, present) if getattr(s, "path", "") == WANTED.command
    ]
    present = replace(FRESH, links={WANTED.command: "/somewhere/else"})
    assert not [
        s for s in plan.install(WANTED, present) if getattr(s, "path", "") == WANTED.command
    ]


def test_without_a_bundle_the_command_is_linked():
    wanted = replace(WANTED, bundle="", program="/venv/bin/cni-hostport", conflists=())
    steps = plan.install(wanted, Present())
    assert steps[0] == Link("/opt/cni/bin/cni-hostport", "/venv/bin/cni-hostport")
    assert CopyBundle not in [type(s) for s in steps]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("{", "no network configuration: no JSON"),
        (TEXT.replace("bridge", "cni-hostport"), "names both: cni-hostport in line 1"),
        (TEXT.replace("bridge", "portmap"), "portmap more than once"),
        (TEXT.replace("portmap", "tuning"), '"portMappings": true'),
    ],
)
def test_a_conflist_that_cannot_be_edited_stops_everything(text, words):
    with pytest.raises(CannotInstall) as refused:
        plan.install(WANTED, replace(FRESH, files={CONF: text}))
    assert words in str(refused.value)
    assert CONF in str(refused.value)


def installed():
    present = after(WANTED, FRESH, plan.install(WANTED, FRESH))
    return Manifest.of(present.files[f"{WANTED.prefix}/{plan.MANIFEST}"]), dict(present.files)


def test_uninstall_gives_the_conflist_back_first_and_removes_everything():
    manifest, files = installed()
    steps = plan.uninstall(manifest, files, WANTED.prefix, "/run/x", systemd=False)
    assert steps == [
        Write(CONF, EDITED, TEXT),
        Remove(CONF + plan.BACKUP),
        EndHelper("/run/x"),
        Remove("/opt/cni/bin/cni-hostport"),
        Remove("/usr/local/bin/cni-hostport"),
        RemoveFolder("/opt/cni-hostport"),
    ]
    assert (
        plan.uninstall(manifest, files, "/p", "/r", systemd=False, give_back_only=True) == steps[:2]
    )


def test_uninstall_keeps_what_somebody_edited_since():
    manifest, files = installed()
    files[CONF] = EDITED.replace("true", "false")
    steps = plan.uninstall(manifest, files, WANTED.prefix, "/run/x", systemd=False)
    assert steps[0] == Write(CONF, files[CONF], TEXT.replace("true", "false"))
    assert Remove(CONF + plan.BACKUP) not in steps


@pytest.mark.parametrize("text", [None, "no JSON", TEXT])
def test_uninstall_passes_over_a_conflist_that_is_not_ours_any_more(text):
    manifest, files = installed()
    files[CONF] = text
    steps = plan.uninstall(manifest, files, WANTED.prefix, "/run/x", systemd=False)
    assert not [s for s in steps if isinstance(s, Write)]


def test_the_dry_run_shows_the_difference():
    text = plan.summary(plan.install(WANTED, FRESH))
    assert "would copy the bundle /src/bundle to /opt/cni-hostport/1.2.0" in text
    assert f"--- {CONF}\n+++ {CONF}\n" in text
    assert '-{"plugins": [{"type": "bridge"}, {"type": "portmap"' in text
    assert '+{"plugins": [{"type": "bridge"}, {"type": "cni-hostport"' in text


def test_every_step_is_a_sentence():
    for present in (FRESH, replace(FRESH, systemd=True, helper=True, selinux=True)):
        for line in plan.summary(plan.install(WANTED, present)).splitlines():
            if line.startswith("would "):
                assert line.split()[1] in {"copy", "link", "write", "remove", "run"}, line


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"links": 5}', '"x"'])
def test_a_broken_manifest_is_an_empty_one(text):
    assert plan.Manifest.of(text) == Manifest()


def test_the_unit_is_the_packaged_one():
    packaged = Path(__file__).parents[3] / "packaging/cni-hostport.service"
    assert unit.text("/opt/cni/bin/cni-hostport") == packaged.read_text()
