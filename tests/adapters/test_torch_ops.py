"""The operations on tensors against what they should give. No gradients here."""

from __future__ import annotations

import pytest
import torch

import hvdlite
import hvdlite.torch as hvd

SIZES = [1, 2, 3, 4, 7]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128]
ALL = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]


def values(rank, n, dtype=torch.float32):
    """Return n numbers that differ between ranks and elements, small enough for every dtype."""
    return (torch.arange(n) % 5 + rank % 3).to(dtype)


def same(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), (actual, expected)


# Every layout must behave as its contiguous clone does.
LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "strided": lambda t: torch.stack([t, t + 100], -1)[..., 0],
    "offset": lambda t: torch.cat([t.new_zeros(3), t.reshape(-1)])[3:].reshape(t.shape),
    "flipped_view": lambda t: torch.cat([t, t])[t.shape[0] :],
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("n", [0, 1, 5, 1001])
def test_allreduce_adds_every_element_once(ranks, size, n):
    def body(rank):
        mine = torch.arange(n, dtype=torch.int64) * size + rank
        before = mine.clone()
        total, mean = hvd.allreduce(mine, op=hvd.Sum), hvd.allreduce(mine.double())
        same(mine, before)
        same(total, torch.arange(n) * size**2 + size * (size - 1) // 2)
        same(mean, torch.arange(n, dtype=torch.float64) * size + (size - 1) / 2)

    ranks(size, body)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, *COMPLEX], ids=str)
def test_every_dtype_is_reduced_in_its_own_kind(ranks, dtype):
    def body(rank):
        mine = values(rank, 37, dtype)
        total = hvd.allreduce(mine, op=hvd.Sum)
        wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        same(total, sum(values(r, 37, wide) for r in range(3)).to(dtype))

    ranks(3, body)


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_every_dtype_is_moved_unchanged(ranks, dtype):
    def body(rank):
        mine = values(rank, 6, dtype).reshape(3, 2)
        same(hvd.allgather(mine), torch.cat([values(r, 6, dtype).reshape(3, 2) for r in range(3)]))
        same(hvd.broadcast(mine, 2), values(2, 6, dtype).reshape(3, 2))
        same(hvd.alltoall(mine), torch.stack([values(r, 6, dtype).reshape(3, 2)[rank] for r in range(3)]))

    ranks(3, body)


@pytest.mark.parametrize("op", [hvd.Min, hvd.Max, hvd.Product])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_other_operators_combine_elementwise(ranks, op, dtype):
    def body(rank):
        everyone = torch.stack([values(r, 9, torch.float64) for r in range(3)])
        expected = {hvd.Min: everyone.amin(0), hvd.Max: everyone.amax(0), hvd.Product: everyone.prod(0)}[op]
        same(hvd.allreduce(values(rank, 9, dtype), op=op), expected.to(dtype))

    ranks(3, body)


def test_bool_has_any_and_all(ranks):
    def body(rank):
        mine = torch.tensor([True, rank == 1, False])
        assert hvd.allreduce(mine, op=hvd.Max).tolist() == [True, True, False]
        assert hvd.allreduce(mine, op=hvd.Min).tolist() == [True, False, False]
        with pytest.raises(hvd.UnsupportedDtypeError, match="Max for 'any rank'"):
            hvd.allreduce(mine, op=hvd.Sum)

    ranks(2, body)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_memory_layout_does_not_matter(ranks, layout, dtype):
    def body(rank):
        plain = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(dtype)
        mine = LAYOUTS[layout](plain + rank)
        expected = plain + plain + 1
        same(hvd.allreduce(mine, op=hvd.Sum), expected)
        same(mine, plain + rank)
        strides = mine.stride()
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        same(mine, expected)
        assert mine.stride() == strides
        same(hvd.allgather(mine), torch.cat([expected, expected]))
        mine.copy_(plain * (rank + 1))
        assert hvd.broadcast_(mine, 1) is mine
        same(mine, plain * 2)

    ranks(2, body)


def test_conjugates_and_negatives_are_what_they_look_like(ranks):
    def body(rank):
        z = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
        same(hvd.allreduce(z.conj(), op=hvd.Sum), torch.tensor([3 - 6j, 9 + 3j]))
        same(hvd.allreduce(z.conj().imag, op=hvd.Sum), torch.tensor([-6.0, 3.0]))
        lazily = z.conj()
        hvd.broadcast_(lazily, 1)
        same(z, torch.tensor([2 + 4j, 6 - 2j]))

    ranks(2, body)


