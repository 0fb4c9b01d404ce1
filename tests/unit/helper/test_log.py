"""Whatever a pod is called, a log line stays one line with the fields it has."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cni_hostport.helper.log import JsonFormatter, LineFormatter, quoted

_FIELD = re.compile(r'([a-z]+)=("(?:[^"\\]|\\.)*"|[^ "=]*)(?: |$)')
NASTY = ["", "a b", "a=b", 'a"b', "a\nlevel=error", "a\\", "\u2028", "\udcff", "\x1b[31m", "'; --"]


def record(message: str, **fields: str) -> logging.LogRecord:
    made = logging.LogRecord("x", logging.INFO, "x.py", 1, "%s", (message,), None)
    made.fields = fields
    return made


def parsed(line: str) -> dict[str, str]:
    at, out = 0, {}
    while at < len(line):
        match = _FIELD.match(line, at)
        assert match, line[at:]
        value = match[2]
        out[match[1]] = json.loads(value) if value.startswith('"') else value
        at = match.end()
    return out


def check(text: str, formatter: logging.Formatter) -> dict[str, Any]:
    line = formatter.format(record(text, verb="ADD", pod=text, result="ok"))
    assert line.isprintable()
    assert line.isascii()
    assert len(line.splitlines()) == 1
    found = json.loads(line) if line.startswith("{") else parsed(line)
    assert found["msg"] == text
    assert found.get("pod", "") == text
    assert (found["verb"], found["level"]) == ("ADD", "info")
    return found


@pytest.mark.parametrize("text", NASTY)
def test_one_line_whatever_it_holds(text: str) -> None:
    check(text, LineFormatter(True))
    check(text, LineFormatter(False))
    check(text, JsonFormatter())


@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    check(text, LineFormatter(False))
    check(text, JsonFormatter())
    assert "\n" not in quoted(text)


def test_a_traceback_is_one_line_too() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError:
        made = record("internal error")
        made.exc_info = sys.exc_info()
    for formatter in (LineFormatter(True), JsonFormatter()):
        line = formatter.format(made)
        assert "\n" not in line
        assert "ValueError" in line
