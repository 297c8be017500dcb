"""What a gradient costs the thread that trains, before anybody waits: its hook, its bucket, and its submission.

    hvdrun -np 2 python benchmarks/submit.py [--parameters 300] [--elements 64] [--json results.json]

CPU time of the main thread in backward(), less that of the same backward() without an optimizer of ours, by gradients.
The two take turns. And that of a call of `allreduce_async_` for each tensor. Waiting and reducing are not in it: they
are the engine's thread's, and synchronize()'s.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import hvdlite.torch as hvd
from hvdlite.bench import peers
from hvdlite.bench.table import render

WARM_UP = 20


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    comm, n = peers.ranks(), arguments.parameters
    alone = Net(n, arguments.elements)
    plain = Net(n, arguments.elements)
    views = Net(n, arguments.elements)
    optimizers = [wrapped(plain, "plain", False), wrapped(views, "views", True)]
    tensors = [torch.zeros(arguments.elements) for _ in range(n)]
    spent: dict[str, list[float]] = {"alone": [], "plain": [], "views": [], "allreduce_async_": []}
    for _ in range(WARM_UP + arguments.repetitions):
        spent["alone"].append(seconds(alone.loss().backward))
        for name, net, optimizer in zip(("plain", "views"), (plain, views), optimizers, strict=True):
            spent[name].append(seconds(net.loss().backward))
            optimizer.step()
        for net in (alone, plain, views):
            net.zero_grad()
        handles: list[object] = []
        spent["allreduce_async_"].append(seconds(functools.partial(submit, tensors, handles)))
        for handle in handles:
            hvd.synchronize(handle)
    if comm.rank == 0:
        medians = {name: statistics.median(values[WARM_UP:]) for name, values in spent.items()}
        found = {
            "hook, bucket and submission": (medians["plain"] - medians["alone"]) / n,
            "the same with gradient_as_bucket_view=True": (medians["views"] - medians["alone"]) / n,
            "allreduce_async_": medians["allreduce_async_"] / n,
        }
        print(f"{n} gradients of {arguments.elements} elements, {comm.size} ranks")
        print(render(["us of the main thread for each", ""], [(k, f"{1e6 * v:.1f}") for k, v in found.items()]))
        if arguments.json:
            figures = {"machine": peers.machine(comm), "gradients": n, "seconds": found}
            arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


class Net(torch.nn.Module):
    """Many small parameters."""

    def __init__(self, n: int, elements: int) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList([torch.full((elements,), 0.5) for _ in range(n)])

    def loss(self) -> torch.Tensor:
        return torch.stack([(one * one).sum() for one in self.all]).sum()


def wrapped(net: Net, name: str, views: bool) -> torch.optim.Optimizer:
    named = [(f"{name}.{key}", parameter) for key, parameter in net.named_parameters()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, gradient_as_bucket_view=views)


def submit(tensors: list[torch.Tensor], handles: list[object]) -> None:
    handles += [hvd.allreduce_async_(tensor, name=f"raw.{i}") for i, tensor in enumerate(tensors)]


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds of this thread in `run()`."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parameters", type=int, default=300, help="of the network (default: 300)")
    parser.add_argument("--elements", type=int, default=64, help="of each (default: 64)")
    parser.add_argument("--repetitions", type=int, default=200, help="default: 200")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
