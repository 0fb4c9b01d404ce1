"""What ``node-cache --help`` says: every flag with its values, exit status, examples. Pure.

Decides words and order; lines stay within 80 columns.
"""

from __future__ import annotations

import textwrap

from cni_hostport.nodecache.flags import FLAGS, Flag

_WIDTH, _INDENT = 80, 6
_HEAD = """\
usage: cni-hostport node-cache -localip IP[,IP...] [FLAG...]

A DNS cache on this node, and the rules that lead pods' questions to it while it
answers. Flags have one dash or two; -flag value or -flag=value; a boolean is
-flag or -flag=true|false.
"""
_TAIL = """\
exit status: 0 ended in good order; 1 it could not begin (a flag, no DNS server,
no packet filter, a foreign link, an unset variable); 2 a second interrupt;
3 something of it could not be removed

examples:
  cni-hostport node-cache -localip 169.254.20.10,10.96.0.10 -conf /run/Corefile
  cni-hostport node-cache -localip 169.254.20.10 -interfacekind ifb
  cni-hostport node-cache -plugins       what of a Corefile unbound is told

docs/node-cache.md says what happens when, and lists the metrics."""


def usage() -> str:
    """The whole text."""
    return "\n".join([_HEAD, *(line for flag in FLAGS for line in _lines(flag)), "", _TAIL])


def _lines(flag: Flag) -> list[str]:
    value = "|".join(flag.choices) or "VALUE"
    first = f"  -{flag.name}" if flag.boolean else f"  -{flag.name} {value}"
    if len(first) > _WIDTH:
        first = f"  -{flag.name} VALUE"
    words = [flag.help]
    if flag.choices and not first.endswith(value):
        words.append(f"one of {', '.join(flag.choices)}")
    if flag.default not in ("", "false"):
        words.append(f"default {flag.default}")
    indent = " " * _INDENT
    text = "; ".join(words)
    return [first, *textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent)]
