"""Which rules a family's raw and filter tables hold, read without running a process.

Decides only how the kernel is asked: nf_tables by a netlink dump, the older
ip_tables by its socket option. It gives a fingerprint that changes when any
rule of the two tables does (counters apart), and counts the rules that hold a
given text. It changes nothing and never loads a kernel module: a table is asked
for only where it exists already.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cni_hostport.host.nlsocket import NetlinkSocket
from cni_hostport.model import Family
from cni_hostport.netfilter import nlwire

Flavour = Literal["nft", "legacy"]
TABLES = ("raw", "filter")
_NETLINK_NETFILTER = 12
_GETTABLE, _GETCHAIN, _GETRULE = 0x0A01, 0x0A04, 0x0A07
_RULE_TABLE, _RULE_HANDLE, _CHAIN_NAME, _TABLE_NAME = 1, 3, 3, 1
_NFPROTO = {Family.V4: 2, Family.V6: 10}
_NFPROTO_INET = 1
# ip_tables.h, ip6_tables.h: both families use the same numbers.
_SO_GET_INFO, _SO_GET_ENTRIES = 64, 65
_LEVEL = {Family.V4: socket.IPPROTO_IP, Family.V6: socket.IPPROTO_IPV6}
_NAME_SIZE, _INFO_SIZE = 32, 84
# Offsets of next_offset and of the two counters in struct ipt_entry, ip6t_entry.
_ENTRY = {Family.V4: (90, 96), Family.V6: (142, 152)}


@dataclass(frozen=True)
class View:
    """The two tables of one family and flavour at one moment.

    ``ours`` counts the rules that hold the text; ``known`` is False where the
    kernel could not be asked, and then nothing else means anything.
    """

    fingerprint: bytes = b""
    ours: int = 0
    known: bool = True


def view(family: Family, flavour: Flavour, mark: bytes) -> View:
    """What the kernel holds; never raises."""
    return _view((_nft if flavour == "nft" else _legacy)(family), mark)


def inet_view(table: str, mark: bytes) -> View:
    """The same of one nftables table of family inet; never raises."""
    return _view(_nft_rules(_NFPROTO_INET, (table,)), mark)


def _view(found: Iterator[tuple[bytes, bytes]], mark: bytes) -> View:
    rules: list[bytes] = []
    digest = hashlib.sha256()
    try:
        for rule, identity in found:
            rules.append(rule)
            digest.update(identity)
    except OSError:
        return View(known=False)
    return View(digest.digest(), sum(mark in rule for rule in rules))


def _nft(family: Family) -> Iterator[tuple[bytes, bytes]]:
    return _nft_rules(_NFPROTO[family], TABLES)


def _nft_rules(proto: int, tables: tuple[str, ...]) -> Iterator[tuple[bytes, bytes]]:
    with closing(NetlinkSocket(_NETLINK_NETFILTER)) as netlink:
        for table in tables:
            body = nlwire.genmsg(proto) + nlwire.attr(_RULE_TABLE, nlwire.string(table))
            try:
                found = netlink.dump(_GETRULE, body)
            except FileNotFoundError:
                continue
            for message in found:
                handle = nlwire.attribute_map(message.body, nlwire.GENMSG_SIZE)[_RULE_HANDLE]
                yield message.body, table.encode() + handle


def _legacy(family: Family) -> Iterator[tuple[bytes, bytes]]:
    present = legacy_tables(family)
    kind = socket.AF_INET if family is Family.V4 else socket.AF_INET6
    with socket.socket(kind, socket.SOCK_DGRAM) as sock:
        for table in TABLES:
            if table in present:
                entries = _entries(sock.fileno(), _LEVEL[family], table)
                for entry, identity in _split(entries, *_ENTRY[family]):
                    yield entry, table.encode() + identity


def legacy_tables(family: Family) -> frozenset[str]:
    """Tables of the older ip_tables that exist in this net namespace."""
    name = "ip_tables_names" if family is Family.V4 else "ip6_tables_names"
    try:
        # Under thread-self: /proc/net would show the main thread's namespace.
        return frozenset(Path(f"/proc/thread-self/net/{name}").read_text(encoding="ascii").split())
    except OSError:
        return frozenset()


def _entries(descriptor: int, level: int, table: str) -> bytes:
    info = _getsockopt(descriptor, level, _SO_GET_INFO, table, _INFO_SIZE)
    size = int(struct.unpack_from("=I", info, _INFO_SIZE - 4)[0])
    header = table.encode().ljust(_NAME_SIZE, b"\0") + struct.pack("=I4x", size)
    answer = _getsockopt(descriptor, level, _SO_GET_ENTRIES, header, len(header) + size)
    return answer[len(header) :]


def _getsockopt(descriptor: int, level: int, option: int, head: str | bytes, size: int) -> bytes:
    begin = head.encode() if isinstance(head, str) else head
    buffer = ctypes.create_string_buffer(begin, size)
    length = ctypes.c_uint32(size)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(descriptor, level, option, buffer, ctypes.byref(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return buffer.raw


def _split(entries: bytes, next_at: int, counters_at: int) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + counters_at + 16 <= len(entries):
        (size,) = struct.unpack_from("=H", entries, position + next_at)
        if not size:
            return
        entry = entries[position : position + size]
        yield entry, entry[:counters_at] + entry[counters_at + 16 :]
        position += size


def used_flavour(family: Family, marks: tuple[bytes, ...]) -> Flavour | None:
    """The flavour whose chains or rules hold one of these texts; None: neither."""
    proto = _NFPROTO[family]
    try:
        with closing(NetlinkSocket(_NETLINK_NETFILTER)) as netlink:
            for message in netlink.dump(_GETCHAIN, nlwire.genmsg(proto)):
                name = nlwire.attribute_map(message.body, nlwire.GENMSG_SIZE).get(_CHAIN_NAME, b"")
                if any(mark in name for mark in marks):
                    return "nft"
        if any(mark in rule for rule, _ in _nft(family) for mark in marks):
            return "nft"
    except OSError:
        pass
    kind = socket.AF_INET if family is Family.V4 else socket.AF_INET6
    try:
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            for table in sorted(legacy_tables(family)):
                blob = _entries(sock.fileno(), _LEVEL[family], table)
                if any(mark in blob for mark in marks):
                    return "legacy"
    except OSError:
        pass
    return None


def has_nft_table(name: str) -> bool:
    """Whether an ``inet`` table of that name exists."""
    try:
        with closing(NetlinkSocket(_NETLINK_NETFILTER)) as netlink:
            body = nlwire.genmsg(_NFPROTO_INET) + nlwire.attr(_TABLE_NAME, nlwire.string(name))
            netlink.get(_GETTABLE, body)
    except OSError:
        return False
    return True
