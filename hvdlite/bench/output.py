"""What all subcommands do with their results: a line at a time, JSON, and a picture where matplotlib is installed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_WIDTH = 12  # of a column of lines that are printed while the measurement runs


def aligned(head: Sequence[str], cells: Sequence[str], *, first: bool) -> str:
    """Return a line of a table that grows; with its head if it is the first."""
    lines = [head, cells] if first else [cells]
    widths = [max(_WIDTH if i else 14, len(name)) for i, name in enumerate(head)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def check_plot(path: str | None) -> None:
    """Raise ValueError, before anything is measured, if a plot is wanted and cannot be made."""
    if path and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'hvdlite[bench]'")


def figure(x: str, y: str) -> tuple[Any, Any]:
    """Return a new figure and its axes, labelled. No window is opened."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(8, 5), layout="constrained")
    axes = made.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    return made, axes


def finish(options: argparse.Namespace, results: Mapping[str, Any], draw: Callable[[str], None]) -> None:
    """Write what the options --json and --plot ask for."""
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        draw(options.plot)
