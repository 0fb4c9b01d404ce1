"""Documents say what is true: links lead somewhere, commands and error texts exist."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from cni_hostport import cni_options
from cni_hostport.cli.main import COMMANDS
from cni_hostport.errors import HostPortError
from cni_hostport.nodecache.metrics import _SERVER, Metrics

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


README, ARCHITECTURE = ((ROOT / n).read_text() for n in ("README.md", "ARCHITECTURE.md"))


def section(text, title):
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table):
    """What stands in back-ticks in the first cell of each row."""
    rows = re.findall(r"^\| ([^|]*) \|", table, re.MULTILINE)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def test_the_map_has_every_package_and_module():
    text = section(ARCHITECTURE, "The map")
    named = set(re.findall(r"(?:^  |\(|; )(\w+(?:\.py|/))(?: |:)", text, re.MULTILINE))
    present = {f"{p.name}/" if p.is_dir() else p.name for p in (ROOT / "cni_hostport").iterdir()}
    assert "  cni*.py " in text
    wanted = {n for n in present if not n.startswith(("__", "cni_")) and n != "cni.py"}
    assert named == wanted


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_modules_that_are_named_exist(document):
    for name in set(re.findall(r"`([\w/]+\.py)`", (ROOT / document).read_text())):
        assert list(ROOT.glob(name)) or list((ROOT / "cni_hostport").rglob(name)), name


def test_the_readme_lists_every_command_option_and_code():
    commands = first_cells(section(README, "Who has port 8080?"))
    assert {c for c in commands if not c.startswith("-")} == set(COMMANDS)
    keys = set(first_cells(section(README, "Configuration")))
    wire = {key for key, _, _ in cni_options._OPTIONS} | set(cni_options._CONDITIONS.values())
    wire |= {"portMappings", "portMappingsAnnotation", "capabilities.portMappings"}
    assert keys == wire
    codes = re.findall(
        r"^\| ([\d, ]+) \|", section(README, "What a pod's event says"), re.MULTILINE
    )
    listed = [int(code) for row in codes for code in row.split(",")]
    ours = {c.code for c in HostPortError.__subclasses__()} - {HostPortError.code}
    assert listed == sorted(ours)


def test_the_cache_lists_every_metric():
    metrics = Metrics(lambda: dict.fromkeys(_SERVER, 0.0), lambda: 0.0)
    found = set(re.findall(r"^# TYPE (\S*nodecache\S*)", metrics.page()[2].decode(), re.MULTILINE))
    text = section((ROOT / "docs/node-cache.md").read_text(), "Metrics and health")
    names = {w.split("{")[0] for w in first_cells(text)}
    assert {n.replace("…", "cni_hostport_nodecache") for n in names} == found


def test_no_host_of_a_real_registry():
    for path in DOCS:
        for host in re.findall(r"https?://([^/\s)\"']+)", path.read_text()):
            assert host.endswith(("example.com", "example.org", "cni.dev", "json-schema.org")), host


def test_every_way_of_holding_is_documented() -> None:
    schema = json.loads((ROOT / "docs/status.schema.json").read_text())
    text = json.dumps(schema)
    listed = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/status-json.md").read_text(), re.M))
    (words,) = re.findall(r'"held": \{"enum": (\[.*?\])', text)
    assert set(json.loads(words)) == {"yes", "no", "waiting", "yielded", "skipped"}
    assert set(json.loads(words)) <= listed
