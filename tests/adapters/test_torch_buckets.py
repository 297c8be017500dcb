"""Small gradients travel together in buffers: which ones, in what order, what is learned, and what if one is sparse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch import buckets
from hvdlite.torch.buckets import cut_into_pieces

MIB = 2**20


def parameters(*lengths, dtype=torch.float32):
    return [nn.Parameter(torch.zeros(n, dtype=dtype)) for n in lengths]


def wrapped(params, lr=1.0, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=lr), **options)


def bundles(optimizer):
    return [[slot.name for slot in bundle.slots] for bundle in optimizer._wrapping.reducer._bundles]


def alone(params):
    return [[p] for p in params]


# How parameters are cut into pieces


@pytest.mark.parametrize("views", [False, True])
def test_the_last_parameters_come_first_and_large_ones_alone(views):
    params = parameters(1, 2, MIB, 3, 4)
    pieces = cut_into_pieces(alone(params), views, 64 * MIB)
    assert [[p.numel() for p in piece.parameters] for piece in pieces] == [[4, 3, 2, 1], [MIB]]
    assert [piece.bucketed for piece in pieces] == [True, views]


@pytest.mark.parametrize("threshold", [0, 7, 8, 1000])
def test_no_copied_piece_is_larger_than_the_fusion_threshold(threshold):
    params = parameters(1, 1, 1, 1, 1, 300)
    pieces = cut_into_pieces(alone(params), False, threshold)
    assert sorted(p.numel() for piece in pieces for p in piece.parameters) == [1, 1, 1, 1, 1, 300]
    for piece in pieces:
        assert not piece.bucketed or sum(p.nbytes for p in piece.parameters) <= threshold
    assert any(piece.bucketed for piece in pieces) == (threshold > 4)


def test_the_last_piece_is_small():
    pieces = cut_into_pieces(alone(parameters(*[MIB // 16] * 40)), False, 64 * MIB)
    nbytes = [sum(p.nbytes for p in piece.parameters) for piece in pieces]
    assert sum(nbytes) == 40 * MIB // 4
    assert max(nbytes) <= buckets.BUCKET_BYTES
    assert nbytes[-1] == buckets.LAST_BYTES


def test_pieces_have_one_dtype_and_groups_stay_together():
    a, b = parameters(1, 2)
    c, d = parameters(3, 4, dtype=torch.bfloat16)
    copied = cut_into_pieces([[a, c], [b], [d]], False, 64 * MIB)
    assert [[p.numel() for p in piece.parameters] for piece in copied] == [[4], [2], [1, 3]]
    assert [(piece.meant, piece.bucketed) for piece in copied] == [(False, True), (False, True), (True, False)]
    viewed = cut_into_pieces([[a, c], [b], [d]], True, 64 * MIB)
    assert [[p.numel() for p in piece.parameters] for piece in viewed] == [[4], [2], [1], [3]]


# What they compute


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_element_of_every_gradient_is_the_mean(ranks, monkeypatch, size, views, spare):
    monkeypatch.setattr("hvdlite.torch.reducer.has_spare_cores", lambda: spare)
    monkeypatch.setattr("hvdlite.torch.buckets.BUCKET_BYTES", 400)  # several buffers
    lengths = [1, 33, 64, 7, 100, 5, 1]

    def body(rank):
        params = parameters(*lengths)
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        seen = []
        for step in range(3):
            optimizer.zero_grad()
            sum(
                (p * torch.arange(1, p.numel() + 1) * (i + 1 + step) * (rank + 1)).sum() for i, p in enumerate(params)
            ).backward()
            seen.append([p.grad.clone() for p in params])
        return seen

    results = ranks(size, body)
    for step in range(3):
        for i, n in enumerate(lengths):
            expected = torch.arange(1, n + 1) * (i + 1 + step) * ((size + 1) / 2)
            for rank in range(size):
                torch.testing.assert_close(results[rank][step][i], expected)
                assert torch.equal(results[rank][step][i], results[0][step][i])


@pytest.mark.parametrize("views", [False, True])
def test_buffers_are_used_again_and_nothing_is_allocated(ranks, views):
    def body(rank):
        params = parameters(10, 20, 30)
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        places = set()
        for step in range(4):
            optimizer.zero_grad()
            sum((p * (rank + step)).sum() for p in params).backward()
            optimizer.step()
            (bundle,) = optimizer._wrapping.reducer._bundles
            places.add(bundle.bucket.memory.data_ptr())
        assert len(places) == 1

    ranks(2, body)


@pytest.mark.parametrize("views", [False, True])
def test_parameters_without_a_gradient_count_as_zero(ranks, views):
    def body(rank):
        params = parameters(3, 4, 5)
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        for _ in range(3):
            optimizer.zero_grad()
            (params[rank] * (rank + 1)).sum().backward()
            optimizer.synchronize()
            assert [p.grad.tolist() for p in params] == [[0.5] * 3, [1.0] * 4, [0.0] * 5]
            with optimizer.skip_synchronize():
                optimizer.step()

    ranks(2, body)


# Sparse gradients


@pytest.mark.parametrize("sparse_ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("as_dense", [False, True])
def test_a_sparse_gradient_lets_its_neighbours_travel_alone_from_then_on(ranks, sparse_ranks, as_dense):
    def body(rank):
        first, table, last = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))
        optimizer = wrapped([first, table, last], sparse_as_dense=as_dense)
        for step in range(3):
            optimizer.zero_grad()
            rows = nn.functional.embedding(torch.tensor([rank, rank]), table, sparse=rank in sparse_ranks)
            (rows.sum() * (step + 1) + (first * (rank + 1)).sum() + (last * (rank + 3)).sum()).backward()
            optimizer.synchronize()
            assert first.grad.tolist() == [1.5] * 2
            assert last.grad.tolist() == [3.5] * 3
            dense = table.grad.to_dense() if table.grad.is_sparse else table.grad
            assert dense.tolist() == [[step + 1.0] * 2] * 2 + [[0.0] * 2] * 2
            with optimizer.skip_synchronize():
                optimizer.step()

    ranks(2, body)


# The order that is learned


@pytest.mark.parametrize("views", [False, True])
def test_what_becomes_ready_together_travels_together_after_the_first_step(ranks, monkeypatch, views):
    monkeypatch.setattr("hvdlite.torch.buckets.BUCKET_BYTES", 8)  # two parameters of one element

    def body(rank):
        params = parameters(1, 1, 1, 1)
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = wrapped(params, named_parameters=named, gradient_as_bucket_view=views)
        before = bundles(optimizer)
        # A chain: what is used last is ready first. Rank 0 uses 0, 2, 1, 3, the other rank the other way round.
        order = [0, 2, 1, 3] if rank == 0 else [3, 1, 2, 0]
        for step in range(3):
            optimizer.zero_grad()
            x = torch.ones(1)
            for i in order:
                x = x + params[i] * (rank + 1 + i + step)
            x.sum().backward()
            assert [p.grad.item() for p in params] == [1.5 + i + step for i in range(4)]
        return before, bundles(optimizer)

    (before, after), (_, elsewhere) = ranks(2, body)
    assert before == [["gradient.p3", "gradient.p2"], ["gradient.p1", "gradient.p0"]]
    assert after == elsewhere == [["gradient.p3", "gradient.p1"], ["gradient.p2", "gradient.p0"]]


@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters_are_put_together(ranks, monkeypatch, views):
    monkeypatch.setattr("hvdlite.torch.buckets.BUCKET_BYTES", 8)

    def body(rank):
        params = parameters(1, 1, 1, 1)
        named = [(f"p{i}", p) for i, p in enumerate(params)]
        optimizer = wrapped(params, named_parameters=named, gradient_as_bucket_view=views)
        for _ in range(2):
            optimizer.zero_grad()
            ((params[0] + params[2]) * (rank + 1)).sum().backward()
            optimizer.synchronize()
            assert [p.grad.item() for p in params] == [1.5, 0.0, 1.5, 0.0]
            with optimizer.skip_synchronize():
                optimizer.step()
        return bundles(optimizer)

    first, second = ranks(2, body)
    assert first == second
    assert [set(one) for one in first] == [{"gradient.p2", "gradient.p0"}, {"gradient.p3", "gradient.p1"}]


# Overlap


@pytest.mark.parametrize("spare", [False, True])
def test_overlap_says_what_was_hidden(ranks, monkeypatch, spare):
    monkeypatch.setattr("hvdlite.torch.reducer.has_spare_cores", lambda: spare)

    def body(rank):
        params = parameters(MIB, 4)
        optimizer = wrapped(params)
        assert optimizer.overlap == (0, 0.0, 0.0, 0.0)
        assert optimizer.overlap.share == 0.0
        for _ in range(3):
            sum((p * (rank + 1)).sum() for p in params).backward()
            optimizer.step()
            optimizer.zero_grad()
        overlap = optimizer.overlap
        assert overlap.rounds == 3
        assert overlap.reducing > 0.0
        assert 0.0 <= overlap.hidden <= overlap.reducing
        assert 0.0 <= overlap.share <= 1.0
        assert optimizer.seconds_waited == overlap.waited > 0.0
        if not spare:
            assert overlap.hidden == 0.0

    ranks(2, body)