@pytest.mark.parametrize("size", [1, 3])
def test_scalars_and_empty_tensors_pass(ranks, size):
    def body(rank):
        same(hvd.allreduce(torch.tensor(rank + 0.5)), torch.tensor((size - 1) / 2 + 0.5))
        same(hvd.broadcast(torch.tensor(rank + 7), size - 1), torch.tensor(size + 6))
        scalar = torch.tensor(rank)
        assert hvd.allreduce_(scalar, op=hvd.Sum) is scalar
        assert scalar.item() == size * (size - 1) // 2
        same(hvd.allreduce(torch.empty(0, 3)), torch.empty(0, 3))
        same(hvd.broadcast(torch.empty(2, 0), 0), torch.empty(2, 0))
        same(hvd.allgather(torch.empty(0, 3)), torch.empty(0, 3))

    ranks(size, body)


def test_contiguous_tensors_are_reduced_without_a_copy(ranks):
    def body(rank):
        tensor = torch.full((100,), float(rank))
        handle = hvd.allreduce_async_(tensor, op=hvd.Sum)
        assert hvd.synchronize(handle).data_ptr() == tensor.data_ptr()
        same(tensor, torch.full((100,), 1.0))

    ranks(2, body)


def test_leaves_that_require_grad_are_written_in_place(ranks):
    def body(rank):
        parameter = torch.nn.Parameter(torch.full((2, 3), float(rank)))
        assert hvd.broadcast_(parameter, 1) is parameter
        same(parameter.data, torch.ones(2, 3))
        turned = torch.nn.Parameter(torch.full((3, 2), float(rank)).t())
        hvd.allreduce_(turned, op=hvd.Sum)
        same(turned.data, torch.ones(2, 3))
        loss = (parameter * 2).sum()
        hvd.allreduce_(parameter, op=hvd.Sum)  # bypasses autograd's version counter, as Horovod does
        loss.backward()
        assert parameter.grad is not None

    ranks(2, body)


def test_async_forms_build_no_graph(ranks):
    def body(rank):
        x = torch.ones(2, requires_grad=True)
        for handle in (
            hvd.allreduce_async(x),
            hvd.allgather_async(x),
            hvd.broadcast_async(x, 0),
            hvd.reducescatter_async(x),
        ):
            assert not hvd.synchronize(handle).requires_grad

    ranks(2, body)


def test_handles_may_be_collected_in_any_order_and_again(ranks):
    def body(rank):
        handles = [hvd.allreduce_async(torch.full((3,), float(rank + i)), op=hvd.Sum, name=f"t{i}") for i in range(5)]
        assert len(set(handles)) == 5
        for i in (3, 0, 4, 1, 2, 3):
            same(hvd.synchronize(handles[i]), torch.full((3,), 2.0 * i + 1))
            assert hvd.poll(handles[i])

    ranks(2, body)


@pytest.mark.parametrize("call", [hvd.synchronize, hvd.poll])
@pytest.mark.parametrize("handle", [None, 3, torch.zeros(1)])
def test_what_is_no_handle_is_refused(call, handle):
    with pytest.raises(hvd.InvalidRequestError, match=r"expected what an hvd\..*_async\(\)"):
        call(handle)


def test_positional_parameters_are_horovods(ranks):
    def body(rank):
        x = torch.tensor([2.0 + rank])
        with pytest.warns(DeprecationWarning, match="average=False is deprecated; use op=hvd.Sum"):
            same(hvd.allreduce(x, False, "a"), torch.tensor([5.0]))
        same(hvd.allreduce(x, None, "b", hvd.Compression.fp16, hvd.Sum, 2.0, 0.5), torch.tensor([5.0]))
        same(hvd.synchronize(hvd.allreduce_async(x, None, "c", hvd.Sum, 2.0, 1.0)), torch.tensor([10.0]))
        same(hvd.reducescatter(torch.ones(2), "d", hvd.Compression.none, hvd.Sum), torch.tensor([2.0]))
        same(hvd.synchronize(hvd.reducescatter_async(torch.ones(2), "e", hvd.Sum)), torch.tensor([2.0]))
        same(hvd.grouped_allreduce([x], None, "f", hvd.Compression.none, hvd.Sum)[0], torch.tensor([5.0]))
        same(hvd.broadcast(x, 1, "g"), torch.tensor([3.0]))
        same(hvd.alltoall(torch.tensor([rank, rank + 5]), None, "h"), torch.tensor([[0, 1], [5, 6]])[rank])

    ranks(2, body)


def test_integers_truncate_as_horovods_do(ranks):
    def body(rank):
        pair = [torch.tensor([1, 2]), torch.tensor([2, 5])][rank].int()
        same(hvd.allreduce(pair), torch.tensor([1, 3], dtype=torch.int32))
        same(hvd.allreduce(torch.tensor([-1 - rank])), torch.tensor([-1]))
        same(hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5), torch.tensor([2]))
        same(hvd.allreduce(torch.tensor([3]), op=hvd.Sum, postscale_factor=0.5), torch.tensor([3]))

    ranks(2, body)


