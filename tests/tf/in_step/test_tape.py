"""Gradients of tapes and optimizers, against one process that has all ranks' examples."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

LAYERS = [(8, 16), (16, 16), (16, 4)]


def network(dtype="float64"):
    """Weights and biases, the same on all ranks."""
    rng = np.random.default_rng(7)
    made = []
    for n, m in LAYERS:
        made.append(tf.Variable(rng.normal(size=(n, m)) / np.sqrt(n), dtype=dtype, name="kernel"))
        made.append(tf.Variable(np.zeros(m), dtype=dtype, name="bias"))
    return made


def loss_of(variables, x, y):
    for kernel, bias in zip(variables[::2], variables[1::2], strict=True):
        x = tf.tanh(x @ kernel + bias)
    return tf.reduce_mean(tf.square(x - y))


def batches(size, steps=6, each=5):
    """(steps, size, each, …) examples."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(steps, size, each, 8)), rng.normal(size=(steps, size, each, 4))


def train_alone(size, make_optimizer):
    """What one process with all ranks' examples makes of the network."""
    variables, optimizer = network(), make_optimizer()
    for x, y in zip(*batches(size), strict=True):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x.reshape(-1, 8), y.reshape(-1, 4))
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    return variables


def equal_on_all(hvd, variables):
    for variable in variables:
        mine = tf.reshape(tf.bitcast(variable, tf.uint8), [1, -1])
        everyone = hvd.allgather(mine).numpy()
        assert (everyone == everyone[0]).all()


