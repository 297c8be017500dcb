"""A picture of one training step, from a real timeline: what the program does, when it waits, and what runs meanwhile.

    hvdrun -np 2 python benchmarks/picture.py timeline.svg [--network mlp1024,2048,2048,1792,10]

Rank 0 records some steps as HVDLITE_TIMELINE would, notes when forward, backward and the optimizer's step begin, and
draws the last of them as SVG.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import torch

import hvdlite.torch as hvd
from hvdlite.bench import train
from hvdlite.bench.train import Training

SAMPLES = 32
WARM_UP, RECORDED = 20, 5  # steps: the schedule is learned in the first ones
COLOURS = {
    "forward": "#7aa6c2", "backward": "#3f7f9f", "optimizer": "#a8c686", "WAIT": "#d9a441",
    "NEGOTIATE_ALLREDUCE": "#d8d8d8", "ALLREDUCE": "#b5523b",
}  # fmt: skip
MEANINGS = {
    "WAIT": "caller waits", "NEGOTIATE_ALLREDUCE": "not yet ready on all ranks, or in line", "ALLREDUCE": "reducing",
}  # fmt: skip
WIDTH, LEFT, ROW, TOP = 960, 170, 24, 34  # pixels


class Span(NamedTuple):
    """A piece of a row; seconds of the system's clock."""

    row: str
    name: str
    begin: float
    end: float


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    make, shape = train.network(arguments.network)
    training = Training(make(), train.by_views, *train.batch(SAMPLES, shape, hvd.rank()))
    for _ in range(WARM_UP):
        training.step()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "timeline.json")
        if hvd.rank() == 0:
            hvd.start_timeline(str(file))
        steps = [step(training) for _ in range(RECORDED)]
        hvd.barrier()
        if hvd.rank() == 0:
            hvd.stop_timeline()
            last = steps[-1]
            recorded = spans(json.loads(file.read_text()))
            inside = [one for one in recorded if last[0].begin <= one.begin and one.end <= last[-1].end]
            title = f"One step of {arguments.network} on {hvd.size()} ranks, as rank 0 sees it"
            arguments.output.write_text(draw([*last, *inside], title))


def step(training: Training) -> list[Span]:
    """Run a step, and return its phases."""
    marks = [time.time()]
    training.optimizer.zero_grad()
    loss = training.loss()
    marks.append(time.time())
    loss.backward()
    marks.append(time.time())
    training.optimizer.step()
    marks.append(time.time())
    names = ("forward", "backward", "optimizer")
    return [Span("program", *span) for span in zip(names, marks[:-1], marks[1:], strict=True)]


def spans(events: Sequence[dict]) -> Iterator[Span]:  # type: ignore[type-arg]
    """Yield the outer spans of every row of a timeline."""
    rows = {event["pid"]: event["args"].get("name") for event in events if event.get("name") == "process_name"}
    start = next(e["args"]["start_time_since_epoch_in_micros"] for e in events if e.get("name") == "process_name")
    opened: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for event in events:
        stack = opened[event["pid"], event.get("tid", 0)]
        if event["ph"] == "B":
            stack.append((event["name"], event["ts"]))
        elif event["ph"] == "E" and stack:
            name, ts = stack.pop()
            if not stack:
                row = rows.get(event["pid"]) or "program waits"
                yield Span(row, name, (start + ts) / 1e6, (start + event["ts"]) / 1e6)


def draw(found: Sequence[Span], title: str) -> str:
    """Return the spans as SVG, a row for each of their rows, milliseconds from the first."""
    begin, end = min(span.begin for span in found), max(span.end for span in found)
    rows = list(dict.fromkeys(span.row for span in sorted(found, key=lambda span: (span.row != "program", span.begin))))
    scale = (WIDTH - LEFT - 20) / (end - begin)
    bottom = TOP + ROW * len(rows)
    parts = [text(LEFT, 20, title, size=14)]
    parts += [text(LEFT - 8, TOP + ROW * i + 16, row, anchor="end") for i, row in enumerate(rows)]
    for i in range(11):
        x, ms = LEFT + (WIDTH - LEFT - 20) * i / 10, 1e3 * (end - begin) * i / 10
        parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(text(x, bottom + 16, f"{ms:.1f}" + (" ms" if i == 10 else ""), anchor="middle"))
    for span in found:
        x, y = LEFT + scale * (span.begin - begin), TOP + ROW * rows.index(span.row) + 3
        width, label = max(0.6, scale * (span.end - span.begin)), f"{span.name} {1e3 * (span.end - span.begin):.2f} ms"
        colour = COLOURS.get(span.name, "#999999")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{colour}">'
            f"<title>{escape(label)}</title></rect>"
        )
    used = [name for name in COLOURS if any(span.name == name for span in found)]
    for i, name in enumerate(used):
        x = LEFT + i * (WIDTH - LEFT) / max(1, len(used)) * 0.95
        parts.append(f'<rect x="{x:.1f}" y="{bottom + 30}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(text(x + 16, bottom + 40, MEANINGS.get(name, name)))
    height = bottom + 52
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, what: str, anchor: str = "start", size: int = 11) -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(what)}</text>'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="the picture, SVG")
    parser.add_argument("--network", default="mlp1024,2048,2048,1792,10", help="as of `bench train`")
    return parser.parse_args()


if __name__ == "__main__":
    main()
