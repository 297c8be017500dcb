"""Train with Keras on torch, in a loop of its own: gradients by torch, the step by an optimizer of Keras.

    python examples/keras_torch_backend.py
    hvdrun -np 2 python examples/keras_torch_backend.py

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from sklearn.datasets import load_digits

import hvdlite.keras as hvd


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    torch.set_num_threads(1)
    keras.utils.set_random_seed(options.seed + hvd.rank())

    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    n = len(images) // hvd.size()
    mine = slice(hvd.rank(), hvd.rank() + n * hvd.size(), hvd.size())

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(options.lr))  # (hvd)
    hvd.broadcast_model(model, root_rank=0)  # (hvd)
    for _ in range(options.epochs):
        for x, y in zip(images[mine].split(32), labels[mine].split(32), strict=True):
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(x, training=True), y).backward()
            variables = model.trainable_variables
            with torch.no_grad():
                model.optimizer.apply([v.value.grad for v in variables], variables)

    with torch.no_grad():
        right = (model(images[mine]).argmax(1) == labels[mine]).float().mean()
    accuracy = 100 * float(hvd.allreduce(right))  # (hvd)
    if hvd.rank() == 0:
        print(f"accuracy {accuracy:.1f} % on the training data over {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")
    return 0 if accuracy >= options.min_accuracy else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this many percent")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
