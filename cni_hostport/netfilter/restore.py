"""The text format of iptables-save and iptables-restore, both directions.

Decides how one line is split into words and how a word is quoted, and how a
list of changes becomes one restore text (what words mean: ``rulewords.py``).
Never runs a tool, never knows a chain by name.
Words that come from a pod (names, comments) are data here: ``quote`` is the
only way into the text, and it refuses what a restore line cannot carry.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cni_hostport.netfilter.rulewords import Meaning, Option, meaning_of, parse_options

_PLAIN = re.compile(r"[A-Za-z0-9_./:,=+@%^-]+")
_COUNTERS = re.compile(r"\[(\d+):(\d+)\]")
# iptables-restore reads a line into a buffer of this size (xshared.h, 1.8).
MAX_LINE = 10240


class RestoreFormatError(ValueError):
    """The text is not what iptables-save writes, or a word cannot be written."""


@dataclass(frozen=True)
class Rule:
    """One rule: the words after ``-A CHAIN``, as they were written."""

    args: tuple[str, ...]
    counters: tuple[int, int] | None = None

    @functools.cached_property
    def options(self) -> tuple[Option, ...]:
        """The rule's options in order, spelled one way."""
        return parse_options(self.args)

    @functools.cached_property
    def meaning(self) -> Meaning:
        """What the rule does, whatever the order and spelling of its words."""
        return meaning_of(self.args)

    def value(self, name: str) -> str | None:
        """First value of an option that is present and not inverted."""
        for option in self.options:
            if option.name == name and option.values and not option.inverted:
                return option.values[0]
        return None

    @property
    def comment(self) -> str | None:
        """The rule's comment, None if it has none."""
        return self.value("--comment")

    @property
    def target(self) -> str | None:
        """What the rule jumps to (``-j`` or ``-g``), None if it only counts."""
        return self.value("-j") or self.value("-g")


@dataclass(frozen=True)
class Chain:
    """One chain; ``policy`` is None for a chain that a user made."""

    name: str
    policy: str | None = None
    rules: tuple[Rule, ...] = ()


@dataclass(frozen=True)
class Table:
    """One table with its chains by name, in the order of the text."""

    name: str
    chains: Mapping[str, Chain] = field(default_factory=dict)

    def rules(self, chain: str) -> tuple[Rule, ...]:
        """Rules of a chain; none where the chain does not exist."""
        found = self.chains.get(chain)
        return found.rules if found is not None else ()


def split(line: str) -> tuple[str, ...]:
    """Split a line as iptables-restore does: blanks, double quotes, backslash in quotes.

    Raises RestoreFormatError when a quote is left open.
    """
    words: list[str] = []
    word: list[str] = []
    begun = quoted = escaped = False
    for char in line:
        if escaped or (quoted and char not in '\\"'):
            word.append(char)
            escaped = False
        elif quoted:
            escaped, quoted = char == "\\", char == "\\"
        elif char == '"':
            begun = quoted = True
        elif char in " \t":
            if begun:
                words.append("".join(word))
            word, begun = [], False
        else:
            word.append(char)
            begun = True
    if quoted:
        raise RestoreFormatError(f"open quote in {line!r}")
    if begun:
        words.append("".join(word))
    return tuple(words)


def quote(word: str) -> str:
    """One word as restore text.

    Raises RestoreFormatError for what a line cannot carry: line ends and NUL.
    """
    if any(char in word for char in "\n\r\0"):
        raise RestoreFormatError(f"a word of a rule holds a line end or NUL: {word!r}")
    if _PLAIN.fullmatch(word) or word == "!":
        return word
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def join(words: Iterable[str]) -> str:
    """Words as one piece of restore text."""
    return " ".join(quote(word) for word in words)


def parse_save(text: str) -> dict[str, Table]:
    """Parse the output of iptables-save into tables by name.

    Raises RestoreFormatError, naming the line, for what it never writes.
    """
    tables: dict[str, Table] = {}
    name = ""
    policies: dict[str, str | None] = {}
    rules: dict[str, list[Rule]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if line.startswith("*"):
            name, policies, rules = line[1:].strip(), {}, {}
        elif line == "COMMIT":
            tables[name] = Table(
                name, {c: Chain(c, policies.get(c), tuple(rules[c])) for c in rules}
            )
            name = ""
        elif not name:
            raise RestoreFormatError(f"line {number} outside a table: {line!r}")
        elif line.startswith(":"):
            chain, policy = _chain_line(line, number)
            policies[chain] = policy
            rules.setdefault(chain, [])
        else:
            chain, rule = _rule_line(line, number)
            rules.setdefault(chain, []).append(rule)
    if name:
        raise RestoreFormatError(f"table {name} has no COMMIT")
    return tables


def _chain_line(line: str, number: int) -> tuple[str, str | None]:
    words = line[1:].split()
    if len(words) < 2:
        raise RestoreFormatError(f"line {number} is no chain: {line!r}")
    return words[0], None if words[1] == "-" else words[1]


def _rule_line(line: str, number: int) -> tuple[str, Rule]:
    words = split(line)
    counters = None
    found = _COUNTERS.fullmatch(words[0]) if words else None
    if found is not None:
        counters, words = (int(found[1]), int(found[2])), words[1:]
    if len(words) < 2 or words[0] not in ("-A", "--append"):
        raise RestoreFormatError(f"line {number} is no rule: {line!r}")
    return words[1], Rule(words[2:], counters)


@dataclass(frozen=True, slots=True)
class NewChain:
    """Create a user's chain, or empty it where it exists (a restore line beginning with ':')."""

    name: str

    def text(self) -> str:
        """The change as one line."""
        return f":{quote(self.name)} - [0:0]"


@dataclass(frozen=True, slots=True)
class Append:
    """Add a rule at the end of a chain."""

    chain: str
    args: tuple[str, ...]

    def text(self) -> str:
        """The change as one line."""
        return join(("-A", self.chain, *self.args))


@dataclass(frozen=True, slots=True)
class Insert:
    """Put a rule at a place of a chain, the first by default."""

    chain: str
    args: tuple[str, ...]
    position: int = 1

    def text(self) -> str:
        """The change as one line."""
        place = () if self.position == 1 else (str(self.position),)
        return join(("-I", self.chain, *place, *self.args))


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove the first rule that equals this one; fails where there is none."""

    chain: str
    args: tuple[str, ...]

    def text(self) -> str:
        """The change as one line."""
        return join(("-D", self.chain, *self.args))


@dataclass(frozen=True, slots=True)
class Flush:
    """Empty a chain."""

    chain: str

    def text(self) -> str:
        """The change as one line."""
        return join(("-F", self.chain))


@dataclass(frozen=True, slots=True)
class DeleteChain:
    """Remove an empty chain that nobody jumps to."""

    chain: str

    def text(self) -> str:
        """The change as one line."""
        return join(("-X", self.chain))


Change = NewChain | Append | Insert | Delete | Flush | DeleteChain


def render(blocks: Iterable[tuple[str, Sequence[Change]]]) -> str:
    """Changes by table as one restore text; tables without changes are left out.

    iptables-restore is atomic for each table, in the order given, and not
    across them. Raises RestoreFormatError for a line longer than the tool reads.
    """
    lines: list[str] = []
    for table, changes in blocks:
        if not changes:
            continue
        lines.append(f"*{table}")
        for change in changes:
            line = change.text()
            if len(line.encode()) >= MAX_LINE:
                raise RestoreFormatError(f"rule of {len(line)} characters: {line[:60]}…")
            lines.append(line)
        lines.append("COMMIT")
    return "\n".join(lines) + "\n" if lines else ""
