"""A strict parser for the part of PromQL that rules and dashboards here use.

Raises SyntaxError for anything else; returns the metric names that an
expression selects. Knows functions, aggregations, matchers, ranges, comparison
and arithmetic operators, and parentheses.
"""

from __future__ import annotations

import re

AGGREGATIONS = {"sum", "count", "max", "min", "avg"}
FUNCTIONS = {
    # name: kinds of its arguments (v instant vector, r range vector, n number)
    "rate": "r",
    "increase": "r",
    "histogram_quantile": "nv",
    "time": "",
    "absent": "v",
}
TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![a-zA-Z_])
    |(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
    |(?P<range>\[(?:\d+[smhdw]|\$__rate_interval)\])
    |(?P<string>"(?:[^"\\]|\\.)*")
    |(?P<op>==|!=|<=|>=|=~|!~|[-+*/<>=(){},]))""",
    re.VERBOSE,
)
BINARY = [{"or"}, {"and", "unless"}, {"==", "!=", "<=", ">=", "<", ">"}, {"+", "-"}, {"*", "/"}]


def metrics(expression: str) -> set[str]:
    """Metric names of a valid expression that yields an instant vector or a number."""
    parser = _Parser(expression)
    kind = parser.binary(0)
    parser.end()
    if kind == "r":
        raise SyntaxError("a range vector is no result")
    return parser.names


class _Parser:
    def __init__(self, text: str) -> None:
        self.tokens: list[tuple[str, str]] = []
        self.names: set[str] = set()
        position = 0
        text = text.rstrip()
        while position < len(text):
            found = TOKEN.match(text, position)
            if not found or found.lastgroup is None:
                raise SyntaxError(f"at {text[position:]!r}")
            self.tokens.append((found.lastgroup, found[found.lastgroup]))
            position = found.end()
        self.tokens.append(("end", ""))

    def peek(self) -> tuple[str, str]:
        return self.tokens[0]

    def take(self, *wanted: str) -> str:
        kind, text = self.tokens.pop(0)
        if wanted and text not in wanted and kind not in wanted:
            raise SyntaxError(f"{text!r} where {' or '.join(wanted)} is wanted")
        return text

    def end(self) -> None:
        self.take("end")

    def binary(self, level: int) -> str:
        if level == len(BINARY):
            return self.postfix()
        kind = self.binary(level + 1)
        while self.peek()[1] in BINARY[level] and self.peek()[0] != "string":
            self.take()
            other = self.binary(level + 1)
            if "r" in (kind, other):
                raise SyntaxError("an operator needs instant vectors or numbers")
            kind = "v" if "v" in (kind, other) else "n"
        return kind

    def postfix(self) -> str:
        kind = self.primary()
        if self.peek()[0] == "range":
            if kind != "selector":
                raise SyntaxError("a range of something that is no selector")
            self.take()
            return "r"
        return "v" if kind == "selector" else kind

    def primary(self) -> str:
        kind, text = self.peek()
        if kind == "number":
            self.take()
            return "n"
        if text == "(":
            self.take()
            inner = self.binary(0)
            self.take(")")
            return inner
        name = self.take("name")
        if name in AGGREGATIONS:
            return self.aggregation()
        if self.peek()[1] == "(":
            return self.function(name)
        self.names.add(name)
        self.matchers()
        return "selector"

    def aggregation(self) -> str:
        if self.peek()[1] in ("by", "without"):
            self.take()
            self.take("(")
            self.take("name")
            while self.peek()[1] == ",":
                self.take()
                self.take("name")
            self.take(")")
        self.take("(")
        if self.binary(0) != "v":
            raise SyntaxError("an aggregation needs an instant vector")
        self.take(")")
        return "v"

    def function(self, name: str) -> str:
        if name not in FUNCTIONS:
            raise SyntaxError(f"no function {name}")
        self.take("(")
        for number, wanted in enumerate(FUNCTIONS[name]):
            if number:
                self.take(",")
            if self.binary(0) != wanted:
                raise SyntaxError(f"argument {number + 1} of {name} is of the wrong kind")
        self.take(")")
        return "v" if FUNCTIONS[name] else "n"

    def matchers(self) -> None:
        if self.peek()[1] != "{":
            return
        self.take()
        while self.peek()[1] != "}":
            self.take("name")
            operator = self.take("=", "!=", "=~", "!~")
            pattern = self.take("string")
            if operator in ("=~", "!~") and "$" not in pattern:
                re.compile(pattern)
            if self.peek()[1] == ",":
                self.take()
        self.take("}")
