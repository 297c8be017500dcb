"""What compression sends, and what it does to training: a table of methods.

    hvdrun -np 2 python benchmarks/compression.py [--json results.json]

Each method trains the same convolutional network of 0.15 million parameters on scikit-learn's digits from the
same start, with the same batches, several times with other seeds. Bytes are counted: the timeline tells what
every operation of some steps moved, and a ring (which links are used for) sends so much of that:

    allreduce              2 (P - 1) / P of the tensor
    allgather, alltoall    (P - 1) / P of what a rank has in the end

The steps per second are those of this machine, where ranks exchange data through memory: how much computing a
method costs. What it gains depends on the link; the last column is the time that the bytes alone take at --mbit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

METHODS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "int8": hvd.Compression.int8,
    "topk(0.1)": hvd.Compression.topk(0.1),
    "topk(0.01)": hvd.Compression.topk(0.01),
    "powersgd(1)": hvd.Compression.powersgd(1),
    "powersgd(2)": hvd.Compression.powersgd(2),
    "powersgd(4)": hvd.Compression.powersgd(4),
}
BATCH = 32  # per rank
N_VALIDATION = 360
COUNTED = 5  # steps whose bytes are counted
ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int64": 8}
SENT = {"ALLREDUCE": 2, "ALLGATHER": 1, "ALLTOALL": 1}  # times (P - 1) / P of the result


def main() -> None:
    arguments = parse_arguments()
    hvd.init()
    torch.set_num_threads(1)
    data = load_data()
    rows = []
    for name in arguments.methods:
        runs = [train(METHODS[name], data, seed, arguments.epochs) for seed in range(arguments.seeds)]
        bytes_sent = count_bytes(METHODS[name], data)
        rows.append(
            {
                "method": name,
                "bytes": bytes_sent,
                "accuracy": statistics.mean(accuracy for accuracy, _ in runs),
                "steps_per_second": statistics.median(speed for _, speed in runs),
                "wire_ms": bytes_sent * 8 / (arguments.mbit * 1000),
            }
        )
        if hvd.rank() == 0:
            print_row(rows[-1], rows[0], first=len(rows) == 1, mbit=arguments.mbit)
    if hvd.rank() == 0 and arguments.json:
        arguments.json.write_text(json.dumps({"ranks": hvd.size(), "results": rows}, indent=2) + "\n")


def train(compression, data, seed: int, epochs: int) -> tuple[float, float]:  # type: ignore[no-untyped-def]
    """Return the accuracy that is reached, in percent, and steps per second of the slowest rank."""
    images, labels = data[0]
    model, optimizer = make(compression, seed)
    shuffle = torch.Generator().manual_seed(seed)
    n_steps = 0
    started = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(images), generator=shuffle)
        for batch in order.split(BATCH * hvd.size()):
            mine = batch[hvd.rank() :: hvd.size()]
            if len(batch) == BATCH * hvd.size():
                step(model, optimizer, images[mine], labels[mine])
                n_steps += 1
    seconds = time.perf_counter() - started
    slowest = hvd.allreduce(torch.tensor(seconds), op=hvd.Max).item()
    return accuracy_of(model, data[1]), n_steps / slowest


def count_bytes(compression, data) -> float:  # type: ignore[no-untyped-def]
    """Return the bytes that a rank sends for one step, by what its operations have moved."""
    images, labels = data[0]
    model, optimizer = make(compression, 0)
    step(model, optimizer, images[:BATCH], labels[:BATCH])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "timeline.json")
        hvd.barrier()
        hvd.start_timeline(str(path))
        for _ in range(COUNTED):
            step(model, optimizer, images[:BATCH], labels[:BATCH])
        hvd.stop_timeline()
        events = json.loads(path.read_text()) if hvd.rank() == 0 else []
    total = torch.tensor(moved(events) * (hvd.size() - 1) / hvd.size() / COUNTED, dtype=torch.float64)
    return hvd.broadcast(total, root_rank=0).item()


def moved(events) -> float:  # type: ignore[no-untyped-def]
    """Return the bytes of the results of operations, an allreduce's twice."""
    total, kinds = 0.0, {}
    for event in events:
        if event.get("ph") == "B" and event["name"] in SENT:
            kinds[event["pid"]] = event["name"]
        elif event.get("ph") == "E" and "shape" in event.get("args", {}):
            result = event["args"]
            total += SENT[kinds[event["pid"]]] * ITEM_BYTES[result["dtype"]] * math.prod(json.loads(result["shape"]))
    return total


def make(compression, seed: int):  # type: ignore[no-untyped-def]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters(), compression=compression)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return model, optimizer


def step(model, optimizer, images: torch.Tensor, labels: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    optimizer.zero_grad()
    cross_entropy(model(images), labels).backward()
    optimizer.step()


@torch.no_grad()
def accuracy_of(model: nn.Module, validation: tuple[torch.Tensor, torch.Tensor]) -> float:
    images, labels = validation
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def load_data() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    return (images[training], labels[training]), (images[validation], labels[validation])


def print_row(row, baseline, first: bool, mbit: float) -> None:  # type: ignore[no-untyped-def]
    if first:
        print(f"| {hvd.size()} ranks | bytes sent per rank and step | | accuracy | steps/s | at {mbit:g} Mbit/s |")
        print("|---|---|---|---|---|---|")
    share = 100 * row["bytes"] / baseline["bytes"] if baseline["bytes"] else 100
    print(
        f"| {row['method']} | {row['bytes']:,.0f} | {share:.1f} % | {row['accuracy']:.1f} % "
        f"| {row['steps_per_second']:.0f} | {row['wire_ms']:.2f} ms |",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compression methods: bytes, accuracy, steps per second.")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=3, help="how often each method is trained")
    parser.add_argument("--mbit", type=float, default=1000, help="rate of the link in the last column, Mbit/s")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