def test_groups_mix_dtypes_and_layouts(ranks):
    def body(rank):
        def make(offset):
            return [
                torch.arange(5.0) + offset,
                torch.arange(4, dtype=torch.int32).reshape(2, 2).t() + offset,
                torch.tensor(3.0, dtype=torch.bfloat16) + offset,
            ]

        expected = [a + b for a, b in zip(make(0), make(1), strict=True)]
        mine = make(rank)
        results = hvd.grouped_allreduce(mine, op=hvd.Sum)
        assert isinstance(results, list)
        for one, other in zip(results, expected, strict=True):
            same(one, other)
        same_tensors = hvd.grouped_allreduce_(mine, op=hvd.Sum)
        assert isinstance(same_tensors, tuple)
        for tensor, one, other in zip(mine, same_tensors, expected, strict=True):
            assert tensor is one
            same(one, other)

    ranks(2, body)


def test_grouped_allgather_and_reducescatter_give_each_member(ranks):
    def body(rank):
        ragged = [torch.full((rank + 1, 2), float(rank)), torch.full((2 - rank,), rank)]
        first, second = hvd.grouped_allgather(ragged)
        same(first, torch.tensor([[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]))
        same(second, torch.tensor([0, 0, 1]))
        first, second = hvd.grouped_reducescatter([torch.arange(3.0), torch.arange(4.0).reshape(2, 2)], op=hvd.Sum)
        same(first, torch.tensor([[0.0, 2.0], [4.0]][rank]))
        same(second, torch.tensor([[0.0, 2.0], [4.0, 6.0]])[rank : rank + 1])

    ranks(2, body)


@pytest.mark.parametrize("empty", [[], ()])
def test_an_empty_group_is_refused(ranks, empty):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError, match="at least one tensor"):
            hvd.grouped_allreduce(empty)

    ranks(1, body)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_returns_what_was_received(ranks, size):
    # Rank r sends j + 1 rows filled with r to rank j.
    def body(rank):
        splits = list(range(1, size + 1))
        rows = torch.full((sum(splits) + 2, 3), rank)  # the last two stay
        for given in (splits, torch.tensor(splits), torch.tensor(splits, dtype=torch.int16)):
            output, received = hvd.alltoall(rows, given)
            same(output, torch.arange(size).repeat_interleave(rank + 1).unsqueeze(1).expand(-1, 3).contiguous())
            dtype = given.dtype if isinstance(given, torch.Tensor) else torch.int32
            same(received, torch.full((size,), rank + 1, dtype=dtype))
        pair = hvd.synchronize(hvd.alltoall_async(torch.arange(size)))
        same(pair[0], torch.full((size,), rank))
        same(pair[1], torch.ones(size, dtype=torch.int32))

    ranks(size, body)


@pytest.mark.parametrize(("size", "rows"), [(3, 7), (3, 2), (2, 0), (4, 5)])
def test_reducescatter_gives_the_first_ranks_the_extra_rows(ranks, size, rows):
    def body(rank):
        whole = torch.arange(rows * 2.0).reshape(rows, 2)
        starts = [sum(rows // size + (r < rows % size) for r in range(n)) for n in range(size + 1)]
        mine = slice(starts[rank], starts[rank + 1])
        same(hvd.reducescatter(whole + rank), (whole + (size - 1) / 2)[mine])
        same(hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5), (whole * size)[mine])

    ranks(size, body)


def test_process_sets_and_meeting_points_work_on_tensors(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        if pair.included():
            same(hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=pair), torch.tensor([2]))
            same(hvd.broadcast(torch.tensor([rank]), 2, process_set=pair), torch.tensor([2]))
            same(hvd.reducescatter(torch.arange(4.0), process_set=pair), torch.arange(4.0).reshape(2, 2)[rank // 2])
        else:
            with pytest.raises(hvd.NotMemberError, match="rank 1 is not in process set"):
                hvd.allreduce(torch.tensor([rank]), process_set=pair)
        hvd.barrier()
        assert hvd.broadcast_object({"rank": rank}, 1) == {"rank": 1}
        assert hvd.allgather_object((rank, "x")) == [(r, "x") for r in range(3)]
        assert hvd.join() in range(3)

    ranks(3, body)


UNSUPPORTED = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "float8": lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
    "meta": lambda: torch.zeros(2, device="meta"),
    "complex32": lambda: torch.zeros(2, dtype=torch.complex32),
    "quantized": lambda: torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
    "list": lambda: [1.0, 2.0],
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about complex32 and quantized tensors
@pytest.mark.parametrize("what", UNSUPPORTED)
@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter])
def test_what_cannot_travel_is_refused_on_all_ranks(ranks, what, call):
    def body(rank):
        if rank == 1:
            with pytest.raises(hvd.InvalidRequestError):
                call(UNSUPPORTED[what](), name="odd")
        else:
            with pytest.raises(hvd.HorovodInternalError, match="'odd' was refused because of rank 1"):
                call(torch.zeros(2), name="odd")
        same(hvd.allreduce(torch.ones(2), op=hvd.Sum), torch.full((2,), 2.0))

    ranks(2, body)


def test_expanded_memory_is_not_written(ranks):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError, match="was expanded"):
            hvd.allreduce_(torch.zeros(1).expand(3))
        same(hvd.allreduce(torch.ones(1).expand(3), op=hvd.Sum), torch.full((3,), 2.0))

    ranks(2, body)


