"""What the tests train: digits, small models, loops of their own on each backend, and one process to compare with."""

from __future__ import annotations

import keras
import numpy as np
from sklearn.datasets import load_digits

import hvdlite.keras as hvd

BATCH = 8


def digits(n_steps, dtype="float32"):
    """Return n_steps batches for all ranks together: row i of a batch is of rank i % size."""
    images, labels = load_digits(return_X_y=True)
    n = n_steps * BATCH * hvd.size()
    at = np.arange(n) % len(images)
    return (images[at] / 16).astype(dtype), labels[at]


def mine(array):
    return array[hvd.rank() :: hvd.size()]


def make_model(seed=0, n_in=64, width=12, n_out=10):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((n_in,)), keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(n_out)]
    )


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(optimizer, seed=0, **more):
    model = make_model(seed)
    model.compile(optimizer, loss=loss(), **more)
    return model


def fit(model, images, labels, batch=BATCH, epochs=1, **more):
    return model.fit(images, labels, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, **more)


def fit_alone(optimizer, images, labels, epochs=1, **more):
    """Return the weights of one process that gets the batches of all ranks."""
    model = compiled(optimizer, **more)
    fit(model, images, labels, batch=BATCH * hvd.size(), epochs=epochs)
    return model.get_weights()


def gradients_of(model, images, labels):
    """Return the gradients of the mean loss by the trainable variables."""
    backend, compute = keras.config.backend(), loss()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = compute(labels, model(images, training=True))
        return tape.gradient(value, [v.value for v in model.trainable_variables])
    if backend == "torch":
        for v in model.trainable_variables:
            v.value.grad = None
        compute(labels, model(images, training=True)).backward()
        return [v.value.grad for v in model.trainable_variables]
    import jax

    def value(trainable):
        fixed = [v.value for v in model.non_trainable_variables]
        outputs, _ = model.stateless_call(trainable, fixed, images, training=True)
        return compute(labels, outputs)

    return jax.grad(value)([v.value for v in model.trainable_variables])


def tensor(values):
    return keras.ops.convert_to_tensor(np.asarray(values))


def one_variable(value=(1.0, 2.0)):
    return keras.Variable(np.asarray(value, "float32"), name="w")


def as_arrays(variables):
    return [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in variables]


def assert_equal_on_all_ranks(arrays):
    """Bit for bit."""
    for theirs in hvd.allgather_object([np.asarray(a) for a in arrays]):
        assert len(theirs) == len(arrays)
        for a, b in zip(theirs, arrays, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_close(found, expected, tolerance):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)
