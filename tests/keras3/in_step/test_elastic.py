"""hvd.elastic in fit(): what comes back after failures, and what is compiled anew for other ranks."""

from __future__ import annotations

import pickle

import keras
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
)

import hvdlite

EPOCHS, STEPS = 2, 4


def batches(first):
    """Yield this rank's batches from the given one on."""
    images, labels = digits(EPOCHS * STEPS)
    n = BATCH * hvdlite.size()
    for at in range(first * n, len(images), n):
        yield mine(images[at : at + n]), mine(labels[at : at + n])


class Once(keras.callbacks.Callback):
    """Calls a function at the beginning of one batch, once."""

    def __init__(self, at, what):
        super().__init__()
        self.at, self.what, self.seen = at, what, 0

    def on_train_batch_begin(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at:
            self.what()


def elastic_fit(hvd, state, *more, epochs=EPOCHS, per_commit=1):
    """Train until the end, and return where each call of fit() began."""
    begun = []

    @hvd.elastic.run
    def train(state):
        begun.append((state.epoch, state.batch))
        state.model.fit(
            batches(state.epoch * STEPS + state.batch), steps_per_epoch=STEPS, initial_epoch=state.epoch,
            epochs=epochs, shuffle=False, verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, per_commit), hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state), *more,
            ],
        )  # fmt: skip
        return begun

    return train(state)


def made(hvd, optimizer=None, seed=0, **more):
    model = compiled(hvd.DistributedOptimizer(optimizer or keras.optimizers.Adam(0.01), **more), seed=seed)
    return hvd.elastic.KerasState(model, batch=0, epoch=0)


@pytest.mark.parametrize(("at", "per_commit", "began"), [(1, 1, (0, 0)), (8, 2, (1, 2))])
def test_elastic_fit_goes_on_amid_an_epoch_after_a_failure_of_one_rank(hvd, at, per_commit, began):
    """The others are in the compiled step then, whose error is the framework's."""

    def fail():
        if hvd.rank() == hvd.size() - 1:
            raise hvd.HorovodInternalError("only this rank sees it")

    state = made(hvd, seed=hvd.rank())
    assert elastic_fit(hvd, state, Once(at, fail), per_commit=per_commit) == [(0, 0), began]
    assert (state.epoch, state.batch, int(state.optimizer.iterations)) == (EPOCHS, 0, EPOCHS * STEPS)
    assert_equal_on_all_ranks([*state.model.get_weights(), *as_arrays(state.optimizer.variables)])
    expected = fit_alone(keras.optimizers.Adam(0.01), *digits(EPOCHS * STEPS))
    assert_close(state.model.get_weights(), expected, 1e-5)


def test_elastic_failures_within_the_compiled_step_are_hvdlites_own(hvd):
    """Whatever the backend makes of them: the training function is called again."""
    images, labels = digits(1)
    model = make_model(width=12 + hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), loss=loss())
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(hvd.size())
        if len(calls) == 1:
            fit(model, mine(images), mine(labels))

    train(hvd.elastic.ObjectState())
    assert calls == [hvd.size()] * 2


def test_elastic_steps_are_compiled_anew_for_other_ranks(hvd):
    """First each rank is alone, and its step reduces nothing; then there are all of them, and it has to."""
    images, labels = digits(2)
    part = mine(images), mine(labels)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model = compiled(optimizer)
    start, me = model.get_weights(), hvd.rank()
    state = hvd.elastic.KerasState(model)
    hvd.shutdown()
    hvd.init(comm=[me])
    assert hvd.size() == 1
    fit(model, *part)
    state.restore()
    hvd.shutdown()
    hvd.init()
    state.on_reset()
    assert_close(model.get_weights(), start, 0)
    fit(model, *part)
    assert_equal_on_all_ranks([*model.get_weights(), *as_arrays(optimizer.variables)])
    assert_close(model.get_weights(), fit_alone(keras.optimizers.SGD(0.1, momentum=0.9), images, labels), 1e-5)


@pytest.mark.parametrize("passes", [1, 2])
def test_elastic_commits_go_into_models_and_optimizers_of_a_new_start(hvd, passes):
    images, labels = digits(3)
    state = made(hvd, backward_passes_per_step=passes)
    fit(state.model, mine(images), mine(labels))
    state.epoch = 5
    state.save()
    content = pickle.loads(pickle.dumps(state.to_commit()))
    other = made(hvd, seed=3, backward_passes_per_step=passes)
    other.from_commit(content)
    other.restore()
    assert other.epoch == 5
    assert_close(other.model.get_weights(), state.model.get_weights(), 0)
    assert_close(as_arrays(other.optimizer.variables), as_arrays(state.optimizer.variables), 0)
    for each in (state, other):
        each.sync()
        fit(each.model, mine(images), mine(labels))
    assert_close(other.model.get_weights(), state.model.get_weights(), 0)
    with pytest.raises(ValueError, match="is of another model or optimizer"):
        made(hvd, keras.optimizers.SGD()).from_commit(content)