MISMATCHES = {
    "shape": lambda rank: hvd.allreduce(torch.zeros(2 + rank), name="t"),
    "dtype": lambda rank: hvd.allreduce(torch.zeros(2, dtype=[torch.bfloat16, torch.float16][rank]), name="t"),
    "op": lambda rank: hvd.allreduce(torch.zeros(2), name="t", op=[hvd.Sum, hvd.Max][rank]),
    "root": lambda rank: hvd.broadcast(torch.zeros(2), rank, name="t"),
    "kind": lambda rank: [hvd.allreduce, hvd.allgather][rank](torch.zeros(2), name="t"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_differ_all_raise(ranks, what):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match="'t'"):
            MISMATCHES[what](rank)
        same(hvd.allreduce(torch.ones(2), name="t", op=hvd.Sum), torch.full((2,), 2.0))

    ranks(2, body)


def test_nothing_works_before_init():
    for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, hvd.allreduce_):
        with pytest.raises(hvd.NotInitializedError, match="hvd.init"):
            call(torch.zeros(1))


def test_everything_of_the_core_is_here_too():
    assert set(hvdlite.__all__) <= set(hvd.__all__)
    assert sorted(set(hvd.__all__)) == sorted(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, op: hvd.allreduce(x, op=op, name="x"),
        lambda x, op: hvd.allreduce_(x, op=op, name="x"),
        lambda x, op: hvd.grouped_allreduce([x, x.clone()], op=op, name="x"),
        lambda x, op: hvd.synchronize(hvd.reducescatter_async(x, op=op, name="x")),
        lambda x, op: hvd.reducescatter(x, op=op, name="x"),
    ],
)
def test_an_op_that_is_none_on_one_rank_raises_on_all(on_ranks, call):
    def body(rank):
        with pytest.raises((ValueError, hvd.HorovodInternalError), match="99"):
            call(torch.ones(2), 99 if rank == 1 else hvd.Sum)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert on_ranks(2, body) == [2.0, 2.0]


NO_SETS = {
    "allreduce": lambda ps: hvd.allreduce(torch.ones(2), process_set=ps),
    "allreduce, named": lambda ps: hvd.allreduce(torch.ones(2), name="x", process_set=ps),
    "grouped_allreduce": lambda ps: hvd.grouped_allreduce([torch.ones(2), torch.ones(1)], process_set=ps),
    "sparse_allreduce_async": lambda ps: hvd.sparse_allreduce_async(
        torch.eye(2).to_sparse(), "x", hvd.Sum, process_set=ps
    ),
    "reducescatter": lambda ps: hvd.reducescatter(torch.ones(2), process_set=ps),
    "allgather": lambda ps: hvd.allgather(torch.ones(2), process_set=ps),
    "broadcast_": lambda ps: hvd.broadcast_(torch.ones(2), 0, process_set=ps),
    "alltoall": lambda ps: hvd.alltoall(torch.ones(2), process_set=ps),
    "metric_average": lambda ps: hvd.metric_average(1.0, process_set=ps),
}


@pytest.mark.parametrize("wrong", [None, 0, [0, 1]], ids=str)
@pytest.mark.parametrize("what", NO_SETS)
def test_what_is_no_process_set_on_one_rank_raises_on_all(ranks, what, wrong):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank == 1 else hvd.RemoteError, match="expected a ProcessSet"):
            handle = NO_SETS[what](wrong if rank == 1 else hvd.global_process_set)
            hvd.synchronize(handle() if callable(handle) else handle)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert ranks(2, body, timeout=10) == [2.0, 2.0]


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_, lambda x, *args: hvd.grouped_allreduce([x], *args)])
def test_a_name_in_the_place_of_average_is_refused_on_all_ranks(ranks, call):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank else hvd.RemoteError, match="for a name say name='loss'"):
            call(torch.ones(1), *["loss"] * rank)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert ranks(2, body, timeout=10) == [2.0, 2.0]
