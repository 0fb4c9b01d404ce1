"""Elements of nftables sets and maps: how a key or a value is packed.

Decides the bytes of every key and value that we keep in the kernel and how they
read to a human. Never talks to the kernel and does not know which sets exist.

In a concatenation every part is padded to four bytes; a key of a single part is
not padded (kernel: the length must equal the set's key length exactly).
Addresses and ports are in network order, an interface name is 16 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from cni_hostport.model import Family, IPAddress, IPNetwork, Protocol

MAX_COMMENT = 128
"""Longest comment in bytes that nft shows."""

IFNAMSIZ = 16

_PORT_KEY = struct.Struct(">B3xH2x")
_SERVICE = struct.Struct(">H2x")
_PROTOCOLS = {p.number: p for p in Protocol}


class Element(NamedTuple):
    """One element of the set or map ``set`` in our table of ``family``.

    ``data`` is a map's value. ``key_end`` is the upper end of a range in a set
    with intervals over a concatenation. ``comment`` is the owner's key.

    A named tuple and no dataclass: tens of thousands are made, hashed and
    compared at a time, at a fifth of the cost.
    """

    family: Family
    set: str
    key: bytes
    data: bytes | None = None
    comment: str = ""
    key_end: bytes | None = None

    @property
    def place(self) -> tuple[Family, str, bytes]:
        """What the kernel allows only once: family, set and key."""
        return (self.family, self.set, self.key)


def port_key(protocol: Protocol, port: int) -> bytes:
    """Key ``inet_proto . inet_service``."""
    return _PORT_KEY.pack(protocol.number, port)


def addr_port_key(address: IPAddress, protocol: Protocol, port: int) -> bytes:
    """Key ``ipv4_addr|ipv6_addr . inet_proto . inet_service``."""
    return address.packed + _PORT_KEY.pack(protocol.number, port)


def target(address: IPAddress, port: int) -> bytes:
    """Value ``ipv4_addr|ipv6_addr . inet_service``: where a mapping leads."""
    return address.packed + _SERVICE.pack(port)


def addr_service_key(address: IPAddress, port: int) -> bytes:
    """Key ``ipv4_addr|ipv6_addr . inet_service``."""
    return address.packed + _SERVICE.pack(port)


def pair_key(first: IPAddress, second: IPAddress) -> bytes:
    """Key of two addresses of one family."""
    return first.packed + second.packed


def addr_key(address: IPAddress) -> bytes:
    """Key ``ipv4_addr|ipv6_addr`` alone."""
    return address.packed


def service_key(port: int) -> bytes:
    """Key ``inet_service`` alone: two bytes, no padding."""
    return port.to_bytes(2, "big")


@lru_cache(maxsize=64)  # one network has many pods
def link_net_key(ifname: str, network: IPNetwork) -> tuple[bytes, bytes]:
    """(key, key_end) of ``ifname . ipv4_addr|ipv6_addr`` with flags interval.

    Raises ValueError for a name that the kernel could not give to a link.
    """
    name = ifname.encode("utf-8", "surrogateescape")
    if not 0 < len(name) < IFNAMSIZ:
        raise ValueError(f"interface name of {len(name)} bytes: {ifname!r}")
    name = name.ljust(IFNAMSIZ, b"\0")
    return name + network.network_address.packed, name + network.broadcast_address.packed


def unpack_port_key(key: bytes) -> tuple[Protocol, int]:
    """The opposite of port_key. Raises ValueError for a protocol we never map."""
    number, port = _PORT_KEY.unpack(key)
    if number not in _PROTOCOLS:
        raise ValueError(f"protocol number {number}")
    return _PROTOCOLS[number], port


def unpack_addr_port_key(key: bytes) -> tuple[IPAddress, Protocol, int]:
    """The opposite of addr_port_key."""
    return _address(key[:-8]), *unpack_port_key(key[-8:])


def unpack_target(data: bytes) -> tuple[IPAddress, int]:
    """The opposite of target and of addr_service_key."""
    return _address(data[:-4]), int(_SERVICE.unpack(data[-4:])[0])


def describe(element: Element) -> str:
    """An element as nft writes it: ``tcp . 8080 : 10.0.0.2 . 80``.

    For people only: which parts a key has is told from its length and padding.
    """
    words = _words(element.family, element.key, element.key_end)
    if element.data is None:
        return words
    return f"{words} : {_words(element.family, element.data, None)}"


def _address(packed: bytes) -> IPAddress:
    return IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed)


def _service(part: bytes) -> str:
    return str(int.from_bytes(part[:2], "big"))


def _protocol(part: bytes) -> str:
    return str(_PROTOCOLS.get(part[0], part[0]))


def _link(part: bytes) -> str:
    return '"' + part.rstrip(b"\0").decode("utf-8", "backslashreplace") + '"'


def _host(part: bytes) -> str:
    return str(_address(part))


_Part = tuple[int, Callable[[bytes], str]]
_PROTO: _Part = (4, _protocol)
_PORT: _Part = (4, _service)


def _parts(family: Family, key: bytes, ranged: bool) -> tuple[_Part, ...]:
    size = 4 if family is Family.V4 else 16
    addr: _Part = (size, _host)
    length = len(key)
    if length == 8 and key[0] in _PROTOCOLS and not any(key[1:4]) and not any(key[6:]):
        return (_PROTO, _PORT)
    if length == 2 * size and not ranged and (size == 16 or any(key[-2:])):
        return (addr, addr)
    by_length: dict[int, tuple[_Part, ...]] = {
        2: ((2, _service),),
        size: (addr,),
        size + 4: (addr, _PORT),
        size + 8: (addr, _PROTO, _PORT),
    }
    if ranged:
        by_length[IFNAMSIZ + size] = ((IFNAMSIZ, _link), addr)
    return by_length.get(length, ())


def _words(family: Family, key: bytes, key_end: bytes | None) -> str:
    parts = _parts(family, key, key_end is not None)
    if not parts or (key_end is not None and len(key_end) != len(key)):
        return "0x" + key.hex() + (f"-0x{key_end.hex()}" if key_end is not None else "")
    words, at = [], 0
    for size, render in parts:
        low = key[at : at + size]
        high = low if key_end is None else key_end[at : at + size]
        words.append(render(low) if render is not _host or low == high else _range(low, high))
        at += size
    return " . ".join(words)


def _range(low: bytes, high: bytes) -> str:
    first, last = _address(low), _address(high)
    host_bits = (int(first) ^ int(last)).bit_length()
    span = (1 << host_bits) - 1
    if not int(first) & span and int(last) & span == span:
        return f"{first}/{first.max_prefixlen - host_bits}"
    return f"{first}-{last}"
