"""Does the steps of an installation, one after the other, on the node or below a mounted one.

Decides nothing: ``installing/plan.py`` has. Stops at the first step that fails;
every step before it is done whole, so the same command can be given again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from functools import singledispatchmethod
from pathlib import Path

from cni_hostport import shim
from cni_hostport.cli import client
from cni_hostport.host import files, selinux, startup, systemd
from cni_hostport.host.confdirs import inside
from cni_hostport.installing import steps as s

PATIENCE = 25.0
"""Seconds a helper has to take over (its predecessor gives it 20)."""


class StepFailed(Exception):
    """Which step, and why."""


class Apply:
    """Does steps; ``root`` is where the node's file system is mounted."""

    def __init__(self, root: Path, say: Callable[[str], None]) -> None:
        self._root = root
        self._say = say

    def all(self, steps: list[s.Step]) -> None:
        """Do them in order. Raises StepFailed."""
        for step in steps:
            try:
                self.do(step)
            except (OSError, shutil.Error) as error:
                raise StepFailed(f"cannot {step}: {error}") from error
            self._say(f"done: {step}")

    @singledispatchmethod
    def do(self, step: object) -> None:
        """Do one step. Raises OSError, StepFailed."""
        raise NotImplementedError(type(step).__name__)

    @do.register
    def _(self, step: s.CopyBundle) -> None:
        target = inside(self._root, step.target)
        if target.parent.is_dir():
            files.sweep(target.parent)
        files.copy_folder(Path(step.source), target)

    @do.register
    def _(self, step: s.Link) -> None:
        files.link(inside(self._root, step.path), step.target)

    @do.register
    def _(self, step: s.Write) -> None:
        path = inside(self._root, step.path)
        if step.backup and step.before is not None:
            mode = path.stat().st_mode & 0o777
            files.write(inside(self._root, step.backup), step.before.encode(), mode)
        files.write(path, step.after.encode())

    @do.register
    def _(self, step: s.Remove) -> None:
        files.remove(inside(self._root, step.path))

    @do.register
    def _(self, step: s.RemoveFolder) -> None:
        files.remove_folder(inside(self._root, step.path))

    @do.register
    def _(self, step: s.Labels) -> None:
        if problem := selinux.restore(step.paths):
            raise StepFailed(f"SELinux labels: {problem}")

    @do.register
    def _(self, step: s.Systemctl) -> None:
        problem = systemd.run(*step.words)
        if problem and not step.may_fail:
            raise StepFailed(problem)

    @do.register
    def _(self, step: s.ReplaceHelper) -> None:
        run_dir = os.fsdecode(shim.run_dir())
        before = client.document("status")["helper"]["pid"]
        command = [f"{step.program}-helper"]
        if not os.access(command[0], os.X_OK):
            command = shim.program()
        pid = startup.spawn([*command, "helper", "--replace"], f"{run_dir}/{startup.LOG_NAME}")
        _wait_for_successor(before, pid, f"{run_dir}/{startup.LOG_NAME}")

    @do.register
    def _(self, step: s.EndHelper) -> None:
        _end_helper(Path(step.run_dir))
        shutil.rmtree(step.run_dir, ignore_errors=True)


def _wait_for_successor(before: int, pid: int, log: str) -> None:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(client.NoHelper, OSError):
            if client.document("status", 2.0)["helper"]["pid"] != before:
                return
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            raise StepFailed(f"the new helper ended with {code}; its log: {log}")
        time.sleep(0.02)
    raise StepFailed(f"the new helper did not take over within {PATIENCE:.0f} s; its log: {log}")


def _end_helper(run_dir: Path) -> None:
    """Ask the helper to end, wait until it has, then insist."""
    try:
        pid = int((run_dir / "helper.lock").read_text() or 0)
    except (OSError, ValueError):
        return
    for number, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 2.0)):
        if not startup.is_helper(pid):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        end = time.monotonic() + patience
        while startup.is_helper(pid) and time.monotonic() < end:
            time.sleep(0.01)


def version_of(bundle: Path) -> str:
    """What a bundle says of itself; proves that it runs here. Raises StepFailed."""
    from cni_hostport.host import commands

    program = str(bundle / shim.HELPER)
    try:
        done = commands.run([program, "version", "--json"], None, 30.0).check()
        return str(json.loads(done.stdout)["version"])
    except (commands.CommandError, ValueError, KeyError) as error:
        raise StepFailed(f"{bundle} is no bundle that runs on this node: {error}") from error
