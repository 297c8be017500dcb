"""Training on all ranks comes to what one process comes to on the batches of all of them."""

from __future__ import annotations

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
    gradients_of,
    make_model,
    mine,
    one_variable,
    tensor,
)

STEPS = 30
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.003),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_fit_is_one_process_on_all_batches(hvd, name):
    images, labels = digits(STEPS)
    expected = fit_alone(OPTIMIZERS[name](), images, labels)
    model = compiled(hvd.DistributedOptimizer(OPTIMIZERS[name]()))
    fit(model, mine(images), mine(labels))
    assert_close(model.get_weights(), expected, 1e-5)
    assert_equal_on_all_ranks(model.get_weights())
    assert int(model.optimizer.iterations) == STEPS


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_it_is_so_in_double_precision(hvd, backend, name):
    if backend == "jax":
        import jax

        if not jax.config.jax_enable_x64:
            pytest.skip("JAX_ENABLE_X64 is not set")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    images, labels = digits(STEPS, "float64")
    targets = np.eye(10)[labels]
    alone, model = make_model(), make_model()
    alone.compile(OPTIMIZERS[name](), loss=keras.losses.MeanSquaredError())
    model.compile(hvd.DistributedOptimizer(OPTIMIZERS[name]()), loss=keras.losses.MeanSquaredError())
    fit(alone, images, targets, batch=BATCH * hvd.size())
    fit(model, mine(images), mine(targets))
    # On torch Keras computes gradients partly in float32: those of halves of a batch differ by 1e-8 in one process.
    assert_close(model.get_weights(), alone.get_weights(), 2e-6 if backend == "torch" else 1e-9)


@pytest.mark.parametrize("way", ["apply_gradients", "apply", "stateless_apply"])
def test_loops_of_ones_own_are_reduced_once(hvd, backend, way):
    if way == "stateless_apply" and backend != "jax":
        pytest.skip("only JAX has it")
    images, labels = digits(STEPS)
    expected = fit_alone(OPTIMIZERS["adam"](), images, labels)
    model, optimizer = make_model(), hvd.DistributedOptimizer(OPTIMIZERS["adam"]())
    optimizer.build(model.trainable_variables)
    for at in range(0, STEPS * BATCH, BATCH):
        here = slice(at, at + BATCH)
        gradients = gradients_of(model, mine(images)[here], mine(labels)[here])
        variables = model.trainable_variables
        if way == "apply_gradients":
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        elif way == "apply":
            optimizer.apply(gradients, variables)
        else:
            state = [v.value for v in optimizer.variables]
            new, state = optimizer.stateless_apply(state, gradients, [v.value for v in variables])
            for variable, value in zip([*variables, *optimizer.variables], [*new, *state], strict=True):
                variable.assign(value)
    assert_close(model.get_weights(), expected, 1e-5)
    assert_equal_on_all_ranks(model.get_weights())


def test_without_it_the_ranks_part(hvd):
    images, labels = digits(3)
    model = compiled(OPTIMIZERS["sgd"]())
    fit(model, mine(images), mine(labels))
    everyone = hvd.allgather_object(model.get_weights())
    assert not np.array_equal(everyone[0][0], everyone[1][0])


def test_other_ways_to_train_a_model(hvd, backend):
    images, labels = digits(4)
    expected = fit_alone(OPTIMIZERS["sgd"](), images, labels)
    eager = compiled(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), run_eagerly=True)
    fit(eager, mine(images), mine(labels))
    assert_close(eager.get_weights(), expected, 1e-5)
    by_hand = compiled(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()))
    for at in range(0, 4 * BATCH, BATCH):
        by_hand.train_on_batch(mine(images)[at : at + BATCH], mine(labels)[at : at + BATCH])
    assert_close(by_hand.get_weights(), expected, 1e-5)
    if backend != "torch":  # where Keras refuses it
        several = compiled(hvd.DistributedOptimizer(OPTIMIZERS["sgd"]()), steps_per_execution=2)
        fit(several, mine(images), mine(labels))
        assert_close(several.get_weights(), expected, 1e-5)


