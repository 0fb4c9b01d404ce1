"""The process inside a node's namespaces that runs plugins and takes the time.

One JSON request a line on stdin, one answer a line on stdout. It stays small and starts
plugins by posix_spawn, so that what it adds to a call is the same little for everybody.
Times in milliseconds; ``cpu`` is the plugin's with all its children, ``helper`` what the
watched process used meanwhile.
"""

import ctypes
import json
import os
import socket
import struct
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from bench import calls
from cni_hostport import shim

LIBC = ctypes.CDLL(None, use_errno=True)
SETTLE = 0.003  # seconds a helper gets to finish what it does after an answer


def cpu_of(pid):
    """CPU of a process in ms, all threads; 0 without one."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat") as file:
                total += int(file.read().split()[0])
    except OSError:
        return 0.0
    return total / 1e6


def memory(text):
    descriptor = os.memfd_create("call")
    os.write(descriptor, text.encode())
    os.lseek(descriptor, 0, 0)
    return descriptor


def start(argv, env, stdin, sink):
    actions = [
        (os.POSIX_SPAWN_DUP2, stdin, 0),
        (os.POSIX_SPAWN_DUP2, sink, 1),
        (os.POSIX_SPAWN_DUP2, sink, 2),
    ]
    return os.posix_spawn(argv[0], argv, env, file_actions=actions)


def run(argv, env, stdin, watch=0):
    """One process from start to end."""
    given, sink = memory(stdin), os.memfd_create("out")
    before = cpu_of(watch) if watch else 0.0
    begin = time.perf_counter()
    pid = start(argv, env, given, sink)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - begin
    helper = 0.0
    if watch:
        time.sleep(SETTLE)
        helper = cpu_of(watch) - before
    os.lseek(sink, 0, 0)
    out = os.read(sink, 2000).decode(errors="replace") if status else ""
    os.close(given)
    os.close(sink)
    return {
        "wall": wall * 1000,
        "cpu": (usage.ru_utime + usage.ru_stime) * 1000,
        "helper": helper,
        "status": os.waitstatus_to_exitcode(status),
        "out": out,
    }


def burst(jobs, watch=0):
    """All processes at once; the time until the last has ended."""
    null = os.open("/dev/null", os.O_WRONLY)
    given = [memory(stdin) for _, _, stdin in jobs]
    before = cpu_of(watch) if watch else 0.0
    begin = time.perf_counter()
    pids = [
        start(argv, env, stdin, null) for (argv, env, _), stdin in zip(jobs, given, strict=True)
    ]
    statuses, cpu = {}, 0.0
    for _ in pids:
        pid, status, usage = os.wait4(-1, 0)
        statuses[pid] = os.waitstatus_to_exitcode(status)
        cpu += usage.ru_utime + usage.ru_stime
    wall = time.perf_counter() - begin
    helper = cpu_of(watch) - before if watch else 0.0
    for descriptor in (*given, null):
        os.close(descriptor)
    return {
        "wall": wall * 1000,
        "cpu": cpu * 1000,
        "helper": helper,
        "failed": sum(1 for p in pids if statuses[p]),
    }


def ask(env, body):
    """One call straight to the helper, without a plugin process: for filling a node."""
    sock = shim.connect(shim.RUN_DIR, 30.0)
    wanted = {k.encode(): v.encode() for k, v in env.items() if k.startswith("CNI_")}
    frame = shim.pack_request(shim.KIND_CALL, 0, wanted, body.encode())
    answer = shim.exchange(sock, frame, (), time.monotonic() + 30)
    sock.close()
    return answer


def fill(verb, numbers, first_port, plugin, backend, targets):
    """Others on our own node: real ADDs (or DELs), one after the other.

    ``targets``: number to address, for those that lead to the pod that is there.
    """
    begin = time.perf_counter()
    for number in range(*numbers):
        address = targets.get(str(number))
        addresses = (address, calls.POD6) if address else calls.other_address(number)
        env, body = calls.call(
            verb,
            number,
            calls.mappings(first_port + number),
            plugin=plugin,
            backend=backend,
            addresses=addresses,
            netns=f"other-{number}",
        )
        status, out, err = ask(env, body)
        if status:
            return {"status": status, "out": out.decode() + err.decode()}
    return {"status": 0, "seconds": time.perf_counter() - begin}


def pairs(count, plugin):
    """ADD and DEL of one attachment, many times."""
    for number in range(count):
        for verb in ("ADD", "DEL"):
            ports = calls.mappings(30000 + number % 1000)
            env, body = calls.call(verb, 10**6 + number, ports, plugin=plugin)
            status, out, err = ask(env, body)
            if status:
                return {"status": status, "out": out.decode() + err.decode()}
    return {"status": 0}


def enter(path):
    descriptor = os.open(path, os.O_RDONLY)
    if LIBC.setns(descriptor, 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")
    os.close(descriptor)


def serve(netns, port):
    """A server in a pod that accepts and closes."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        enter(f"/run/netns/{netns}")
        listener = socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("", port))
        listener.listen(1024)
        os.write(writer, b".")
        while True:
            listener.accept()[0].close()
    os.read(reader, 1)
    return {"pid": pid}


def connect(netns, host, port, count):
    """New connections from another host, one after the other; seconds for all of them."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    enter(f"/run/netns/{netns}")
    try:
        begin = time.perf_counter()
        for _ in range(count):
            sock = socket.socket()
            sock.settimeout(5)
            sock.connect((host, port))
            sock.recv(1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        return {"seconds": time.perf_counter() - begin}
    finally:
        LIBC.setns(home, 0x40000000)
        os.close(home)


def until_connects(host, port, limit):
    """Seconds until a connection from the node itself is accepted."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < limit:
        sock = socket.socket()
        sock.settimeout(0.2)
        try:
            sock.connect((host, port))
            return {"seconds": time.perf_counter() - begin}
        except OSError:
            time.sleep(0.001)
        finally:
            sock.close()
    return {"seconds": None}


OPERATIONS = {f.__name__: f for f in (run, burst, fill, pairs, serve, connect, until_connects)}
OPERATIONS["cpu_of"] = lambda pid: {"cpu": cpu_of(pid)}


def main():
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = OPERATIONS[name](**arguments)
        except OSError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
