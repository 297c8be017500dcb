"""Each operation against NumPy, eager and in functions, and each gradient against one worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

DTYPES = ["uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
SHAPES = [(), (1,), (5,), (0, 3), (17, 3), (300, 7)]


def values(shape, rank, dtype="float64"):
    """Small whole numbers, different on each rank and for each neighbour: exact in every dtype."""
    return tf.cast((np.arange(np.prod(shape, dtype=int)).reshape(shape) * 3 + rank) % 8, dtype)


def numbers(tensor):
    return np.asarray(tf.cast(tensor, tf.float64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_is_numpys(hvd, call, dtype):
    for shape in SHAPES:
        everyone = np.stack([numbers(values(shape, r)) for r in range(hvd.size())])
        mine = values(shape, hvd.rank(), dtype)
        for op, expected in ((hvd.Sum, everyone.sum(0)), (hvd.Min, everyone.min(0)), (hvd.Max, everyone.max(0))):
            found = call(lambda x, op=op: hvd.allreduce(x, op=op), mine)
            assert found.dtype == mine.dtype
            np.testing.assert_array_equal(numbers(found), expected, err_msg=f"{op} {shape}")


def test_factors_and_averages(hvd, call):
    size, mine = hvd.size(), tf.constant([1.0, 2.0, 4.0]) * (hvd.rank() + 1)
    total = np.array([1.0, 2.0, 4.0]) * size * (size + 1) / 2
    np.testing.assert_allclose(call(hvd.allreduce, mine), total / size, rtol=1e-6)
    scaled = call(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0), mine)
    np.testing.assert_allclose(scaled, total * 1.5, rtol=1e-6)
    half = call(lambda x: hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), mine)
    assert half.dtype == tf.float32
    np.testing.assert_array_equal(half, total)


def test_a_group_may_mix_dtypes_and_slices(hvd, call):
    rank, size = hvd.rank(), hvd.size()

    def group(x, y, rows):
        slices = tf.IndexedSlices(rows, tf.range(tf.shape(rows)[0]), dense_shape=tf.constant([9, 2]))
        a, s, b = hvd.grouped_allreduce([x, slices, y], op=hvd.Sum)
        return a, s.values, s.indices, s.dense_shape, b

    rows = tf.fill([rank, 2], float(rank))  # none on rank 0
    a, v, i, shape, b = call(group, values((5,), rank, "float32"), values((2, 2), rank, "int32"), rows)
    np.testing.assert_array_equal(a, sum(numbers(values((5,), r)) for r in range(size)))
    np.testing.assert_array_equal(b, sum(numbers(values((2, 2), r)) for r in range(size)))
    assert i.numpy().tolist() == [n for r in range(size) for n in range(r)]
    assert v.numpy().tolist() == [[float(r)] * 2 for r in range(size) for _ in range(r)]
    assert shape.numpy().tolist() == [9, 2]
    assert hvd.grouped_allreduce([]) == []


def test_averages_of_slices_divide_the_values(hvd, call):
    def average(rows):
        return hvd.allreduce(tf.IndexedSlices(rows, tf.constant([hvd.rank()]), tf.constant([8, 1]))).values

    found = call(average, tf.constant([[hvd.size() * (hvd.rank() + 1.0)]]))
    assert found.numpy().ravel().tolist() == [r + 1.0 for r in range(hvd.size())]


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "uint16"])
def test_allgather_takes_rows_of_any_number(hvd, call, dtype):
    def rows(rank):
        return values((2 * rank, 3), rank, dtype)  # none on rank 0

    found = call(hvd.allgather, rows(hvd.rank()))
    assert found.dtype == tf.as_dtype(dtype)
    np.testing.assert_array_equal(numbers(found), np.concatenate([numbers(rows(r)) for r in range(hvd.size())]))
    first, second = call(lambda a, b: hvd.grouped_allgather([a, b]), rows(hvd.rank()), rows(hvd.rank() + 1))
    np.testing.assert_array_equal(numbers(first), numbers(found))
    assert len(second) == sum(2 * (r + 1) for r in range(hvd.size()))


def test_every_rank_can_broadcast(hvd, call):
    for root in range(hvd.size()):
        for dtype in ("float32", "bool", "uint32", "bfloat16"):
            mine = values((4, 3), hvd.rank(), dtype)
            found = call(lambda x, root=root: hvd.broadcast(x, root), mine)
            np.testing.assert_array_equal(numbers(found), numbers(values((4, 3), root, dtype)))


def test_alltoall_sends_as_many_rows_as_splits_say(hvd, call):
    rank, size = hvd.rank(), hvd.size()
    splits = tf.constant([j + 1 for j in range(size)])
    rows = tf.fill([int(sum(splits)) + 2, 1], float(rank))  # two stay
    found, received = call(lambda x, s: hvd.alltoall(x, s), rows, splits)
    assert received.dtype == tf.int32
    assert received.numpy().tolist() == [rank + 1] * size
    assert found.numpy().ravel().tolist() == [float(r) for r in range(size) for _ in range(rank + 1)]
    even = call(hvd.alltoall, tf.fill([2 * size], rank))
    assert even.numpy().tolist() == [r for r in range(size) for _ in range(2)]


def test_reducescatter_leaves_each_rank_its_rows(hvd, call):
    rank, size = hvd.rank(), hvd.size()
    for n in (7, 2):
        everyone = sum(numbers(values((n, 2), r)) for r in range(size))
        mine = np.array_split(everyone, size)[rank]
        found = call(lambda x: hvd.reducescatter(x, op=hvd.Sum), values((n, 2), rank, "float32"))
        np.testing.assert_array_equal(found, mine)
        one, other = call(lambda x: hvd.grouped_reducescatter([x, 2 * x]), values((n, 2), rank, "float64"))
        np.testing.assert_allclose(one, mine / size)
        np.testing.assert_allclose(other, 2 * mine / size)


def test_process_sets_are_apart(hvd, call):
    size, rank = hvd.size(), hvd.rank()
    if size == 1:  # there is no set but that of all
        return
    last = hvd.add_process_set([size - 1])
    evens = hvd.add_process_set(list(range(0, size, 2)))
    try:
        if rank % 2 == 0:
            found = call(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=evens), tf.constant([float(rank)]))
            assert found.numpy().tolist() == [float(sum(range(0, size, 2)))]
        if rank == size - 1:
            assert hvd.allgather(tf.constant([7]), process_set=last).numpy().tolist() == [7]
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
                hvd.allreduce(tf.constant(1.0), process_set=last)
        asked = call(lambda: (hvd.size_op(evens.process_set_id), hvd.process_set_included_op(evens.process_set_id)))
        assert [int(n) for n in asked] == [(size + 1) // 2, int(rank % 2 == 0)]
    finally:
        hvd.remove_process_set(evens)
        hvd.remove_process_set(last)
    assert int(hvd.size_op(99)) == -3


def test_ranks_and_sizes_are_asked_when_the_graph_runs(hvd, call):
    found = call(lambda: (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op()))
    assert [int(n) for n in found] == [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()]
    assert {n.dtype for n in found} == {tf.int32}


def test_join_stands_in_for_a_rank_without_data(hvd, call):
    last = hvd.size() - 1
    if hvd.rank() == last:  # it has one batch more than the others
        found = call(lambda x: hvd.allreduce(x, name="of one rank"), tf.constant([float(hvd.size())]))
        assert found.numpy().tolist() == [1.0]
    joined = call(hvd.join)
    assert (int(joined), joined.dtype) == (last if hvd.size() > 1 else 0, tf.int32)


# Gradients


def gradient_of(f, x, weights=None):
    """The gradient of sum(weights * f(x))."""
    x = tf.convert_to_tensor(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
        loss = tf.reduce_sum(y if weights is None else y * weights)
    return tape.gradient(loss, x)


def test_the_gradient_of_allreduce_is_reduced_alike(hvd, call):
    rank, size = hvd.rank(), hvd.size()
    weights = tf.constant([1.0, 10.0]) * (rank + 1)
    total = np.array([1.0, 10.0]) * size * (size + 1) / 2
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
        found = call(lambda x, op=op: gradient_of(lambda x: hvd.allreduce(x, op=op), x, weights), tf.ones(2))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    scaled = call(
        lambda x: gradient_of(
            lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=3.0), x, weights
        ),
        tf.ones(2),
    )
    np.testing.assert_allclose(scaled, 6 * total, rtol=1e-6)
    grouped = call(
        lambda x: gradient_of(lambda x: tf.add_n(hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum)), x, weights),
        tf.ones(2),
    )
    np.testing.assert_allclose(grouped, 3 * total, rtol=1e-6)


def test_the_gradient_of_allgather_is_the_mean_of_the_own_rows(hvd, call):
    rank, size = hvd.rank(), hvd.size()
    rows = [r + 1 for r in range(size)]
    weights = tf.constant(np.arange(sum(rows)) + 100.0 * rank)
    everyone = np.mean([np.arange(sum(rows)) + 100.0 * r for r in range(size)], axis=0)
    mine = everyone[sum(rows[:rank]) :][: rows[rank]]
    x = tf.ones(rank + 1, tf.float64)
    np.testing.assert_allclose(call(lambda x: gradient_of(hvd.allgather, x, weights), x), mine)
    group = call(lambda x: gradient_of(lambda x: hvd.grouped_allgather([x, 2 * x])[1], x, weights), x)
    np.testing.assert_allclose(group, 2 * mine)


def test_the_gradient_of_broadcast_is_the_mean_on_the_root(hvd, call):
    size, rank = hvd.size(), hvd.rank()
    root = size - 1
    found = call(lambda x: gradient_of(lambda x: hvd.broadcast(x, root), x, rank + 1.0), tf.ones(3))
    np.testing.assert_allclose(found, [(size + 1) / 2 if rank == root else 0.0] * 3, rtol=1e-6)


def test_the_gradient_of_alltoall_goes_back(hvd, call):
    rank, size = hvd.rank(), hvd.size()
    splits = tf.constant([j + 1 for j in range(size)])
    x = tf.ones([int(sum(splits)) + 1, 2])  # a row stays
    found = call(lambda x: gradient_of(lambda x: hvd.alltoall(x, splits)[0], x, rank + 1.0), x)
    expected = [float(j + 1) for j in range(size) for _ in range(j + 1)] + [0.0]
    assert found.numpy().tolist() == [[one, one] for one in expected]


def test_the_gradient_of_reducescatter_is_gathered(hvd, call):
    size, rank = hvd.size(), hvd.rank()
    n = 2 * size + 1
    rows = [len(part) for part in np.array_split(np.arange(n), size)]
    everyone = np.array([r + 1.0 for r in range(size) for _ in range(rows[r])])
    for op, factor in ((hvd.Sum, size), (hvd.Average, 1)):
        found = call(lambda x, op=op: gradient_of(lambda x: hvd.reducescatter(x, op=op), x, rank + 1.0), tf.ones(n))
        np.testing.assert_allclose(found, everyone * factor, rtol=1e-6)


def test_other_reductions_have_no_gradient_and_say_so(hvd):
    with pytest.raises(hvd.InvalidRequestError, match=r"op=Max has no gradient.*stop_gradient"):
        gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), tf.ones(2))


# In graphs


def test_ranks_may_start_as_many_as_there_are_threads_in_any_order(hvd):
    names = [f"tensor {i}" for i in range(2)]  # TensorFlow has a thread per core for nodes that wait
    mine = names if hvd.rank() % 2 == 0 else names[::-1]

    @tf.function
    def step(x):
        started = {name: hvd.allreduce(x * float(name.split()[1]), op=hvd.Sum, name=name) for name in mine}
        return [started[name] for name in names]

    for turn in range(3):
        found = step(tf.constant(turn + 1.0))
        assert [float(one) for one in found] == [0.0, hvd.size() * (turn + 1.0)]


def test_loops_and_branches_communicate(hvd):
    @tf.function
    def loop(x, n):
        for _ in tf.range(n):
            x = hvd.allreduce(x, op=hvd.Sum) if tf.reduce_sum(x) < 1000.0 else hvd.allreduce(x)
        return x

    expected = 1.0
    for _ in range(5):
        expected = expected * hvd.size() if 2 * expected < 1000.0 else expected
    assert loop(tf.ones(2), tf.constant(5)).numpy().tolist() == [expected] * 2


def test_iterations_that_overlap_use_one_name_after_the_other(hvd):
    @tf.function
    def many(x):
        return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum), x, parallel_iterations=8)

    found = many(tf.reshape(tf.range(12.0), [6, 2]))
    np.testing.assert_array_equal(found, np.arange(12.0).reshape(6, 2) * hvd.size())


def test_names_survive_another_trace_on_one_rank(hvd):
    @tf.function
    def step(x):
        return hvd.allreduce(tf.reduce_sum(x), op=hvd.Sum)

    step(tf.ones(4))
    if hvd.rank() == 0:  # the last batch is shorter here: traced once more, while the other ranks go on as before
        assert float(step(tf.ones(3))) == 3.0 + 4 * (hvd.size() - 1)
    else:
        assert float(step(tf.ones(4))) == 3.0 + 4 * (hvd.size() - 1)


def test_a_result_that_nobody_uses_harms_nothing(hvd):
    @tf.function
    def step(x):
        hvd.allreduce(x, op=hvd.Sum)
        return hvd.allreduce(2 * x, op=hvd.Sum)

    for _ in range(200):
        found = step(tf.constant(1.0))
    assert float(found) == 2.0 * hvd.size()


def test_results_are_not_overwritten_by_later_steps(hvd):
    @tf.function
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum)

    kept = [step(tf.fill([5000], float(i))) for i in range(20)]
    eager = [hvd.allreduce(tf.fill([5000], float(i)), op=hvd.Sum) for i in range(20)]
    for i in range(20):
        np.testing.assert_array_equal(kept[i], np.full(5000, float(i) * hvd.size()))
        np.testing.assert_array_equal(eager[i], np.full(5000, float(i) * hvd.size()))


def test_xla_is_refused_with_the_remedy(hvd):
    step = tf.function(hvd.allreduce, jit_compile=True, autograph=False)
    with pytest.raises(hvd.InvalidRequestError, match=r"XLA cannot call Python.*jit_compile=False"):
        step(tf.ones(2))


# Errors


def test_ranks_that_differ_are_a_failed_precondition_everywhere(hvd):
    if hvd.size() == 1:
        return
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"Mismatched shape.*rank 0") as caught:
        hvd.allreduce(tf.ones(3 + hvd.rank()), name="differs")
    assert isinstance(caught.value, hvd.MismatchError)
    assert caught.value.tensor == "differs"
    assert hvd.allreduce(tf.ones(2), op=hvd.Sum, name="differs").numpy().tolist() == [hvd.size()] * 2


def test_errors_in_graphs_come_with_the_text(hvd):
    if hvd.size() == 1:
        return
    step = tf.function(lambda x: hvd.allreduce(x, name="in a graph"))
    with pytest.raises(tf.errors.UnknownError, match=r"Mismatched dtype for tensor 'in a graph'"):
        step(tf.ones(3, tf.float32 if hvd.rank() else tf.float64))
    assert step(tf.ones(3)).numpy().tolist() == [1.0] * 3


def test_wrong_arguments_on_one_rank_are_told_to_all(hvd):
    wrong = hvd.rank() == hvd.size() - 1
    kind = tf.errors.InvalidArgumentError if wrong else tf.errors.FailedPreconditionError
    with pytest.raises(kind, match="string"):
        hvd.allreduce(tf.constant("text") if wrong else tf.constant(1.0), name="argument")
    with pytest.raises(kind, match="root_rank=99"):
        hvd.broadcast(tf.ones(2), 99 if wrong else 0, name="root")
    with pytest.raises(tf.errors.AbortedError, match="Sum or Average"):
        hvd.reducescatter(tf.ones(2), op=hvd.Max)
    with pytest.raises(tf.errors.InvalidArgumentError, match="scalar"):
        hvd.reducescatter(tf.constant(1.0))
    with pytest.raises(NotImplementedError, match="Sum or Average"):
        hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2])), op=hvd.Max)
    with pytest.raises(ValueError, match="both given"):
        hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum)


def test_errors_can_be_pickled(hvd):
    import pickle

    with pytest.raises(ValueError, match="scalar") as caught:
        hvd.allgather(tf.constant(1.0))
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is hvd.InvalidRequestError
    assert str(again) == str(caught.value)
