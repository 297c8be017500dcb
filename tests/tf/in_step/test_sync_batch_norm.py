"""SyncBatchNormalization against BatchNormalization on all ranks' examples."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf


def examples(size, each=4):
    rng = np.random.default_rng(5)
    n = [each + r for r in range(size)]  # each rank another number
    return np.split(rng.normal(loc=100.0, size=(sum(n), 3, 5)).astype("float64"), np.cumsum(n)[:-1])


def outputs_and_gradients(layer, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
        loss = tf.reduce_sum(tf.sin(y))
    return y, *tape.gradient(loss, [x, layer.gamma, layer.beta])


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("axis", [-1, 1])
def test_it_normalizes_as_one_batch(hvd, traced, axis):
    parts = examples(hvd.size())
    mine = parts[hvd.rank()]
    layer = hvd.SyncBatchNormalization(axis=axis, dtype="float64")
    layer.build((None, 3, 5))
    alone = keras.layers.BatchNormalization(axis=axis, dtype="float64")
    alone.build((None, 3, 5))
    run = tf.function(outputs_and_gradients) if traced else outputs_and_gradients
    y, dx, dgamma, dbeta = run(layer, tf.constant(mine))
    all_y, all_dx, all_dgamma, all_dbeta = outputs_and_gradients(alone, tf.constant(np.concatenate(parts)))
    start = sum(len(part) for part in parts[: hvd.rank()])
    close = {"rtol": 1e-7, "atol": 1e-9}
    np.testing.assert_allclose(y, all_y[start : start + len(mine)], **close)
    np.testing.assert_allclose(dx, all_dx[start : start + len(mine)], **close)
    np.testing.assert_allclose(hvd.allreduce(dgamma, op=hvd.Sum), all_dgamma, **close)
    np.testing.assert_allclose(hvd.allreduce(dbeta, op=hvd.Sum), all_dbeta, **close)
    np.testing.assert_allclose(layer.moving_mean.numpy(), alone.moving_mean.numpy(), **close)
    np.testing.assert_allclose(layer.moving_variance.numpy(), alone.moving_variance.numpy(), **close)


def test_masked_steps_do_not_count(hvd):
    rng = np.random.default_rng(hvd.rank())
    x = rng.normal(size=(4, 6, 3))
    mask = rng.random((4, 6)) < 0.6
    layer = hvd.SyncBatchNormalization(dtype="float64")
    layer(tf.constant(x), training=True, mask=tf.constant(mask))
    everyone = hvd.allgather(x[mask]).numpy()
    # Keras's own moments, which it uses with one rank, add an epsilon to the count.
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.01 * everyone.mean(0), rtol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 0.99 + 0.01 * everyone.var(0), rtol=1e-6)


def test_inference_talks_to_nobody(hvd):
    layer = hvd.SyncBatchNormalization()
    if hvd.rank() == 0:
        layer(tf.ones([2, 3]), training=False)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's, on saving
def test_it_is_saved_and_wrong_arguments_are_refused(hvd, tmp_path):
    model = keras.Sequential([keras.layers.Input((3,)), hvd.SyncBatchNormalization(momentum=0.5)])
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again.layers[0]) is hvd.SyncBatchNormalization
    assert again.layers[0].momentum == 0.5
    for arguments in ({"fused": True}, {"fused": None}, {"synchronized": True}):
        with pytest.raises(ValueError, match=r"fused|synchronized"):
            hvd.SyncBatchNormalization(**arguments)
