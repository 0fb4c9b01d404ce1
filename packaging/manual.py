"""Writes the man page and the shell completions from the commands' own parsers.

``python packaging/manual.py`` writes them; with ``--check`` it tells whether those
in the tree are what it would write. Decides their look only: every word comes from
the program.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "packaging")]

from completions import bash, options, zsh  # noqa: E402

from cni_hostport.cli.main import COMMANDS, module_of  # noqa: E402
from cni_hostport.nodecache.usage import usage  # noqa: E402

FOREIGN = {"node-cache"}
"""Commands without a parser of ours: Kubernetes' node-cache flags, in Go's syntax."""

INTRO = """\
Gives pods their host ports: a CNI plugin that takes portmap's place in a conflist,
and a helper that reserves the ports, maps them, and repairs what others damage.

Container runtimes call it as a plugin, without arguments and with CNI_* in the
environment. With a command it is for the node's operator.
"""

ENVIRONMENT = {
    "CNI_HOSTPORT_RUN_DIR": "directory of socket, records and queue (default "
    "/run/cni-hostport, mode 0700). Only the default reaches every call of every runtime.",
    "CNI_HOSTPORT_LISTEN_METRICS": "ADDR:PORT, as helper --listen-metrics.",
    "CNI_HOSTPORT_INSTANCE": "name of a helper, shown by status and compared by ping.",
    "NO_COLOR": "no colours, whatever the terminal can.",
    "COLUMNS": "width that tables keep to.",
}

FILES = {
    "/run/cni-hostport/helper.sock": "where the helper answers",
    "/run/cni-hostport/helper.log": "log of a helper that a plugin call started",
    "/run/cni-hostport/records/": "one JSON file an attachment",
    "/opt/cni-hostport/VERSION/": "the bundle",
    "/opt/cni/bin/cni-hostport": "link to its plugin",
    "/etc/systemd/system/cni-hostport.service": "the helper's unit",
}

STATUSES = {
    "0": "well",
    "1": "differences were found, or something failed",
    "2": "the command line is wrong",
    "3": "no helper answers",
}


class _Captured(Exception):
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: str) -> argparse.ArgumentParser:
    """The parser that a command makes, taken before it parses anything."""

    def capture(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise _Captured(self)

    original = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = capture  # type: ignore[method-assign,assignment]
    try:
        importlib.import_module(module_of(command)).main([])
    except _Captured as captured:
        return captured.parser
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
    raise SystemExit(f"{command} parses no arguments")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command's parser, in the order of the overview."""
    return {name: parser_of(name) for name in COMMANDS if name not in FOREIGN}


def _term(action: argparse.Action) -> str:
    word = ", ".join(action.option_strings)
    if action.nargs == 0:
        return word
    value = "|".join(action.choices) if action.choices else action.metavar or action.dest.upper()
    return f"{word} {value}"


def markdown(found: dict[str, argparse.ArgumentParser]) -> str:
    """docs/man/cni-hostport.8.md."""
    out = [
        "# cni-hostport(8)",
        "",
        "Written by packaging/manual.py from the program's own words.",
        "",
        "## NAME",
        "",
        "cni-hostport - host ports of containers",
        "",
        "## SYNOPSIS",
        "",
        "`cni-hostport` *COMMAND* [*OPTION*...]",
        "",
        "## DESCRIPTION",
        "",
        INTRO,
    ]
    out += ["## COMMANDS", ""]
    for name, parser in found.items():
        out += [f"### cni-hostport {name}", "", parser.description or "", ""]
        out += [f"- `{_term(a)}`: {a.help}" for a in options(parser)]
        out += ["", "```text", (parser.epilog or "").rstrip(), "```", ""]
    for name in sorted(FOREIGN):
        out += [f"### cni-hostport {name}", "", "```text", usage(), "```", ""]
    for title, table in (("EXIT STATUS", STATUSES), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        out += [f"## {title}", "", *(f"- `{k}`: {v}" for k, v in table.items()), ""]
    return "\n".join(out).rstrip() + "\n"


def _roff_text(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^(['.])", r"\\&\1", text, flags=re.MULTILINE)


def roff(found: dict[str, argparse.ArgumentParser]) -> str:
    """packaging/man/cni-hostport.8."""
    out = [
        ".TH CNI-HOSTPORT 8",
        ".SH NAME",
        "cni\\-hostport \\- host ports of containers",
        ".SH SYNOPSIS",
        ".B cni\\-hostport",
        ".I COMMAND",
        "[\\fIOPTION\\fR...]",
        ".SH DESCRIPTION",
        _roff_text(INTRO).replace("\n\n", "\n.PP\n").rstrip(),
    ]
    out.append(".SH COMMANDS")
    for name, parser in found.items():
        out += [f".SS cni\\-hostport {_roff_text(name)}", _roff_text(parser.description or "")]
        for action in options(parser):
            out += [".TP", f".B {_roff_text(_term(action))}", _roff_text(action.help or "")]
        out += [".PP", ".nf", _roff_text((parser.epilog or "").rstrip()), ".fi"]
    for name in sorted(FOREIGN):
        out += [f".SS cni\\-hostport {_roff_text(name)}", ".nf", _roff_text(usage()), ".fi"]
    for title, table in (("EXIT STATUS", STATUSES), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        out.append(f".SH {title}")
        for key, value in table.items():
            out += [".TP", f".B {_roff_text(key)}", _roff_text(value)]
    return "\n".join(out) + "\n"


def everything() -> dict[Path, str]:
    """Each file with its text."""
    os.environ.pop("CNI_HOSTPORT_LISTEN_METRICS", None)
    found = parsers()
    return {
        ROOT / "docs/man/cni-hostport.8.md": markdown(found),
        ROOT / "packaging/man/cni-hostport.8": roff(found),
        ROOT / "packaging/completion/cni-hostport.bash": bash(found),
        ROOT / "packaging/completion/_cni-hostport": zsh(found),
    }


def main(argv: list[str]) -> int:
    """Write, or check."""
    stale = []
    for path, text in everything().items():
        if not path.exists() or path.read_text() != text:
            stale.append(str(path.relative_to(ROOT)))
            if "--check" not in argv:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    if stale and "--check" in argv:
        print(
            f"not as the program says: {', '.join(stale)}; run packaging/manual.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
