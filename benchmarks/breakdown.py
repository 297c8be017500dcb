"""Where the microseconds of a small allreduce go: samples of the running Python code, by function.

    hvdrun -np 2 python benchmarks/breakdown.py [--bytes 1024] [--json results.json]

A timer interrupts rank 0 some thousand times a second while it runs one synchronous allreduce after the other; what it
was in, outside of NumPy and torch, is counted. A function's share of the samples is its share of the time. The other
ranks do the same work uninterrupted.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

import torch

import hvdlite
import hvdlite.torch as hvd
from hvdlite.bench import peers
from hvdlite.bench.table import render

# The adapter may lie below the core, or beside it in a checkout.
HOMES = {f"{Path(hvd.__file__).parent}/": "torch/", f"{Path(hvdlite.__file__).parent}/": ""}
Place = tuple[str, str]  # file, function
EVERY = 0.4e-3  # seconds from one sample to the next
WARM_UP = 200


class Samples:
    """Counts the functions of ours that are interrupted. One rank at a time, in its main thread."""

    def __init__(self) -> None:
        self.counts: Counter[Place] = Counter()

    def begin(self) -> None:
        signal.signal(signal.SIGALRM, self._take)
        signal.setitimer(signal.ITIMER_REAL, EVERY)

    def end(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _take(self, _signal: int, frame: FrameType | None) -> None:
        homes = tuple(HOMES)
        while frame is not None and not frame.f_code.co_filename.startswith(homes):
            frame = frame.f_back
        code = None if frame is None else frame.f_code
        self.counts[("", "") if code is None else (code.co_filename, code.co_name)] += 1
        signal.setitimer(signal.ITIMER_REAL, EVERY)  # not periodically: this must not interrupt itself


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    comm = peers.ranks()
    tensor, samples = torch.zeros(max(1, arguments.bytes // 4)), Samples()
    plain = run(tensor, arguments.repetitions)
    if comm.rank == 0:
        samples.begin()
    run(tensor, arguments.repetitions * 4)
    samples.end()
    if comm.rank == 0:
        median = statistics.median(plain)
        print(f"allreduce_ of {arguments.bytes} bytes on {comm.size} ranks: {1e6 * median:.1f} us")
        found: dict[str, object] = {"machine": peers.machine(comm), "bytes": arguments.bytes, "median": median}
        for what, name_of in (("part", part_of), ("function", " ".join)):
            found[what] = rows = shares(samples.counts, name_of, median)
            print(f"\n{render([what, 'us', 'share'], [(n, f'{1e6 * s:.1f}', f'{s / median:.0%}') for n, s in rows])}")
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def run(tensor: torch.Tensor, repetitions: int) -> list[float]:
    """Return the seconds of each of so many allreduces, after some that do not count."""
    took = []
    for _ in range(WARM_UP + repetitions):
        started = time.perf_counter()
        hvd.allreduce_(tensor, op=hvd.Sum, name="small")
        took.append(time.perf_counter() - started)
    return took[WARM_UP:]


def shares(counts: Mapping[Place, int], name_of: Callable[[Place], str], median: float) -> list[tuple[str, float]]:
    """Return names and seconds, the largest first; those below 2 % together at the end."""
    named: Counter[str] = Counter()
    for (file, function), n in counts.items():
        named[name_of((readable(file), function)).strip()] += n
    total = sum(counts.values())
    large = [(name, n) for name, n in named.most_common() if n >= 0.02 * total]
    large.append(("all others", total - sum(n for _, n in large)))
    return [(name, median * n / total) for name, n in large if n]


def readable(file: str) -> str:
    """Return a file's path within the package."""
    for home, prefix in HOMES.items():
        if file.startswith(home):
            return prefix + file.removeprefix(home)
    return file or "the program"


def part_of(place: Place) -> str:
    """Return the package of a place: `comm` is mostly waiting for the other ranks."""
    return place[0].split("/")[0].removesuffix(".py")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bytes", type=int, default=1024, help="of the tensor (default: 1024)")
    parser.add_argument("--repetitions", type=int, default=10_000, help="default: 10000; four times that with samples")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