OPTIMIZERS = {
    "sgd": lambda: tf.compat.v1.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.compat.v1.train.AdamOptimizer(0.01),
}


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"gradient_predivide_factor": 4.0}], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("which", list(OPTIMIZERS))
def test_training_is_that_of_one_process(hvd, which, traced, options):
    variables, optimizer = network(), OPTIMIZERS[which]()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(variables, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if traced else step
    for x, y in zip(*batches(hvd.size()), strict=True):
        run(tf.constant(x[hvd.rank()]), tf.constant(y[hvd.rank()]))
    for mine, alone in zip(variables, train_alone(hvd.size(), OPTIMIZERS[which]), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
    equal_on_all(hvd, variables)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("which", list(OPTIMIZERS))
def test_optimizers_of_v1_reduce_in_minimize(hvd, which, traced):
    variables, optimizer = network(), hvd.DistributedOptimizer(OPTIMIZERS[which]())

    def step(x, y):
        optimizer.minimize(lambda: loss_of(variables, x, y), var_list=variables)

    run = tf.function(step) if traced else step
    for x, y in zip(*batches(hvd.size()), strict=True):
        run(tf.constant(x[hvd.rank()]), tf.constant(y[hvd.rank()]))
    for mine, alone in zip(variables, train_alone(hvd.size(), OPTIMIZERS[which]), strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
    equal_on_all(hvd, variables)


def test_optimizers_of_keras_get_all_arguments(hvd):
    import keras

    weight = keras.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, backward_passes_per_step=2)
    for _ in range(2):
        optimizer.apply([tf.constant([hvd.rank() + 1.0])], [weight])
    size = hvd.size()
    np.testing.assert_allclose(weight.numpy(), [1.0 - size * (size + 1)])  # two passes of the sum of 1 to size


def test_the_structure_of_sources_is_kept_and_none_stays_none(hvd, call):
    a, b, unused = (tf.Variable(n) for n in (1.0, 2.0, 3.0))
    rank = float(hvd.rank())
    mean = (hvd.size() - 1) / 2

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            y = a * a * rank + b * rank
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(y, {"a": a, "more": [b, unused]}), tape.gradient(y, a)

    nested, single = call(gradients)
    assert float(nested["a"]) == float(single) == 2 * mean
    assert float(nested["more"][0]) == mean
    assert nested["more"][1] is None


def test_embeddings_send_their_slices(hvd, call):
    table = tf.Variable(tf.ones([10, 2]))
    rank, size = hvd.rank(), hvd.size()

    def gradient(dense):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(tf.gather(table, tf.range(rank))) * (rank + 1.0)  # no row on rank 0
        found = hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(y, table)
        return found if dense else (found.values, found.indices)

    expected = np.zeros((10, 2))
    for r in range(size):
        expected[:r] += (r + 1.0) / size
    values, indices = call(lambda: gradient(False))
    assert indices.numpy().tolist() == [n for r in range(size) for n in range(r)]
    summed = np.zeros((10, 2))
    np.add.at(summed, indices.numpy(), values.numpy())
    np.testing.assert_allclose(summed, expected, rtol=1e-6)
    np.testing.assert_allclose(call(lambda: gradient(True)), expected, rtol=1e-6)


def test_local_sources_stay_and_are_scaled(hvd, call):
    shared, own = tf.Variable(1.0), tf.Variable(1.0)
    rank, size = float(hvd.rank()), hvd.size()

    def gradients(scale):
        with tf.GradientTape() as tape:
            y = (shared + own) * rank
        tape = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        tape.register_local_source(own)
        return tape.gradient(y, [own, shared])

    mean = (size - 1) / 2
    assert [float(g) for g in call(lambda: gradients(True))] == pytest.approx([rank / size, mean])
    assert [float(g) for g in call(lambda: gradients(False))] == [rank, mean]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_small_gradients_have_the_same_bits_everywhere(hvd, dtype):
    least = 6e-8  # of float16; threads of TensorFlow take the float32 on the way to it for zero
    w = tf.Variable(tf.ones([300, 20], dtype))
    factors = tf.reshape(tf.range(6000, dtype=dtype), [300, 20]) * least * 0.37

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(w * factors) * (hvd.rank() + 1.0)
        return hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16).gradient(y, w)

    for _ in range(8):
        found = step()
        equal_on_all(hvd, [found])
    np.testing.assert_allclose(found, factors * (hvd.size() + 1) / 2, rtol=0.01, atol=2 * least)


def test_layers_can_be_local(hvd):
    import keras

    rank, size = hvd.rank(), hvd.size()
    own, shared = keras.layers.Dense(2, use_bias=False), keras.layers.Dense(1, use_bias=False)
    x = tf.ones([1, 3]) * (rank + 1.0)
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(own(x)) + tf.reduce_sum(shared(x))
    weights = [own.kernel, shared.kernel]
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=own)
    mine, mean = tape.gradient(y, weights)
    np.testing.assert_allclose(mine, np.full((3, 2), (rank + 1.0) / size), rtol=1e-6)
    np.testing.assert_allclose(mean, np.full((3, 1), (size + 1) / 2), rtol=1e-6)
    with pytest.raises(ValueError, match="expected layers"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=["dense"])


def test_names_go_by_place_not_by_how_a_rank_numbers_its_layers(hvd):
    import keras

    for _ in range(hvd.rank()):
        keras.layers.Dense(1).build((None, 1))  # dense, dense_1, … are taken here
    layer = keras.layers.Dense(1)
    layer.build((None, 2))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer(x))
        return hvd.DistributedGradientTape(tape).gradient(y, layer.trainable_weights)

    kernel, _ = step(tf.fill([1, 2], hvd.rank() + 1.0))
    np.testing.assert_allclose(kernel, np.full((2, 1), (hvd.size() + 1) / 2), rtol=1e-6)


def test_two_networks_in_one_function(hvd):
    one, other = tf.Variable(1.0, name="w"), tf.Variable(1.0, name="w")
    rank = float(hvd.rank())

    @tf.function
    def step():
        with tf.GradientTape() as first:
            y = one * rank
        with tf.GradientTape() as second:
            z = other * rank * 10
        first, second = hvd.DistributedGradientTape(first), hvd.DistributedGradientTape(second)
        return first.gradient(y, [one]) + second.gradient(z, [other])

    mean = (hvd.size() - 1) / 2
    for _ in range(3):
        assert [float(g) for g in step()] == [mean, 10 * mean]


