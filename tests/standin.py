"""A stand-in for the helper: a unix socket server that speaks the frame and echoes.

As a program it behaves as a helper does that the plugin call starts: it takes
``helper.lock``, binds the socket in CNI_HOSTPORT_RUN_DIR and answers each call with
what came in and what it is itself. CNI_HOSTPORT_STANDIN says how it misbehaves:
``die`` before it listens, ``slow`` to come up, ``once`` dies on the first call.
"""

import base64
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from cni_hostport import shim


def receive_request(connection):
    """(flags, env, body, descriptors) of one request; None when the peer left."""
    data, descriptors, *_ = socket.recv_fds(connection, 1 << 20, 8)
    while len(data) < shim.HEADER_SIZE:
        part = connection.recv(1 << 20)
        if not part:
            return None
        data += part
    _, kind, flags, env_size, body_size = shim.parse_request_header(data[: shim.HEADER_SIZE])
    whole = shim.HEADER_SIZE + env_size + body_size
    parts, have = [data], len(data)
    while have < whole:
        parts.append(connection.recv(1 << 20))
        if not parts[-1]:
            return None
        have += len(parts[-1])
    data = b"".join(parts)
    block = data[shim.HEADER_SIZE : shim.HEADER_SIZE + env_size]
    body = data[shim.HEADER_SIZE + env_size :]
    return kind, flags, shim.parse_env(block), body, descriptors


def echo(request):
    """Answer that shows the request."""
    kind, flags, env, body, descriptors = request
    facts = {
        "kind": kind.decode(),
        "flags": flags,
        "env": {
            k.decode(errors="surrogateescape"): v.decode(errors="surrogateescape")
            for k, v in env.items()
        },
        "size": len(body),
        "body": base64.b64encode(body[:1000]).decode(),
        "inodes": [os.fstat(fd).st_ino for fd in descriptors],
        "self": self_facts(),
    }
    return shim.pack_response(0, json.dumps(facts).encode(), b"")


def self_facts():
    umask = os.umask(0)
    os.umask(umask)
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "sid": os.getsid(0),
        "cwd": os.getcwd(),
        "umask": umask,
        "environ": dict(os.environ),
        "stdio": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)],
        "inherited": INHERITED,
        "blocked": int(status["SigBlk"], 16),
        "ignored": int(status["SigIgn"], 16),
    }


class Server:
    """Serve ``answer(request) -> bytes | None`` (None: hang up) in threads of this process."""

    def __init__(self, run_dir, answer=echo, backlog=128):
        self.requests = 0
        self.answer = answer
        os.makedirs(run_dir, 0o700, exist_ok=True)
        folder = os.open(run_dir, os.O_PATH | os.O_DIRECTORY)
        path = f"/proc/self/fd/{folder}/helper.sock"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        os.close(folder)
        self.listener.listen(backlog)

    def start(self):
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with connection, contextlib.suppress(ConnectionError):
            request = receive_request(connection)
            if request is None:
                return
            self.requests += 1
            data = self.answer(request)
            for fd in request[-1]:
                os.close(fd)
            if data is not None:
                connection.sendall(data)

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


def main():
    run_dir = os.environ["CNI_HOSTPORT_RUN_DIR"]
    manner = os.environ.get("CNI_HOSTPORT_STANDIN", "")
    with open(f"{run_dir}/starts", "a") as file:
        file.write(f"{os.getpid()}\n")
    if manner == "die":
        print("first line\nstand-in: cannot live", file=sys.stderr)
        return 3
    if manner.startswith("slow"):
        time.sleep(float(manner.removeprefix("slow")))
    lock = os.open(f"{run_dir}/helper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("stand-in: one is running", file=sys.stderr)
        return 0

    def answer(request):
        if manner == "once":
            os._exit(1)
        return echo(request)

    server = Server(run_dir, answer)
    signal.alarm(60)  # no test may leave one behind
    server.run()
    return 0


def open_descriptors():
    numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    return sorted(n for n in numbers if os.path.exists(f"/proc/self/fd/{n}"))


INHERITED = open_descriptors() if "helper" in sys.argv else []
if __name__ == "__main__":
    sys.exit(main())
