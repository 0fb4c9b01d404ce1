#!/usr/bin/python3
"""Stands for CoreDNS in tests: same command line, and it behaves as it is told.

    standin.py -conf COREFILE -dns.port PORT [-quiet]

Answers on the addresses of the Corefile's bind lines, with TTL 7. The file named
by STANDIN (environment) holds words: "deaf" answers nothing, "exit" ends with
status 1 at start, "stubborn" ignores TERM, "mute-query" answers no ordinary
question, "mute-status" no other. SIGUSR1 is noted, as every start is, in STANDIN.log.
"""

import os
import re
import selectors
import signal
import socket
import struct
import sys
import threading
import time


def text_of(path: str) -> str:
    with open(path) as file:
        return file.read()


def told() -> str:
    try:
        return text_of(os.environ["STANDIN"])
    except (OSError, KeyError):
        return ""


def note(text: str) -> None:
    with open(os.environ["STANDIN"] + ".log", "a") as file:
        file.write(text + "\n")


def answer(data: bytes) -> bytes | None:
    words = told()
    if "deaf" in words or len(data) < 12:
        return None
    if data[2] & 0x78:
        if "mute-status" in words:
            return None
        return data[:2] + bytes((data[2] | 0x80, 4)) + data[4:12]
    if "mute-query" in words:
        return None
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 7, 4) + bytes((10, 9, 9, 9))
    end = data.index(b"\0", 12) + 5
    return data[:2] + b"\x81\x80" + struct.pack(">HHHH", 1, 1, 0, 0) + data[12:end] + record


def serve_tcp(conn: socket.socket) -> None:
    with conn:
        conn.settimeout(5)
        try:
            head = conn.recv(2, socket.MSG_WAITALL)
            data = conn.recv(struct.unpack(">H", head)[0], socket.MSG_WAITALL)
            reply = answer(data)
            if reply is not None:
                conn.sendall(struct.pack(">H", len(reply)) + reply)
        except (OSError, struct.error):
            pass


def main() -> None:
    args = sys.argv[1:]
    conf, port = args[args.index("-conf") + 1], int(args[args.index("-dns.port") + 1])
    note(f"start {os.getpid()} {' '.join(args)}")
    if "exit" in told():
        sys.exit(1)
    signal.signal(signal.SIGUSR1, lambda *_: note("usr1 " + text_of(conf).split("\n")[0]))
    signal.signal(signal.SIGTERM, lambda *_: None if "stubborn" in told() else stop())
    addresses = {a for line in re.findall(r"bind (.*)", text_of(conf)) for a in line.split()}
    selector = selectors.DefaultSelector()
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        udp = socket.socket(family, socket.SOCK_DGRAM)
        udp.bind((address, port))
        selector.register(udp, selectors.EVENT_READ, "udp")
        tcp = socket.socket(family, socket.SOCK_STREAM)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        tcp.bind((address, port))
        tcp.listen()
        selector.register(tcp, selectors.EVENT_READ, "tcp")
    while True:
        for key, _ in selector.select():
            if key.data == "udp":
                data, peer = key.fileobj.recvfrom(2048)
                reply = answer(data)
                if reply is not None:
                    key.fileobj.sendto(reply, peer)
            else:
                conn, _ = key.fileobj.accept()
                threading.Thread(target=serve_tcp, args=(conn,), daemon=True).start()


def stop() -> None:
    note("term")
    time.sleep(0.05)
    os._exit(0)


main()