def test_wrong_arguments_are_refused(hvd):
    tape = tf.GradientTape()
    for options, text in (
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "only an average"),
        ({"groups": 0}, "groups=0"),
        ({"groups": ["w"]}, "groups="),
        ({"op": 17}, "op=17"),
        ({"process_set": [0]}, "process_set="),
    ):
        with pytest.raises(ValueError, match=text):
            hvd.DistributedGradientTape(tape, **options)
    with pytest.raises(ValueError, match="distributed already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))


def test_the_exchange_is_refused_inside_xla(hvd):
    if hvd.size() == 1:
        return
    w = tf.Variable(1.0)

    def step(x):
        with tf.GradientTape() as tape:
            y = w * x
        return hvd.DistributedGradientTape(tape).gradient(y, w)

    with pytest.raises(hvd.InvalidRequestError, match=r"exchange of gradients: XLA cannot call Python"):
        tf.function(step, jit_compile=True, autograph=False)(tf.constant(1.0))

    @tf.function(jit_compile=True)
    def compiled(x):
        with tf.GradientTape() as tape:
            y = w * x * x
        return tape.gradient(y, w)

    @tf.function
    def split(x):  # what the message says: the backward pass compiled, the exchange outside
        return hvd.allreduce(compiled(x))

    found = split(tf.constant(float(hvd.rank())))
    assert float(found) == pytest.approx(np.mean([r * r for r in range(hvd.size())]))


def test_variables_become_those_of_the_root(hvd, call):
    for root in range(hvd.size()):
        variables = [
            tf.Variable(tf.fill([3, 2], hvd.rank() + 1.0)),
            tf.Variable(hvd.rank(), dtype=tf.int64),
            tf.Variable([True, bool(hvd.rank() % 2)]),
        ]

        def broadcast(root=root, variables=variables):
            hvd.broadcast_variables(variables, root)
            return variables[0] + 0

        assert call(broadcast).numpy().tolist() == [[root + 1.0] * 2] * 3
        assert variables[0].numpy().tolist() == [[root + 1.0] * 2] * 3
        assert (int(variables[1].numpy()), variables[2].numpy().tolist()) == (root, [True, bool(root % 2)])
    variables = [tf.Variable([float(hvd.rank())])]
    (value,) = call(lambda: hvd.broadcast_(variables, 0, name="in place"))
    assert (value.numpy().tolist(), variables[0].numpy().tolist()) == ([0.0], [0.0])
    with pytest.warns(UserWarning, match="not built"):
        assert hvd.broadcast_variables([], 0) is None


def test_a_variable_that_was_broadcast_can_be_trained(hvd):
    variable = tf.Variable(tf.fill([3000], float(hvd.rank() + 1)))
    hvd.broadcast_variables([variable], 0)
    kept = variable.numpy()
    variable.assign_add(tf.ones(3000))
    other = tf.Variable(tf.fill([3000], float(hvd.rank() + 5)))
    hvd.broadcast_variables([other], 0)
    np.testing.assert_array_equal(variable, kept + 1)


def test_objects_travel(hvd):
    rank = hvd.rank()
    assert hvd.broadcast_object({"epoch": rank}, root_rank=0) == {"epoch": 0}
    assert hvd.broadcast_object_fn(root_rank=0)([rank]) == [0]
    assert hvd.allgather_object("x" * rank) == ["x" * r for r in range(hvd.size())]


def test_names_of_sessions_say_what_to_do(hvd):
    with pytest.raises(RuntimeError, match="broadcast_variables"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(RuntimeError, match="sessions"):
        hvd.BroadcastGlobalVariablesHook(0)
    with pytest.raises(RuntimeError, match="backward_passes_per_step"):
        hvd.LocalGradientAggregationHelper()