def test_two_models_nested_and_with_equal_names_train_in_turn(hvd):
    images, labels = digits(2)

    def nested(optimizer):
        model = keras.Sequential([keras.Input((64,)), make_model(), keras.layers.Dense(10, name="dense")])
        return model, optimizer

    models = []
    for rank in range(2):
        keras.utils.clear_session()
        if hvd.rank() == rank:
            keras.layers.Dense(1)  # numbers the layers of this rank differently
        model, optimizer = nested(hvd.DistributedOptimizer(OPTIMIZERS["adam"]()))
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        models.append(model)
    hvd.broadcast_model(models[0], 0)
    hvd.broadcast_model(models[1], 1)
    for _ in range(3):
        for model in models:
            fit(model, mine(images), mine(labels))
    assert_equal_on_all_ranks([*models[0].get_weights(), *models[1].get_weights()])


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
        lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
        lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
        lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=64.0),
    ],
    ids=["clipnorm", "global_clipnorm", "weight_decay", "ema", "schedule", "accumulation", "rmsprop", "loss_scale"],
)
def test_what_the_optimizer_does_comes_after_the_reduction(hvd, make):
    images, labels = digits(7)
    expected = fit_alone(make(), images, labels)
    model = compiled(hvd.DistributedOptimizer(make()))
    fit(model, mine(images), mine(labels))
    assert_close(model.get_weights(), expected, 2e-5)
    assert_equal_on_all_ranks(model.get_weights())


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1),
        ({"op": "Sum"}, "size"),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"groups": 2}, 1),
        ({"groups": "variables"}, 1),
        ({"num_groups": 1}, 1),
        ({"compression": "fp16"}, 1),
        ({"compression": "bf16"}, 1),
        ({"sparse_as_dense": True}, 1),
        ({"name": "mine"}, 1),
    ],
)
def test_how_gradients_are_reduced(hvd, options, factor):
    variables = [one_variable(), one_variable([0.0]), one_variable([3.0, 4.0, 5.0])]
    options = dict(options)
    if options.get("op"):
        options["op"] = hvd.Sum
    if options.get("groups") == "variables":
        options["groups"] = [[variables[0], variables[2]]]
    if "compression" in options:
        options["compression"] = getattr(hvd.Compression, options["compression"])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
    before = as_arrays(variables)
    for _ in range(2):
        optimizer.apply([tensor(np.full(v.shape, hvd.rank() + 1.0, "float32")) for v in variables], variables)
    mean = (hvd.size() + 1) / 2 * (hvd.size() if factor == "size" else 1)
    assert_close(as_arrays(variables), [b - 2 * mean for b in before], 1e-6)


def test_local_variables_stay_on_their_rank(hvd):
    for scale in (True, False):
        shared, local = one_variable(), one_variable()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(local)
        gradient = np.full(2, hvd.rank() + 1.0, "float32")
        optimizer.apply([tensor(gradient), tensor(gradient)], [shared, local])
        divisor = hvd.size() if scale else 1
        assert_close(as_arrays([shared]), [np.array([1.0, 2.0]) - (hvd.size() + 1) / 2], 1e-6)
        assert_close(as_arrays([local]), [np.array([1.0, 2.0]) - gradient / divisor], 1e-6)


def test_local_layers_stay_on_their_rank(hvd):
    images, labels = digits(3)
    model = make_model()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=model.layers[-1])
    model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model, mine(images), mine(labels))
    everyone = hvd.allgather_object(model.layers[-1].get_weights())
    assert not np.array_equal(everyone[0][0], everyone[1][0])


def test_a_process_set_trains_for_itself(hvd):
    alone = hvd.add_process_set([0])
    rest = hvd.add_process_set(list(range(1, hvd.size())))
    try:
        variable = one_variable()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=alone if hvd.rank() == 0 else rest)
        optimizer.apply([tensor(np.full(2, hvd.rank() + 1.0, "float32"))], [variable])
        mean = 1.0 if hvd.rank() == 0 else np.mean(np.arange(1, hvd.size())) + 1
        assert_close(as_arrays([variable]), [np.array([1.0, 2.0]) - mean], 1e-6)
    finally:
        hvd.remove_process_set(alone)
        hvd.remove_process_set(rest)


@pytest.mark.parametrize("average", [False, True])
def test_passes_are_added_up_reduced_and_applied(hvd, average):
    variable = one_variable()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=4, average_aggregated_gradients=average
    )
    for step in range(1, 9):
        optimizer.apply([tensor(np.full(2, 2.0 * hvd.rank(), "float32"))], [variable])
        applied = step // 4 * (hvd.size() - 1) * (1 if average else 4)
        assert_close(as_arrays([variable]), [np.array([1.0, 2.0]) - applied], 1e-6)
        assert int(optimizer.iterations) == step


def test_passes_work_in_fit(hvd):
    images, labels = digits(6)
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    # Three batches of a rank are what one process sees as one, if the data are put together so.
    order = np.arange(6 * BATCH * hvd.size())
    expected = compiled(plain)
    for at in range(2):
        part = np.concatenate(
            [order[r :: hvd.size()][at * 3 * BATCH : (at + 1) * 3 * BATCH] for r in range(hvd.size())]
        )
        expected.train_on_batch(images[part], labels[part])
    model = compiled(
        hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=3, average_aggregated_gradients=True
        )
    )
    fit(model, mine(images), mine(labels))
    assert_close(model.get_weights(), expected.get_weights(), 1e-5)
    assert_equal_on_all_ranks(model.get_weights())
    assert int(model.optimizer.iterations) == 6
    assert hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)).variables() is not None


