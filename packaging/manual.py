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
sys.path.insert(0, str(ROOT))

from cni_hostport.cli.main import COMMANDS, module_of  # noqa: E402

FOREIGN = {"node-cache"}
"""Commands whose options are not ours to describe (Kubernetes' node-cache flags)."""

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


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options with a text, help excepted."""
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


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
        out += [f"### cni-hostport {name}", "", f"{COMMANDS[name]}; see docs/{name}.md.", ""]
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
        _roff_text(INTRO.replace("\n\n", "\n.PP\n")).rstrip(),
    ]
    out.append(".SH COMMANDS")
    for name, parser in found.items():
        out += [f".SS cni\\-hostport {_roff_text(name)}", _roff_text(parser.description or "")]
        for action in options(parser):
            out += [".TP", f".B {_roff_text(_term(action))}", _roff_text(action.help or "")]
        out += [".PP", ".nf", _roff_text((parser.epilog or "").rstrip()), ".fi"]
    for name in sorted(FOREIGN):
        out += [f".SS cni\\-hostport {_roff_text(name)}", _roff_text(COMMANDS[name])]
    for title, table in (("EXIT STATUS", STATUSES), ("ENVIRONMENT", ENVIRONMENT), ("FILES", FILES)):
        out.append(f".SH {title}")
        for key, value in table.items():
            out += [".TP", f".B {_roff_text(key)}", _roff_text(value)]
    return "\n".join(out) + "\n"


def _kind(action: argparse.Action) -> str:
    """What stands after an option: ``choice``, ``file``, ``folder``, ``text`` or nothing."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "choice"
    return {"FILE": "file", "PATH": "file", "DIR": "folder"}.get(str(action.metavar), "text")


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def bash(found: dict[str, argparse.ArgumentParser]) -> str:
    """packaging/completion/cni-hostport.bash."""
    cases, values = [], []
    for name, parser in found.items():
        words = " ".join(o for a in options(parser) for o in a.option_strings)
        cases.append(f"        {name}) words='--help {words}' ;;")
        for action in options(parser):
            key = "|".join(f"{name}:{o}" for o in action.option_strings)
            reply = {
                "choice": f"$(compgen -W '{_choices(action)}' -- \"$current\")",
                "file": '$(compgen -f -- "$current")',
                "folder": '$(compgen -d -- "$current")',
                "text": "",
            }.get(_kind(action))
            if reply is not None:
                values.append(f"        {key}) COMPREPLY=({reply}); return ;;")
    return "\n".join(
        [
            "# bash completion for cni-hostport; written by packaging/manual.py",
            "_cni_hostport() {",
            "    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words",
            "    COMPREPLY=()",
            '    if [ "$COMP_CWORD" -eq 1 ]; then',
            f"        words='{' '.join(COMMANDS)} --help --version'",
            '        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
            "        return",
            "    fi",
            '    case "${COMP_WORDS[1]}:$before" in',
            *values,
            "    esac",
            '    case "${COMP_WORDS[1]}" in',
            *cases,
            "        *) return ;;",
            "    esac",
            '    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")',
            "}",
            "complete -F _cni_hostport cni-hostport",
            "",
        ]
    )


def _zsh_quoted(text: str) -> str:
    return text.replace("'", "'\\''").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")


def zsh(found: dict[str, argparse.ArgumentParser]) -> str:
    """packaging/completion/_cni-hostport."""
    out = [
        "#compdef cni-hostport",
        "# zsh completion; written by packaging/manual.py",
        "",
        "local -a commands",
        "commands=(",
    ]
    out += [f"    '{name}:{_zsh_quoted(text)}'" for name, text in COMMANDS.items()]
    out += [
        ")",
        "",
        "if (( CURRENT == 2 )); then",
        "    _describe command commands",
        "    return",
        "fi",
        "shift words",
        "(( CURRENT-- ))",
        "case $words[1] in",
    ]
    for name, parser in found.items():
        out.append(f"{name})")
        specs = ["'--help[show help]'"]
        for action in options(parser):
            value = {
                "choice": f":value:({_choices(action)})",
                "file": ":file:_files",
                "folder": ":folder:_files -/",
                "text": f":{str(action.metavar or 'value').lower()}: ",
            }.get(_kind(action), "")
            specs += [
                f"'{o}[{_zsh_quoted(action.help or '')}]{value}'" for o in action.option_strings
            ]
        out.append("    _arguments \\\n        " + " \\\n        ".join(specs))
        out.append("    ;;")
    return "\n".join([*out, "esac", ""])


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
