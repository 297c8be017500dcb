"""Train on scikit-learn's handwritten digits, and go on when ranks are lost or hosts come and go.

    hvdrun -np 4 --min-np 1 python examples/pytorch_elastic.py

Kill a rank while it trains: hvdrun starts the job again, and it goes on from the last commit. Lines marked (elastic)
are what pytorch_digits.py does not have.
"""

from __future__ import annotations

import argparse
import sys

import torch
from pytorch_digits import evaluate, load_data, make_model
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import hvdlite.torch as hvd


def main() -> int:
    options = parse_arguments()
    hvd.init()
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)

    training, validation = load_data()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=options.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # What is done of an epoch is not dealt out again, whatever the number of ranks is by then.
    sampler = hvd.elastic.ElasticSampler(training, seed=options.seed)  # (elastic)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, step=0)  # (elastic)
    train(state, training, options)

    accuracy = evaluate(model, validation)
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.1f} % after {state.step} steps, the last of them on {hvd.size()} ranks")
    return 0 if accuracy >= options.min_accuracy else 1


@hvd.elastic.run  # (elastic)
def train(state, training, options) -> None:
    """Train from where `state` stands: at the beginning, or at the last commit."""
    # Each step sees hvd.size() times as many images, so it may be longer.
    for group in state.optimizer.param_groups:
        group["lr"] = options.lr * hvd.size() ** 0.5
    batches = DataLoader(training, batch_size=options.batch_size, sampler=state.sampler)
    state.model.train()
    while state.epoch < options.epochs:
        for i, (images, labels) in enumerate(batches):
            state.optimizer.zero_grad()
            cross_entropy(state.model(images), labels).backward()
            state.optimizer.step()
            state.step += 1
            state.sampler.record_batch(i, len(labels))  # (elastic)
            if state.step % options.steps_per_commit == 0:
                state.commit()  # (elastic)
        if hvd.rank() == 0:
            print(f"epoch {state.epoch + 1} of {options.epochs} on {hvd.size()} ranks")
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.commit()  # (elastic)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, and go on when ranks are lost.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.001, help="learning rate for one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps-per-commit", type=int, default=5, help="what a lost rank can cost")
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this many percent")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