@pytest.mark.parametrize("way", ["outside", "inside", "policy"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(hvd, way):
    images, labels = digits(4)
    images = mine(images).copy()
    if hvd.rank() == hvd.size() - 1:
        images[BATCH : 2 * BATCH] = 1e30  # of the second step
    if way == "policy":
        keras.config.set_dtype_policy("mixed_float16")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    elif way == "outside":
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), initial_scale=64.0)
        optimizer = hvd.DistributedOptimizer(scaled)
    else:
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    model.compile(optimizer, loss=keras.losses.MeanSquaredError())
    scale = 64.0 if way != "policy" else 2.0**15
    targets = np.eye(10, dtype="float32")[mine(labels)]
    fit(model, images, targets)
    assert int(model.optimizer.iterations) == 3
    assert float(model.optimizer.dynamic_scale) == scale / 2
    assert all(np.isfinite(w).all() for w in model.get_weights())
    assert_equal_on_all_ranks([*model.get_weights(), *as_arrays(model.optimizer.variables)])


def test_an_overflow_in_a_local_gradient_skips_the_step_on_all(hvd, backend):
    shared, local = one_variable(), one_variable()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaled, scale_local_gradients=False)
    optimizer.register_local_var(local)
    optimizer.build([shared, local])
    for step in range(2):
        overflow = step == 0 and hvd.rank() == hvd.size() - 1
        gradients = [tensor(np.full(2, value, "float32")) for value in (4.0, np.inf if overflow else 2.0)]
        if backend == "jax":  # where Keras's LossScaleOptimizer has no apply() that works
            variables = [shared, local, *optimizer.variables]
            new, own = optimizer.stateless_apply(
                [v.value for v in variables[2:]], gradients, [shared.value, local.value]
            )
            for variable, value in zip(variables, [*new, *own], strict=True):
                variable.assign(value)
        else:
            optimizer.apply(gradients, [shared, local])
    assert float(scaled.dynamic_scale) == 2.0
    assert_close(as_arrays([shared, local]), [np.array([-1.0, 0.0]), np.array([0.0, 1.0])], 1e-6)


def test_passes_and_loss_scaling_together(hvd, backend):
    if backend == "jax":
        pytest.skip("there Keras's LossScaleOptimizer has no apply() that works")
    variable = one_variable()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer = hvd.DistributedOptimizer(scaled, backward_passes_per_step=2)
    for step in range(4):
        gradient = np.full(2, np.inf if step == 0 and hvd.rank() == 0 else 4.0, "float32")
        optimizer.apply([tensor(gradient)], [variable])
    # The first two are dropped, for all ranks; the others leave nothing of the overflow behind.
    assert_close(as_arrays([variable]), [np.array([1.0, 2.0]) - 4.0], 1e-6)
    assert float(scaled.dynamic_scale) == 2.0


def test_wrong_arguments_are_refused(hvd):
    from hvdlite import InvalidRequestError

    def sgd(**more):
        return keras.optimizers.SGD(0.1, **more)

    for options, words in [
        ({"op": hvd.Adasum}, "op=Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        ({"groups": "all"}, "groups='all'"),
        ({"num_groups": -1}, "groups=-1"),
        ({"compression": 3}, "compression=3"),
        ({"process_set": 1}, "process_set"),
    ]:
        with pytest.raises(InvalidRequestError, match=words):
            hvd.DistributedOptimizer(sgd(), **options)
    with pytest.raises(InvalidRequestError, match="gradient_accumulation_steps=2"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(InvalidRequestError, match="distributed already"):
        hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd()))
    with pytest.raises(InvalidRequestError, match="optimizer of Keras 3, got builtins.str"):
        hvd.DistributedOptimizer("sgd")
    with pytest.raises(InvalidRequestError, match="local_layers"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers="dense")


def test_the_optimizer_stays_what_it_was(hvd):
    plain = keras.optimizers.SGD(0.1, momentum=0.9)
    variable = one_variable()
    plain.apply([tensor(np.ones(2, "float32"))], [variable])
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, keras.optimizers.SGD)
    assert (int(optimizer.iterations), type(optimizer).__name__) == (1, "SGD")
    assert len(optimizer.variables()) == len(optimizer.variables) == 3
    again = optimizer.from_config(optimizer.get_config())
    assert again.momentum == 0.9
    again.apply([tensor(np.full(2, 1.0 * hvd.rank(), "float32"))], [one_variable()])
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedOptimizer(again)
