"""`bench allreduce`: collectives over sizes and dtypes, with peers in the same job, in turn."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hvdlite as hvd
from hvdlite.bench import output, peers
from hvdlite.bench.operations import COLLECTIVES, DTYPES, Case, bus_factor
from hvdlite.bench.turns import TURNS, Ranks, take_turns, times
from hvdlite.bench.units import show_bytes, show_time
from hvdlite.config import set_environment

PEERS = ("mpi", "gloo")
BACKENDS = ("auto", "shared_memory", "ring", "tree", "mpi_native", "reference")
MOST = 1000  # repetitions of a contender
LEAST = 3


def run(options: argparse.Namespace) -> None:
    """Measure what the options ask for, and print it on rank 0. Collective."""
    rows: list[dict[str, Any]] = []
    for number, backend in enumerate(options.backends):
        set_environment({"HVDLITE_BACKEND": backend})
        hvd.init()
        comm = peers.ranks()
        with _gloo(comm, options.vs):
            for case in _cases(options, comm):
                row = {"backend": backend, **measure(case, options.vs, options.seconds, comm)}
                rows.append(row)
                if comm.rank == 0:
                    print(output.aligned(*_line(row, options.vs), first=len(rows) == 1), flush=True)
            facts = peers.machine(comm)
        if number + 1 < len(options.backends):
            hvd.shutdown()
    if comm.rank == 0:
        print("\nwhy it ran this way: " + "; ".join(f"{kind}: {why}" for kind, why in hvd.backend_reasons().items()))
        output.finish(options, {"machine": facts, "results": rows}, lambda path: draw(rows, path))


def _cases(options: argparse.Namespace, comm: Ranks) -> Iterator[Case]:
    names = COLLECTIVES if options.all else (options.collective,)
    for collective in names:
        for dtype in options.dtypes:
            for nbytes in options.sizes:
                yield Case(
                    collective, nbytes, dtype, comm.rank, comm.size, tensors=options.tensors, memory=options.memory
                )


def measure(case: Case, against: Sequence[str], seconds: float, comm: Ranks) -> dict[str, Any]:
    """Return a row of the results: what ran, and for each contender times and bandwidths. Collective.

    Args:
        seconds: about as long each contender may run.
    """
    runs: dict[str, Callable[[], None]] = {}
    missing: dict[str, str] = {}
    for name in ("hvdlite", *against):
        try:
            runs[name] = case.contender(name)
            if name != "hvdlite":
                case.fill(name)
                runs[name]()
        except (ValueError, RuntimeError, NotImplementedError) as error:  # a peer cannot do this, on all ranks alike
            if name == "hvdlite":
                raise
            runs.pop(name, None)
            missing[name] = str(error).splitlines()[0]
    repetitions = _repetitions(case, runs, seconds, comm)
    turns = min(TURNS, repetitions)
    taken = take_turns(runs, repetitions, comm, before=case.fill, after_turn=case.check, turns=turns)
    factor = bus_factor(case.collective, comm.size)
    contenders = {}
    for name, values in taken.items():
        one = times(values)
        algorithm = case.nbytes / one.median
        contenders[name] = {
            **{key: getattr(one, key) for key in one._fields},
            "algorithm_bandwidth": algorithm,
            "bus_bandwidth": algorithm * factor,
        }
    return {
        "collective": case.collective, "dtype": case.dtype, "bytes": case.nbytes, "tensors": case.tensors,
        "memory": "shared" if case.home is not None else "private", "repetitions": repetitions,
        "contenders": contenders, "missing": missing,
    }  # fmt: skip


def _repetitions(case: Case, runs: dict[str, Callable[[], None]], seconds: float, comm: Ranks) -> int:
    """Return how often each contender is to run; the slowest of them decides, as all take equal turns."""
    slowest = 0.0
    for name, one in runs.items():
        for _ in range(2):
            case.fill(name)
            comm.Barrier()
            started = time.perf_counter()
            one()
            took = time.perf_counter() - started
        slowest = max(slowest, took)
    count: int = comm.bcast(max(LEAST, min(MOST, int(seconds / slowest))))
    return count


def _line(row: dict[str, Any], against: Sequence[str]) -> tuple[list[str], list[str]]:
    head = ["collective", "dtype", "backend", "size", "median", "p10", "p90", "algbw GB/s", "busbw GB/s"]
    mine = row["contenders"]["hvdlite"]
    cells = [row["collective"], row["dtype"], row["backend"], show_bytes(row["bytes"])]
    cells += [show_time(mine[key]) for key in ("median", "p10", "p90")]
    cells += [f"{mine[key] / 1e9:.3f}" for key in ("algorithm_bandwidth", "bus_bandwidth")]
    for name in against:
        head += [name, f"speed/{name}"]
        theirs = row["contenders"].get(name)
        cells += (
            ["-", "-"] if theirs is None else [show_time(theirs["median"]), f"{theirs['median'] / mine['median']:.2f}x"]
        )
    return head, cells


@contextlib.contextmanager
def _gloo(comm: Ranks, against: Sequence[str]) -> Iterator[None]:
    if "gloo" not in against:
        yield
        return
    folder = peers.start_gloo(comm)
    try:
        yield
    finally:
        peers.stop_gloo(folder, comm)


def draw(rows: Sequence[dict[str, Any]], path: str) -> None:
    """Plot bus bandwidth over size, one line for each contender, collective, dtype and backend."""
    figure, axes = output.figure("bytes", "bus bandwidth, GB/s")
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, one in row["contenders"].items():
            label = f"{name} {row['collective']} {row['dtype']}" + (f" {row['backend']}" if name == "hvdlite" else "")
            lines.setdefault(label, []).append((row["bytes"], one["bus_bandwidth"] / 1e9))
    for label, points in lines.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.legend()
    figure.savefig(path, dpi=120)


def check_options(options: argparse.Namespace) -> None:
    """Raise ValueError if options name what does not exist."""
    for what, given, known in [
        ("--dtypes", options.dtypes, tuple(DTYPES)),
        ("--backends", options.backends, BACKENDS),
        ("--vs", options.vs, PEERS),
    ]:
        for one in given:
            if one not in known:
                raise ValueError(f"{what} {one!r} is unknown; known are {', '.join(known)}")
    if not options.sizes:
        raise ValueError("--sizes names no size")
