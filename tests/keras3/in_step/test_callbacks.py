"""Callbacks, in fit()."""

from __future__ import annotations

import csv
import warnings

import keras
import numpy as np
import pytest
from training import (
    BATCH,
    as_arrays,
    assert_close,
    assert_equal_on_all_ranks,
    compiled,
    digits,
    fit,
    fit_alone,
    loss,
    make_model,
    mine,
    tensor,
)


class Recorder(keras.callbacks.Callback):
    """Keeps what each batch begins with."""

    def __init__(self):
        super().__init__()
        self.rates, self.weights, self.logs = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))
        if not self.weights:
            self.weights = self.model.get_weights()

    def on_epoch_end(self, epoch, logs=None):
        self.logs.append(dict(logs))


def test_callbacks_broadcast_before_the_first_batch(hvd):
    images, labels = digits(3)
    model = make_model(seed=hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (hvd.rank() + 1))), loss=loss())
    broadcast, recorder = hvd.callbacks.BroadcastGlobalVariablesCallback(0), Recorder()
    fit(model, mine(images), mine(labels), callbacks=[broadcast, recorder])
    assert broadcast.broadcast_done
    assert_close(recorder.weights, make_model(seed=0).get_weights(), 0)
    assert_close(model.get_weights(), fit_alone(keras.optimizers.Adam(0.01), images, labels), 1e-5)
    assert_equal_on_all_ranks([*model.get_weights(), *as_arrays(model.optimizer.variables)])


def test_callbacks_broadcast_what_the_first_batch_builds(hvd):
    images, labels = digits(3)
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dropout(0.1), keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss=loss())
    fit(model, mine(images), mine(labels), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert_equal_on_all_ranks([*model.get_weights(), *as_arrays(model.optimizer.variables)])
    seeds = [v for v in model.variables if "seed" in v.path]
    assert seeds
    assert_equal_on_all_ranks(as_arrays(seeds))


def test_callbacks_leave_local_variables_alone(hvd):
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD()), seed=hvd.rank())
    mine_before = model.layers[0].get_weights()[0]
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=model.layers[0].kernel)
    callback.set_model(model)
    callback.on_train_begin()
    assert_close(model.layers[0].get_weights()[:1], [mine_before], 0)
    assert_equal_on_all_ranks(model.layers[1].get_weights())
    with pytest.raises(ValueError, match="local_variables"):
        hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables="kernel")


def test_callbacks_say_that_models_differ(hvd):
    model = make_model(width=12 if hvd.rank() else 13)
    with pytest.raises(ValueError, match=r"differ between ranks: .* the first that differs is number 0: \(64, 13\)"):
        hvd.broadcast_model(model, 0)
    if hvd.rank():
        model.trainable = False
    model = make_model()
    model.trainable = hvd.rank() == 0
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss=loss())
    images, labels = digits(1)
    with pytest.raises(ValueError, match="Build and compile the same model on every rank"):
        fit(model, mine(images), mine(labels), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


def test_callbacks_see_averages(hvd, tmp_path):
    images, labels = digits(4)
    labels = mine(labels).copy()
    labels[:] = labels if hvd.rank() == 0 else 3
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), metrics=["accuracy"])
    before, after = Recorder(), Recorder()
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=100.0)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=100.0, factor=0.5)
    callbacks = [
        before, hvd.callbacks.MetricAverageCallback(), after, plateau,
        keras.callbacks.CSVLogger(tmp_path / "log.csv"), stop,
    ]  # fmt: skip
    validation = (mine(images)[:BATCH], labels[:BATCH])
    history = fit(model, mine(images), labels, epochs=5, callbacks=callbacks, validation_data=validation)
    everyone = hvd.allgather_object(before.logs)
    for epoch, logs in enumerate(after.logs):
        assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(logs)
        for key in ("loss", "accuracy", "val_loss", "val_accuracy"):
            mean = np.mean([theirs[epoch][key] for theirs in everyone])
            assert logs[key] == pytest.approx(mean, rel=1e-6)
            assert history.history[key][epoch] == logs[key]
    assert everyone[0][0]["loss"] != everyone[1][0]["loss"]
    assert stop.stopped_epoch == 1
    with open(tmp_path / "log.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["val_loss"]) for row in rows] == pytest.approx([logs["val_loss"] for logs in after.logs])
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.05)


def test_callbacks_say_that_metrics_differ(hvd):
    average = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0, **({"val_loss": 2.0} if hvd.rank() == 0 else {})}
    with pytest.raises(ValueError, match=r"differ between ranks: \['loss', 'val_loss'\] on rank 0, \['loss'\] on rank"):
        average.on_epoch_end(0, logs)
    logs = {"loss": float(hvd.rank())}
    average.on_epoch_end(0, logs)
    assert logs["loss"] == (hvd.size() - 1) / 2


