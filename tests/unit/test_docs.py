"""Documents say what is true: links lead somewhere, commands and error texts exist."""

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("conflist-examples/*.md")])
SOURCES = "\n".join(p.read_text() for p in (ROOT / "cni_hostport").rglob("*.py"))

sys.path.insert(0, str(ROOT / "packaging"))
manual = importlib.import_module("manual")


def name(path):
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if not target.startswith(("http", "#")):
            assert (path.parent / target.split("#")[0]).exists(), f"{name(path)}: {target}"


@pytest.mark.parametrize("path", DOCS, ids=name)
def test_command_lines_are_the_programs(path):
    lines = re.findall(
        r"^ {4,}(?:\S*/)?cni-hostport ([a-z-]+)(.*)$", path.read_text(), re.MULTILINE
    )
    for command, rest in lines:
        if command in manual.FOREIGN:
            continue
        words = rest.split("#")[0].split("|")[0].split("   ")[0].split()
        manual.parser_of(command).parse_args([w for w in words if w not in "&>"])


def _pieces(text):
    """Words of an error as the source spells them: joined literals, braces cut out."""
    return re.sub(r'"\s*f?"', "", text)


JOINED = _pieces(SOURCES)
TABLE = re.findall(
    r"^\| (`[^|]*`[^|]*) \|", (ROOT / "docs/operations.md").read_text(), re.MULTILINE
)


def test_there_is_a_table():
    assert len(TABLE) > 15


@pytest.mark.parametrize("row", TABLE)
def test_an_error_of_the_table_is_one_of_the_programs(row):
    """Upper-case words stand for what differs."""
    for text in re.findall(r"`([^`]+)`", row):
        for piece in re.split(r"[A-Z]{2,}[A-Z/]*|is in use by|\(pid N\)", text):
            words = piece.strip(" (")
            if words and words != "pod":
                assert words in JOINED, f"{text!r}: {words!r} is nowhere"


def test_no_host_of_a_real_registry():
    for path in DOCS:
        for host in re.findall(r"https?://([^/\s)\"']+)", path.read_text()):
            assert host.endswith(("example.com", "example.org", "cni.dev", "json-schema.org")), host
