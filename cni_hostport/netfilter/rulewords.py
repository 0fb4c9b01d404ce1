"""What the words of an iptables rule mean, however they are spelled and ordered.

Decides which spellings are the same option and which differences between two
rules are none. Pure, and knows no table, chain or target by purpose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import ip_network

_OPTION = re.compile(r"-[A-Za-z]|--[A-Za-z][A-Za-z0-9-]*")
_ALIASES = {
    "--protocol": "-p",
    "--source": "-s",
    "--src": "-s",
    "--destination": "-d",
    "--dst": "-d",
    "--jump": "-j",
    "--goto": "-g",
    "--in-interface": "-i",
    "--out-interface": "-o",
    "--fragment": "-f",
    "--match": "-m",
    "--destination-port": "--dport",
    "--source-port": "--sport",
    "--destination-ports": "--dports",
    "--source-ports": "--sports",
}
_PROTOCOLS = {"6": "tcp", "17": "udp", "132": "sctp", "1": "icmp", "58": "ipv6-icmp"}
_UNORDERED = {"--ctstate", "--state", "--dports", "--sports"}


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a rule with its values; ``inverted`` where ``!`` stands before it."""

    name: str
    values: tuple[str, ...] = ()
    inverted: bool = False


Meaning = frozenset[Option]


def parse_options(args: Sequence[str]) -> tuple[Option, ...]:
    """The options of a rule, long names shortened, values left as written.

    A comment's value is data even where it looks like an option.
    """
    options: list[Option] = []
    inverted = False
    position = 0
    while position < len(args):
        word = args[position]
        position += 1
        if word == "!":
            inverted = True
            continue
        name = _ALIASES.get(word, word)
        values: list[str] = []
        if name == "--comment" and position < len(args):
            values.append(args[position])
            position += 1
        while position < len(args) and args[position] != "!" and not _is_option(args[position]):
            values.append(args[position])
            position += 1
        options.append(Option(name, tuple(values), inverted))
        inverted = False
    return tuple(options)


def _is_option(word: str) -> bool:
    return _OPTION.fullmatch(word) is not None


def meaning_of(args: Sequence[str]) -> Meaning:
    """What a rule means, comparable with ``==``.

    iptables-save reorders words, adds ``/32`` and ``-m tcp``, and spells the
    target its own way; none of that is a difference. Measured on 1.8.9, nft
    and legacy.
    """
    options = [_normal(option) for option in parse_options(args)]
    protocol = next((o.values[0] for o in options if o.name == "-p" and o.values), None)
    if any(o.name == "-j" and o.values == ("CT",) for o in options) and any(
        o.name == "--notrack" for o in options
    ):
        options = [o for o in options if o.name not in ("-j", "--notrack")]
        options.append(Option("-j", ("NOTRACK",)))
    kept = (
        o
        for o in options
        if not (o.name == "-m" and o.values in ((protocol,), ("comment",)))
        and o != Option("--reject-with", ("icmp-port-unreachable",))
        and not (o.name in ("-s", "-d") and o.values and o.values[0].endswith("/0"))
    )
    return frozenset(kept)


def _normal(option: Option) -> Option:
    if not option.values:
        return option
    value = option.values[0]
    if option.name in ("-s", "-d"):
        try:
            value = str(ip_network(value, strict=False))
        except ValueError:
            return option
    elif option.name == "-p":
        value = _PROTOCOLS.get(value, value.lower())
    elif option.name in _UNORDERED:
        value = ",".join(sorted(value.split(",")))
    else:
        return option
    return Option(option.name, (value, *option.values[1:]), option.inverted)
