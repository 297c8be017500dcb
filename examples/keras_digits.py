"""Train a small network on scikit-learn's handwritten digits with Keras's model.fit() and all callbacks of hvdlite.

    python examples/keras_digits.py
    hvdrun -np 2 python examples/keras_digits.py

Lines marked (hvd) are what makes it distributed. It runs on any backend of Keras; KERAS_BACKEND says on which.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before TensorFlow is imported: its log is long

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdlite.keras as hvd

N_VALIDATION = 360  # of 1797 images


def main() -> int:
    options = parse_arguments()
    hvd.init()  # (hvd)
    keras.utils.set_random_seed(options.seed)

    (images, labels), validation = load_data()
    n = len(images) // hvd.size()  # as many on each rank: with fewer steps, one would leave the others waiting
    mine = slice(hvd.rank() * n, (hvd.rank() + 1) * n)

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10),
        ]
    )
    rate = options.lr * hvd.size()  # each step sees hvd.size() times as many images
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9))  # (hvd)
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "best.keras")
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # (hvd)
            hvd.callbacks.MetricAverageCallback(),  # (hvd) before all that read metrics
            hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, verbose=1),  # (hvd)
            hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, start_epoch=options.epochs - 1),  # (hvd)
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=3),
        ]
        if hvd.rank() == 0:  # (hvd) one rank writes
            best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
            best.filepath = path
            callbacks.append(best)
        model.fit(
            images[mine], labels[mine], batch_size=options.batch_size, epochs=options.epochs, callbacks=callbacks,
            validation_data=validation, verbose=2 if hvd.rank() == 0 else 0,
        )  # fmt: skip
        if hvd.rank() == 0:
            model = hvd.load_model(path)  # (hvd) its optimizer reduces again
            accuracy = 100 * model.evaluate(*validation, verbose=0, return_dict=True)["accuracy"]
            print(f"accuracy {accuracy:.1f} % over {hvd.size()} rank{'s' if hvd.size() > 1 else ''}")
        else:
            accuracy = 0.0
    accuracy = float(hvd.broadcast(np.float32(accuracy), root_rank=0))  # (hvd)
    return 0 if accuracy >= options.min_accuracy else 1


def load_data() -> tuple:
    """Return training and validation data, the same on every rank."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype("float32"), labels[order]
    return (images[N_VALIDATION:], labels[N_VALIDATION:]), (images[:N_VALIDATION], labels[:N_VALIDATION])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate for one rank")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--min-accuracy", type=float, default=0.0, help="exit with 1 below this many percent")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
