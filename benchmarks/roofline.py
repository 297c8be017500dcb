"""What memory allows: the bytes that an allreduce must move, moved without any waiting, against the allreduce itself.

    hvdrun -np 2 python benchmarks/roofline.py [--json results.json]

Every rank does at the same time what an allreduce makes it do, in the same steps, but does not ask whether the others
are ready: that time is the floor. Two ways: in place in memory that all ranks see, and through the peers' memory for
tensors that are private. Traffic is counted, per rank:

    in place        reads S / P of each rank's tensor, and writes S / P to each: 2 S
    private         reads S / P of each other rank's tensor (the kernel copies it into a scratch that stays in the
                    cache), reads and writes S / P of its own, and writes S / P to each other: 2 S

A copy (2 bytes of traffic a byte) and a sum (3) of the same lengths, by all ranks at once, show what the memory gives.
All is float32; medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import hvdlite as hvd
from hvdlite import runtime
from hvdlite.bench import peers
from hvdlite.bench.table import render
from hvdlite.bench.turns import Ranks, medians, take_turns
from hvdlite.bench.units import show_bytes, show_time
from hvdlite.comm.arena import address_of
from hvdlite.comm.base import Communicator

Array = NDArray[np.float32]
Run = Callable[[], object]
SIZES = [2**18, 2**20, 2**22, 2**24, 2**26]  # bytes
STEP = 2**16  # elements, as hvdlite/collectives/direct.py has it
SECONDS = 0.15  # about as long each contender runs


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    comm = peers.ranks()
    transport = runtime.current().world.create(range(comm.size))
    assert transport is not None
    results = [measure(nbytes, comm, transport) for nbytes in (SIZES[:1] if arguments.quick else SIZES)]
    transport.close()
    if comm.rank == 0:
        print(f"{comm.size} ranks at once; GB/s of traffic of one rank\n\n{table(results)}")
        if arguments.json:
            found = {"machine": peers.machine(comm), "results": results}
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def measure(nbytes: int, comm: Ranks, transport: Communicator) -> dict[str, object]:
    """Return the median seconds of everything for tensors of `nbytes`. Collective."""
    n = nbytes // 4
    private, other, shared = np.zeros(n, np.float32), np.zeros(n, np.float32), hvd.shared_zeros(n, np.float32)
    runs: dict[str, Run] = {
        "copy": lambda: np.copyto(other, private),
        "sum": lambda: np.add(private, other, out=other),
        "in place": lambda: hvd.allreduce_(shared, op=hvd.Sum, name=f"shared.{n}"),
        "private": lambda: hvd.allreduce_(private, op=hvd.Sum, name=f"private.{n}"),
    }
    blocks, memory = transport.shared_blocks(nbytes), transport.peer_memory()
    if blocks is not None:
        runs["in place, bytes alone"] = in_place([block.view(np.float32) for block in blocks], comm.rank)
    if memory is not None:
        places = comm.allgather(address_of(other))
        runs["private, bytes alone"] = through_peers(other, places, memory, comm)
    repetitions = max(5, min(400, int(SECONDS / (nbytes / 2e9))))
    seconds = medians(take_turns(runs, repetitions, comm, turns=5))
    comm.Barrier()  # nobody may touch the others' memory after this
    return {"bytes": nbytes, "median_seconds": seconds}


def in_place(values: list[Array], rank: int) -> Run:
    """Return what a rank does to reduce its slice in everybody's memory."""
    cuts = np.linspace(0, values[0].size, len(values) + 1, dtype=int)
    others = [value for i, value in enumerate(values) if i != rank]

    def run() -> None:
        for first in range(cuts[rank], cuts[rank + 1], STEP):
            part = slice(first, min(first + STEP, cuts[rank + 1]))
            for other in others:
                np.add(values[rank][part], other[part], out=values[rank][part])
            for other in others:
                other[part] = values[rank][part]

    return run


def through_peers(mine: Array, places: list[int], memory, comm: Ranks) -> Run:  # type: ignore[no-untyped-def]
    """Return what a rank does to reduce its slice of tensors that only their ranks can see."""
    cuts = np.linspace(0, mine.size, comm.size + 1, dtype=int)
    room = np.empty(STEP, np.float32)
    others = [rank for rank in range(comm.size) if rank != comm.rank]

    def run() -> None:
        for first in range(cuts[comm.rank], cuts[comm.rank + 1], STEP):
            part = mine[first : min(first + STEP, cuts[comm.rank + 1])]
            for rank in others:
                memory.read(rank, places[rank] + 4 * int(first), address_of(room), part.nbytes)
                np.add(part, room[: part.size], out=part)
            for rank in others:
                memory.write(rank, places[rank] + 4 * int(first), address_of(part), part.nbytes)

    return run


def table(results: list[dict]) -> str:  # type: ignore[type-arg]
    """Return the results as text."""
    head = ["size", "copy", "sum", "way", "bytes alone", "GB/s", "allreduce", "GB/s", "share"]
    return render(head, [cells for one in results for cells in rows(one["bytes"], one["median_seconds"])])


def rows(nbytes: int, seconds: dict[str, float]) -> list[list[str]]:
    """Return a line for each way: the roofs, the floor, the allreduce, and how close it comes to the floor."""
    lines = []
    for way in ("in place", "private"):
        floor = seconds.get(f"{way}, bytes alone")
        line = [show_bytes(nbytes), rate(2 * nbytes, seconds["copy"]), rate(3 * nbytes, seconds["sum"]), way]
        line += ["-", "-"] if floor is None else [show_time(floor), rate(2 * nbytes, floor)]
        line += [show_time(seconds[way]), rate(2 * nbytes, seconds[way])]
        lines.append([*line, "-" if floor is None else f"{floor / seconds[way]:.0%}"])
    return lines


def rate(nbytes: float, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.1f}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one size: does it run at all?")
    return parser.parse_args()


if __name__ == "__main__":
    main()
