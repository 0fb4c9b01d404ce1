"""What the other end of stdout is: how wide, and whether it likes colours.

Decides by the conventions people know: COLUMNS, NO_COLOR, TERM=dumb, a pipe.
Never changes text that goes to a pipe or a file.
"""

from __future__ import annotations

import os
import shutil
import sys

BOLD, RED, YELLOW, GREEN = "1", "31", "33", "32"
CLEAR = "\x1b[H\x1b[2J"


def width() -> int | None:
    """Columns to stay within; None where nothing is to be cut.

    COLUMNS counts also for a pipe, since then somebody asked for it.
    """
    asked = os.environ.get("COLUMNS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return shutil.get_terminal_size().columns if interactive() else None


def interactive() -> bool:
    """Whether a person looks at stdout."""
    return sys.stdout.isatty()


def colours() -> bool:
    """Whether to colour: a terminal that can, and nobody said no (no-color.org)."""
    return interactive() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def paint(text: str, code: str) -> str:
    """The text in a colour, or as it is."""
    return f"\x1b[{code}m{text}\x1b[0m" if colours() else text
