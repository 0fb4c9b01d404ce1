"""CPU of a plugin call, as a ratio to starting Python at all.

Runs the bundle's plugin (or another command, ``--plugin``) and
``/usr/bin/python3 -I -S -c pass`` in turn and compares medians of user + system
time, so that a busy machine disturbs both alike. The call is answered by a stand-in
helper of its own: what the helper costs is another measurement.

    .venv/bin/python bench/plugin_cpu.py [--runs 60] [--json]
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile

from cni_hostport import shim

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BASE = ["/usr/bin/python3", "-I", "-S", "-c", "pass"]
BUDGET = 1.15
CONF = {
    "cniVersion": "1.1.0",
    "name": "bench",
    "type": "cni-hostport",
    "capabilities": {"portMappings": True},
    "runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80}]},
    "prevResult": {
        "cniVersion": "1.1.0",
        "interfaces": [{"name": "eth0", "sandbox": "/run/netns/bench"}],
        "ips": [{"address": "10.1.0.2/16", "interface": 0}],
    },
}


async def stand_in(run_dir):
    """Answer every call with its own stdin."""

    async def serve(reader, writer):
        head = await reader.readexactly(shim.HEADER_SIZE)
        _, _, _, env, body = shim.parse_request_header(head)
        await reader.readexactly(env)
        writer.write(shim.pack_response(0, await reader.readexactly(body), b""))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, f"{run_dir}/helper.sock")
    print("ready", flush=True)
    await server.serve_forever()


def cpu_ms(argv, env, stdin, sink):
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, sink, 1)]
    os.lseek(stdin, 0, 0)
    pid = os.posix_spawn(argv[0], argv, env, file_actions=actions)
    _, status, usage = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"{argv} ended with {os.waitstatus_to_exitcode(status)}")
    return (usage.ru_utime + usage.ru_stime) * 1000


def measure(plugin, runs):
    """Medians in ms: base, VERSION, ADD."""
    with tempfile.TemporaryDirectory(prefix="chp-") as run_dir:
        server = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--stand-in", run_dir],
            stdout=subprocess.PIPE,
        )
        try:
            server.stdout.readline()
            env = {
                "CNI_CONTAINERID": "bench",
                "CNI_NETNS": "/proc/self/ns/net",
                "CNI_IFNAME": "eth0",
                "CNI_PATH": "/opt/cni/bin",
                "CNI_HOSTPORT_RUN_DIR": run_dir,
                "PATH": "/usr/sbin:/usr/bin",
            }
            stdin = os.memfd_create("conf")
            os.write(stdin, json.dumps(CONF).encode())
            sink = os.open("/dev/null", os.O_WRONLY)
            cases = {
                "base": (BASE, env),
                "VERSION": (plugin, env | {"CNI_COMMAND": "VERSION"}),
                "ADD": (plugin, env | {"CNI_COMMAND": "ADD"}),
            }
            times = {name: [] for name in cases}
            for turn in range(runs + 5):
                for name, (argv, case_env) in cases.items():
                    ms = cpu_ms(argv, case_env, stdin, sink)
                    if turn >= 5:
                        times[name].append(ms)
        finally:
            server.terminate()
            server.wait()
    return {name: statistics.median(values) for name, values in times.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plugin", nargs="...", default=[f"{ROOT}/dist/cni-hostport/cni-hostport"])
    parser.add_argument("--stand-in", metavar="RUN_DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stand_in:
        asyncio.run(stand_in(arguments.stand_in))
    medians = measure(arguments.plugin, arguments.runs)
    ratios = {name: value / medians["base"] for name, value in medians.items()}
    if arguments.json:
        print(json.dumps({"ms": medians, "ratio": ratios, "budget": BUDGET}))
        return
    print(f"{'':10}{'CPU ms':>8}{'x base':>8}   budget {BUDGET}")
    for name, value in medians.items():
        print(f"{name:10}{value:8.2f}{ratios[name]:8.2f}")


if __name__ == "__main__":
    main()
