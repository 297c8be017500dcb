"""Trains with Keras elastically, by model.fit(), and compares with one process that nothing disturbs.

In the first start the last rank ends by SIGKILL amid the second epoch. `HOROVOD` as argument: by Horovod's names.
"""

from __future__ import annotations

import os
import signal
import sys

import keras
import numpy as np

if sys.argv[1:] == ["HOROVOD"]:
    import horovod.keras as hvd
else:
    import hvdlite.keras as hvd

EPOCHS, STEPS, BATCH = 3, 5, 12  # batches and their samples are those of all ranks together

hvd.init()
rng = np.random.default_rng(1)
images = rng.normal(size=(EPOCHS * STEPS, BATCH, 6)).astype("float32")
labels = rng.normal(size=(EPOCHS * STEPS, BATCH, 1)).astype("float32")


def compiled(optimizer, seed):
    # Not keras.utils.set_random_seed(), which imports TensorFlow on each backend.
    first, second = (keras.initializers.GlorotUniform(seed=2 * seed + i) for i in range(2))
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh", kernel_initializer=first),
            keras.layers.Dense(1, kernel_initializer=second),
        ]
    )
    model.compile(optimizer, loss="mse")
    return model


def batches(first, part):
    for x, y in zip(images[first:], labels[first:], strict=True):
        yield x[part], y[part]


class Killed(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        here = (state.epoch, state.batch, hvd.rank()) == (1, 2, hvd.size() - 1)
        if here and (state.begun_epoch, state.begun_batch) == (0, 0):
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    state.begun_epoch, state.begun_batch = state.epoch, state.batch
    model.fit(
        batches(state.epoch * STEPS + state.batch, slice(hvd.rank(), None, hvd.size())),
        steps_per_epoch=STEPS,
        initial_epoch=state.epoch,
        epochs=EPOCHS,
        callbacks=[
            hvd.elastic.CommitStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.UpdateEpochStateCallback(state),
            Killed(),
        ],
        shuffle=False,
        verbose=0,
    )


model = compiled(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), seed=hvd.rank())
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
train(state)

everyone = hvd.allgather_object(
    [model.get_weights(), int(model.optimizer.iterations), (state.begun_epoch, state.begun_batch), hvd.size()]
)
if hvd.rank() == 0:
    for weights, _, _, _ in everyone:
        for mine, theirs in zip(everyone[0][0], weights, strict=True):
            np.testing.assert_array_equal(theirs, mine)
    alone = compiled(keras.optimizers.Adam(0.05), seed=0)
    alone.fit(batches(0, slice(None)), steps_per_epoch=STEPS, epochs=EPOCHS, shuffle=False, verbose=0)
    for mine, theirs in zip(alone.get_weights(), everyone[0][0], strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=0, atol=1e-5)
    print(f"done {[rest for _, *rest in everyone]}", flush=True)
