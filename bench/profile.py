"""Where the milliseconds of one ADD go, from exec to exit: the plugin's and the helper's.

    .venv/bin/python -m bench.profile > bench/PROFILE.md

The plugin is watched by strace, which stops it at a dozen system calls and no others
(--seccomp-bpf); the helper's own code is run in a process of its own in the same node, each
step wrapped in a stopwatch. Medians. Both watch from within and so cost something: the sums
are a little above what the bench measures.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
import time
from pathlib import Path

from bench import calls, plugins, report
from bench.lab import BenchNode

TRACED = "execve,getrandom,openat,connect,sendmsg,recvfrom,write,exit_group"
LINE = re.compile(r"(?:\d+ +)?(\d+\.\d+) (\w+)\((.*)")


# The plugin, from outside


def trace(node, plugin, number, verb="ADD"):
    """[(seconds, system call, rest)] of one call."""
    argv, env, stdin = plugin.call(verb, number, calls.mappings(30080))
    out = node.node.path("/run/trace")
    strace = ["/usr/bin/strace", "-f", "--seccomp-bpf", "-qq", "-ttt", "-e", f"trace={TRACED}"]
    node.ask("run", argv=[*strace, "-o", "/run/trace", *argv], env=env, stdin=stdin)
    found = (LINE.match(line) for line in out.read_text(errors="replace").splitlines())
    return [(float(m[1]), m[2], m[3]) for m in found if m]


def python_steps(events):
    """Milliseconds of each step of the Python plugin."""
    first = {}
    for at, name, rest in events:
        key = name
        if name == "openat" and "/dev/null" in rest:
            key = "script"
        elif name == "openat" and "/proc/self/ns/net" in rest:
            key = "descriptors"
        first.setdefault(key, at)
    marks = [
        ("exec, start of a static program", first["execve"]),
        ("core of the interpreter, to the script's first line", first["getrandom"]),
        ("the script itself, to its first line of work", first["script"]),
        ("connected: stdin read, frame made", first["connect"]),
        ("namespaces opened, request sent, answer waited for", first["descriptors"]),
        ("answer read", first["recvfrom"]),
        ("answer printed", first["write"]),
        ("exit", first["exit_group"]),
    ]
    return [(name, (after - at) * 1000) for (name, at), (_, after) in itertools.pairwise(marks)]


def launcher_steps(events):
    """The same of the launcher."""
    first = {}
    for at, name, _ in events:
        first.setdefault(name, at)
    marks = [
        ("exec, start of a static program", first["execve"]),
        ("connected: stdin read, frame made, namespaces opened", first["connect"]),
        ("request sent, waits for the answer", first["sendmsg"]),
        ("answer printed", first["write"]),
        ("exit", first["exit_group"]),
    ]
    return [(name, (after - at) * 1000) for (name, at), (_, after) in itertools.pairwise(marks)]


def medians(runs):
    """One list of steps out of many."""
    return [
        (name, statistics.median(run[at][1] for run in runs))
        for at, (name, _) in enumerate(runs[0])
    ]


# The helper, from inside


def steps_of_helper():
    """(verb, [(name, owner, attribute)]): what is timed, in the order in which it happens."""
    from cni_hostport import cni
    from cni_hostport.helper import adds, core
    from cni_hostport.helper.machine import KernelMachine
    from cni_hostport.host.conntrack import Conntrack
    from cni_hostport.host.nfnetlink import Nftables
    from cni_hostport.host.records import RecordStore
    from cni_hostport.hostport import nftables
    from cni_hostport.hostport.holds import Holds, PendingChange
    from cni_hostport.hostport.links import LinkKeeper
    from cni_hostport.hostport.manager import HostPortManager
    from cni_hostport.hostport.record import Record
    from cni_hostport.hostport.registry import Registry

    return (
        ("environment and JSON parsed and checked", cni, "parse_call"),
        ("mappings, options, pod addresses out of it", cni, "attachment_of"),
        ("the result made ready", cni, "result_bytes"),
        ("the pod namespace's cookie (path opened, its number asked for)", adds.Adds, "_cookie"),
        ("address events taken in", HostPortManager, "follow_addresses"),
        ("conflicts looked up", HostPortManager, "_settle_conflicts"),
        ("socket opened and bound", Holds, "change"),
        ("route, link and bridge port asked for", KernelMachine, "pod_link"),
        ("link flags planned", LinkKeeper, "plan"),
        ("record as JSON", Record, "model_dump_json"),
        ("record written", RecordStore, "prepare"),
        ("link flags set", LinkKeeper, "use"),
        ("elements planned", nftables, "planned"),
        ("one transaction: built, sent, acknowledged", Nftables, "apply"),
        ("stale UDP flows dropped", Conntrack, "drop_udp_to"),
        ("record renamed into place", RecordStore, "commit"),
        ("registered", Registry, "put"),
        ("change kept", PendingChange, "keep"),
        ("link flags put back", LinkKeeper, "release"),
        ("socket closed", Holds, "release"),
        ("record deleted", RecordStore, "delete"),
        ("queue looked at", core.queue, "names"),
        ("line of log, metrics", core.Core, "_note"),
    )


class Stopwatch:
    """Exclusive time of each wrapped function, call by call."""

    def __init__(self, steps):
        self.spent = {}
        self.inner = [0.0]
        for name, owner, attribute in steps:
            setattr(owner, attribute, self._wrapped(name, getattr(owner, attribute)))

    def _wrapped(self, name, plain):
        def timed(*arguments, **options):
            self.inner.append(0.0)
            begin = time.perf_counter()
            try:
                return plain(*arguments, **options)
            finally:
                took = time.perf_counter() - begin
                own = took - self.inner.pop()
                self.inner[-1] += took
                self.spent[name] = self.spent.get(name, 0.0) + own

        return timed


def inside(rounds, others):
    """Runs in the node: the helper's code without its server; JSON of medians on stdout."""
    from cni_hostport.host import light

    light.load_asyncio()
    from cni_hostport.helper import log as logs
    from cni_hostport.helper.asked import CallRequest
    from cni_hostport.helper.parts import Helper

    run_dir = Path("/run/profile")
    run_dir.mkdir(mode=0o700)
    log = os.open(run_dir / "helper.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    terminal = os.dup(2)
    os.dup2(log, 2)
    logs.set_up(run_dir)
    helper = Helper(run_dir)
    helper.restore()
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    steps = steps_of_helper()
    watch = Stopwatch(steps)
    names = [name for name, _, _ in steps]
    found = {}

    def do(verb, number, port, keep):
        env, stdin = calls.call(verb, number, calls.mappings(port), plugin="cni-hostport")
        pod = os.open(env["CNI_NETNS"], os.O_RDONLY)
        request = CallRequest(env=env, stdin=stdin.encode(), own_netns=own, pod_netns=pod)
        watch.spent.clear()
        watch.inner[:] = [0.0]
        begin = time.perf_counter()
        outcome = helper.core.handle(request)
        outcome.note()
        answer = outcome.answer
        took = time.perf_counter() - begin
        os.close(pod)
        if answer.status:
            os.write(terminal, answer.out)
            raise SystemExit(1)
        if keep:
            rest = took - watch.inner[0]
            found.setdefault(verb, []).append(dict(watch.spent) | {"everything else": rest})

    for number in range(others):
        do("ADD", number, 10000 + number, keep=False)
    for turn in range(rounds + 50):
        for verb in ("ADD", "DEL"):
            do(verb, 10**6 + turn, 30080, keep=turn >= 50)
    os.dup2(terminal, 2)
    result = {}
    for verb, runs in found.items():
        used = [n for n in [*names, "everything else"] if any(n in run for run in runs)]
        result[verb] = [
            (name, statistics.median(run.get(name, 0.0) for run in runs) * 1000) for name in used
        ]
    os.write(1, json.dumps(result).encode())


def table(title, steps):
    """One Markdown table with its sum."""
    lines = [f"## {title}", "", "| step | ms |", "|---|---:|"]
    lines += [f"| {name} | {ms:.3f} |" for name, ms in steps]
    total = sum(ms for _, ms in steps)
    return [*lines, f"| **together** | **{total:.2f}** |", ""]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.rounds, 100)
        return
    about = report.machine()
    node = BenchNode("ours")
    try:
        node.warm(plugins.OURS)
        node.fill(plugins.OURS, 100)
        runs = {plugins.OURS: [], plugins.FRONT: []}
        for turn in range(arguments.rounds // 4):
            for plugin, steps in ((plugins.OURS, python_steps), (plugins.FRONT, launcher_steps)):
                number = 2 * 10**6 + turn
                runs[plugin].append(steps(trace(node, plugin, number)))
                node.run(plugins.FRONT, "DEL", number, calls.mappings(30080))
        node.node.run("kill", str(helper := node.helper))
        while Path(f"/proc/{helper}").exists():  # it holds the ports
            time.sleep(0.01)
        command = [sys.executable, "-O", "-m", "bench.profile", "--inside"]
        env = {"PATH": calls.PATH, "PYTHONPATH": str(plugins.ROOT)}
        helper = json.loads(
            node.node.run(*command, f"--rounds={arguments.rounds}", env=env, timeout=300).stdout
        )
    finally:
        node.close()
    print(text(about, runs, helper))


def text(about, runs, helper):
    """The whole page."""
    lines = ["# Where the milliseconds of one ADD go", ""]
    lines += [f"- {key}: {value}" for key, value in about.items() if "portmap" not in key]
    lines += [
        "",
        "One TCP mapping, 100 others on the node; medians. Made by `python -m bench.profile`;",
        "each table is watched from within, so its sum is a little more than a bare call takes.",
        "",
        *table("The plugin call (Python)", medians(runs[plugins.OURS])),
        *table("The plugin call (launcher)", medians(runs[plugins.FRONT])),
        *table("The helper's part of an ADD, without its server", helper["ADD"]),
        *table("The helper's part of a DEL", helper["DEL"]),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
