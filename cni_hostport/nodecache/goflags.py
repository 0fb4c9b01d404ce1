"""Go's flag syntax and Go's scalar values, as upstream's node-cache reads them.

Decides how an argument list becomes name and value (one dash or two, ``-f v``
or ``-f=v``, booleans without a value) and which spellings of a number, a
boolean, a duration or an address are valid. Knows no flag by name and never
prints or exits.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from ipaddress import AddressValueError, IPv4Address, IPv6Address

_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


class FlagError(ValueError):
    """An argument cannot be used; the text names the flag and the value."""


def bad(flag: str, value: str, why: str) -> FlagError:
    """The one form of every flag error."""
    return FlagError(f'invalid value "{value}" for flag -{flag}: {why}')


def scan(
    argv: Sequence[str], values: Collection[str], booleans: Collection[str]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Split arguments into flags by name (the last one wins) and what follows them.

    Parsing stops at the first word that is no flag and after ``--``, as Go's
    flag package does. Raises FlagError for an unknown flag or a missing value.
    """
    found: dict[str, str] = {}
    position = 0
    while position < len(argv):
        word = argv[position]
        if len(word) < 2 or not word.startswith("-"):
            break
        position += 1
        if word == "--":
            break
        name, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        if not name or name.startswith("-"):
            raise FlagError(f"bad flag syntax: {word}")
        if name in booleans:
            found[name] = value if equals else "true"
        elif name not in values:
            raise FlagError(f"flag provided but not defined: -{name}")
        elif equals:
            found[name] = value
        elif position < len(argv):
            found[name] = argv[position]
            position += 1
        else:
            raise FlagError(f"flag needs an argument: -{name}")
    return found, tuple(argv[position:])


def boolean(flag: str, value: str) -> bool:
    """Go's strconv.ParseBool. Raises FlagError."""
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise bad(flag, value, "must be true or false")


def port(flag: str, value: str) -> int:
    """A port, 1 to 65535, in Go's spelling of an integer. Raises FlagError."""
    if re.fullmatch(r"[+-]?[0-9]+", value) is None:
        raise bad(flag, value, "must be a port number")
    number = int(value)
    if not 1 <= number <= 65535:
        raise bad(flag, value, "a port is 1 to 65535")
    return number


def duration(text: str) -> float | None:
    """Go's time.ParseDuration in seconds; None where the text is no duration."""
    sign, rest = 1.0, text
    if rest[:1] in ("+", "-") and rest:
        sign, rest = (-1.0 if rest[0] == "-" else 1.0), rest[1:]
    if rest == "0":
        return 0.0
    total, position = 0.0, 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None:
            return None
        total += float(part[1]) * _UNITS[part[2]]
        position = part.end()
    return sign * total if position else None


def seconds(flag: str, value: str) -> float:
    """An interval: whole seconds or a Go duration, above zero. Raises FlagError.

    Upstream multiplies what it read by a second, so that ``60ns`` became the
    only way to say a minute; whole nanoseconds below a microsecond therefore
    count as seconds here.
    """
    if re.fullmatch(r"[+-]?[0-9]+", value) is not None:
        found: float | None = float(value)
    else:
        found = duration(value)
        if found is not None and 0 < found < 1e-6:
            found = round(found * 1e9, 0)
    if found is None:
        raise bad(flag, value, "must be seconds, or a duration such as 30s or 2m")
    if found <= 0:
        raise bad(flag, value, "must be above zero")
    if found > 86400:
        raise bad(flag, value, "must be a day at most")
    return found


def address(text: str) -> IPv4Address | IPv6Address | None:
    """Go's net.ParseIP: no zone, no leading zeros; an IPv4-mapped one is IPv4."""
    try:
        return IPv4Address(text)
    except AddressValueError:
        pass
    try:
        found = IPv6Address(text)
    except AddressValueError:
        return None
    if found.scope_id is not None:
        return None
    return found.ipv4_mapped or found


def split_address(value: str) -> tuple[str, int] | None:
    """``host:port``, ``[v6]:port`` or ``:port`` as host and port; None for anything else."""
    host, colon, number = value.rpartition(":")
    if not colon or not number.isascii() or not number.isdigit() or int(number) > 65535:
        return None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return None
    return host, int(number)
