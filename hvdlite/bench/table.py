"""Text tables with aligned columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def render(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table; the first column is aligned to the left, numbers and all others to the right."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    lines = []
    for row in cells:
        first = row[0].ljust(widths[0])
        lines.append("  ".join([first, *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))]).rstrip())
    return "\n".join(lines)
