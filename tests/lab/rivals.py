"""Everybody who might want a reserved port: the ways to bind it, and a process that does.

A rival tries to become a server on an address and port of the node in one of
the styles that servers use. Says who won; judges nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from lab.node import NODE4, NODE4_SECOND, NODE6, NODE6_SECOND, Node
from lab.peers import Protocol, open_socket

STYLES = {
    "plain": (),
    "reuseaddr": (socket.SO_REUSEADDR,),
    "reuseport": (socket.SO_REUSEPORT,),
    "both": (socket.SO_REUSEADDR, socket.SO_REUSEPORT),
}

# "dual" is :: without V6ONLY, which wants the IPv4 port as well.
PLACES4 = ("0.0.0.0", "127.0.0.1", "127.0.0.5", NODE4, NODE4_SECOND)
PLACES6 = ("::", "::1", NODE6, NODE6_SECOND)
DUAL = "dual"

_SQUATTER = """
import socket, sys
open('/proc/self/comm', 'w').write('squatter')
address, port, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
family = socket.AF_INET6 if ':' in address else socket.AF_INET
s = socket.socket(family, socket.SOCK_STREAM if kind == 'tcp' else socket.SOCK_DGRAM)
if kind == 'tcp': s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind((address, port))
if kind == 'tcp': s.listen()
print('bound', flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True)
class Rival:
    """One way to want a port."""

    place: str
    style: str
    protocol: Protocol

    def __str__(self) -> str:
        return f"{self.protocol} {self.place} {self.style}"

    def wins(self, node: Node, port: int) -> bool:
        """Whether it can serve there now; the port is given back at once."""
        dual = self.place == DUAL
        try:
            sock = open_socket(
                node,
                "::" if dual else self.place,
                port,
                self.protocol,
                options=STYLES[self.style],
                dual=dual,
                listen=True,
            )
        except OSError:
            return False
        sock.close()
        return True


def rivals(*places: str, protocols: tuple[Protocol, ...] = ("tcp", "udp")) -> list[Rival]:
    """Every style and protocol at these places."""
    return [Rival(p, s, k) for p, s, k in itertools.product(places, STYLES, protocols)]


EVERY_STYLE = rivals("0.0.0.0", NODE4, "127.0.0.1", "::", DUAL)


def winners(node: Node, port: int, who: list[Rival]) -> set[str]:
    """Names of the rivals that can have the port."""
    return {str(rival) for rival in who if rival.wins(node, port)}


@contextlib.contextmanager
def squatter(
    node: Node, address: str, port: int, protocol: Protocol = "tcp"
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the node, named ``squatter``, that serves on a port inside the block."""
    process = node.popen(
        "/usr/bin/python3",
        "-I",
        "-S",
        "-c",
        _SQUATTER,
        address,
        str(port),
        protocol,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"bound\n"
        yield process
    finally:
        process.communicate()
