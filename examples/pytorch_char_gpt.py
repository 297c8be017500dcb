"""Train a small character-level GPT on Python's own help texts, on any number of ranks.

    python examples/pytorch_char_gpt.py
    hvdrun -np 2 python examples/pytorch_char_gpt.py

--batch-size is that of all ranks together, and every rank draws the same windows of text before it takes its share.
So the number of ranks changes the speed and nothing else: the loss curve of two ranks is that of one, but for rounding.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import hvdlite.torch as hvd

CONTEXT = 64  # characters that the model sees


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    if options.batch_size % hvd.size():
        sys.exit(f"--batch-size {options.batch_size} is not a multiple of {hvd.size()}, the number of ranks")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # a model so small keeps no second core busy, and ranks share the cores
    torch.set_default_dtype(getattr(torch, options.dtype))

    alphabet, training, validation = load_text()
    model = CharGPT(len(alphabet))
    # The global batch is the same on any number of ranks, and so is the learning rate.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())  # (hvd)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (hvd)

    losses = []
    draw = torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        starts = torch.randint(len(training) - CONTEXT, (options.batch_size,), generator=draw)
        loss = train_step(model, optimizer, windows(training, starts[hvd.rank() :: hvd.size()]))  # (hvd)
        losses.append(hvd.allreduce(loss, name="loss").item())  # (hvd)
        if hvd.rank() == 0 and (step + 1) % 25 == 0:
            print(f"step {step + 1}/{options.steps}, loss {losses[-1]:.3f}", flush=True)

    bits = evaluate(model, validation) / math.log(2)
    if hvd.rank() == 0:
        print(f"{bits:.2f} bits per character of text it has not seen, {math.log2(len(alphabet)):.2f} by guessing")
        print("a line of its own:", sample_line(model, alphabet))
        if options.losses:
            options.losses.write_text(json.dumps(losses))
    return 0


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, window: torch.Tensor) -> torch.Tensor:
    """Learn to say the next character at each place of this rank's windows; return the mean loss of this rank."""
    optimizer.zero_grad()
    loss = loss_of(model, window)
    loss.backward()
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def evaluate(model: nn.Module, text: torch.Tensor) -> float:
    """Return the mean loss per character over 48 windows of `text`; each rank looks at its share."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 48).long()[hvd.rank() :: hvd.size()]
    mine = torch.tensor([loss_of(model, windows(text, starts)) * len(starts), len(starts)])
    total, n = hvd.allreduce(mine, op=hvd.Sum, name="validation")  # (hvd)
    return (total / n).item()


@torch.no_grad()
def sample_line(model: nn.Module, alphabet: str) -> str:
    """Return what the model goes on with after a full stop and a new line."""
    text = [alphabet.index(c) for c in ".\n"]
    while len(text) < 80:
        scores = model(torch.tensor([text[-CONTEXT:]]))[0, -1]
        text.append(torch.multinomial(scores.softmax(0), 1).item())
    return "".join(alphabet[i] for i in text[2:]).replace("\n", " ")


def loss_of(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())


def windows(text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """Return CONTEXT + 1 characters from each start on, as rows."""
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def load_text() -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return the alphabet, and the text for training and for validation as numbers of characters."""
    lines = [line.strip() for name in sorted(topics) for line in topics[name].splitlines()]
    text = "\n".join(line for line in lines if line[:1].isalpha() and line.isascii())  # mostly prose
    alphabet = "".join(sorted(set(text)))
    number = {c: i for i, c in enumerate(alphabet)}
    numbers = torch.tensor([number[c] for c in text])
    n_training = len(numbers) * 9 // 10
    return alphabet, numbers[:n_training], numbers[n_training:]


class CharGPT(nn.Module):
    """A decoder of two blocks. Its embedding of characters also turns features into scores, so one weight is tied."""

    def __init__(self, n_characters: int, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(n_characters, width)
        self.places = nn.Embedding(CONTEXT, width)
        nn.init.normal_(self.characters.weight, std=0.1)
        nn.init.normal_(self.places.weight, std=0.1)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(2)), nn.LayerNorm(width))
        self.scores = nn.Linear(width, n_characters, bias=False)
        self.scores.weight = self.characters.weight

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        features = self.characters(text) + self.places.weight[: text.shape[1]]
        return self.scores(self.blocks(features))


class Block(nn.Module):
    """Attention to earlier characters, and a layer that thinks about what it saw."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.attend = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width))
        self.merge = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        heads = self.attend(features).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(*heads, is_causal=True)
        features = features + self.merge(seen.transpose(1, 2).flatten(2))
        return features + self.think(features)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character-level GPT on Python's help texts.")
    parser.add_argument("--steps", type=int, default=300, help="batches to train on (default: 300)")
    parser.add_argument("--batch-size", type=int, default=24, help="windows of text per step, all ranks together (24)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate (0.003)")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="default: float32")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the batches (1)")
    parser.add_argument("--losses", type=Path, help="write the loss of each step to this file, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
