"""What all commands' command lines have in common. Decides their look, nothing else."""

from __future__ import annotations

import argparse

STATUSES = "exit status: {}2 usage, 3 no helper answers"


def parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A command's parser: description, options, then the epilog as it is written."""
    return argparse.ArgumentParser(
        prog=f"cni-hostport {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def port(text: str) -> int:
    """A port number on the command line."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number (1 to 65535)")
    return int(text)
