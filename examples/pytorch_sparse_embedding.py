"""Learn to tell Python's prose from its code by the words in a line, with a large table of which a step needs few rows.

    python examples/pytorch_sparse_embedding.py
    hvdrun -np 2 python examples/pytorch_sparse_embedding.py

The gradient of such a table is sparse: it has rows for the words of the batch only, and only these travel. SparseAdam
moves the table, AdamW the dense layer behind it. The last batch of an epoch is a single line, so that all ranks but one
have no words at all; they contribute nothing, and learn what the others do.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import inspect
import pickle
import re
import sys
import tarfile
import zipfile
import zlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

N_ROWS = 2**15  # words share a row by chance
N_LINES = 3025, 975  # for training and validation; 3025 is a multiple of the batch size and one more


@dataclass(frozen=True)
class Line:
    """One line: the numbers of its words, and 1 if it is code."""

    words: list[int]
    label: int


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    lines = load_lines()
    training, validation = lines[: N_LINES[0]], lines[N_LINES[0] :]
    model = Classifier()
    optimizers = [
        torch.optim.SparseAdam(model.table.parameters(), lr=options.lr),
        torch.optim.AdamW(model.scores.parameters(), lr=options.lr),
    ]
    # op=hvd.Sum, because losses are divided by the lines of all ranks, of which some may have none.
    optimizers = [
        hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)  # (hvd)
        for optimizer in optimizers
    ]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)

    n_rows = n_without = 0
    for _ in range(options.epochs):
        order = torch.randperm(len(training)).tolist()  # the same on all ranks: they share the seed
        for start in range(0, len(order), options.batch_size):
            batch = [training[i] for i in order[start : start + options.batch_size]]
            mine = batch[hvd.rank() :: hvd.size()]  # (hvd)
            train_step(model, optimizers, mine, len(batch))
            n_rows = max(n_rows, len(model.table.weight.grad.coalesce().indices()[0]))
            n_without += not any(line.words for line in mine)

    accuracy = evaluate(model, validation)
    steps_without = hvd.allgather_object(n_without)  # (hvd)
    if hvd.rank() == 0:
        print(
            f"accuracy {accuracy:.1f} %, at most {n_rows} of {N_ROWS} rows in a step, "
            f"steps without words on each rank: {steps_without}"
        )
    return 0


def train_step(model: nn.Module, optimizers: list[torch.optim.Optimizer], mine: list[Line], n_lines: int) -> None:
    """Learn from this rank's lines, which may be none, of `n_lines` on all ranks."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = cross_entropy(model(mine), labels_of(mine), reduction="sum") / n_lines
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, lines: list[Line]) -> float:
    """Return the accuracy on all lines in percent; each rank looks at its share."""
    mine = lines[hvd.rank() :: hvd.size()]
    correct = (model(mine).argmax(1) == labels_of(mine)).sum()
    return 100 * hvd.allreduce(correct, op=hvd.Sum, name="correct").item() / len(lines)  # (hvd)


class Classifier(nn.Module):
    """The mean of the rows of a line's words, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(N_ROWS, 16, mode="mean", sparse=True)
        self.scores = nn.Linear(16, 2)

    def forward(self, lines: list[Line]) -> torch.Tensor:
        words = torch.tensor([word for line in lines for word in line.words], dtype=torch.long)
        lengths = torch.tensor([0, *(len(line.words) for line in lines)], dtype=torch.long)
        return self.scores(self.table(words, lengths.cumsum(0)[:-1]))


def labels_of(lines: list[Line]) -> torch.Tensor:
    return torch.tensor([line.label for line in lines], dtype=torch.long)


def load_lines() -> list[Line]:
    """Return lines of Python's manual and of its source, half and half, mixed, the same on every rank."""
    manual = "\n".join(topics[name] for name in sorted(topics))
    prose = "\n".join(re.findall(r"^ *[A-Z].{40,}", manual, re.MULTILINE))  # hardly an example of code
    code = "".join(inspect.getsource(module) for module in (pickle, tarfile, zipfile))
    shuffled = torch.Generator().manual_seed(0)
    lines = []
    for label, text in enumerate((prose, code)):
        found = [Line(words_of(line), label) for line in text.splitlines() if line.strip()]
        lines += [found[i] for i in torch.randperm(len(found), generator=shuffled)[: sum(N_LINES) // 2].tolist()]
    return [lines[i] for i in torch.randperm(len(lines), generator=shuffled).tolist()]


def words_of(line: str) -> list[int]:
    return [zlib.crc32(word.encode()) % N_ROWS for word in re.findall(r"\w+|[^\w\s]", line)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tell prose from code by the words in a line.")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=48, help="lines per step, on all ranks together")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
