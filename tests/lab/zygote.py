"""Starts helpers from source in a fraction of a second, and kills them where asked.

A process of a lab node that has everything imported and forks one helper for each
line ``start`` on its standard input; the helper runs the project's own code with
one difference: after each effect on the machine it looks for the file
CHP_FAULT_FILE. Where that holds ``kill N`` it dies by SIGKILL after its N-th effect
since the file appeared; where it holds ``stop N`` it stops there. The names of
effects go into CHP_FAULT_FILE.log. Prints ``up PID`` and, when a helper ends,
``down PID STATUS``.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import prometheus_client.openmetrics.exposition  # noqa: F401
from pydantic import TypeAdapter  # noqa: F401

from cni_hostport.cli import helper as command
from cni_hostport.helper import connection, machine, parts
from cni_hostport.helper import run as _run  # noqa: F401
from cni_hostport.host import conntrack, nfnetlink, queue, records, rtnl

FAULTS = os.environ.get("CHP_FAULT_FILE", "/run/fault")
_count = 0
_order = ""


def effect(name: str) -> None:
    """One effect was just done."""
    global _count, _order
    try:
        with open(FAULTS) as file:
            order = file.read().strip()
    except OSError:
        _order = ""
        return
    if order != _order:
        _order, _count = order, 0
    _count += 1
    with open(f"{FAULTS}.log", "a") as log:
        log.write(f"{_count} {name}\n")
    kind, _, number = order.partition(" ")
    if _count == int(number or 0):
        try:
            os.unlink(FAULTS)
        except FileNotFoundError:  # taken back meanwhile
            return
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def watched(owner: Any, name: str) -> None:
    """Report each return of a function as an effect."""
    plain: Callable[..., Any] = getattr(owner, name)
    label = f"{getattr(owner, '__name__', owner)}.{name}"

    @functools.wraps(plain)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        effect(label)
        return result

    setattr(owner, name, wrapper)


EFFECTS: tuple[tuple[Any, str], ...] = (
    (machine, "open_holder"),
    (machine, "replace_wildcard"),
    (machine, "replace_specific"),
    (machine.KernelMachine, "pod_link"),
    (records.RecordStore, "prepare"),
    (records.RecordStore, "commit"),
    (records.RecordStore, "discard"),
    (records.RecordStore, "delete"),
    (nfnetlink.Nftables, "apply"),
    (nfnetlink.Nftables, "delete_tables"),
    (parts.nftcmd, "load"),
    (machine.KernelMachine, "set_route_localnet"),
    (rtnl.Rtnl, "set_hairpin"),
    (conntrack.Conntrack, "drop_udp_to"),
    (conntrack.Conntrack, "drop_udp_from"),
    (queue, "remove"),
    (queue, "cancel"),
    (connection.Connection, "answer"),
)


def start() -> int:
    """Fork a helper; its process id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for number in range(3, 64):
        try:
            os.close(number)
        except OSError:
            continue
    if limit := int(os.environ.get("CHP_NOFILE", "0")):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    try:
        status = command.main([])
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
        status = 70
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    """Serve standard input."""
    for owner, name in EFFECTS:
        watched(owner, name)
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, argument = line.strip().partition(" ")
        if word == "env":
            name, _, value = argument.partition("=")
            os.environ[name] = value
            continue
        pid = start()
        print(f"up {pid}", flush=True)
        _, status = os.waitpid(pid, 0)  # one at a time
        print(f"down {pid} {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
