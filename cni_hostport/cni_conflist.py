"""Network configuration files as text: which plugins, on which line, and one word exchanged.

Decides where in the text a plugin's ``type`` stands. An edit changes those
characters alone: key order, indentation, number forms, unknown keys, duplicate
keys and line ends stay as somebody wrote them. Pure; never writes a file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_SCALAR = re.compile(r"[^\s,\]}]+")

Path = tuple[str | int, ...]


class NotAConflist(ValueError):
    """The text is no network configuration list; the words say why."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry of ``plugins``: its type, its line (from 1), and where the type's value stands."""

    type: str
    line: int
    start: int
    end: int
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Conflist:
    """A whole file. ``plugins`` in the order of the file."""

    name: str
    version: str
    plugins: tuple[Plugin, ...]

    def of_type(self, *types: str) -> list[Plugin]:
        """The entries with one of these types."""
        return [p for p in self.plugins if p.type in types]


def read(text: str) -> Conflist:
    """The plugins of a conflist, or the one plugin of a ``.conf``. Raises NotAConflist."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotAConflist(f"no JSON: {error}") from None
    if not isinstance(content, dict):
        raise NotAConflist("no JSON object")
    prefix, entries = _entries(content)
    spans = {path: span for path, span in _strings(text) if path and path[-1] == "type"}
    plugins = []
    for number, entry in enumerate(entries):
        path = (*prefix, number, "type") if prefix else ("type",)
        if not isinstance(entry, dict) or path not in spans:
            raise NotAConflist(f"plugin {number} has no type")
        start, end = spans[path]
        line = text.count("\n", 0, start) + 1
        plugins.append(Plugin(str(entry["type"]), line, start, end, entry))
    name, version = content.get("name", ""), content.get("cniVersion", "")
    return Conflist(str(name), str(version), tuple(plugins))


def _entries(content: dict[str, Any]) -> tuple[Path, list[Any]]:
    if "plugins" in content:
        if not isinstance(content["plugins"], list):
            raise NotAConflist("plugins is no list")
        return ("plugins",), content["plugins"]
    if "type" in content:
        return (), [content]
    raise NotAConflist("neither plugins nor type")


def retype(text: str, old: str, new: str) -> str:
    """The text with every plugin of type ``old`` turned into ``new``; nothing else differs."""
    for plugin in reversed(read(text).of_type(old)):
        text = text[: plugin.start] + json.dumps(new) + text[plugin.end :]
    return text


def _strings(text: str) -> Iterator[tuple[Path, tuple[int, int]]]:
    """Every string value of a valid JSON text with its path; of duplicate keys the last counts."""
    position = _skip(text, 0)
    yield from _value(text, position, ())[1]


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    assert found is not None
    return found.end()


def _value(text: str, position: int, path: Path) -> tuple[int, list[tuple[Path, tuple[int, int]]]]:
    """End of the value at ``position``, and the strings in it."""
    character = text[position]
    if character == '"':
        _, end = scanstring(text, position + 1)
        return end, [(path, (position, end))]
    if character in "{[":
        return _container(text, position, path)
    found = _SCALAR.match(text, position)
    assert found is not None
    return found.end(), []


def _container(
    text: str, position: int, path: Path
) -> tuple[int, list[tuple[Path, tuple[int, int]]]]:
    """An object or a list: the same but for the keys."""
    closing = "}" if text[position] == "{" else "]"
    found: list[tuple[Path, tuple[int, int]]] = []
    position = _skip(text, position + 1)
    number = 0
    while text[position] != closing:
        key: str | int = number
        if closing == "}":
            key, position = scanstring(text, position + 1)
            position = _skip(text, _skip(text, position) + 1)
        position, inner = _value(text, position, (*path, key))
        found += inner
        number += 1
        position = _skip(text, position)
        if text[position] == ",":
            position = _skip(text, position + 1)
    return position + 1, found
