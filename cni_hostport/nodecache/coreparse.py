"""The Corefile as server blocks and directives.

Decides how a Corefile's text becomes words (quotes, comments, ``{$NAME}``),
blocks and directives with their line numbers. Knows what no directive means;
``unbound.py`` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_ENVIRONMENT = re.compile(r"\{\$([A-Za-z_][A-Za-z0-9_]*)\}|\{%([A-Za-z_][A-Za-z0-9_]*)%\}")


class CorefileError(ValueError):
    """The Corefile cannot be read; the text names the line."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word and the line it stands on (from 1); ``quoted`` where it cannot be a brace."""

    text: str
    line: int
    quoted: bool = False


@dataclass(frozen=True)
class Directive:
    """One directive: its name, its arguments, and the directives in its braces."""

    name: str
    args: tuple[str, ...]
    line: int
    body: tuple[Directive, ...] = ()

    def inside(self, name: str) -> tuple[Directive, ...]:
        """Directives of that name in the braces."""
        return tuple(d for d in self.body if d.name == name)


@dataclass(frozen=True)
class Block:
    """One server block: its keys as written, and its directives."""

    keys: tuple[str, ...]
    line: int
    directives: tuple[Directive, ...]

    def all(self, name: str) -> tuple[Directive, ...]:
        """Directives of that name."""
        return tuple(d for d in self.directives if d.name == name)


def words(text: str, environment: Mapping[str, str]) -> tuple[Word, ...]:
    """Split a Corefile into words. Raises CorefileError for an open quote."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match[1] or match[2], "")

    found: list[Word] = []
    pending = ""
    begun = 0
    for number, line in enumerate(_ENVIRONMENT.sub(value, text).splitlines(), 1):
        rest = line
        while True:
            if pending:
                end = _closing(rest)
                if end < 0:
                    pending += rest + "\n"
                    break
                inside = (pending[1:] + rest[:end]).replace('\\"', '"')
                found.append(Word(inside, begun, quoted=True))
                pending, rest = "", rest[end + 1 :]
            rest = rest.lstrip()
            if not rest or rest.startswith("#"):
                break
            if rest.startswith('"'):
                pending, begun, rest = '"', number, rest[1:]
                continue
            word = rest.split(maxsplit=1)[0]
            found.append(Word(word, number))
            rest = rest[len(word) :]
    if pending:
        raise CorefileError(f"line {begun}: a quote is not closed")
    return tuple(found)


def _closing(text: str) -> int:
    position = text.find('"')
    while position > 0 and text[position - 1] == "\\":
        position = text.find('"', position + 1)
    return position


def parse(text: str, environment: Mapping[str, str]) -> tuple[Block, ...]:
    """The server blocks of a Corefile, in order.

    ``environment`` fills ``{$NAME}``. Raises CorefileError naming the line.
    """
    stream = list(words(text, environment))
    stream.reverse()
    blocks: list[Block] = []
    while stream:
        line = stream[-1].line
        keys: list[str] = []
        while stream and not _is_brace(stream[-1], "{"):
            keys.extend(key for key in stream.pop().text.split(",") if key)
        if not stream:
            raise CorefileError(f"line {line}: {' '.join(keys)} has no block")
        stream.pop()
        if not keys:
            raise CorefileError(f"line {line}: a block without a zone")
        blocks.append(Block(tuple(keys), line, _body(stream, line)))
    return tuple(blocks)


def _is_brace(word: Word, brace: str) -> bool:
    return word.text == brace and not word.quoted


def _body(stream: list[Word], opened: int) -> tuple[Directive, ...]:
    found: list[Directive] = []
    while stream:
        word = stream.pop()
        if _is_brace(word, "}"):
            return tuple(found)
        args: list[str] = []
        body: tuple[Directive, ...] = ()
        line = word.line
        while stream and stream[-1].line == line and not _is_brace(stream[-1], "}"):
            following = stream.pop()
            if _is_brace(following, "{"):
                body = _body(stream, line)
                break
            args.append(following.text)
        found.append(Directive(word.text, tuple(args), line, body))
    raise CorefileError(f"line {opened}: a brace is not closed")


def zone_of(key: str) -> str:
    """The zone that a block's key names, "." for a network in CIDR form or none."""
    bare = key.partition("://")[2] or key
    zone, colon, port = bare.rpartition(":")
    if not (colon and port.isdigit()):
        zone = bare
    return zone if zone and "/" not in zone and not zone.startswith("(") else "."