def test_elastic_sync_brings_the_state_of_rank_0_and_saves_it(hvd):
    state = made(hvd, keras.optimizers.SGD(0.1 * (hvd.rank() + 1)), seed=hvd.rank())
    state.batch = hvd.rank() + 3
    state.sync()
    state.batch = 9
    state.model.set_weights([w + 1 for w in state.model.get_weights()])
    state.restore()
    assert state.batch == 3
    assert_close(state.model.get_weights(), make_model(seed=0).get_weights(), 0)
    assert abs(float(keras.ops.convert_to_numpy(state.optimizer.learning_rate)) - 0.1) < 1e-6


class Log(keras.callbacks.Callback):
    def __init__(self, state):
        super().__init__()
        self.state, self.batches, self.epochs, self.targets = state, [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.batches.append(self.state.batch)

    def on_epoch_begin(self, epoch, logs=None):
        self.targets.append(self.params["steps"])

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(self.state.epoch)


@pytest.mark.parametrize("how", ["initial_epoch", "from 0"])
def test_elastic_callbacks_count_batches_and_epochs(hvd, how):
    images, labels = digits(3)
    state = made(hvd)
    state.epoch, state.batch = 4, 1
    log = Log(state)
    counting = [hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.UpdateEpochStateCallback(state), log]
    more = {"initial_epoch": 4, "epochs": 6} if how == "initial_epoch" else {"epochs": 2}
    state.model.fit(mine(images), mine(labels), batch_size=BATCH, verbose=0, callbacks=counting, **more)
    assert (log.batches, log.epochs, log.targets) == ([1, 2, 0, 1, 2], [5, 6], [2, 3])
    assert (state.epoch, state.batch, bool(state.model.stop_training)) == (6, 0, False)


def test_elastic_callbacks_let_others_end_the_training_with_a_shorter_epoch(hvd):
    class Ending(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

    images, labels = digits(3)
    state = made(hvd)
    state.batch = 7  # more than the epoch has: one batch is done
    log = Log(state)
    counting = [Ending(), hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state), log]
    fit(state.model, mine(images), mine(labels), epochs=3, callbacks=counting)
    assert (log.batches, state.epoch, state.batch) == ([7], 1, 0)


def test_elastic_commits_come_every_so_many_batches_and_after_each_epoch(hvd):
    images, labels = digits(5)
    state = made(hvd)
    seen = []
    state.commit = lambda: seen.append((state.epoch, state.batch))
    counting = [
        hvd.elastic.CommitStateCallback(state, 2), hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
    ]  # fmt: skip
    fit(state.model, mine(images), mine(labels), epochs=2, callbacks=counting)
    assert seen == [(0, 2), (0, 4), (1, 0), (1, 2), (1, 4), (2, 0)]


def test_elastic_refuses_what_cannot_be_right(hvd):
    model = make_model()
    with pytest.raises(ValueError, match="the model has no variables yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="expected an optimizer of Keras 3, got builtins.str"):
        hvd.elastic.KerasState(model, "sgd")
    with pytest.raises(ValueError, match="'sync' is a method of states"):
        hvd.elastic.KerasState(model, sync=1)
    plain = hvd.elastic.KerasState(model)
    assert plain.optimizer is None
    for callback, name in (("UpdateBatchStateCallback", "batch"), ("UpdateEpochStateCallback", "epoch")):
        with pytest.raises(ValueError, match=f"the state has no attribute '{name}'"):
            getattr(hvd.elastic, callback)(plain)
    with pytest.raises(ValueError, match=r"batches_per_commit=0\): expected a number"):
        hvd.elastic.CommitStateCallback(plain, 0)


def test_elastic_remembers_a_loop_of_its_own(hvd):
    """An optimizer that no model was compiled with, which is not built when the state is made."""
    model, optimizer = make_model(), hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    state = hvd.elastic.KerasState(model, optimizer, step=0)
    assert optimizer.built
    before = as_arrays([*model.variables, *optimizer.variables])
    gradients = [keras.ops.ones(v.shape) * (hvd.rank() + 1) for v in model.trainable_variables]
    optimizer.apply(gradients, model.trainable_variables)
    state.restore()
    assert_close(as_arrays([*model.variables, *optimizer.variables]), before, 0)
