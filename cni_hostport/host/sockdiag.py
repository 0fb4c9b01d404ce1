"""Asks the kernel which sockets sit on a port (sock_diag(7)).

Decides which socket states count as listener, client or silent holder. It must
never ask about SCTP: the question alone would load the kernel module. Answers
are about the net namespace in which the ``SockDiag`` was made.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import IPAddress, Protocol
from cni_hostport.netfilter import nlwire

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_AF_INET, _AF_INET6 = 2, 10

# States as the kernel numbers them (tcp_states.h); UDP uses 1 and 7 only.
_ESTABLISHED, _CLOSE, _LISTEN = 1, 7, 10
_BOUND_INACTIVE = 13  # only as a question, since Linux 6.8; the answer says CLOSE
_TCP_CLIENTS = 0xFFF & ~(1 << _CLOSE | 1 << _LISTEN)

_REQUEST = struct.Struct("=BBBxI")
_SOCKET_ID = struct.Struct("!HH16s16s12x")
_ANSWER = struct.Struct("!BBxxHH16s16s12x")
_TAIL = struct.Struct("=IIIII")  # expires, receive queue, send queue, uid, inode
_REQ_BYTECODE = 1
_SKV6ONLY = 11


@dataclass(frozen=True, slots=True)
class DiagSocket:
    """One socket as the kernel describes it.

    ``family`` is the socket's, so a dual-stack one is 6. ``address`` None is
    the wildcard; an IPv4-mapped address is given as IPv4. ``v6only`` None: the
    kernel did not say (it says for unconnected IPv6 sockets). ``inode`` 0: no
    file belongs to it (TIME_WAIT). ``remote`` None: not connected.
    """

    family: int
    address: IPAddress | None
    port: int
    state: int
    inode: int
    uid: int
    v6only: bool | None
    remote: tuple[IPAddress, int] | None


class SockDiag:
    """Questions about ports over one socket that stays open; not for two threads at once."""

    def __init__(self) -> None:
        """Open it. Raises OSError."""
        self._netlink = NetlinkSocket(_NETLINK_SOCK_DIAG)

    def close(self) -> None:
        """Give the descriptor back."""
        self._netlink.close()

    def listeners(self, port: int, protocol: Protocol) -> list[DiagSocket]:
        """TCP sockets that listen on the port, or UDP ones that are not connected, both families.

        A UDP client that has not called connect(2) looks like a server; the
        kernel cannot tell them apart. Raises ValueError for SCTP, OSError.
        """
        state = _LISTEN if protocol is Protocol.TCP else _CLOSE
        return self._sockets(port, protocol, 1 << state)

    def clients(self, port: int, protocol: Protocol) -> list[DiagSocket]:
        """Connected sockets with that local port, dying ones and TIME_WAIT included."""
        states = _TCP_CLIENTS if protocol is Protocol.TCP else 1 << _ESTABLISHED
        return self._sockets(port, protocol, states)

    def bound_inactive(self, port: int) -> list[DiagSocket]:
        """TCP sockets that are bound to the port and neither listen nor are connected.

        Empty before Linux 6.8. Walks every such socket of the namespace, so ask
        only when bind(2) failed and nobody listens.
        """
        return self._sockets(port, Protocol.TCP, 1 << _BOUND_INACTIVE)

    def _sockets(self, port: int, protocol: Protocol, states: int) -> list[DiagSocket]:
        if protocol is Protocol.SCTP:
            raise ValueError("SCTP sockets are not looked up")
        found = []
        for family in (_AF_INET, _AF_INET6):
            body = request(family, protocol.number, states, port)
            try:
                answers = self._netlink.dump(_SOCK_DIAG_BY_FAMILY, body)
            except OSError as error:
                if error.errno != errno.ENOENT:  # a kernel without that family or module
                    raise
                continue
            sockets = (parse(a.body) for a in answers if a.kind == _SOCK_DIAG_BY_FAMILY)
            found += [s for s in sockets if s.port == port]
        return found


def request(family: int, protocol: int, states: int, port: int) -> bytes:
    """A struct inet_diag_req_v2, with a filter program for the one port.

    The id's own port field is not looked at for bound-inactive sockets; the
    program is. It says: port >= p and port <= p, each jump that fails leaves
    the program behind its end (inet_diag.h, INET_DIAG_BC_S_GE 2 and S_LE 3).
    """
    program = struct.pack("=BBHBBHBBHBBH", 2, 8, 20, 0, 0, port, 3, 8, 12, 0, 0, port)
    return (
        _REQUEST.pack(family, protocol, 0, states)
        + _SOCKET_ID.pack(port, 0, b"", b"")
        + nlwire.attr(_REQ_BYTECODE, program)
    )


def parse(body: bytes) -> DiagSocket:
    """Read one struct inet_diag_msg and what follows it."""
    family, state, port, remote_port, source, target = _ANSWER.unpack_from(body)
    _, _, _, uid, inode = _TAIL.unpack_from(body, _ANSWER.size)
    v6only = nlwire.attribute_map(body, _ANSWER.size + _TAIL.size).get(_SKV6ONLY)
    remote = _address(family, target)
    return DiagSocket(
        family=6 if family == _AF_INET6 else 4,
        address=_address(family, source),
        port=port,
        state=state,
        inode=inode,
        uid=uid,
        v6only=None if v6only is None else v6only != b"\0",
        remote=None if remote is None or not remote_port else (remote, remote_port),
    )


def _address(family: int, raw: bytes) -> IPAddress | None:
    if family == _AF_INET:
        return IPv4Address(raw[:4]) if any(raw[:4]) else None
    if not any(raw):
        return None
    address = IPv6Address(raw)
    return address.ipv4_mapped or address
