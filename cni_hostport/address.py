"""Addresses: families, canonical form, and a pod's address with its network.

An address is canonicalised once, here. Decides nothing else.
"""

from __future__ import annotations

import enum
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_address,
)

IPAddress = IPv4Address | IPv6Address
IPInterface = IPv4Interface | IPv6Interface
IPNetwork = IPv4Network | IPv6Network


class Family(enum.IntEnum):
    """Address family, numbered as people say it."""

    V4 = 4
    V6 = 6


FAMILIES = _V4, _V6 = (Family.V4, Family.V6)
"""Both families, IPv4 first. A tuple: walking the enumeration itself costs four times as much."""


class PodAddress:
    """An address of a pod and the prefix length of its network.

    What ``ipaddress`` calls an interface, in a fifth of the memory.
    """

    __slots__ = ("ip", "prefixlen")

    def __init__(self, ip: IPAddress, prefixlen: int) -> None:
        self.ip = ip
        self.prefixlen = prefixlen

    @classmethod
    def of(cls, value: object) -> PodAddress:
        """From ``10.1.0.5/24``, or from an interface address. Raises ValueError."""
        if isinstance(value, PodAddress):
            return value
        if isinstance(value, str):
            text, _, bits = value.partition("/")
            address = ip_address(text)
            if not bits.isdecimal() or int(bits) > address.max_prefixlen:
                raise ValueError(f"not an address with a prefix length: {value!r}")
            return cls(address, int(bits))
        if isinstance(value, IPv4Interface | IPv6Interface):
            return cls(value.ip, value.network.prefixlen)
        raise ValueError(f"not an address with a prefix length: {value!r}")

    @property
    def version(self) -> int:
        """4 or 6."""
        return self.ip.version

    @property
    def max_prefixlen(self) -> int:
        """32 or 128."""
        return self.ip.max_prefixlen

    @property
    def network(self) -> IPNetwork:
        """The network the address is in."""
        host_bits = self.ip.max_prefixlen - self.prefixlen
        return _network(self.ip.version, int(self.ip) >> host_bits << host_bits, self.prefixlen)

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefixlen}"

    def __repr__(self) -> str:
        return f"PodAddress({self})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PodAddress):
            return NotImplemented
        return self.ip == other.ip and self.prefixlen == other.prefixlen

    def __hash__(self) -> int:
        return hash((self.ip, self.prefixlen))


@lru_cache(maxsize=64)  # a node has few networks, and making one costs more than all else here
def _network(version: int, number: int, prefixlen: int) -> IPNetwork:
    return IPv4Network((number, prefixlen)) if version == 4 else IPv6Network((number, prefixlen))


def family_of(address: IPAddress | IPInterface | IPNetwork | PodAddress) -> Family:
    """Family of an address, interface address or network."""
    return _V4 if address.version == 4 else _V6


def canonical_ip(text: str) -> IPAddress:
    """Parse an address; ``::ffff:a.b.c.d`` is IPv4 (RFC 4291 2.5.5.2).

    Raises ValueError when the text is no address or carries a zone.
    """
    address = ip_address(text)
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            raise ValueError(f"address with a zone: {text!r}")
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
    return address
