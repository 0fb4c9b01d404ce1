"""Shell completions, from the commands' parsers and node-cache's table of flags. Pure."""

from __future__ import annotations

import argparse

from cni_hostport.cli.main import COMMANDS
from cni_hostport.nodecache.flags import FLAGS, Flag


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Options with a text, help excepted."""
    return [a for a in parser._actions if a.option_strings and a.dest != "help"]


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
    cases.append(f"        node-cache) words='-help {' '.join(f'-{f.name}' for f in FLAGS)}' ;;")
    values += [
        f"        node-cache:-{f.name}) COMPREPLY=($(compgen -W '{' '.join(f.choices)}' "
        '-- "$current")); return ;;'
        for f in FLAGS
        if f.choices
    ]
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
    out += ["node-cache)", "    _arguments \\"]
    out += [f"        '-{f.name}[{_zsh_quoted(f.help)}]{_flag_value(f)}' \\" for f in FLAGS]
    out += ["        '-help[show help]'", "    ;;"]
    return "\n".join([*out, "esac", ""])


def _flag_value(flag: Flag) -> str:
    if flag.boolean:
        return ""
    return f":value:({' '.join(flag.choices)})" if flag.choices else ":value: "
