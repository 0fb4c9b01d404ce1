"""SCTP over raw sockets: the kernel under test may have no SCTP, and needs none to forward it.

An association's first two packets (RFC 9260, 5.1: INIT and INIT ACK) prove a path and
its way back. Knows packets and sockets, nothing of host ports.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Final

from lab.node import Node

PROTOCOL: Final = 132
INIT, INIT_ACK = 1, 2
_PORTS: Final = itertools.count(40000)  # each time another: no flow of an earlier question
_POLYNOMIAL: Final = 0x82F63B78  # CRC32c, bits reversed (RFC 9260, appendix A)


def checksum(data: bytes) -> int:
    """CRC32c of a packet whose checksum field is zero."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def packet(source: int, target: int, tag: int, chunk: int, own_tag: int) -> bytes:
    """One packet with an INIT or INIT ACK chunk."""
    body = struct.pack("!BBHIIHHI", chunk, 0, 20, own_tag, 65535, 1, 1, 1)
    head = struct.pack("!HHI", source, target, tag)
    return head + struct.pack("<I", checksum(head + bytes(4) + body)) + body


@dataclass(frozen=True)
class Seen:
    """One packet as it arrived."""

    sender: str
    source: int
    target: int
    chunk: int
    own_tag: int
    intact: bool


def _receive(sock: socket.socket, port: int) -> Seen:
    """The next packet to a port; a raw socket sees those to every port. Raises TimeoutError."""
    while True:
        data, address = sock.recvfrom(2048)
        if sock.family == socket.AF_INET:  # IPv4 comes with its header, IPv6 without
            data = data[(data[0] & 15) * 4 :]
        source, target, _ = struct.unpack("!HHI", data[:8])
        if target == port:
            blank = data[:8] + bytes(4) + data[12:]
            intact = checksum(blank) == struct.unpack("<I", data[8:12])[0]
            own_tag = struct.unpack("!I", data[16:20])[0]
            return Seen(address[0], source, target, data[12], own_tag, intact)


def _raw(node: Node, netns: str | None, host: str, timeout: float) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with node.within(netns):
        sock = socket.socket(family, socket.SOCK_RAW, PROTOCOL)
    sock.settimeout(timeout)
    return sock


def associate(
    node: Node, host: str, port: int, *, pod: str, pod_port: int, at: str | None = "client"
) -> tuple[Seen | None, Seen | None]:
    """INIT to a host port; a pod answers. What the pod saw, and what came back; None: nothing."""
    seen: list[Seen] = []
    port_here = next(_PORTS)
    server = _raw(node, pod, host, 1.0)
    client = _raw(node, at, host, 1.0)

    def answer() -> None:
        try:
            init = _receive(server, pod_port)
        except TimeoutError:
            return
        seen.append(init)
        reply = packet(pod_port, init.source, init.own_tag, INIT_ACK, 77)
        server.sendto(reply, (init.sender, 0))

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        client.sendto(packet(port_here, port, 0, INIT, 1234), (host, 0))
        back = _receive(client, port_here)
    except TimeoutError:
        back = None
    thread.join()
    server.close()
    client.close()
    return (seen[0] if seen else None), back
