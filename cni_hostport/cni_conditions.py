"""The options ``conditionsV4`` and ``conditionsV6``: words that end up in a rule.

Decides which words may stand in front of our rule and in whose syntax they are
written. Never lets a word through that could end the rule, open another one,
or decide what happens to a packet: a condition narrows a rule, nothing else.
"""

from __future__ import annotations

import re
from typing import Literal

from cni_hostport.cni_fields import items, refuse
from cni_hostport.cni_json import show
from cni_hostport.errors import InvalidConfig

Syntax = Literal["iptables", "nftables"]

WORD_LIMIT = 256
"""Characters of one word; iptables-restore reads lines of 10,240."""
WORDS_LIMIT = 64
"""Words of one option; iptables takes 255 arguments, its own and ours included."""

_FORBIDDEN_CHARS = re.compile(r"[;{}#'\"`\\$]")

_VERDICT_WORDS = (
    "accept|continue|dnat|drop|goto|jump|masquerade|nfqueue|queue"
    "|redirect|reject|return|snat|tproxy"
)
_VERDICT = re.compile(_VERDICT_WORDS)
"""Refused in either syntax, in any case."""

_NFT_STATEMENT = re.compile(
    rf"(?<![a-z_])(?:{_VERDICT_WORDS}"
    r"|add|comment|counter|delete|dup|flow|fwd|notrack|quota|set|synproxy|update|vmap)(?![a-z0-9_])"
)
"""Verdicts, and words that begin a statement or a verdict map; the latter are legal names of
matches in iptables. Searched, not matched: nft reads ``80drop`` as ``80 drop``."""

_IPTABLES_SHORT = frozenset(("-s", "-d", "-i", "-o", "-p", "-m", "-f"))
"""The only one-dash words: getopt reads ``-jACCEPT`` and ``-fj`` as a jump too."""

_IPTABLES_LONG = ("--jump", "--goto", "--modprobe", "--table")
"""Refused with all their abbreviations, which getopt_long accepts; modprobe names a program."""


def parse_conditions(field: str, value: object) -> tuple[tuple[str, ...], Syntax | None]:
    """The words of one option and their syntax; None where there are no words.

    A leading ``-`` or ``!`` in the first word means iptables, as portmap has it.
    Raises ``InvalidConfig`` (code 7) naming the option, the word's index and the word.
    """
    words = items(field, value)
    if len(words) > WORDS_LIMIT:
        raise InvalidConfig(f"{field}: {len(words)} words, at most {WORDS_LIMIT} are taken")
    if not words:
        return (), None
    syntax: Syntax = "nftables"
    if isinstance(words[0], str) and words[0].startswith(("-", "!")):
        syntax = "iptables"
    return tuple(_word(f"{field}[{i}]", word, syntax) for i, word in enumerate(words)), syntax


def _word(field: str, word: object, syntax: Syntax) -> str:
    if not isinstance(word, str) or not word:
        refuse(field, word, "a non-empty string")
    if len(word) > WORD_LIMIT:
        raise InvalidConfig(f"{field}: {show(word)} is longer than {WORD_LIMIT} characters")
    if not word.isascii() or not word.isprintable() or " " in word:
        refuse(field, word, "one word of printable ASCII (one word a list entry)")
    forbidden = _FORBIDDEN_CHARS.search(word)
    if forbidden:
        raise InvalidConfig(f"{field}: {show(word)} contains {show(forbidden[0])}")
    if _decides(word, syntax):
        raise InvalidConfig(
            f"{field}: {show(word)} is not a condition",
            "conditions narrow a rule; a verdict, jump or statement is not allowed in them",
        )
    return word


def _decides(word: str, syntax: Syntax) -> bool:
    lower = word.lower()
    if syntax == "nftables":
        # A leading dash means nothing to nft; refused here, where the text can be plain about it.
        return bool(_NFT_STATEMENT.search(lower)) or word.startswith("-")
    if _VERDICT.fullmatch(lower):
        return True
    if word.startswith("--"):
        name = word.partition("=")[0]
        return any(option.startswith(name) for option in _IPTABLES_LONG)
    return word.startswith("-") and word not in _IPTABLES_SHORT
