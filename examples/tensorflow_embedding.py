"""Learn which of Python's help texts a word comes from, with a large table of which a step needs few rows.

    python examples/tensorflow_embedding.py
    hvdrun -np 2 python examples/tensorflow_embedding.py

The gradient of such a table is an `IndexedSlices`: it has rows for the words of the batch, and only these travel. Ranks
may have any number of them.

Lines marked (hvd) are what makes it distributed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import zlib
from pydoc_data.topics import topics

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd

N_ROWS, WIDTH = 2**15, 16  # words share a row by chance
TOPICS = ("compound", "specialnames", "debugger", "formatstrings")


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    words, labels = load_words()
    order = np.random.default_rng(0).permutation(len(words))  # the same on all ranks
    table = tf.Variable(tf.random.stateless_normal((N_ROWS, WIDTH), [0, hvd.rank()]) * 0.1, name="table")
    kernel = tf.Variable(tf.zeros((WIDTH, len(TOPICS))), name="kernel")
    hvd.broadcast_variables([table, kernel], root_rank=0)  # (hvd)

    @tf.function(reduce_retracing=True)
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            logits = tf.gather(table, x) @ kernel
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        tape = hvd.DistributedGradientTape(tape)  # (hvd)
        rows, dense = tape.gradient(loss, [table, kernel])
        table.scatter_sub(tf.IndexedSlices(options.lr * rows.values, rows.indices))
        kernel.assign_sub(options.lr * dense)
        return loss, tf.shape(rows.indices)[0]

    n_rows = 0
    for _ in range(options.epochs):
        for start in range(0, len(order) - options.batch_size + 1, options.batch_size):
            mine = order[start : start + options.batch_size][hvd.rank() :: hvd.size()]  # (hvd)
            loss, n = train_step(words[mine], labels[mine])
            n_rows = max(n_rows, int(n))
    mean_loss = hvd.allreduce(loss)  # (hvd)
    if hvd.rank() == 0:
        right = np.argmax(tf.gather(table, words) @ kernel, 1) == labels
        guess = np.bincount(labels).max() / len(labels)  # the longest text, every time
        print(
            f"loss {float(mean_loss):.3f}, accuracy {100 * np.mean(right):.1f} % (guessing {100 * guess:.1f} %), "
            f"{n_rows} of {N_ROWS} rows in a step"
        )
    return 0


def load_words() -> tuple[np.ndarray, np.ndarray]:
    found = [(word, label) for label, topic in enumerate(TOPICS) for word in re.findall(r"\w+", topics[topic].lower())]
    rows = [zlib.crc32(word.encode()) % N_ROWS for word, _ in found]
    return np.array(rows, np.int32), np.array([label for _, label in found], np.int32)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="words of all ranks together")
    parser.add_argument("--lr", type=float, default=2.0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
