"""Ranks that ask for different things: all raise within seconds, hear why, and the next call works."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

import hvdlite as hvd

SECONDS = 5.0  # within which all ranks must have raised
SIZE = 3


def all_raise(on_ranks, call, odd=1, words=(), errors=hvd.HorovodInternalError, odd_errors=None):
    """Check that call(rank == odd) raises on every rank, in time, that each says `words`, and that work goes on.

    Each rank then makes the same call right, and one under another name, and gets the sums of all.
    """

    def body(rank):
        hvd.barrier()
        started = time.monotonic()
        with pytest.raises(Exception) as caught:
            call(rank == odd)
        seconds = time.monotonic() - started
        error = caught.value
        if rank == odd and odd_errors is not None:
            assert isinstance(error, odd_errors), repr(error)
        else:
            assert isinstance(error, errors), repr(error)
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        again = hvd.allreduce(np.array([rank + 1.0, 2.0]), op=hvd.Sum, name="w")
        other = hvd.allreduce(np.array([rank + 1]), op=hvd.Sum, name="other")
        return seconds, again.tolist(), other.tolist()

    for seconds, again, other in on_ranks(SIZE, body):
        assert seconds < SECONDS
        assert again == [6.0, 6.0]
        assert other == [6]


ONES = np.ones(2)


def reduce(x=ONES, **how):
    return hvd.allreduce(x, name="w", **how)


def as_single_calls(*_):
    return [handle.wait() for handle in [hvd.allreduce_async(ONES, name=f"w_{i}of2") for i in (1, 2)]]


MISMATCHES = {
    "shape": (lambda odd: reduce(np.ones(3 if odd else 2)), ["shape", "[2]", "[3]"]),
    "size of shared arrays": (
        lambda odd: hvd.shared_zeros(3 if odd else 4, np.float32, name="w"),
        ["size", "16 bytes", "12 bytes"],
    ),
    "number of dimensions": (lambda odd: reduce(np.ones((2, 1) if odd else 2)), ["shape", "[2, 1]"]),
    "dtype": (lambda odd: reduce(np.ones(2, "f4" if odd else "f8")), ["dtype", "float32", "float64"]),
    "kind": (lambda odd: hvd.allgather(ONES, "w") if odd else reduce(), ["operation", "ALLGATHER", "ALLREDUCE"]),
    "kind, broadcast": (lambda odd: hvd.broadcast(ONES, 0, "w") if odd else reduce(), ["BROADCAST"]),
    "op": (lambda odd: reduce(op=hvd.Max if odd else hvd.Min), ["reduce op", "MAX", "MIN"]),
    "average": (lambda odd: reduce(average=not odd), ["reduce op", "AVERAGE", "SUM"]),
    "adasum": (lambda odd: reduce(op=hvd.Adasum if odd else hvd.Sum), ["reduce op", "ADASUM", "SUM"]),
    "root": (lambda odd: hvd.broadcast(ONES, 2 if odd else 0, "w"), ["root rank", "2 on rank"]),
    "broadcast shape": (lambda odd: hvd.broadcast(np.ones(3 if odd else 2), 0, "w"), ["shape", "[2]", "[3]"]),
    "prescale": (lambda odd: reduce(prescale_factor=0.5 if odd else 1.0), ["prescale factor", "0.5", "1.0"]),
    "postscale": (lambda odd: reduce(postscale_factor=2 if odd else 1), ["postscale factor", "2.0", "1.0"]),
    "allgather width": (lambda odd: hvd.allgather(np.ones((2, 3 if odd else 4)), "w"), ["shape", "[3]", "[4]"]),
    "allgather dims": (lambda odd: hvd.allgather(np.ones((2, 3) if odd else 2), "w"), ["dimensions", "2 on rank"]),
    "alltoall width": (lambda odd: hvd.alltoall(np.ones((3, 3 if odd else 4)), name="w"), ["shape", "[3]", "[4]"]),
    "reducescatter shape": (lambda odd: hvd.reducescatter(np.ones(3 if odd else 2), "w"), ["shape", "[2]", "[3]"]),
    "reducescatter op": (lambda odd: hvd.reducescatter(ONES, "w", hvd.Sum if odd else hvd.Average), ["reduce op"]),
    "group": (lambda odd: as_single_calls() if odd else hvd.grouped_allreduce([ONES, ONES], name="w"), ["no group"]),
}


@pytest.mark.filterwarnings("ignore:average=")
@pytest.mark.parametrize("what", MISMATCHES)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_mismatch_raises_everywhere_and_names_tensor_ranks_and_values(on_ranks, what, odd):
    call, words = MISMATCHES[what]
    others = [rank for rank in range(SIZE) if rank != odd]
    words = [*words, "'w", f"rank {odd}", f"ranks {others[0]}, {others[1]}"]
    all_raise(on_ranks, call, odd, words, hvd.MismatchError)


def test_a_mismatch_tells_its_parts_as_attributes(on_ranks):
    def body(rank):
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.allreduce(np.ones(rank + 1), name="layer4.weight")
        return caught.value.tensor, caught.value.what, caught.value.by_value

    for found in on_ranks(SIZE, body):
        assert found == ("layer4.weight", "shape", {"[1]": [0], "[2]": [1], "[3]": [2]})


def test_a_mismatch_in_a_known_tensor_is_found_too(on_ranks):
    def body(rank):
        for _ in range(3):
            hvd.allreduce(np.ones(2), name="w")
        with pytest.raises(hvd.MismatchError):
            hvd.allreduce(np.ones(2 + (rank == 1)), name="w")
        return [float(hvd.allreduce(np.ones(2), op=hvd.Sum, name="w")[0]) for _ in range(3)]

    assert on_ranks(SIZE, body) == [[3.0] * 3] * 3


# Arguments that are wrong on one rank only

read_only = np.ones(2)
read_only.setflags(write=False)


class NotAnArray:
    pass


def reduce_in_place(x):
    return hvd.allreduce_(x, name="w")


def exchange(rows, splits=(1, 1, 1)):
    return hvd.alltoall(np.ones(rows), splits, name="w")


FLOAT8 = np.ones(2, ml_dtypes.float8_e4m3fn)
WRONG_HERE = {
    "unsupported dtype": (lambda odd: reduce(np.array(["a", "b"]) if odd else ONES), ["<U1"]),
    "object dtype": (lambda odd: reduce(NotAnArray() if odd else ONES), ["dtype"]),
    "float8": (lambda odd: reduce(FLOAT8 if odd else ONES), ["float8"]),
    "ragged list": (lambda odd: reduce([[1.0], [1.0, 2.0]] if odd else ONES), []),
    "sum of bool": (lambda odd: reduce(np.ones(2, bool) if odd else ONES, op=hvd.Sum), ["bool"]),
    "minimum of complex": (lambda odd: reduce(ONES * 1j if odd else ONES, op=hvd.Min), ["complex"]),
    "adasum of integers": (lambda odd: reduce([1, 2] if odd else ONES, op=hvd.Adasum), ["Adasum"]),
    "unknown op": (lambda odd: reduce(op=17 if odd else hvd.Sum), ["17"]),
    "op and average": (lambda odd: reduce(average=True if odd else None, op=hvd.Sum), ["average"]),
    "name in the place of average": (
        lambda odd: hvd.allreduce(ONES, "loss", "w") if odd else reduce(),
        ["average='loss'", "True or False", "name='loss'"],
    ),
    "average that is no boolean": (lambda odd: reduce(average=2 if odd else None), ["average=2"]),
    "no process set": (lambda odd: reduce(process_set=None) if odd else reduce(), ["process_set=None", "ProcessSet"]),
    "factor that is no number": (lambda odd: reduce(prescale_factor="x" if odd else 1.0), ["x"]),
    "read-only target": (lambda odd: reduce_in_place(read_only if odd else ONES.copy()), ["read-only"]),
    "target that is no array": (lambda odd: reduce_in_place([1.0, 2.0] if odd else ONES.copy()), ["list"]),
    "foreign target": (lambda odd: reduce_in_place(np.ones(2, ">f8") if odd else ONES.copy()), ["byte order"]),
    "invalid root": (lambda odd: hvd.broadcast(ONES, 3 if odd else 0, "w"), ["root_rank=3", "[0, 1, 2]"]),
    "negative root": (lambda odd: hvd.broadcast(ONES, -1 if odd else 0, "w"), ["root_rank=-1"]),
    "scalar allgather": (lambda odd: hvd.allgather(1.0 if odd else ONES, "w"), ["scalar"]),
    "scalar alltoall": (lambda odd: hvd.alltoall(1.0 if odd else np.ones(3), name="w"), ["scalar"]),
    "scalar reducescatter": (lambda odd: hvd.reducescatter(1.0 if odd else ONES, "w"), ["scalar"]),
    "maximum in reducescatter": (lambda odd: hvd.reducescatter(ONES, "w", hvd.Max if odd else hvd.Sum), ["Max"]),
    "unknown op in reducescatter": (lambda odd: hvd.reducescatter(ONES, "w", 17 if odd else hvd.Sum), ["17"]),
    "rows that cannot be cut": (lambda odd: exchange(4 if odd else 3, None), ["4 rows"]),
    "too few splits": (lambda odd: exchange(3, [1, 2] if odd else [1, 1, 1]), ["[1, 2]", "2 entries"]),
    "negative splits": (lambda odd: exchange(3, [2, -1, 1] if odd else [1, 1, 1]), ["negative"]),
    "splits beyond the rows": (lambda odd: exchange(3, [1, 1, 2] if odd else [1, 1, 1]), ["sum to 4", "3 rows"]),
    "splits that are no integers": (lambda odd: exchange(3, [1, 1, 0.5] if odd else [1, 1, 1]), ["0.5"]),
    "splits of two dimensions": (lambda odd: exchange(3, [[1, 1, 1]] if odd else [1, 1, 1]), ["splits"]),
    "a wrong member of a group": (
        lambda odd: hvd.grouped_allreduce([ONES, np.array(["a"]) if odd else ONES], name="w"),
        ["<U1"],
    ),
}


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("what", WRONG_HERE)
def test_what_is_wrong_on_one_rank_is_a_value_error_there_and_raised_everywhere(on_ranks, what, odd):
    call, words = WRONG_HERE[what]
    here = (ValueError, TypeError)
    all_raise(on_ranks, call, odd, words, hvd.RemoteError, odd_errors=here)


def test_the_other_ranks_hear_which_rank_was_wrong(on_ranks):
    def body(rank):
        with pytest.raises(Exception) as caught:
            hvd.allreduce(np.ones(2) if rank else np.array(["a"]), name="w")
        hvd.barrier()  # a rank that ends earlier would be the reason
        return caught.value

    first, *others = on_ranks(SIZE, body)
    assert isinstance(first, hvd.UnsupportedDtypeError)
    for error in others:
        assert list(error.problems) == [0]
        assert "'w'" in str(error)
        assert "rank 0" in str(error)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_tensor_that_dlpack_cannot_hand_over_is_refused_everywhere(on_ranks, odd):
    import torch

    def call(is_odd):
        return hvd.allreduce(torch.ones(2, requires_grad=True) if is_odd else ONES, name="w")

    all_raise(on_ranks, call, odd, [], hvd.RemoteError, odd_errors=hvd.InvalidRequestError)


def test_all_ranks_may_be_wrong_at_once(on_ranks):
    def body(rank):
        for _ in range(3):
            with pytest.raises(ValueError, match="scalar"):
                hvd.allgather(1.0, name="w")
        return hvd.allgather(np.array([rank]), name="w").tolist()

    assert on_ranks(SIZE, body) == [[0, 1, 2]] * 3


def test_a_wrong_call_and_its_retry_meet_the_right_calls_of_the_others(on_ranks):
    # Whichever rank is early: a retry must not be taken for the first try, whose result would be zeros of one rank.
    def body(rank):
        seen = []
        for k in range(50):
            wrong = k % 4 == rank
            try:
                seen.append(float(hvd.allreduce(np.array(["a"]) if wrong else float(rank + k), op=hvd.Sum, name="w")))
            except (hvd.RemoteError, hvd.UnsupportedDtypeError):
                seen.append(None)
        hvd.barrier()  # a rank that ended meanwhile would be a reason of its own
        return seen

    expected = [None if k % 4 < SIZE else float(3 + 3 * k) for k in range(50)]
    assert on_ranks(SIZE, body) == [expected] * SIZE


GROUPED = {
    "allreduce": lambda tensors, name: hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name),
    "allgather": hvd.grouped_allgather,
    "reducescatter": lambda tensors, name: hvd.grouped_reducescatter(tensors, name, hvd.Sum),
}


def tries_of_groups(rank, call, lengths):
    """Call once for each length under one name; each rank is wrong now and then, and goes on at once."""
    seen = []
    for k, n in enumerate(lengths):
        tensors = [np.array([rank + k, i, 5]) for i in range(n)]
        if k % (SIZE + 1) == rank:
            tensors[-1] = np.array(["a"])
        try:
            seen.append([float(np.sum(x)) for x in call(tensors, "w")])
        except (hvd.HorovodInternalError, hvd.UnsupportedDtypeError):
            seen.append(None)
    hvd.barrier()  # a rank that ended meanwhile would be a reason of its own
    return seen


@pytest.mark.parametrize("changing", [False, True])
@pytest.mark.parametrize("kind", GROUPED)
def test_a_refused_group_and_its_retry_meet_the_right_calls_of_the_others(on_ranks, kind, changing):
    lengths = [2 + (k // 2 % 3 if changing else 0) for k in range(40)]

    def body(rank):
        return tries_of_groups(rank, GROUPED[kind], lengths)

    for rank, seen in enumerate(on_ranks(SIZE, body)):
        for k, (sums, n) in enumerate(zip(seen, lengths, strict=True)):
            assert sums == (None if k % (SIZE + 1) < SIZE else [expected_sum(kind, rank, k, i) for i in range(n)])


def expected_sum(kind, rank, k, i):
    mine = [3 * k + 3, 3 * i, 15]  # of all ranks; reducescatter gives each one row
    return mine[rank] if kind == "reducescatter" else sum(mine)


def test_the_groups_of_a_step_go_on_after_some_were_refused(on_ranks):
    # As an optimizer does: all groups of a step start before any is waited for.
    # In every other step one rank is wrong in the last one, two or three; after three it goes on at once.
    def wrong(step, g):
        return step % 2 == 0 and g >= step // 2 % 3

    def body(rank):
        seen = []
        for step in range(36):
            handles = []
            for g in range(3):
                tensors = [np.array([rank + step]), np.array([rank + g])]
                if wrong(step, g) and rank == step // 6 % SIZE:
                    tensors[1] = np.array(["a"])
                try:
                    handles.append(hvd.grouped_allreduce_async(tensors, op=hvd.Sum, name=f"g{g}"))
                except hvd.UnsupportedDtypeError:
                    handles.append(None)
            seen.append([result_of(handle) for handle in handles])
        hvd.barrier()
        return seen

    for seen in on_ranks(SIZE, body):
        for step, sums in enumerate(seen):
            assert sums == [None if wrong(step, g) else [3 + 3 * step, 3 + 3 * g] for g in range(3)]


def result_of(handle):
    try:
        return None if handle is None else [int(x[0]) for x in handle.wait()]
    except hvd.HorovodInternalError:
        return None


# Names


def test_a_second_operation_under_a_name_in_flight_raises_on_all_ranks(on_ranks):
    def body(rank):  # rank 2 comes last, so the first operations of 0 and 1 are surely in flight
        if rank == 2:
            hvd.barrier()
        first = hvd.allreduce_async(np.array([rank]), op=hvd.Sum, name="w")
        if rank != 2:
            with pytest.raises(hvd.DuplicateNameError, match="same name as another tensor") as caught:
                hvd.allreduce_async(np.array([1]), op=hvd.Sum, name="w")
            assert __file__ in str(caught.value)
            hvd.barrier()
        assert int(first.wait()[0]) == 3
        if rank == 2:
            with pytest.raises(hvd.RemoteError, match="same name as another tensor"):
                hvd.allreduce(np.array([1]), op=hvd.Sum, name="w")
        return int(hvd.allreduce(np.array([rank]), op=hvd.Sum, name="w")[0])

    assert on_ranks(SIZE, body) == [3] * 3


def test_racing_duplicates_raise_on_all_ranks_and_never_shift_later_calls(on_ranks):
    # On a rank whose first operation is done already the second one is taken in, but the others cannot come.
    def body(rank):
        sums = []
        for k in range(30):
            first = hvd.allreduce_async(np.array([rank + k]), op=hvd.Sum, name="w")
            if k % 3 == rank:
                first.wait()
            second = None
            try:
                second = hvd.allreduce_async(np.array([1]), op=hvd.Sum, name="w")
                second.wait(SECONDS)
            except (hvd.DuplicateNameError, hvd.RemoteError) as error:
                assert "same name as another tensor" in str(error)
            sums.append(int(first.wait()[0]))
        hvd.barrier()  # a rank that ended meanwhile would be a reason of its own
        return sums

    assert on_ranks(SIZE, body) == [[3 + 3 * k for k in range(30)]] * 3


def test_one_name_may_serve_two_kinds_of_operation_in_turn(on_ranks):
    def body(rank):
        reduce = hvd.allreduce_async(np.array([rank]), op=hvd.Sum, name="w")
        gather = hvd.allgather_async(np.array([rank]), name="w")
        return reduce.wait().tolist(), gather.wait().tolist()

    assert on_ranks(SIZE, body) == [([3], [0, 1, 2])] * 3


def test_unnamed_operations_match_by_order_per_kind(on_ranks):
    def body(rank):
        if rank == 0:
            hvd.size()
        a = hvd.allreduce_async(np.array([rank]), op=hvd.Sum)
        b = hvd.allreduce_async(np.array([10 * rank]), op=hvd.Sum)
        return int(a.wait()[0]), int(b.wait()[0])

    assert on_ranks(SIZE, body) == [(3, 30)] * 3


@pytest.mark.parametrize("name", ["", "größe/重み:0", "a b\n", "x" * 5000, "😀"])
def test_any_text_is_a_name(on_ranks, name):
    def body(rank):
        with pytest.raises(hvd.MismatchError) as caught:
            hvd.allreduce(np.ones(rank + 1), name=name)
        assert repr(name) in str(caught.value)
        return [float(hvd.allreduce(1.0, op=hvd.Sum, name=name)) for _ in range(3)]

    assert on_ranks(2, body) == [[2.0] * 3] * 2


def test_a_group_needs_tensors(on_ranks):
    def body(rank):
        for call in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
            with pytest.raises(hvd.InvalidRequestError, match=r"expected a list of at least one tensor, got \[\]"):
                call([])

    on_ranks(2, body)


@pytest.mark.parametrize("size", [2, 3])
def test_groups_of_different_length_raise_on_all_ranks(on_ranks, size):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match="3 tensors on rank 1") as caught:
            hvd.grouped_allreduce([np.ones(2)] * (3 if rank == 1 else 2), name="g")
        assert "2 tensors on rank" in str(caught.value)
        return hvd.grouped_allreduce([np.ones(1)] * 2, op=hvd.Sum, name="g")[1].item()

    assert on_ranks(size, body, timeout=10) == [size] * size


@pytest.mark.parametrize("name", [np.int64(3), 5, b"a", ("a", 1), ["a"]])
def test_a_name_may_be_anything_that_has_a_text(on_ranks, name):
    assert on_ranks(2, lambda rank: hvd.allreduce(np.ones(1), op=hvd.Sum, name=name).item()) == [2, 2]
