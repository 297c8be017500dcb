"""hvd.elastic with TensorFlow: variables and loops of one's own."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf


def train_with(hvd, disturb, traced=True):
    """Train a variable, with a commit in every second of six steps; return its values of all ranks, and the calls."""
    weights = tf.Variable(np.arange(4.0) + hvd.rank())
    calls, disturbed = [], []

    @hvd.elastic.run
    def train(state):
        calls.append(int(state.step))

        def update(x):
            weights.assign(0.5 * weights + tf.reduce_sum(hvd.allreduce(x, name="x")))

        step = tf.function(update) if traced else update
        while state.step < 6:
            if state.step == 3 and not disturbed:
                disturbed.append(True)
                disturb(step)
            step(tf.constant(np.arange(4.0) * (state.step + hvd.rank())))
            state.step += 1
            if state.step % 2 == 0:
                state.commit()
        return weights.numpy()

    return train(hvd.elastic.TensorFlowState([weights], step=0)), calls


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("how", ["all ranks disagree", "one rank fails"])
def test_elastic_training_ends_as_if_nothing_had_happened(hvd, how, traced):
    def disagree(step):
        step(tf.zeros([5 + hvd.rank()], tf.float64))
        raise hvd.HorovodInternalError("of a single rank, which agrees with itself")

    def fail(step):
        if hvd.rank() == hvd.size() - 1:
            raise hvd.HorovodInternalError("only this rank sees it")

    expected, calls = train_with(hvd, lambda step: None, traced)
    assert calls == [0]
    found, calls = train_with(hvd, disagree if how == "all ranks disagree" else fail, traced)
    assert calls == [0, 2]
    np.testing.assert_array_equal(found, expected)
    for theirs in hvd.allgather_object(found):
        np.testing.assert_array_equal(theirs, found)


def test_elastic_states_send_nothing_before_sync(hvd):
    """Horovod's constructor is a collective operation, and its sync() does not bring the variables."""
    if hvd.rank() == 0:
        hvd.elastic.TensorFlowState([tf.Variable(1.0)], step=0)
    variable = tf.Variable([1.0 + hvd.rank()])
    state = hvd.elastic.TensorFlowState([variable], step=hvd.rank())
    state.sync()
    variable.assign([9.0])
    state.restore()
    assert (variable.numpy().tolist(), state.step) == ([1.0], 0)


def test_elastic_commits_fit_the_variables_or_are_refused(hvd):
    state = hvd.elastic.TensorFlowState([tf.Variable([1.0, 2.0])], step=3)
    content = state.to_commit()
    fresh = tf.Variable([0.0, 0.0])
    other = hvd.elastic.TensorFlowState([fresh], step=0)
    other.from_commit(content)
    other.restore()
    assert (fresh.numpy().tolist(), other.step) == ([1.0, 2.0], 3)
    with pytest.raises(ValueError, match="the last commit has 1 variables, this program 2"):
        hvd.elastic.TensorFlowState([fresh, fresh]).from_commit(content)


def test_elastic_refuses_what_is_not_there(hvd):
    with pytest.raises(ValueError, match="TensorFlow 2 keeps no list of all variables"):
        hvd.elastic.TensorFlowState(step=0)
    with pytest.raises(ValueError, match="sessions of TensorFlow 1"):
        hvd.elastic.TensorFlowState([], session=object())
    with pytest.raises(AttributeError, match=r"hvdlite\.tensorflow\.elastic.* no attribute 'rnu'"):
        _ = hvd.elastic.rnu


def test_other_errors_of_functions_are_not_caught(hvd):
    @hvd.elastic.run
    def train(state):
        tf.function(lambda: tf.numpy_function(lambda: 1 // 0, [], tf.int64))()

    with pytest.raises(tf.errors.UnknownError, match="ZeroDivisionError"):
        train(hvd.elastic.TensorFlowState([]))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras 3.15 with NumPy 2
def test_elastic_keras_state_takes_horovods_arguments(hvd):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = hvd.elastic.TensorFlowKerasState(model, keras.optimizers.SGD(), None, batch=0)
    assert isinstance(state, hvd.elastic.ObjectState)
    assert state.batch == 0
    with pytest.raises(ValueError, match="TensorFlowKerasState: the model has no variables yet"):
        hvd.elastic.TensorFlowKerasState(keras.Sequential([keras.layers.Dense(1)]))
