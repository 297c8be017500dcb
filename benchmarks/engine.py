"""What the engine costs besides moving data: idle, in memory, and when a step leaves the learned schedule.

hvdrun -np 2 python benchmarks/engine.py
"""

from __future__ import annotations

import statistics
import time

import torch

import hvdlite.torch as hvd

IDLE_SECONDS = 10.0
STEPS = 10_000


def main() -> None:
    hvd.init()
    tensors = [torch.ones(64) for _ in range(4)]
    for _ in range(1000):
        step(tensors)
    idle = idle_share()
    before = resident_kib()
    started = time.perf_counter()
    for _ in range(STEPS):
        step(tensors)
    took = (time.perf_counter() - started) / STEPS
    after = resident_kib()
    learned, deviating = median_seconds(tensors, deviates=False), median_seconds(tensors, deviates=True)
    print(
        f"rank {hvd.rank()}: idle {100 * idle:.2f} % of a core; resident {before} KiB, {after} after {STEPS} steps of "
        f"{1e6 * took:.0f} us; a learned step {1e6 * learned:.0f} us, with a new operation in it {1e6 * deviating:.0f}",
        flush=True,
    )


def step(tensors: list[torch.Tensor]) -> None:
    handles = [hvd.allreduce_async_(t, name=f"t{i}", op=hvd.Max) for i, t in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


def idle_share() -> float:
    """Return the share of a core that this process takes while it does nothing."""
    time.sleep(0.5)
    used = time.process_time()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - used) / IDLE_SECONDS


def resident_kib() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4


def median_seconds(tensors: list[torch.Tensor], deviates: bool) -> float:
    """Return the median seconds of a step; one that deviates has an operation that never comes again."""
    seconds = []
    for n in range(300):
        started = time.perf_counter()
        step(tensors)
        if deviates:
            hvd.allreduce(torch.ones(3), name=f"once.{n}", op=hvd.Max)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
