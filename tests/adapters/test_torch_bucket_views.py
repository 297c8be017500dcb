"""gradient_as_bucket_view=True: every gradient is a view of a flat buffer, whatever is done with gradients."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch import buckets

STEPS = 4


def model_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 1))
    model = model.double().to(memory_format=torch.channels_last)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) / 3)
    return model


def loss_of(model, rank, step=0):
    x = torch.arange(2 * 3 * 4 * 4, dtype=torch.float64).view(2, 3, 4, 4)
    return model(torch.sin(x * (rank + 1) + step)).square().mean()


def wrapped(model, views=True, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), gradient_as_bucket_view=views, **options)


def storages(model):
    return [p.grad.untyped_storage().data_ptr() for p in model.parameters()]


def check_views(model):
    """Gradients share memory, do not overlap, and have the strides of their parameters."""
    spans = set()
    for p in model.parameters():
        assert p.grad.stride() == p.stride()
        begin = p.grad.data_ptr()
        spans.add((begin, begin + p.grad.nbytes))
    ordered = sorted(spans)
    assert len(ordered) == len(list(model.parameters()))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ordered))
    assert len(set(storages(model))) < len(ordered)


# Where gradients live


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", [{}, {"groups": 2}, {"backward_passes_per_step": 2}], ids=str)
def test_every_gradient_is_a_view_after_a_reduced_backward(ranks, size, options):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model, **options)
        for step in range(3):
            optimizer.zero_grad()
            for _ in range(options.get("backward_passes_per_step", 1)):
                loss_of(model, rank, step).backward()
            check_views(model)
            optimizer.step()
            check_views(model)

    ranks(size, body)


@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_clearing_to_none_takes_the_views_away_until_the_next_backward(ranks, owner):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model)
        for step in range(3):
            (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=True)
            assert all(p.grad is None for p in model.parameters())
            loss_of(model, rank, step).backward()
            check_views(model)
            optimizer.step()

    ranks(2, body)


@pytest.mark.parametrize("owner", ["optimizer", "model"])
def test_clearing_to_zero_keeps_the_views(ranks, owner):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model)
        loss_of(model, rank).backward()
        optimizer.step()
        kept = [p.grad for p in model.parameters()]
        for step in range(3):
            (optimizer if owner == "optimizer" else model).zero_grad(set_to_none=False)
            assert all(p.grad is g and not g.any() for p, g in zip(model.parameters(), kept, strict=True))
            check_views(model)
            loss_of(model, rank, step).backward()
            optimizer.step()
            assert all(p.grad.data_ptr() == g.data_ptr() for p, g in zip(model.parameters(), kept, strict=True))

    ranks(2, body)


def test_the_buffers_stay_the_same_over_steps(ranks):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model)
        seen = set()
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
            seen.add(tuple(p.grad.data_ptr() for p in model.parameters()))
        assert len(seen) == 1

    ranks(2, body)


def test_unused_parameters_get_views_of_zeros(ranks):
    def body(rank):
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])
        optimizer = wrapped(model)
        for _ in range(2):
            optimizer.zero_grad()
            (model[rank].weight * (rank + 1)).sum().backward()
            optimizer.synchronize()
            check_views(model)
            assert [p.grad.flatten()[0].item() for p in model.parameters()] == [0.5, 0.0, 1.0, 0.0, 0.0, 0.0]
            with optimizer.skip_synchronize():
                optimizer.step()

    ranks(2, body)


def test_each_dtype_has_its_own_buffer(ranks):
    def body(rank):
        dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16, torch.float32]
        params = nn.ParameterList([nn.Parameter(torch.zeros(n + 1, dtype=d)) for n, d in enumerate(dtypes)])
        optimizer = wrapped(params)
        sum((p * (i + 1) * (rank + 1)).sum().double() for i, p in enumerate(params)).backward()
        assert [p.grad.dtype for p in params] == dtypes
        assert [p.grad.tolist() for p in params] == [[1.5 * (i + 1)] * (i + 1) for i in range(5)]
        assert len(set(storages(params))) <= 3
        optimizer.step()

    ranks(2, body)


def test_empty_and_scalar_parameters_have_views_too(ranks):
    def body(rank):
        shapes = [(), (0,), (3, 0), (1,), (2, 1)]
        params = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in shapes])
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad()
            sum((p * (rank + 1)).sum() for p in params).backward()
            optimizer.step()
            assert [p.grad.shape for p in params] == shapes
            assert [p.grad.flatten().tolist() for p in params] == [[1.5], [], [], [1.5], [1.5, 1.5]]

    ranks(2, body)


# What is computed: the same bits as without


def plain(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    optimizer.step()


def model_clears(model, optimizer, rank, step):
    model.zero_grad(set_to_none=step % 2 == 0)
    loss_of(model, rank, step).backward()
    optimizer.step()


def zeros(model, optimizer, rank, step):
    optimizer.zero_grad(set_to_none=False)
    loss_of(model, rank, step).backward()
    optimizer.step()


def clips(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


def scales(model, optimizer, rank, step):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer.zero_grad()
    broken = step == 1 and rank == 1
    scaler.scale(loss_of(model, rank, step) * (float("inf") if broken else 1.0)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0**9 if step == 1 else 2.0**10)


def accumulates(model, optimizer, rank, step):
    optimizer.set_backward_passes_per_step(3)
    optimizer.zero_grad()
    for micro in range(3 if step != 2 else 2):
        loss_of(model, rank, 10 * step + micro).backward()
    optimizer.step()


def does_not_sync(model, optimizer, rank, step):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    for micro in range(3):
        with optimizer.no_sync() if micro < 2 else contextlib.nullcontext():
            loss_of(model, rank, 10 * step + micro).backward()
    optimizer.step()


def passes_more(model, optimizer, rank, step):
    optimizer.zero_grad()
    for micro in range(2):
        loss_of(model, rank, 10 * step + micro).backward()
    optimizer.step()


def leaves_out(model, optimizer, rank, step):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    used = [p for i, p in enumerate(model.parameters()) if (i + step + rank) % 3]
    sum((p * (rank + 1)).square().sum() for p in used).backward()
    optimizer.step()


def replaces(model, optimizer, rank, step):
    optimizer.zero_grad()
    loss_of(model, rank, step).backward()
    for p in model.parameters():
        p.grad = p.grad / 2
    optimizer.step()


def moves(model, optimizer, rank, step):
    zeros(model, optimizer, rank, step)
    if step == 1:
        model.share_memory()  # torch moves the memory under the gradients, too


WAYS = [
    plain, model_clears, zeros, clips, scales, accumulates, does_not_sync, passes_more, leaves_out, replaces, moves,
]  # fmt: skip


def train(rank, way, views, copied=False, **options):
    model = model_of()
    optimizer = wrapped(model, views, **options)
    if copied:
        way(model, optimizer, rank, 0)
        model, optimizer = copy.deepcopy((model, optimizer))
    for step in range(STEPS):
        way(model, optimizer, rank, step)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def compare(ranks, size, way, **options):
    results = [ranks(size, lambda rank, views=views: train(rank, way, views, **options)) for views in (False, True)]
    for without, with_views in zip(*results, strict=True):
        assert torch.equal(with_views, without)
        assert not torch.equal(with_views, torch.cat([p.detach().reshape(-1) for p in model_of().parameters()]))
    return results[1]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_they_change_no_result(ranks, size, way):
    weights = compare(ranks, size, way)
    assert all(torch.equal(other, weights[0]) for other in weights)


@pytest.mark.parametrize("way", [plain, clips, accumulates, leaves_out], ids=lambda way: way.__name__)
@pytest.mark.parametrize("copied", [False, True], ids=["", "copied"])
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 1},
        {"groups": 3},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "groups": 2},
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 4.0},
    ],
    ids=str,
)
def test_they_change_no_result_with_other_options(ranks, way, copied, options):
    compare(ranks, 2, way, copied=copied, **options)


# Large gradients are reduced from where autograd has put them


@pytest.fixture
def all_are_large(monkeypatch):
    monkeypatch.setattr(buckets, "ALONE_BYTES", 1)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_large_ones_change_no_result(ranks, all_are_large, size, way):
    weights = compare(ranks, size, way)
    assert all(torch.equal(other, weights[0]) for other in weights)


@pytest.mark.parametrize("way", [plain, clips, accumulates, leaves_out], ids=lambda way: way.__name__)
@pytest.mark.parametrize("options", [{"groups": 2}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}], ids=str)
def test_large_ones_change_no_result_with_other_options(ranks, all_are_large, way, options):
    compare(ranks, 2, way, copied=True, **options)


def test_a_large_fresh_gradient_is_lent_until_it_is_reduced_and_given_back_when_cleared(ranks, all_are_large):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model)
        fresh = {}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(
                lambda p: fresh.__setitem__(p, (weakref.ref(p.grad), p.grad.data_ptr()))
            )
        places = []
        for step in range(3):
            loss_of(model, rank, step).backward()
            check = [(fresh[p][1], p.grad.data_ptr()) for p in model.parameters()]
            assert all(before != after for before, after in check)  # a copy would have been a view at once
            places.append([after for _, after in check])
            optimizer.step()
            optimizer.zero_grad()
            assert all(gradient() is None for gradient, _ in fresh.values())
        assert places[0] == places[1] == places[2]

    ranks(2, body)


def test_a_large_gradient_that_changes_while_it_travels_is_noticed(ranks, all_are_large):
    def body(rank):
        model = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        optimizer = wrapped(model)
        for change in (lambda p: p.grad.mul_(2), lambda p: setattr(p, "grad", p.grad.clone())):
            optimizer.zero_grad()
            model[0].weight.sum().backward()  # not all: so they are under way when it returns
            change(model[0].weight)
            with pytest.raises(hvd.InvalidRequestError, match="before it was reduced"):
                optimizer.synchronize()
        optimizer.zero_grad()
        (model[0].weight * (rank + 1)).sum().backward()
        optimizer.synchronize()
        assert model[0].weight.grad.eq(1.5).all()

    ranks(2, body)


def test_they_stay_within_a_process_set(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        return train(rank, plain, views=True, process_set=pair)

    first, second, third = ranks(3, body)
    assert torch.equal(first, third)
    assert not torch.equal(first, second)


def test_a_copy_has_its_own_buffers(ranks):
    def body(rank):
        model = model_of()
        optimizer = wrapped(model)
        plain(model, optimizer, rank, 0)
        before = [p.grad.clone() for p in model.parameters()]
        twin, other = copy.deepcopy((model, optimizer))
        plain(twin, other, rank, 1)
        check_views(twin)
        assert not set(storages(model)) & set(storages(twin))
        assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
        plain(model, optimizer, rank, 1)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))

    ranks(2, body)
