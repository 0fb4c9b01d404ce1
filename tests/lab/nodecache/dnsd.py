"""A small DNS server for tests: the cluster's DNS, a stub domain's, an upstream.

    dnsd.py ADDRESS PORT LOGFILE

Answers A and AAAA for every name with TTL 300, TXT with how it was asked, names
that begin with "nx" with NXDOMAIN; "slow" waits 3 s. Every question is a line
in LOGFILE: protocol, type, name.
"""

import selectors
import socket
import struct
import sys
import threading
import time

TTL = 300


def parse(data: bytes) -> tuple[str, int, int]:
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode())
        at += 1 + data[at]
    kind = struct.unpack(">H", data[at + 1 : at + 3])[0]
    return ".".join(labels), kind, at + 5


def answer(data: bytes, protocol: str) -> bytes:
    name, kind, end = parse(data)
    rcode, records = 0, b""
    count = 0
    if name.startswith("nx"):
        soa = b"\0\0" + struct.pack(">IIIII", 1, 3600, 600, 86400, 300)
        records = b"\xc0\x0c" + struct.pack(">HHIH", 6, 1, TTL, len(soa)) + soa
        head = struct.pack(">HHHHHH", *struct.unpack(">H", data[:2]), 0x8183, 1, 0, 1, 0)
        return head + data[12:end] + records
    if kind in (1, 28):
        value = bytes((10, 1, 2, 3)) if kind == 1 else socket.inet_pton(socket.AF_INET6, "fd00::9")
        records = b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, TTL, len(value)) + value
        count = 1
    elif kind == 16:
        text = protocol.encode()
        records = b"\xc0\x0c" + struct.pack(">HHIH", 16, 1, TTL, len(text) + 1)
        records += bytes((len(text),)) + text
        count = 1
    head = struct.pack(">HHHHHH", *struct.unpack(">H", data[:2]), 0x8180 | rcode, 1, count, 0, 0)
    return head + data[12:end] + records


def main() -> None:
    address, port, log_name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    log = open(log_name, "a", buffering=1)
    udp = socket.socket(family, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    udp.bind((address, port))
    tcp = socket.socket(family, socket.SOCK_STREAM)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    tcp.bind((address, port))
    tcp.listen(128)
    selector = selectors.DefaultSelector()
    for sock in (udp, tcp):
        selector.register(sock, selectors.EVENT_READ)

    def note(protocol: str, data: bytes) -> None:
        name, kind, _ = parse(data)
        log.write(f"{protocol} {kind} {name}\n")
        if name.startswith("slow"):
            time.sleep(3)

    def serve(conn: socket.socket) -> None:
        with conn:
            conn.settimeout(30)
            try:
                while True:
                    head = conn.recv(2, socket.MSG_WAITALL)
                    if len(head) < 2:
                        return
                    data = conn.recv(struct.unpack(">H", head)[0], socket.MSG_WAITALL)
                    note("tcp", data)
                    reply = answer(data, "tcp")
                    conn.sendall(struct.pack(">H", len(reply)) + reply)
            except OSError:
                return

    while True:
        for key, _ in selector.select():
            if key.fileobj is udp:
                data, peer = udp.recvfrom(2048)
                if len(data) > 12:
                    note("udp", data)
                    udp.sendto(answer(data, "udp"), peer)
            else:
                conn, _ = tcp.accept()
                threading.Thread(target=serve, args=(conn,), daemon=True).start()


main()
