"""Allreduce of sparse tensors against allreduce of the same tensors made dense."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd

SIZES = [1, 2, 3, 4]


def entries(rank, shape=(5, 3), sparse_dim=1, nnz=None, dtype=torch.float32):
    """A sparse tensor, not coalesced: rank r has r + 2 entries, which wrap around, so that indices repeat."""
    n = rank + 2 if nnz is None else nnz
    indices = torch.stack([(torch.arange(n) + rank + d) % shape[d] for d in range(sparse_dim)])
    values = torch.arange(n * torch.tensor(shape[sparse_dim:]).prod().int().item()).view(n, *shape[sparse_dim:])
    return torch.sparse_coo_tensor(indices, (values + 100 * rank + 1).to(dtype), shape, check_invariants=True)


def mean(tensors):
    return sum(tensor.to_dense() for tensor in tensors) / len(tensors)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shape", "sparse_dim"), [((5,), 1), ((2, 3), 1), ((2, 3), 2), ((4, 2, 3), 2), ((2, 3, 0), 1)])
def test_the_average_is_that_of_the_dense_tensors(ranks, size, shape, sparse_dim):
    def body(rank):
        result = hvd.sparse_allreduce_async(entries(rank, shape, sparse_dim), "x", hvd.Average)()
        assert (result.is_sparse, result.sparse_dim(), result.shape) == (True, sparse_dim, shape)
        return result.to_dense()

    expected = mean([entries(rank, shape, sparse_dim) for rank in range(size)])
    for dense in ranks(size, body):
        torch.testing.assert_close(dense, expected)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.complex64]
)
def test_a_sum_keeps_the_dtype(ranks, dtype):
    def body(rank):
        result = hvd.sparse_allreduce_async(entries(rank, (2, 2), dtype=dtype, nnz=1), "x", hvd.Sum)()
        assert result.dtype == dtype
        return result.to_dense()

    expected = sum(entries(rank, (2, 2), dtype=dtype, nnz=1).to_dense() for rank in range(2))
    for dense in ranks(2, body):
        torch.testing.assert_close(dense, expected)


def test_averages_of_integers_truncate_each_entry(ranks):
    def body(rank):
        mine = torch.sparse_coo_tensor([[1]], [-7 if rank else 3], (2,), check_invariants=True)
        return hvd.sparse_allreduce_async(mine, "x", hvd.Average)().to_dense().tolist()

    assert ranks(2, body) == [[0, 1 - 3]] * 2


def test_entries_come_in_rank_order_and_alike_on_every_rank(ranks):
    def body(rank):
        mine = torch.sparse_coo_tensor([[2, 0]], [10.0 * rank + 1, 10.0 * rank + 2], (3,), check_invariants=True)
        result = hvd.sparse_allreduce_async(mine, "x", hvd.Sum)()
        return result._indices().tolist(), result._values().tolist()

    assert ranks(3, body) == [([[0, 2, 0, 2, 0, 2]], [2.0, 1.0, 12.0, 11.0, 22.0, 21.0])] * 3


@pytest.mark.parametrize("with_entries", [[], [1], [0, 2]])
def test_ranks_may_have_no_entries(ranks, with_entries):
    def body(rank):
        nnz = 2 if rank in with_entries else 0
        result = hvd.sparse_allreduce_async(entries(rank, nnz=nnz), "x", hvd.Sum)()
        assert result._nnz() == 2 * len(with_entries)
        return result.to_dense()

    expected = sum([entries(rank, nnz=2).to_dense() for rank in with_entries], torch.zeros(5, 3))
    for dense in ranks(3, body):
        torch.testing.assert_close(dense, expected)


def test_the_input_stays_as_it_is_and_no_graph_is_built(ranks):
    def body(rank):
        mine = entries(rank).requires_grad_()
        values = mine._values().clone()
        result = hvd.sparse_allreduce_async(mine, "x", hvd.Average)()
        assert not result.requires_grad
        assert torch.equal(mine._values(), values)

    ranks(2, body)


def test_several_are_in_flight_and_wait_in_any_order(ranks):
    def body(rank):
        first = hvd.sparse_allreduce_async(entries(rank), "first", hvd.Sum)
        second = hvd.sparse_allreduce_async(entries(rank, (7,)), None, hvd.Sum)
        return second().to_dense(), first().to_dense(), first().to_dense()

    for second, first, again in ranks(2, body):
        torch.testing.assert_close(second, 2 * mean([entries(0, (7,)), entries(1, (7,))]))
        torch.testing.assert_close(first, 2 * mean([entries(0), entries(1)]))
        assert torch.equal(first, again)


def test_an_embedding_learns_from_the_words_of_all_ranks(ranks):
    def body(rank):
        table = torch.nn.Embedding(6, 2, sparse=True)
        words = torch.tensor([0, 1, 1] if rank else [4])
        table(words).sum().backward()
        return hvd.sparse_allreduce_async(table.weight.grad, "table", hvd.Average)().to_dense()[:, 0].tolist()

    assert ranks(2, body) == [[0.5, 1.0, 0.0, 0.0, 0.5, 0.0]] * 2


def test_a_process_set_reduces_among_its_members(ranks):
    def body(rank):
        some = hvd.add_process_set([0, 2])
        if rank == 1:
            with pytest.raises(hvd.NotMemberError):
                hvd.sparse_allreduce_async(entries(rank), "x", hvd.Average, some)
            return None
        return hvd.sparse_allreduce_async(entries(rank), "x", hvd.Average, process_set=some)().to_dense()

    first, _, last = ranks(3, body)
    torch.testing.assert_close(first, mean([entries(0), entries(2)]))
    assert torch.equal(first, last)


def test_a_rank_that_has_joined_gives_nothing(ranks):
    def body(rank):
        if rank == 1:
            hvd.join()
            return None
        result = hvd.sparse_allreduce_async(entries(rank), "x", hvd.Sum)()
        hvd.join()
        return result.to_dense()

    torch.testing.assert_close(ranks(3, body)[2], entries(0).to_dense() + entries(2).to_dense())


def wrong(rank):
    """What only the last of three ranks does wrong, the error there, and what the others read."""
    return [
        (torch.ones(5, 3), hvd.Sum, "expected a tensor of layout torch.sparse_coo, got torch.strided"),
        ("text", hvd.Sum, "expected a tensor of layout torch.sparse_coo, got str"),
        (entries(rank), hvd.Max, "op=Max: expected Sum or Average"),
        (entries(rank), hvd.Adasum, "op=Adasum: expected Sum or Average"),
        (entries(rank), 77, "op=77: expected one of"),
        (entries(rank, dtype=torch.bool), hvd.Sum, "Sum of bool has no one meaning"),
    ]


@pytest.mark.parametrize("case", range(6))
def test_what_one_rank_cannot_give_is_told_to_all_and_the_next_call_works(ranks, case):
    def body(rank):
        tensor, op, message = wrong(rank)[case]
        if rank == 2:
            with pytest.raises(hvd.InvalidRequestError, match=message):
                hvd.sparse_allreduce_async(tensor, "x", op)
        else:
            with pytest.raises(hvd.RemoteError, match=f"rank 2.*{message}"):
                hvd.sparse_allreduce_async(entries(rank), "x", hvd.Sum)()
        return hvd.sparse_allreduce_async(entries(rank), "x", hvd.Sum)().to_dense()

    for dense in ranks(3, body):
        torch.testing.assert_close(dense, 3 * mean([entries(0), entries(1), entries(2)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"shape": (6, 3)},
            r"\[5, 3\] with sparse_dim 1, Sum on ranks 0, 2; \[6, 3\] with sparse_dim 1, Sum on rank 1",
        ),
        ({"shape": (5, 4)}, r"\[5, 4\] with sparse_dim 1, Sum on rank 1"),
        ({"shape": (5, 3, 1)}, r"\[5, 3, 1\] with sparse_dim 1, Sum on rank 1"),
        ({"sparse_dim": 2}, r"\[5, 3\] with sparse_dim 2, Sum on rank 1"),
        ({"op": hvd.Average}, r"\[5, 3\] with sparse_dim 1, Average on rank 1"),
        ({"dtype": torch.float64}, "dtype.*float64 on rank 1"),
    ],
)
def test_differences_between_ranks_are_named_on_all_and_the_next_call_works(ranks, change, message):
    def body(rank):
        other = dict(change) if rank == 1 else {}
        op = other.pop("op", hvd.Sum)
        with pytest.raises(hvd.MismatchError, match=message):
            hvd.sparse_allreduce_async(entries(rank, **other), "x", op)()
        hvd.sparse_allreduce_async(entries(rank), "x", hvd.Sum)()

    ranks(3, body)


@pytest.mark.parametrize("call", [hvd.allreduce, hvd.allreduce_async, hvd.allreduce_])
def test_the_dense_operations_refuse_and_name_this_one(ranks, call):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError, match=r"sparse_coo.*use sparse_allreduce_async"):
            call(entries(rank))

    ranks(2, body)
