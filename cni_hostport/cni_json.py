"""JSON as Go's ``encoding/json`` reads it, and values as error texts show them.

Decides which bytes are a document and which key is meant. Knows nothing of CNI
fields, and never lets anything but ``DecodeFailure`` out of ``decode_object``.
The rules are those of the CNI project's library, which every runtime's plugins
are built with: keys match without regard to case, bytes that are no UTF-8 turn
into U+FFFD, NaN, Infinity and a byte order mark are errors.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from cni_hostport.errors import DecodeFailure

Object = dict[str, Any]

MAX_DEPTH = 400
"""Levels of nesting accepted. Python's scanner and encoder give up near 1000 levels
of the whole stack; half of it leaves room to print what was read, however deep the caller is."""

VALUE_LIMIT = 200
"""Characters of a foreign value that an error text shows."""

_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        # 1e999: Go refuses it; kept, it would be printed as Infinity.
        raise ValueError("a number is too large")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def decode_text(text: str) -> Any:
    """Decode one JSON document. Raises ``DecodeFailure`` (code 6) and nothing else."""
    try:
        value = _DECODER.decode(text)
        if text.count("{") + text.count("[") > MAX_DEPTH and _too_deep(value):
            raise RecursionError
        if "\\u" in text and _ESCAPED_SURROGATE.search(text):
            value = _without_surrogates(value)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise DecodeFailure(
            "the input is not valid JSON", f"{error.msg.removesuffix(' at')} at {where}"
        ) from None
    except RecursionError:
        raise DecodeFailure(
            "the input is not valid JSON", f"nested deeper than {MAX_DEPTH} levels"
        ) from None
    except ValueError as error:
        words = str(error).partition(";")[0]  # what follows is advice to a Python programmer
        raise DecodeFailure("the input is not valid JSON", shorten(words)) from None
    return value


def decode_object(data: bytes) -> Object:
    """Decode a configuration: an object, or ``null``, which Go takes for an empty one.

    Raises ``DecodeFailure`` (code 6) for everything else.
    """
    value = decode_text(data.decode("utf-8", "replace"))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DecodeFailure(f"the input is {kind(value)}, not a JSON object")
    return value


def encode(value: object) -> bytes:
    """One JSON document as UTF-8, ended by a newline."""
    return _ENCODER.encode(value).encode("utf-8", "replace") + b"\n"


def fold(value: Object) -> Object:
    """The object with folded keys; of several spellings of one key the last counts, as in Go."""
    return {key.casefold(): item for key, item in value.items()}


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[object] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        if not below:
            return False
        level = below
    return True


def _without_surrogates(value: Any) -> Any:
    """Half a surrogate pair in an escape becomes U+FFFD: it could never be written as UTF-8."""
    if isinstance(value, str):
        return replace_surrogates(value)
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


def replace_surrogates(text: str) -> str:
    """The text with every half of a surrogate pair replaced by U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)


def kind(value: object) -> str:
    """What a value is, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {dict: "an object", list: "a list", str: "a string", int: "a number", float: "a number"}
    return names.get(type(value), "no JSON value")


def show(value: object) -> str:
    """A foreign value for an error text: on one line, escaped, at most 200 characters of it."""
    if isinstance(value, dict | list):
        return f"{kind(value)} of {len(value)}"
    if isinstance(value, str):
        return f'"{clean(shorten(value))}"'
    return shorten(json.dumps(value))


def shorten(text: str, limit: int = VALUE_LIMIT) -> str:
    """The text, cut with a note of its length where it is longer than the limit."""
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def clean(text: str) -> str:
    """The text with control characters, line ends and half surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
