"""Holds host ports with bound, silent sockets, and moves them without a free instant.

Decides how a socket must be made so that nobody else can listen on the port
while nothing is promised to a client: TCP is bound and never listens, UDP is
bound and drops what it gets. It must never listen, never read, and never leave
SO_REUSEADDR on: a holder with it reserves nothing.

Kernel facts (Linux, inet_csk_get_port and udp_lib_get_port): SO_REUSEADDR at
bind time passes over connections in TIME_WAIT, and what counts against a later
bind or listen is the flag as it is then. Two sockets that are bound to
different device numbers never conflict, whatever their addresses; a socket
bound to no device conflicts with both.
"""

from __future__ import annotations

import array
import errno
import itertools
import json
import os
import socket
import struct
from collections.abc import Iterable, Sequence

from cni_hostport.model import Family, HostPort, Protocol

# Not in Python's socket module (linux/in6.h, asm-generic/socket.h).
_IPV6_FREEBIND = 78
_SO_ATTACH_FILTER = 26
_SO_BINDTOIFINDEX = 62
_IP_FREEBIND = 15

_LOOPBACK = 1  # `lo` has this number in every net namespace
_NOWHERE = 0x7FFFFFFF  # no link has it; the option does not ask for one

_BATCH = 250  # the kernel takes 253 descriptors a message (SCM_MAX_FD)
_BATCH_HEADER = struct.Struct("!II")  # descriptors, bytes of names
_ACK = b"\x06"

# One classic BPF instruction, "return 0": keep no byte of any datagram. An array
# lends its address, so that ctypes need not be loaded for it.
_DROP_ALL = array.array("B", struct.pack("=HBBI", 0x06, 0, 0, 0))
_DROP_ALL_PROGRAM = struct.pack("@HP", 1, _DROP_ALL.buffer_info()[0])


def open_holder(port: HostPort) -> socket.socket:
    """A socket that keeps ``port`` from every other listener until it is closed.

    The address need not be on the node yet. Raises ValueError for SCTP (the
    socket would load the kernel module; conflicts come from the records) and
    OSError as the kernel gives it: EADDRINUSE, EACCES, EMFILE, ...
    """
    return _open(port, 0)


def replace_wildcard(old: socket.socket, new: Sequence[HostPort]) -> list[socket.socket]:
    """Hold the addresses of ``new`` in place of the wildcard, with no free instant.

    ``old`` is closed on success. On failure (OSError) it holds on as before and
    none of ``new`` is held. While it runs (some tens of microseconds) only a
    socket that is itself bound to a device (SO_BINDTODEVICE) could slip in;
    before Linux 5.0 one with SO_REUSEADDR could. Needs CAP_NET_RAW.
    """
    return _exchange((old,), new)


def replace_specific(old: Sequence[socket.socket], wildcard: HostPort) -> socket.socket:
    """The reverse of ``replace_wildcard``, with the same promises.

    Raises OSError, EADDRINUSE for one, when somebody listens on an address
    that none of ``old`` held.
    """
    return _exchange(old, (wildcard,))[0]


def _exchange(old: Sequence[socket.socket], new: Sequence[HostPort]) -> list[socket.socket]:
    opened: list[socket.socket] = []
    try:
        for holder in old:
            _set_apart(holder, _NOWHERE)
        for port in new:
            opened.append(_open(port, _LOOPBACK))
        for holder in opened:
            _set_apart(holder, 0)
    except BaseException:
        for holder in opened:
            holder.close()
        for holder in old:
            _set_apart(holder, 0)
        raise
    for holder in old:
        holder.close()
    return opened


def _set_apart(holder: socket.socket, device: int) -> None:
    """Bind to a device number, so that holders of another number do not conflict; 0 undoes it.

    Kernels before 5.0 lack the option; there SO_REUSEADDR, on both sides,
    stands in for it.
    """
    try:
        holder.setsockopt(socket.SOL_SOCKET, _SO_BINDTOIFINDEX, device)
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(device != 0))


def _open(port: HostPort, device: int) -> socket.socket:
    if port.protocol is Protocol.SCTP:
        raise ValueError(f"no socket may be opened for {port}")
    family = socket.AF_INET if port.family is Family.V4 else socket.AF_INET6
    tcp = port.protocol is Protocol.TCP
    holder = socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    try:
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if port.address is not None:
            _allow_absent(holder)
        if not tcp:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 0)
            holder.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, _DROP_ALL_PROGRAM)
        if device:
            _set_apart(holder, device)
        if tcp:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("" if port.address is None else str(port.address), port.port))
        if tcp:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except BaseException:
        holder.close()
        raise
    return holder


def _allow_absent(holder: socket.socket) -> None:
    """Let it bind an address that the node does not have (yet), or still probes (IPv6 DAD)."""
    if holder.family == socket.AF_INET6:
        holder.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
    else:
        holder.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)


def send_holders(channel: socket.socket, items: Iterable[tuple[str, socket.socket]]) -> int:
    """Pass named holders through a unix stream socket; how many went.

    Every batch waits for the receiver's acknowledgement, so once this returns
    the receiver has them all. The sender's copies stay open. Raises OSError
    (the channel's time limit included), ConnectionError when the other end
    gave up: it then holds nothing, and the sender's copies hold on.
    """
    sent = 0
    remaining = iter(items)
    while True:
        batch = list(itertools.islice(remaining, _BATCH))
        names = json.dumps([name for name, _ in batch]).encode()
        message = _BATCH_HEADER.pack(len(batch), len(names)) + names
        went = socket.send_fds(channel, [message], [holder.fileno() for _, holder in batch])
        channel.sendall(message[went:])
        if channel.recv(1) != _ACK:
            raise ConnectionError("the receiver of the sockets gave up")
        if not batch:
            return sent
        sent += len(batch)


def recv_holders(channel: socket.socket) -> list[tuple[str, socket.socket]]:
    """Take the holders that ``send_holders`` passes, in its order.

    Raise RLIMIT_NOFILE first. Raises OSError, EMFILE for one when descriptors
    were lost on the way, ConnectionError when the sender ended early; whatever
    had come is closed then, and the caller must close the channel, which tells
    the sender.
    """
    taken: list[tuple[str, socket.socket]] = []
    try:
        while batch := _recv_batch(channel):
            taken += batch
            channel.sendall(_ACK)
        channel.sendall(_ACK)
    except BaseException:
        for _, holder in taken:
            holder.close()
        raise
    return taken


def _recv_batch(channel: socket.socket) -> list[tuple[str, socket.socket]]:
    data, ancillary, flags, _ = channel.recvmsg(
        _BATCH_HEADER.size, socket.CMSG_SPACE(_BATCH * 4), socket.MSG_CMSG_CLOEXEC
    )
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(payload[: len(payload) - len(payload) % 4])
    batch: list[tuple[str, socket.socket]] = []
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "descriptors were lost on the way")
        data += _recv_exactly(channel, _BATCH_HEADER.size - len(data))
        count, size = _BATCH_HEADER.unpack(data)
        names = json.loads(_recv_exactly(channel, size))
        if not len(names) == count == len(descriptors):
            raise ConnectionError(f"{count} sockets announced, {len(descriptors)} came")
        while descriptors:
            holder = socket.socket(fileno=descriptors[-1])
            descriptors.pop()
            batch.append((names[len(descriptors)], holder))
    except BaseException:
        for _, holder in batch:
            holder.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    batch.reverse()
    return batch


def _recv_exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = channel.recv(size - len(data))
        if not part:
            raise ConnectionError("the sender of the sockets ended early")
        data += part
    return data
