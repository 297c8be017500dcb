"""Allreduce by hvdlite, by raw MPI and by torch's gloo: the same tensors, in the same job, in turn.

    hvdrun -np 2 python benchmarks/allreduce.py [--json results.json]

The contenders take turns, some repetitions each, so that a drift of the machine's speed
hits all of them, and each runs with warm caches; the medians and their ratios are
printed. A repetition lasts from the call until this rank has its result, and the slowest
rank's time counts. MPI is silent within a turn: a rank that waits in an MPI call spins,
and takes the core from the other contenders' threads.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from turns import connect, machine, medians, take_turns

import hvdlite.torch as hvd

Contender = Callable[[list[torch.Tensor]], None]


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    comm = connect()
    contenders: dict[str, Contender] = {"hvdlite": by_hvdlite, "mpi": by_mpi(comm), "gloo": by_gloo}
    results = []
    if comm.rank == 0 and not arguments.quick:
        print("medians of the slowest rank's times; this takes about a minute", flush=True)
    for name, sizes, dtype, repetitions in cases(arguments.quick):
        able = {who: run for who, run in contenders.items() if who != "mpi" or dtype is torch.float32}
        seconds = measure(able, sizes, dtype, repetitions, comm)
        results.append(row(name, sum(sizes) * dtype.itemsize, seconds))
        if comm.rank == 0:
            print(line(results[-1]), flush=True)
    if comm.rank == 0:
        print("\nwhy hvdlite ran it this way: " + hvd.backend_reasons().get("allreduce", ""))
        if arguments.json:
            arguments.json.write_text(json.dumps({"machine": machine(comm), "results": results}, indent=2) + "\n")
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run at all?")
    return parser.parse_args()


def cases(quick: bool) -> list[tuple[str, list[int], torch.dtype, int]]:
    """Return (name, lengths of the tensors, their dtype, repetitions). MPI has no bfloat16."""
    few = 20 if quick else 1
    return [
        ("1 KiB", [256], torch.float32, 1000 // few),
        ("256 KiB", [2**16], torch.float32, 400 // few),
        ("4 MiB", [2**20], torch.float32, 100 // few),
        ("16 MiB", [2**22], torch.float32, 40 // few),
        ("64 MiB", [2**24], torch.float32, max(3, 20 // few)),
        ("ResNet-50 gradients", resnet50_gradients(), torch.float32, max(3, 20 // few)),
        ("ResNet-50 bfloat16", resnet50_gradients(), torch.bfloat16, max(3, 20 // few)),
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


def by_hvdlite(tensors: list[torch.Tensor]) -> None:
    if len(tensors) == 1:
        hvd.allreduce_(tensors[0], name=f"one.{tensors[0].numel()}.{tensors[0].dtype}", op=hvd.Sum)
        return
    handles = [hvd.allreduce_async_(t, name=f"t{i}.{t.numel()}.{t.dtype}", op=hvd.Sum) for i, t in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def by_gloo(tensors: list[torch.Tensor]) -> None:
    if len(tensors) == 1:
        dist.all_reduce(tensors[0])
        return
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        work.wait()


def by_mpi(comm) -> Contender:  # type: ignore[no-untyped-def]  # mpi4py is imported late
    from mpi4py import MPI

    def run(tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            comm.Allreduce(MPI.IN_PLACE, [t.numpy(), MPI.FLOAT])

    return run


def measure(  # type: ignore[no-untyped-def]
    contenders: dict[str, Contender], sizes: list[int], dtype: torch.dtype, repetitions: int, comm
) -> dict[str, float]:
    """Return the median seconds of a repetition by contender."""
    tensors = {name: [torch.zeros(n, dtype=dtype) for n in sizes] for name in contenders}
    total = comm.size * (comm.size + 1) / 2

    def fill(name: str) -> None:
        for tensor in tensors[name]:
            tensor.fill_(float(comm.rank + 1))

    def check(name: str) -> None:
        if not all(bool((tensor == total).all()) for tensor in tensors[name]):
            raise SystemExit(f"{name}: wrong sum on rank {comm.rank}")

    runs = {name: functools.partial(run, tensors[name]) for name, run in contenders.items()}
    return medians(take_turns(runs, repetitions, comm, before=fill, after_turn=check))


def row(name: str, nbytes: int, seconds: dict[str, float]) -> dict[str, object]:
    return {
        "case": name,
        "bytes": nbytes,
        "median_seconds": seconds,
        "times_as_fast_as": {c: seconds[c] / seconds["hvdlite"] for c in seconds if c != "hvdlite"},
    }


def line(result: dict) -> str:  # type: ignore[type-arg]
    medians = "  ".join(f"{name} {1e6 * s:10.0f} us" for name, s in result["median_seconds"].items())
    ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in result["times_as_fast_as"].items())
    return f"{result['case']:<20} {medians}   speed against: {ratios}"


if __name__ == "__main__":
    main()
