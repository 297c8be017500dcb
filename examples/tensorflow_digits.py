"""Train a small network on scikit-learn's handwritten digits with TensorFlow, in a loop of one's own.

    python examples/tensorflow_digits.py
    hvdrun -np 2 python examples/tensorflow_digits.py

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # before TensorFlow comes: no notes about the machine

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import hvdlite.tensorflow as hvd

N_VALIDATION = 360  # of 1797 images
SHAPES = [(64, 128), (128, 64), (64, 10)]


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    tf.config.threading.set_intra_op_parallelism_threads(1)  # ranks share the cores

    images, labels = load_digits(return_X_y=True)
    images = (images / 16.0).astype(np.float32)
    order = np.random.default_rng(options.seed).permutation(len(images))  # the same on all ranks
    validation, training = order[:N_VALIDATION], order[N_VALIDATION:]
    variables = make_variables(seed=hvd.rank())  # different here: the broadcast makes them equal
    # Each step sees hvd.size() times as many images, so it may be longer.
    rate, momentum = options.lr * hvd.size() ** 0.5, 0.9
    velocities = [tf.Variable(tf.zeros_like(v)) for v in variables]

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        tape = hvd.DistributedGradientTape(tape)  # (hvd)
        for variable, velocity, gradient in zip(variables, velocities, tape.gradient(loss, variables), strict=True):
            velocity.assign(momentum * velocity + gradient)
            variable.assign_sub(rate * velocity)
        return loss

    hvd.broadcast_variables(variables, root_rank=0)  # (hvd)
    for epoch in range(options.epochs):
        shuffled = np.random.default_rng(options.seed + epoch).permutation(training)
        steps = len(shuffled) // (options.batch_size * hvd.size())
        mine = shuffled[hvd.rank() :: hvd.size()]  # (hvd)
        for batch in np.array_split(mine, steps):
            loss = train_step(images[batch], labels[batch])
        mean_loss = hvd.allreduce(loss, name="loss")  # (hvd)
        if hvd.rank() == 0 and epoch == options.epochs - 1:
            print(f"loss {float(mean_loss):.3f}")

    right = tf.argmax(scores(variables, images[validation]), 1) == labels[validation]
    if hvd.rank() == 0:
        print(f"accuracy {100 * np.mean(right):.1f} %")
    return 0


def make_variables(seed: int) -> list[tf.Variable]:
    made = []
    for i, (n, m) in enumerate(SHAPES):
        made.append(tf.Variable(tf.random.stateless_normal((n, m), [seed, i]) * (2.0 / n) ** 0.5, name="kernel"))
        made.append(tf.Variable(tf.zeros(m), name="bias"))
    return made


def scores(variables: list[tf.Variable], x: tf.Tensor) -> tf.Tensor:
    for kernel, bias in zip(variables[:-2:2], variables[1:-2:2], strict=True):
        x = tf.nn.relu(x @ kernel + bias)
    return x @ variables[-2] + variables[-1]


def loss_of(variables: list[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, scores(variables, x)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images of each rank in a step")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate of one rank")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