def test_callbacks_say_that_ranks_took_different_numbers_of_steps(hvd):
    images, labels = digits(3)
    n = (3 if hvd.rank() else 2) * BATCH  # rank 0 ends the epoch while the others are in a step
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match=r"numbers of steps in epoch 1: 2 on rank 0, 3 on rank.*steps_per_epoch"):
        fit(
            model, mine(images)[:n], mine(labels)[:n], epochs=2, callbacks=[hvd.callbacks.MetricAverageCallback()]
        )  # fmt: skip


def test_callbacks_average_metrics_that_are_no_floats(hvd):
    logs = {"loss": keras.ops.cast(tensor(np.float32(hvd.rank())), "bfloat16")}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs["loss"] == (hvd.size() - 1) / 2


def test_callbacks_warn_of_an_optimizer_that_does_not_reduce(hvd):
    def begin(optimizer):
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(compiled(optimizer))
        callback.on_train_begin()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        begin(hvd.DistributedOptimizer(keras.optimizers.SGD()))
        assert not [one for one in caught if "does not reduce" in str(one.message)]
        begin(keras.optimizers.SGD())
    said = [one for one in caught if "does not reduce gradients" in str(one.message)]
    assert len(said) == (hvd.rank() == 0)


def test_callbacks_warm_up_as_documented(hvd, monkeypatch, capsys):
    import hvdlite

    monkeypatch.setattr(hvdlite, "size", lambda: 4)
    warm = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=5, steps_per_epoch=5)
    found = [0.4 * warm.multiplier(epoch + batch / 5) for epoch in range(5) for batch in range(5)]
    assert found[0] == pytest.approx(0.112)
    assert found[-1] == pytest.approx(0.4)
    assert np.diff(found) == pytest.approx(np.full(24, 0.012))
    monkeypatch.undo()

    images, labels = digits(4)
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.4)))
    warm, recorder = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1), Recorder()
    fit(model, mine(images), mine(labels), epochs=3, callbacks=[warm, recorder])
    size = hvd.size()
    steps = [(epoch + (batch + 1) / 4) for epoch in range(2) for batch in range(4)]
    expected = [0.4 / size * (e * (size - 1) / 2 + 1) for e in steps]
    assert recorder.rates == pytest.approx([*expected, *[0.4] * 4], rel=1e-6)
    assert [logs["lr"] for logs in recorder.logs] == pytest.approx([expected[3], 0.4, 0.4], rel=1e-6)
    assert ("finished gradual learning rate warmup to 0.4" in capsys.readouterr().out) == (hvd.rank() == 0)


def test_callbacks_schedule_learning_rates(hvd):
    images, labels = digits(2)
    schedule = hvd.callbacks.LearningRateScheduleCallback
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)))
    recorder = Recorder()
    callbacks = [schedule(0.1, 0.5, start_epoch=1, end_epoch=3), schedule(0.3, lambda epoch: 1 / epoch, start_epoch=3)]
    fit(model, mine(images), mine(labels), epochs=5, callbacks=[*callbacks, recorder])
    expected = [1.0, 0.1, 0.05, 0.1, 0.075]
    assert recorder.rates == pytest.approx(np.repeat(expected, 2).tolist(), rel=1e-6)
    with pytest.raises(ValueError, match="initial_lr is None"):
        schedule(None, 1.0)
    callback = schedule(0.1, 0.5, staircase=False)
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match="give steps_per_epoch"):
        callback.on_train_begin()


@pytest.mark.parametrize("correct", [True, False])
def test_callbacks_correct_the_momentum(hvd, correct):
    # A gradient of 1 for each weight, whatever they are: weights are what the recurrence comes to.
    images, targets = np.ones((4 * BATCH, 1), "float32"), np.zeros((4 * BATCH, 1), "float32")
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), layer])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, momentum=0.9))
    model.compile(optimizer, loss=lambda true, predicted: keras.ops.mean(predicted - true, axis=-1))
    rates = [1.0, 0.5, 0.25, 0.25]
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        1.0, lambda epoch: rates[round(4 * epoch)], staircase=False, momentum_correction=correct
    )
    fit(model, images, targets, callbacks=[schedule])
    weight, velocity, old = 0.0, 0.0, 1.0
    for rate in rates:
        velocity = 0.9 * (rate / old if correct else 1.0) * velocity - rate
        weight, old = weight + velocity, rate
    assert float(layer.get_weights()[0][0, 0]) == pytest.approx(weight, rel=1e-6)
    assert optimizer.momentum == 0.9


def test_what_old_scripts_give_compile_is_accepted_and_an_unbuilt_model_is_refused(hvd):
    model = keras.Sequential([keras.layers.Dense(1)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    model.compile(optimizer, loss="mse", experimental_run_tf_function=False)
    with pytest.raises(ValueError, match=r"no variables yet.*keras.Input"):
        hvd.broadcast_model(model, root_rank=0)


def test_callbacks_save_the_best_model(hvd, tmp_path):
    images, labels = digits(2)
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    model = compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="filepath"):
        fit(model, mine(images), mine(labels), callbacks=[best])
    best.filepath = str(tmp_path / "best.keras")
    fit(model, mine(images), mine(labels), callbacks=[best])
    assert (tmp_path / "best.keras").exists()
