"""One netlink request and its answer, over a socket that stays open.

Decides nothing: it sends a body, waits for the message that carries the same
sequence number and turns the kernel's error into an OSError. It must never be
shared by two threads at once, and it talks to the net namespace that the
calling thread was in when it was made, for good.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from cni_hostport.netfilter import nlwire

_RECEIVE_BYTES = 65536
# The kernel answers inside send(); only a lost answer could block, and then for ever.
_RECEIVE_TIMEOUT = struct.pack("@ll", 5, 0)
_SOL_NETLINK, _GET_STRICT_CHK = 270, 12
# A storm that overtakes this many sends events, and those mend what is missing.
_DUMP_TRIES = 5


class NetlinkSocket:
    """A request/answer socket of one netlink protocol (netlink(7)).

    A context manager; ``close`` may be called twice.
    """

    def __init__(self, protocol: int) -> None:
        """Open it in the calling thread's net namespace. Raises OSError."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _RECEIVE_TIMEOUT)
        self._sequence = 0

    def __enter__(self) -> NetlinkSocket:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        self._socket.close()

    def get(self, kind: int, body: bytes) -> nlwire.Message:
        """Ask for one object. Raises OSError with the kernel's errno."""
        return next(self._answers(kind, 0, body))

    def change(self, kind: int, body: bytes) -> None:
        """Make a change and wait for its acknowledgement. Raises OSError as ``get``."""
        for _ in self._answers(kind, nlwire.NLM_F_ACK, body):
            pass

    def dump(self, kind: int, body: bytes) -> list[nlwire.Message]:
        """Ask for every object that the body selects. Raises OSError as ``get``."""
        return list(self._answers(kind, nlwire.NLM_F_DUMP, body))

    def whole_dump(self, kind: int, body: bytes) -> list[nlwire.Message]:
        """A dump read again when a change overtook it. Raises OSError as ``get``."""
        for _ in range(_DUMP_TRIES):
            listed = self.dump(kind, body)
            # The kernel marks one that was overtaken; it may lack any entry.
            if not any(m.flags & nlwire.NLM_F_DUMP_INTR for m in listed):
                break
        return listed

    def check_strictly(self) -> None:
        """Have the kernel heed what a dump selects; older than 4.20 it cannot."""
        with suppress(OSError):
            self._socket.setsockopt(_SOL_NETLINK, _GET_STRICT_CHK, 1)

    def _answers(self, kind: int, flags: int, body: bytes) -> Iterator[nlwire.Message]:
        self._sequence = sequence = (self._sequence + 1) & 0xFFFFFFFF
        self._socket.send(nlwire.message(kind, flags | nlwire.NLM_F_REQUEST, sequence, body))
        while True:
            for answer in nlwire.messages(self._socket.recv(_RECEIVE_BYTES)):
                if answer.sequence != sequence:
                    continue  # left over from a request that was given up half way
                if answer.kind in (nlwire.NLMSG_ERROR, nlwire.NLMSG_DONE):
                    errno = nlwire.ack(answer).errno
                    if errno:
                        raise OSError(errno, os.strerror(errno))
                    return
                yield answer
