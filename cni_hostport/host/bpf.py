"""Classic BPF programs on netlink sockets: what the kernel need not even queue.

Decides how a program is written down and attached (linux/filter.h, socket(7)
SO_ATTACH_FILTER). A filter sees the first message of a datagram, and loads in
network order what stands there in the machine's. Knows no message.
"""

from __future__ import annotations

import array
import contextlib
import socket
import struct
import sys
from collections.abc import Iterable

LOAD_WORD, LOAD_HALF, LOAD_BYTE, IF_EQUAL = 0x20, 0x28, 0x30, 0x15
KEEP = (0x06, 0, 0, 0xFFFFFFFF)
DROP = (0x06, 0, 0, 0)

Instruction = tuple[int, int, int, int]
"""Code, instructions to skip if equal, and if not, operand."""

_INSTRUCTION = struct.Struct("=HBBI")
_ATTACH_FILTER = 26


def attach(sock: socket.socket, program: Iterable[Instruction]) -> None:
    """Filter what the socket receives; where the kernel will not, all of it comes."""
    code = array.array("B")
    for instruction in program:
        code.frombytes(_INSTRUCTION.pack(*instruction))
    described = struct.pack("@HP", len(code) // _INSTRUCTION.size, code.buffer_info()[0])
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, described)


def as_loaded(number: int, size: int) -> int:
    """What a load of ``size`` bytes finds where the machine wrote that number."""
    return int.from_bytes(number.to_bytes(size, sys.byteorder), "big")
