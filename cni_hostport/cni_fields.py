"""Checks of single values: each takes a field's name and what stood there.

Decides what is an integer, a boolean, a name or an address on the wire. Never
coerces: ``80.0``, ``"80"`` and ``true`` are no integers. Every refusal is
``InvalidConfig`` (code 7) with the field and the value in its text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network
from typing import Any, NoReturn

from cni_hostport.cni_json import Object, fold, show
from cni_hostport.errors import InvalidConfig
from cni_hostport.model import IPNetwork, PodAddress, canonical_ip

_CIDR = re.compile(r"([0-9A-Fa-f:.]+)/([0-9]{1,3})")
_PLAIN_NAME = re.compile(r"[0-9A-Za-z_.-]{1,15}")
_MAPPED_BITS = 96

IFNAME_LIMIT = 15
"""Bytes of an interface name: the kernel's IFNAMSIZ without the final NUL."""


def refuse(field: str, value: object, wanted: str) -> NoReturn:
    """Raise ``InvalidConfig`` saying that the field's value is not what is wanted."""
    raise InvalidConfig(f"{field}: {show(value)} is not {wanted}")


def integer(field: str, value: object, low: int, high: int) -> int:
    """An integer within bounds, both included."""
    if type(value) is not int:
        refuse(field, value, "an integer")
    if not low <= value <= high:
        refuse(field, value, f"in {low}..{high}")
    return value


def boolean(field: str, value: object) -> bool:
    """True or false, spelled as JSON does."""
    if not isinstance(value, bool):
        refuse(field, value, "true or false")
    return value


def string(field: str, value: object) -> str:
    """A string that is not empty."""
    if not isinstance(value, str) or not value:
        refuse(field, value, "a non-empty string")
    return value


def items(field: str, value: object) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        refuse(field, value, "a list")
    return value


def folded(field: str, value: object) -> Object:
    """An object, its keys folded."""
    if not isinstance(value, dict):
        refuse(field, value, "an object")
    return fold(value)


def choice(field: str, value: object, options: Mapping[str, Any]) -> Any:
    """One of some words, returned as what it stands for."""
    if not isinstance(value, str) or value not in options:
        refuse(field, value, "one of " + ", ".join(options))
    return options[value]


def ifname_error(name: str) -> str | None:
    """Why a text cannot be a network interface's name, None if it can.

    The kernel's rules (dev_valid_name), as the CNI library checks them: at
    most 15 bytes, not ``.`` or ``..``, no ``/``, ``:`` or white space.
    """
    if _PLAIN_NAME.fullmatch(name) and name not in (".", ".."):
        return None  # nearly every name there is
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return "interface name is not valid UTF-8"
    if size > IFNAME_LIMIT:
        return f"interface name is longer than {IFNAME_LIMIT} bytes"
    if name in ("", ".", ".."):
        return "interface name is empty, . or .."
    if "/" in name or ":" in name or "\0" in name or any(map(str.isspace, name)):
        return "interface name contains / or : or white space"
    return None


def link_names(field: str, value: object) -> tuple[str, ...]:
    """A list of interface names, repeats removed."""
    names = items(field, value)
    for index, name in enumerate(names):
        text = string(f"{field}[{index}]", name)
        problem = ifname_error(text)
        if problem:
            raise InvalidConfig(f"{field}[{index}]: {show(text)}", problem)
    return tuple(dict.fromkeys(names))


def _split_cidr(field: str, value: object) -> tuple[str, int]:
    match = _CIDR.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        refuse(field, value, "an address with a prefix length")
    return match[1], int(match[2])


def interface_address(field: str, value: object) -> PodAddress:
    """An address with the prefix length of its network, host bits kept.

    An IPv4-mapped IPv6 address is IPv4, with the prefix length that remains.
    """
    text, bits = _split_cidr(field, value)
    try:
        address = canonical_ip(text)
    except ValueError:
        refuse(field, value, "an address with a prefix length")
    if address.version == 4 and ":" in text:
        bits -= _MAPPED_BITS
    if not 0 <= bits <= address.max_prefixlen:
        refuse(field, value, "an address with a prefix length")
    return PodAddress(address, bits)


def network(field: str, value: object) -> IPNetwork:
    """A network in CIDR notation; host bits are cleared, as kube-proxy does."""
    address, bits = _split_cidr(field, value)
    try:
        if ":" not in address:
            return IPv4Network((address, bits), strict=False)
        found = IPv6Network((address, bits), strict=False)
        mapped = found.network_address.ipv4_mapped
        if mapped is None or bits < _MAPPED_BITS:
            return found
        return IPv4Network((mapped, bits - _MAPPED_BITS), strict=False)
    except ValueError:
        refuse(field, value, "a network in CIDR notation")
