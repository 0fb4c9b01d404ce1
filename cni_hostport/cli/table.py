"""Aligned columns of text. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def render(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, two spaces apart, no trailing space."""
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
    lines = []
    for row in [columns, *rows]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
