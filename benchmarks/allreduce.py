"""Allreduce by hvdlite, by raw MPI and by torch's gloo: the same values, in the same job, in turn.

    hvdrun -np 2 python benchmarks/allreduce.py [--json results.json]

hvdlite runs twice: on ordinary tensors (`hvdlite`), and on tensors in memory that all ranks see (`shared`:
hvd.shared_zeros; of many gradients, those below 1 MiB are together in buckets of up to 4 MiB, as they are with
gradient_as_bucket_view=True). A repetition lasts from the call until this rank has its result, and the slowest rank's
time counts; medians and their ratios are printed. GB/s a core: what a rank reduces for all, S / P, by the time.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.bench import peers
from hvdlite.bench.turns import Ranks, medians, take_turns

MIB = 2**20
BUCKET_BYTES, ALONE_BYTES = 4 * MIB, MIB  # as hvdlite.torch joins gradients
Run = Callable[[], object]


class Case(NamedTuple):
    """What is summed: tensors of these lengths, all at once if there are several."""

    name: str
    lengths: Sequence[int]
    dtype: torch.dtype
    repetitions: int

    @property
    def nbytes(self) -> int:
        return sum(self.lengths) * self.dtype.itemsize


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    comm = peers.ranks()
    folder = peers.start_gloo(comm)
    if comm.rank == 0 and not arguments.quick:
        print("medians of the slowest rank's times; this takes about 90 seconds", flush=True)
    results = []
    for case in cases(arguments.quick):
        seconds = measure(case, comm)
        results.append(row(case, seconds, comm.size))
        if comm.rank == 0:
            print(line(results[-1]), flush=True)
    if comm.rank == 0:
        print("\nwhy hvdlite ran it this way: " + hvd.backend_reasons().get("allreduce", ""))
        if arguments.json:
            found = {"machine": peers.machine(comm), "results": results}
            arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    peers.stop_gloo(folder, comm)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run at all?")
    return parser.parse_args()


def cases(quick: bool) -> list[Case]:
    few, gradients = 20 if quick else 1, resnet50_gradients()
    return [
        Case("1 KiB", [256], torch.float32, 1000 // few),
        Case("256 KiB", [2**16], torch.float32, 400 // few),
        Case("1 MiB", [2**18], torch.float32, 200 // few),
        Case("4 MiB", [2**20], torch.float32, 100 // few),
        Case("16 MiB", [2**22], torch.float32, 40 // few),
        Case("64 MiB", [2**24], torch.float32, max(1, 20 // few)),
        Case("ResNet-50's gradients", gradients, torch.float32, max(1, 20 // few)),
        Case("ResNet-50's, bfloat16", gradients, torch.bfloat16, max(1, 20 // few)),
        Case("ResNet-50's, float16", gradients, torch.float16, max(1, 20 // few)),
    ]


def resnet50_gradients() -> list[int]:
    """Return the lengths of the 161 gradients of ResNet-50 (102 MB), in the order in which backward makes them."""
    lengths = [64 * 3 * 7 * 7, 64, 64]
    width_in = 64
    for blocks, width in [(3, 64), (4, 128), (6, 256), (3, 512)]:
        for block in range(blocks):
            for kernel, c_in, c_out in [(1, width_in, width), (3, width, width), (1, width, 4 * width)]:
                lengths += [c_out * c_in * kernel**2, c_out, c_out]
            if block == 0:
                lengths += [4 * width * width_in, 4 * width, 4 * width]
            width_in = 4 * width
    lengths += [1000 * 2048, 1000]
    return lengths[::-1]


def bucketed(case: Case) -> list[int]:
    """Return the lengths of the tensors of `case` with neighbours joined into buckets."""
    joined: list[int] = []
    last_is_bucket = False
    for length in case.lengths:
        small = length * case.dtype.itemsize < ALONE_BYTES
        if small and last_is_bucket and (joined[-1] + length) * case.dtype.itemsize <= BUCKET_BYTES:
            joined[-1] += length
        else:
            joined.append(length)
        last_is_bucket = small
    return joined


def tensors_of(contender: str, case: Case) -> list[torch.Tensor]:
    """Return what a contender sums; of `shared` all ranks must ask at the same time."""
    if contender != "shared":
        return [torch.zeros(n, dtype=case.dtype) for n in case.lengths]
    lengths = bucketed(case)
    return list(hvd.shared_zeros(sum(lengths), case.dtype).split(lengths))


def contenders(case: Case) -> dict[str, Callable[[list[torch.Tensor]], Run]]:
    """Return what makes a repetition of tensors, by contender. MPI has no half types."""
    able = {
        "hvdlite": functools.partial(by_hvdlite, "private"),
        "shared": functools.partial(by_hvdlite, "shared"),
        "mpi": by_mpi,
        "gloo": by_gloo,
    }
    return {who: make for who, make in able.items() if who != "mpi" or case.dtype is torch.float32}


def by_hvdlite(memory: str, tensors: list[torch.Tensor]) -> Run:
    names = [f"{memory}.{i}.{tensor.numel()}.{tensor.dtype}" for i, tensor in enumerate(tensors)]
    if len(tensors) == 1:
        return functools.partial(hvd.allreduce_, tensors[0], name=names[0], op=hvd.Sum)

    def run() -> None:
        handles = [hvd.allreduce_async_(t, name=name, op=hvd.Sum) for name, t in zip(names, tensors, strict=True)]
        for handle in handles:
            hvd.synchronize(handle)

    return run


def by_gloo(tensors: list[torch.Tensor]) -> Run:
    if len(tensors) == 1:
        return functools.partial(dist.all_reduce, tensors[0])

    def run() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    return run


def by_mpi(tensors: list[torch.Tensor]) -> Run:
    arrays = [tensor.numpy() for tensor in tensors]

    def run() -> None:
        for array in arrays:
            peers.mpi("allreduce", array, array)

    return run


def measure(case: Case, comm: Ranks) -> dict[str, float]:
    """Return the median seconds of a repetition by contender."""
    made = contenders(case)
    tensors = {name: tensors_of(name, case) for name in made}
    total = comm.size * (comm.size + 1) / 2

    def fill(name: str) -> None:
        for tensor in tensors[name]:
            tensor.fill_(float(comm.rank + 1))

    def check(name: str) -> None:
        if not all(bool((tensor == total).all()) for tensor in tensors[name]):
            raise SystemExit(f"{name}: wrong sum on rank {comm.rank}")

    runs = {name: make(tensors[name]) for name, make in made.items()}
    return medians(take_turns(runs, case.repetitions, comm, before=fill, after_turn=check))


def row(case: Case, seconds: dict[str, float], ranks: int) -> dict[str, object]:
    """Return one case as JSON has it."""
    mine = [name for name in ("hvdlite", "shared") if name in seconds]
    return {
        "case": case.name,
        "bytes": case.nbytes,
        "dtype": str(case.dtype).removeprefix("torch."),
        "median_seconds": seconds,
        "times_as_fast_as": {
            name: {peer: seconds[peer] / seconds[name] for peer in seconds if peer not in mine} for name in mine
        },
        "reduced_bytes_per_second": {name: case.nbytes / ranks / seconds[name] for name in mine},
    }


def line(result: dict) -> str:  # type: ignore[type-arg]
    times = "  ".join(f"{name} {1e6 * s:9.0f} us" for name, s in result["median_seconds"].items())
    speed = "; ".join(
        f"{name} is " + " and ".join(f"{ratio:.2f}x {peer}" for peer, ratio in ratios.items())
        for name, ratios in result["times_as_fast_as"].items()
    )
    rates = "  ".join(f"{rate / 1e9:.1f}" for rate in result["reduced_bytes_per_second"].values())
    return f"{result['case']:<22} {times}\n{'':<22} speed: {speed}; {rates} GB/s a core"


if __name__ == "__main__":
    main()
