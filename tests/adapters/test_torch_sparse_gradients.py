"""Sparse gradients of embeddings: gathered or made dense, next to dense ones, and missing on some ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

ROWS, COLUMNS = 7, 3
OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
FORMS = pytest.mark.parametrize("as_dense", [False, True], ids=["gathered", "as dense"])
IDS = [[0, 3, 3], [3, 5], [6]]  # of each rank: doubles, shared rows, and row 1, which nobody has


def table_of(sparse=True):
    return nn.Embedding.from_pretrained(
        torch.arange(ROWS * COLUMNS, dtype=torch.float64).view(ROWS, COLUMNS), freeze=False, sparse=sparse
    )


def loss_of(table, ids, rank):
    """The gradient of the i-th id is (i + 1) * (rank + 1)."""
    ids = torch.tensor(ids, dtype=torch.int64)
    return (table(ids) * (torch.arange(len(ids)) + 1.0).unsqueeze(1) * (rank + 1)).sum()


def gradient_of(ids, rank):
    dense = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for i, row in enumerate(ids):
        dense[row] += (i + 1) * (rank + 1)
    return dense


def reduced(all_ids, op):
    total = sum(gradient_of(ids, rank) for rank, ids in enumerate(all_ids))
    return total / len(all_ids) if op == hvd.Average else total


@pytest.mark.parametrize("size", [1, 2, 3])
@FORMS
@OPS
def test_gradients_stay_sparse_and_are_those_of_all_ranks(ranks, size, as_dense, op):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), op=op, sparse_as_dense=as_dense
        )
        start, expected = table.weight.detach().clone(), reduced(IDS[:size], op)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(table, IDS[rank], rank).backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            torch.testing.assert_close(table.weight.grad.to_dense(), expected)
        torch.testing.assert_close(table.weight.data, start - 2 * expected)
        return table.weight.tolist()

    weights = ranks(size, body)
    assert all(other == weights[0] for other in weights)


@pytest.mark.parametrize("without", [0, 1, 2])
@pytest.mark.parametrize("how", ["no ids", "no part", "no part, and cleared by zeros"])
@FORMS
def test_a_rank_may_have_nothing_to_say(ranks, without, how, as_dense):
    def body(rank):
        table, weight = table_of(), nn.Parameter(torch.ones(2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([table.weight, weight], lr=1.0), sparse_as_dense=as_dense
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad(set_to_none="zeros" not in how)
            loss = (weight * (rank + 1)).sum()
            if rank != without or how == "no ids":
                loss = loss + loss_of(table, ids[rank], rank)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(table.weight.grad.to_dense(), reduced(ids, hvd.Average))
            assert weight.grad.tolist() == [2.0, 2.0]
        return table.weight.tolist()

    ids = [[] if rank == without else IDS[rank] for rank in range(3)]
    first, second, third = ranks(3, body)
    assert first == second == third


@pytest.mark.parametrize("sparse_on", [0, 1])
@FORMS
@OPS
def test_sparse_on_one_rank_and_dense_on_another(ranks, sparse_on, as_dense, op):
    def body(rank):
        table = table_of(sparse=rank == sparse_on)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), op=op, sparse_as_dense=as_dense
        )
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(table, IDS[rank], rank).backward()
            optimizer.step()
            torch.testing.assert_close(table.weight.grad.to_dense(), reduced(IDS[:2], op))
        return table.weight.tolist()

    first, second = ranks(2, body)
    assert first == second


def test_the_kind_of_a_gradient_may_change_between_steps(ranks):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0))
        for step in range(4):
            table.sparse = (step + rank) % 3 != 0
            optimizer.zero_grad()
            loss_of(table, IDS[rank], rank).backward()
            optimizer.step()
            torch.testing.assert_close(table.weight.grad.to_dense(), reduced(IDS[:2], hvd.Average))

    ranks(2, body)


@FORMS
def test_a_table_used_twice_has_a_dense_and_a_sparse_part(ranks, as_dense):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense)
        (loss_of(table, IDS[rank], rank) + (table.weight * (rank + 1)).sum()).backward()
        optimizer.step()
        torch.testing.assert_close(table.weight.grad.to_dense(), reduced(IDS[:2], hvd.Average) + 1.5)

    ranks(2, body)


@pytest.mark.parametrize("passes", [2, 3])
@FORMS
def test_sparse_gradients_of_several_passes_are_summed(ranks, passes, as_dense):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), backward_passes_per_step=passes, sparse_as_dense=as_dense
        )
        for made in (passes, passes - 1):  # an epoch's last group is short
            optimizer.zero_grad()
            for _ in range(made):
                loss_of(table, IDS[rank], rank).backward()
            optimizer.step()
            torch.testing.assert_close(table.weight.grad.to_dense(), made * reduced(IDS[:2], hvd.Average))

    ranks(2, body)


@FORMS
def test_a_further_pass_adds_to_a_reduced_sparse_gradient(ranks, as_dense):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=as_dense)
        for total in (1, 2, 3):
            loss_of(table, IDS[rank], rank).backward()
            optimizer.synchronize()
            torch.testing.assert_close(table.weight.grad.to_dense(), total * reduced(IDS[:2], hvd.Average))

    ranks(2, body)


@pytest.mark.parametrize("groups", [None, 1, 2, "list"])
@FORMS
def test_dense_and_sparse_gradients_share_a_model(ranks, groups, as_dense):
    def body(rank):
        table, weights = table_of(), [nn.Parameter(torch.full((n,), 1.0)) for n in (5, 0, 1)]
        params = [weights[0], table.weight, *weights[1:]]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(params, lr=1.0), groups=[params[:2], params[2:]] if groups == "list" else groups,
            sparse_as_dense=as_dense,
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            (loss_of(table, IDS[rank], rank) + sum((w * (rank + 1)).sum() for w in weights)).backward()
            optimizer.step()
            torch.testing.assert_close(table.weight.grad.to_dense(), reduced(IDS[:2], hvd.Average))
            assert [w.grad.tolist() for w in weights] == [[1.5] * 5, [], [1.5]]

    ranks(2, body)


@pytest.mark.parametrize("of", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("size", [2, 3])
@FORMS
def test_sparse_adam_trains_as_in_one_process(ranks, of, size, as_dense):
    data = torch.randint(0, ROWS, (5, size, 4, 2))
    table = getattr(nn, of)(ROWS + 1, COLUMNS, sparse=True)  # the last row is never looked up
    template = nn.ModuleDict({"table": table, "head": nn.Linear(COLUMNS, 2)}).double()

    def optimizers_of(model):
        return [
            torch.optim.SparseAdam(list(model["table"].parameters()), lr=0.1),
            torch.optim.Adam(model["head"].parameters(), lr=0.1),
        ]

    def train(model, optimizers, data):
        for ids in data:
            for optimizer in optimizers:
                optimizer.zero_grad()
            model["head"](model["table"](ids)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def body(rank):
        model = copy.deepcopy(template)
        optimizers = [hvd.DistributedOptimizer(one, sparse_as_dense=as_dense) for one in optimizers_of(model)]
        return train(model, optimizers, data[:, rank])

    alone = copy.deepcopy(template)
    expected = train(alone, optimizers_of(alone), data.flatten(1, 2))
    weights = ranks(size, body)
    assert all(torch.equal(other, weights[0]) for other in weights)
    torch.testing.assert_close(weights[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("used_by", [0, 1])
@pytest.mark.parametrize("cleared", [True, False])
@FORMS
def test_sparse_adam_steps_where_no_rank_or_one_has_used_the_table(ranks, used_by, cleared, as_dense):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(list(table.parameters()), lr=0.5), sparse_as_dense=as_dense
        )  # fmt: skip
        start = table.weight.detach().clone()
        optimizer.zero_grad()
        optimizer.step()  # it refuses dense gradients
        assert torch.equal(table.weight.data, start)
        if cleared:
            optimizer.zero_grad()
        if rank == used_by:
            loss_of(table, [2, 4], rank).backward()
        optimizer.step()
        moved = (table.weight.data != start).all(dim=1)
        assert moved.nonzero().flatten().tolist() == [2, 4]
        return table.weight.tolist()

    first, second = ranks(2, body)
    assert first == second


def test_sparse_gradients_stay_within_their_process_set(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        table = table_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), process_set=pair)
        loss_of(table, IDS[rank], rank).backward()
        optimizer.step()
        both = (gradient_of(IDS[0], 0) + gradient_of(IDS[2], 2)) / 2
        torch.testing.assert_close(table.weight.grad.to_dense(), gradient_of(IDS[1], 1) if rank == 1 else both)

    ranks(3, body)


def test_predividing_leaves_an_average(ranks):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), gradient_predivide_factor=4.0)
        loss_of(table, IDS[rank], rank).backward()
        optimizer.step()
        torch.testing.assert_close(table.weight.grad.to_dense(), reduced(IDS[:2], hvd.Average))

    ranks(2, body)


@pytest.mark.parametrize("sparse_on", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_bucket_views_of_sparse_gradients_are_refused_where_they_come_up(ranks, sparse_on):
    def body(rank):
        table, weight = table_of(sparse=rank in sparse_on), nn.Parameter(torch.ones(2))
        params = [("table", table.weight), ("weight", weight)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p for _, p in params], lr=1.0), params, gradient_as_bucket_view=True
        )  # fmt: skip
        expected = hvd.InvalidRequestError if rank in sparse_on else hvd.HvdliteError
        with pytest.raises(expected, match=r"table(?s:.*)sparse"):
            (loss_of(table, IDS[rank], rank) + (weight * (rank + 1)).sum()).backward()
            optimizer.step()
        hvd.barrier()
        return True

    assert ranks(2, body) == [True, True]


def test_that_refusal_says_what_to_do(ranks):
    def body(rank):
        table = table_of()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), gradient_as_bucket_view=True
        )  # fmt: skip
        with pytest.raises(hvd.InvalidRequestError, match="sparse_as_dense=True|gradient_as_bucket_view=False"):
            loss_of(table, IDS[rank], rank).backward()
            optimizer.step()

    ranks(2, body)
