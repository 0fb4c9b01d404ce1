"""The helper process from start to end: take over, mend, serve, leave.

Order at start: the lock (one helper a run directory), records and sockets,
the queue, comparison with the kernel, and only then the socket, so that the
first answer already describes what is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cni_hostport import shim
from cni_hostport.helper import handover
from cni_hostport.helper import log as logs
from cni_hostport.helper.fdstore import inherited
from cni_hostport.helper.loop import Loop
from cni_hostport.helper.operations import pages
from cni_hostport.helper.parts import Helper
from cni_hostport.helper.reception import listen
from cni_hostport.helper.rundir import RunDir, sign, take_guard, take_lock
from cni_hostport.helper.web import Web
from cni_hostport.host import startup

log = logging.getLogger(__name__)

GUARD_PATIENCE = 2.0
"""Seconds that the namespace's present helper has to end, or to make its run directory anew."""

LOCK_PATIENCE = 0.1
"""Seconds for which a lock whose owner does not answer is tried again: a helper that was killed
while it started a tool leaves it, for an instant, to the tool."""

END_PATIENCE, KILL_PATIENCE = 5.0, 2.0
"""Seconds that a helper which hands nothing over has to end, asked and then killed."""


def raise_descriptor_limit() -> None:
    """Every held port is a descriptor: use all the hard limit gives."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def predecessor(run_dir: Path) -> handover.Inheritance | None:
    """What a running helper hands over; an old one that cannot is asked to end."""
    try:
        return handover.take(run_dir)
    except handover.HandoverFailed as error:
        log.warning("no hand-over: %s", error)
        return None


def wait_for_lock(run_dir: Path) -> int | None:
    """The helper's lock after its present owner was asked to end."""
    pid = _pid_in(run_dir)
    for number, patience in ((signal.SIGTERM, END_PATIENCE), (signal.SIGKILL, KILL_PATIENCE)):
        # one that is stopped (SIGSTOP) heeds nothing but KILL
        if pid and startup.is_helper(pid):
            log.warning("ending the running helper, pid %d (%s)", pid, number.name)
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if (lock := take_lock(run_dir)) is not None:
                return lock
            time.sleep(0.01)
    return None


def wait_for_free_lock(run_dir: Path) -> int | None:
    """The helper's lock if its owner is just gone; None where one serves, or is about to."""
    return _once_free(lambda: take_lock(run_dir), run_dir, LOCK_PATIENCE)


def wait_for_guard(run_dir: Path) -> int | None:
    """The net namespace's lock, once its owner has ended or serves this directory again."""
    return _once_free(take_guard, run_dir, GUARD_PATIENCE)


def _once_free(take: Callable[[], int | None], run_dir: Path, patience: float) -> int | None:
    end = time.monotonic() + patience
    while (lock := take()) is None and time.monotonic() < end and not _answers(run_dir):
        time.sleep(0.01)
    return lock


def answered_by_another(run_dir: Path) -> int:
    """Exit status where the namespace has a helper: 0 if it serves this directory."""
    if _answers(run_dir):
        sys.stderr.write("cni-hostport: a helper is running already\n")
        return 0
    sys.stderr.write(
        "cni-hostport: another run directory's helper serves this network namespace "
        "(is CNI_HOSTPORT_RUN_DIR the same for all callers?)\n"
    )
    return 1


def _answers(run_dir: Path) -> bool:
    try:
        shim.connect(os.fsencode(run_dir), 0.1).close()
    except OSError:
        return False
    return True


def _pid_in(run_dir: Path) -> int:
    try:
        return int((run_dir / "helper.lock").read_text() or 0)
    except (OSError, ValueError):
        return 0


def serve(
    run_dir: Path,
    style: str,
    level: str,
    replace: bool = False,
    metrics: str = "",
    linger: bool = False,
) -> int:
    """Be the helper of this run directory; 0 also when another one is.

    ``metrics`` is an ADDR:PORT for ``/metrics``; ``linger``: after a hand-over stay
    as a process that does nothing until it is told to end.
    """
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    logs.set_up(run_dir, style, level)
    raise_descriptor_limit()
    kept = inherited()
    lock = take_lock(run_dir) if replace else wait_for_free_lock(run_dir)
    if lock is None and not replace:
        sys.stderr.write("cni-hostport: a helper is running already\n")
        return 0
    guard = take_guard()
    if lock is not None and guard is None:
        # its owner may be about to make this directory anew, and needs the lock for that
        os.close(lock)
        guard = wait_for_guard(run_dir)
        lock = take_lock(run_dir) if guard is not None else None
        if lock is None:
            return answered_by_another(run_dir)
    helper = Helper(run_dir)  # before a hand-over: nobody is served while it lasts
    given = predecessor(run_dir) if lock is None else None
    if lock is None:
        lock = given.lock if given else wait_for_lock(run_dir)
    if lock is None:
        sys.stderr.write("cni-hostport: the running helper does not end\n")
        return 1
    sign(lock)
    helper.adopt([*kept, *(given.holders if given else [])])
    helper.restore()
    sock = given.listening if given else listen(run_dir / "helper.sock")
    log.info("serving %d attachments", len(helper.manager.registry))
    if given:
        given.accept()

    # what is there now stays: looking through it for garbage stopped every call for 40 ms
    gc.freeze()
    home = RunDir(run_dir, lock, helper.store, helper.manager.registry)
    home.keep_guard(guard)

    async def main() -> None:
        loop = Loop(helper, sock, home, linger=linger)
        web = asyncio.create_task(Web(metrics, pages(helper)).run()) if metrics else None
        await loop.run(given.clients if given else ())
        if web is not None:
            web.cancel()

    asyncio.run(main())
    return 0
