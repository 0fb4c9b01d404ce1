"""The plugin's own options: one entry of a conflist becomes ``Options``.

Decides names, defaults, types and which options exclude each other. A key that
is absent or null has its default. Never looks at the node: whether a backend
works is decided elsewhere, ``auto`` stays ``auto`` where the configuration
does not settle it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from cni_hostport.cni_conditions import Syntax, parse_conditions
from cni_hostport.cni_fields import boolean, choice, integer, items, link_names, network, refuse
from cni_hostport.cni_json import Object, show
from cni_hostport.errors import InvalidConfig
from cni_hostport.model import IPNetwork, Options, ReservePorts

MARK_BIT_MAX = 31
_DEFAULTS = Options()
_CONDITIONS = {"conditions_v4": "conditionsV4", "conditions_v6": "conditionsV6"}
_BACKENDS = {name: name for name in ("auto", "nftables", "iptables")}
_RESERVE = {str(policy): policy for policy in ReservePorts}

_CHAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,27}")
"""28 characters are what the kernel leaves of a chain name (XT_EXTENSION_MAXNAMELEN)."""
_NO_CHAIN = re.compile(
    "ACCEPT|DROP|QUEUE|RETURN|REJECT|PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING"
)


def _mark_bit(field: str, value: object) -> int:
    return integer(field, value, 0, MARK_BIT_MAX)


def _chain(field: str, value: object) -> str:
    if not isinstance(value, str) or not _CHAIN.fullmatch(value) or _NO_CHAIN.fullmatch(value):
        refuse(field, value, "the name of a user-defined iptables chain")
    return value


def _networks(field: str, value: object) -> tuple[IPNetwork, ...]:
    found = [network(f"{field}[{i}]", item) for i, item in enumerate(items(field, value))]
    return tuple(dict.fromkeys(found))


def _backend(field: str, value: object) -> str:
    return str(choice(field, value, _BACKENDS))


def _reserve(field: str, value: object) -> ReservePorts:
    policy: ReservePorts = choice(field, value, _RESERVE)
    return policy


_OPTIONS: tuple[tuple[str, str, Callable[[str, object], Any]], ...] = (
    ("backend", "backend", _backend),
    ("snat", "snat", boolean),
    ("masqAll", "masq_all", boolean),
    ("markMasqBit", "mark_masq_bit", _mark_bit),
    ("externalSetMarkChain", "external_set_mark_chain", _chain),
    ("reservePorts", "reserve_ports", _reserve),
    ("nodeAddresses", "node_addresses", _networks),
    ("openForward", "open_forward", boolean),
    ("excludeInterfaces", "exclude_interfaces", link_names),
)
"""Key on the wire, field of ``Options``, check. Conditions follow: they bear on the backend."""

_WIRE = {name: (key.casefold(), key, check) for key, name, check in _OPTIONS}


def parse_options(config: Object) -> Options:
    """Options out of the folded configuration.

    Raises ``InvalidConfig`` (code 7) naming key and value, or both keys of a pair that cannot
    stand together.
    """
    values: Object = {}
    for name, (folded_key, key, check) in _WIRE.items():
        value = config.get(folded_key)
        if value is not None:
            values[name] = check(key, value)
    syntaxes: dict[str, Syntax] = {}
    for name, key in _CONDITIONS.items():
        value = config.get(key.casefold())
        if value is not None:
            values[name], syntax = parse_conditions(key, value)
            if syntax:
                syntaxes[key] = syntax
    if not values:
        return _DEFAULTS
    if "mark_masq_bit" in values and "external_set_mark_chain" in values:
        raise InvalidConfig(
            "markMasqBit and externalSetMarkChain exclude each other",
            f"markMasqBit is {values['mark_masq_bit']}, "
            f"externalSetMarkChain is {show(values['external_set_mark_chain'])}",
        )
    values["backend"] = _choose_backend(values, syntaxes)
    return Options(**values)


def _choose_backend(values: Object, syntaxes: dict[str, Syntax]) -> str:
    """The backend asked for, else the one the other keys need, else ``auto``."""
    needs: dict[str, list[str]] = {"iptables": [], "nftables": []}
    if "external_set_mark_chain" in values:
        needs["iptables"].append("externalSetMarkChain")
    for key, syntax in syntaxes.items():
        needs[syntax].append(key)
    backend: str = values.get("backend", "auto")
    wrong = needs["iptables"] if backend == "nftables" else needs["nftables"]
    if backend != "auto" and wrong:
        other = "iptables" if backend == "nftables" else "nftables"
        raise InvalidConfig(
            f'backend is "{backend}", but {" and ".join(wrong)} can only be used with {other}'
        )
    if needs["iptables"] and needs["nftables"]:
        raise InvalidConfig(
            f"{' and '.join(needs['iptables'])} can only be used with iptables, "
            f"{' and '.join(needs['nftables'])} only with nftables"
        )
    if backend == "auto":
        return next((name for name, keys in needs.items() if keys), "auto")
    return backend
