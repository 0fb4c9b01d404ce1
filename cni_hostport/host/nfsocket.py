"""One open NETLINK_NETFILTER socket: bytes sent, answers that are already there read.

Decides buffer sizes and that nothing ever waits: the kernel queues all answers
to a request before send() returns (a dump's next part when the one before it is
taken). Knows no message. Belongs to the network namespace in which it was made.
"""

from __future__ import annotations

import contextlib
import socket

from cni_hostport.host import bpf

NETLINK_NETFILTER = 12
_SOL_NETLINK = 270
_ADD_MEMBERSHIP, _CAP_ACK, _EXT_ACK = 1, 10, 11
_SNDBUFFORCE, _RCVBUFFORCE = 32, 33  # Python has no names for these
_PORTID_AT = 12  # in struct nlmsghdr
_RECV_SIZE = 65536
_SEND_LIMIT = 32 << 20


class NetfilterSocket:
    """A bound socket with extended acks; raises OSError where the kernel has no netfilter."""

    def __init__(self, receive_limit: int = 2 << 20, group: int | None = None) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_NETFILTER)
        try:
            self._set_up(receive_limit, group)
        except OSError:
            self._sock.close()
            raise
        self.portid: int = self._sock.getsockname()[0]
        """By this the kernel names the socket's changes in events."""

    def _set_up(self, receive_limit: int, group: int | None) -> None:
        sock = self._sock
        sock.bind((0, 0))
        for option in (_CAP_ACK, _EXT_ACK):
            sock.setsockopt(_SOL_NETLINK, option, 1)
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, receive_limit)
            sock.setsockopt(socket.SOL_SOCKET, _SNDBUFFORCE, _SEND_LIMIT)
        sock.setblocking(False)
        if group is not None:
            sock.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)

    def fileno(self) -> int:
        """The descriptor."""
        return self._sock.fileno()

    def ignore(self, portid: int) -> None:
        """Let the kernel drop what that socket caused; where it will not, all of it comes.

        One filter looks at the first message of a datagram: those of one transaction have one
        writer.
        """
        program = (
            (bpf.LOAD_WORD, 0, 0, _PORTID_AT),
            (bpf.IF_EQUAL, 0, 1, bpf.as_loaded(portid, 4)),
            bpf.DROP,
            bpf.KEEP,
        )
        bpf.attach(self._sock, program)

    def close(self) -> None:
        """Only for the end of the process: waits about 8 ms after an nf_tables delete."""
        self._sock.close()

    def send(self, data: bytes) -> None:
        """Hand one datagram to the kernel, which works on it before this returns."""
        self._sock.send(data)

    def receive(self) -> bytes:
        """The next datagram that is queued, empty where there is none.

        Raises OSError(ENOBUFS) where some were lost.
        """
        try:
            return self._sock.recv(_RECV_SIZE)
        except BlockingIOError:
            return b""

    def drain(self) -> list[bytes]:
        """All datagrams that are queued. Raises OSError(ENOBUFS) where some were lost."""
        found = []
        while data := self.receive():
            found.append(data)
        return found
