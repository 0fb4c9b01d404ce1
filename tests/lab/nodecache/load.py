"""200 questions a second, each by a socket of its own, and how they fared.

    load.py SERVER PORT RATE OUTFILE NAME...

Runs until TERM, then writes a JSON list of [sent, answered or null, ttl] with
times of the system's monotonic clock. Names that hold "%" get the number of the
question in its place.
"""

import contextlib
import json
import random
import selectors
import signal
import socket
import struct
import sys
import time

LIMIT = 1.0


def question(number: int, name: str) -> bytes:
    body = b"".join(bytes((len(p),)) + p.encode() for p in name.split(".")) + b"\0"
    return struct.pack(">HHHHHH", number, 0x0100, 1, 0, 0, 0) + body + struct.pack(">HH", 1, 1)


def main() -> None:
    server, port, rate, out = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    names = sys.argv[5:]
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    selector = selectors.DefaultSelector()
    done: list[list[float | None]] = []
    waiting: dict[socket.socket, tuple[int, int]] = {}
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    begin, count = time.monotonic(), 0
    while not stop or waiting:
        now = time.monotonic()
        while not stop and begin + count / rate <= now:
            sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            sock.connect((server, port))
            number = random.randrange(65536)
            done.append([time.monotonic(), None, None])
            with contextlib.suppress(OSError):
                sock.send(question(number, names[count % len(names)].replace("%", str(count))))
            waiting[sock] = (len(done) - 1, number)
            selector.register(sock, selectors.EVENT_READ)
            count += 1
            if count == 20:
                open(f"{out}.begun", "w").close()
        for key, _ in selector.select(0.002):
            sock = key.fileobj
            index, number = waiting[sock]
            try:
                data = sock.recv(2048)
            except OSError:
                continue  # refused: a datagram may still come
            if data[:2] == struct.pack(">H", number) and data[3] & 15 == 0 and data[7]:
                done[index][1] = time.monotonic()
                done[index][2] = struct.unpack(">I", data[-10:-6])[0]
                forget(sock, waiting, selector)
        for sock in [s for s, (i, _) in waiting.items() if time.monotonic() - done[i][0] > LIMIT]:
            forget(sock, waiting, selector)
    with open(out, "w") as file:
        json.dump(done, file)


def forget(sock, waiting, selector) -> None:
    selector.unregister(sock)
    del waiting[sock]
    sock.close()


main()
