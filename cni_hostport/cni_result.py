"""The previous plugin's result: what is read from it, and how it is passed on.

Decides which of its addresses are the pod's and which version a result may
have. Never changes what it passes on, except ``cniVersion``: unknown keys,
``interface: 0`` and the spelling of addresses stay as they came.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cni_hostport.cni_fields import folded, ifname_error, interface_address, items, refuse
from cni_hostport.cni_json import Object, encode, fold, kind, show
from cni_hostport.errors import DecodeFailure, InvalidConfig
from cni_hostport.model import FAMILIES, Family, PodAddress, family_of

_SHAPES = (("0.1.0", "0.2.0"), ("0.3.0", "0.3.1", "0.4.0"), ("1.0.0", "1.1.0"))
"""Versions whose results have one shape; the reference library refuses to cross them here."""

OLD_SHAPE = _SHAPES[0]
"""Results with ``ip4`` and ``ip6`` objects, without interfaces."""


class PodNetwork(NamedTuple):
    """The pod's addresses, first of each family, IPv4 first; and the links on the host's side."""

    addresses: tuple[PodAddress, ...]
    interfaces: tuple[str, ...]


def read_prev_result(config: Object) -> Object | None:
    """``prevResult`` as it came, None when absent or null. Raises ``DecodeFailure`` (code 6)."""
    value = config.get("prevresult")
    if value is not None and not isinstance(value, dict):
        raise DecodeFailure(f"prevResult is {kind(value)}, not an object", show(value))
    return value


def check_version(prev_result: Object, version: str) -> None:
    """Raise unless a result of this version may be passed on in a call of that version.

    A result without a version has the call's. Raises ``InvalidConfig`` (code 7) where the
    shapes differ, ``DecodeFailure`` (code 6) where the version is no string.
    """
    own = fold(prev_result).get("cniversion")
    if own is None or own == "":
        return
    if not isinstance(own, str):
        raise DecodeFailure(f"prevResult.cniVersion is {kind(own)}, not a string", show(own))
    if not any(own in shape and version in shape for shape in _SHAPES):
        raise InvalidConfig(
            f"prevResult.cniVersion: {show(own)} does not fit cniVersion {show(version)}",
            "the plugin before this one answered in another version than it was called with",
        )


def render_result(prev_result: Object, version: str) -> bytes:
    """The result to print: the previous one with the call's ``cniVersion``."""
    rest = {k: v for k, v in prev_result.items() if k.casefold() != "cniversion"}
    return encode({"cniVersion": version, **rest})


def read_network(prev_result: Object, version: str, ifname: str) -> PodNetwork:
    """The pod's addresses and the host's links in a result.

    Raises ``InvalidConfig`` (code 7) naming the entry that is malformed, used or not.
    """
    fields = fold(prev_result)
    found: dict[Family, PodAddress] = {}
    if version in OLD_SHAPE:
        for key in ("ip4", "ip6"):
            if fields.get(key) is not None:
                entry = folded(f"prevResult.{key}", fields[key])
                _keep(found, interface_address(f"prevResult.{key}.ip", entry.get("ip")))
        return PodNetwork(_sorted(found), ())
    interfaces = _entries("interfaces", fields)
    names = [_name(index, entry) for index, entry in enumerate(interfaces)]
    for index, entry in enumerate(_entries("ips", fields)):
        address = interface_address(f"prevResult.ips[{index}].address", entry.get("address"))
        link = _index(f"prevResult.ips[{index}].interface", entry, len(interfaces))
        if link is None or (names[link] == ifname and interfaces[link].get("sandbox")):
            _keep(found, address)
    host_side = (n for n, e in zip(names, interfaces, strict=True) if not e.get("sandbox"))
    return PodNetwork(_sorted(found), tuple(n for n in host_side if ifname_error(n) is None))


def _entries(key: str, fields: Object) -> list[Object]:
    value: Any = fields.get(key)
    if value is None:
        return []
    field = f"prevResult.{key}"
    return [folded(f"{field}[{i}]", item) for i, item in enumerate(items(field, value))]


def _index(field: str, entry: Object, count: int) -> int | None:
    """The entry's interface; an index that points nowhere counts as none, as portmap has it."""
    value = entry.get("interface")
    if value is None:
        return None
    if type(value) is not int:
        refuse(field, value, "an integer")
    return value if 0 <= value < count else None


def _name(index: int, entry: Object) -> str:
    for key in ("name", "sandbox"):
        value = entry.get(key)
        if value is not None and not isinstance(value, str):
            refuse(f"prevResult.interfaces[{index}].{key}", value, "a string")
    return entry.get("name") or ""


def _keep(found: dict[Family, PodAddress], address: PodAddress) -> None:
    ip = address.ip
    # Nothing can be translated to these; a link-local address would need a link with it.
    if ip.is_unspecified or ip.is_loopback or ip.is_multicast:
        return
    family = family_of(address)
    if family is Family.V6 and ip.is_link_local:
        return
    found.setdefault(family, address)


def _sorted(found: dict[Family, PodAddress]) -> tuple[PodAddress, ...]:
    return tuple([found[family] for family in FAMILIES if family in found])
