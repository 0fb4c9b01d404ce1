"""Aligned columns of text that fit the terminal. Pure.

Decides what a narrow terminal loses: long cells are cut first (a cut cell ends
in ``…``), then whole columns go, the least important first. Where nobody looks
at a terminal (a pipe, a file) nothing is ever cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

GAP = 2
ELLIPSIS = "…"


def render(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    shrink: Mapping[str, int] | None = None,
    drop: Sequence[str] = (),
) -> str:
    """Columns as wide as their widest cell, two spaces apart, no trailing space.

    ``width`` is the terminal's, None for no limit. ``shrink`` names columns that
    may be cut and the characters they keep at least; ``drop`` names columns that
    may go, the first to go first.
    """
    kept = list(range(len(columns)))
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in kept]
    if width is not None:
        _shrink(columns, widths, kept, width, shrink or {})
        for name in drop:
            if _total(widths, kept) <= width:
                break
            kept.remove(list(columns).index(name))
    lines = []
    for row in [columns, *rows]:
        cells = [_cut(row[i], widths[i]).ljust(widths[i]) for i in kept]
        lines.append((" " * GAP).join(cells).rstrip())
    return "\n".join(lines)


def _total(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[i] for i in kept) + GAP * (len(kept) - 1)


def _shrink(
    columns: Sequence[str],
    widths: list[int],
    kept: Sequence[int],
    width: int,
    shrink: Mapping[str, int],
) -> None:
    """Take from the widest column that may be cut, one character at a time."""
    while _total(widths, kept) > width:
        able = [i for i in kept if widths[i] > max(shrink.get(columns[i], 1 << 30), 1)]
        if not able:
            return
        widths[max(able, key=lambda i: widths[i])] -= 1


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + ELLIPSIS
