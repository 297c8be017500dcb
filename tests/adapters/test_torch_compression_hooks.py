"""Compression with error feedback in DistributedOptimizer: nothing is lost, and ranks stay equal, whatever happens."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.compression import CommHook

HOOKS = pytest.mark.parametrize(
    "hook",
    [
        hvd.Compression.int8,
        hvd.Compression.int8(8),
        hvd.Compression.topk(0.3),
        hvd.Compression.topk(0.02),
        hvd.Compression.powersgd,
        hvd.Compression.powersgd(rank=3),
    ],
    ids=str,
)
ONE_OF_EACH = pytest.mark.parametrize(
    "hook", [hvd.Compression.int8(8), hvd.Compression.topk(0.3), hvd.Compression.powersgd(2)], ids=str
)
SHAPES = [(7, 5), (3,), (), (7, 5), (0,), (4, 3, 2, 2), (1, 9), (0, 4), (11, 13)]


def parameters(shapes=SHAPES, dtype=torch.float64):
    return [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]


def gradient(shape, rank, step, i=0):
    """A gradient that no other rank, step or parameter has."""
    seed = 1 + i + 100 * step + 10_000 * rank
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(optimizer, ps, rank, step, passes=1, skip=()):
    """Run one step whose gradients are known; nothing but zeros for step None."""
    optimizer.zero_grad()
    for k in range(passes):
        loss = torch.zeros((), dtype=ps[0].dtype)
        for i, p in enumerate(ps):
            if i not in skip:
                g = torch.zeros(p.shape) if step is None else gradient(p.shape, rank, step, i + 50 * k)
                loss = loss + (p * g.to(p.dtype)).sum()
        loss.backward()
    optimizer.step()


def steps_until_all_has_come(hook):
    """How many steps without gradients it takes until everything that was held back has been sent."""
    return 70 if isinstance(hook, hvd.Compression.topk) and hook.ratio < 0.1 else 20


def wrapped(ps, hook, **options):
    sgd = torch.optim.SGD(ps, lr=1.0)
    return hvd.DistributedOptimizer(sgd, [(f"p{i}", p) for i, p in enumerate(ps)], compression=hook, **options)


def check_all_has_come(results, expected, tolerance=1e-9):
    for other in results[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(results[0], other, strict=True))
    for p, sum_of_gradients in zip(results[0], expected, strict=True):
        torch.testing.assert_close(p, -sum_of_gradients, atol=tolerance, rtol=tolerance)


# Nothing is lost


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@HOOKS
def test_what_is_held_back_arrives_in_the_end_and_ranks_are_equal_at_every_step(ranks, size, hook):
    n_steps = 4

    def body(rank):
        ps = parameters()
        optimizer, path = wrapped(ps, hook), []
        for step in [*range(n_steps), *[None] * steps_until_all_has_come(hook)]:
            train(optimizer, ps, rank, step)
            path.append(torch.cat([p.detach().reshape(-1) for p in ps]))
        return [p.detach() for p in ps], path

    results = ranks(size, body)
    expected = [
        sum(gradient(shape, rank, step, i) for rank in range(size) for step in range(n_steps)) / size
        for i, shape in enumerate(SHAPES)
    ]
    check_all_has_come([final for final, _ in results], expected)
    for _, path in results[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(results[0][1], path, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 3.0},
        {"backward_passes_per_step": 2},
        {"groups": 2},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
@ONE_OF_EACH
def test_nothing_is_lost_with_other_arguments(ranks, hook, options):
    passes = options.get("backward_passes_per_step", 1)

    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook, **options)
        for step in [0, 1, *[None] * 20]:
            train(optimizer, ps, rank, step, passes)
        return [p.detach() for p in ps]

    n = 1 if options.get("op") == hvd.Sum else 3
    expected = [
        sum(gradient(shape, r, step, i + 50 * k) for r in range(3) for step in range(2) for k in range(passes)) / n
        for i, shape in enumerate(SHAPES)
    ]
    check_all_has_come(ranks(3, body), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@ONE_OF_EACH
def test_other_dtypes_are_reduced_in_float32(ranks, hook, dtype):
    def body(rank):
        ps = [*parameters([(7, 5), (3,)], dtype), *parameters([(2, 2)], torch.float64)]
        optimizer, total = wrapped(ps, hook), 0.0
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step)
            assert [p.grad.dtype for p in ps] == [dtype, dtype, torch.float64]
            total = total + ps[0].grad.double()
        return [total]

    expected = [sum(gradient((7, 5), rank, 0).to(dtype).double() for rank in range(2)) / -2]
    check_all_has_come(ranks(2, body), expected, 0.02 if dtype is not torch.float32 else 1e-5)


@ONE_OF_EACH
def test_complex_parameters_travel_as_they_are(ranks, hook):
    def body(rank):
        weight = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        ps = [weight, *parameters([(5, 4)], torch.float32)]
        optimizer = wrapped(ps, hook)
        (weight * (1 + 1j) * (rank + 1)).sum().real.backward()
        optimizer.step()
        return weight.tolist()

    assert ranks(2, body) == [[-1.5 + 1.5j] * 3] * 2


@ONE_OF_EACH
def test_only_members_of_a_process_set_exchange(ranks, hook):
    def body(rank):
        odd = hvd.add_process_set([0, 2])
        ps = parameters()
        optimizer = wrapped(ps, hook, process_set=odd)
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step)
        return [p.detach() for p in ps]

    results = ranks(3, body)
    expected = [(gradient(shape, 0, 0, i) + gradient(shape, 2, 0, i)) / 2 for i, shape in enumerate(SHAPES)]
    check_all_has_come([results[0], results[2]], expected)
    check_all_has_come([results[1]], [gradient(shape, 1, 0, i) for i, shape in enumerate(SHAPES)])


@pytest.mark.parametrize("views", [False, True], ids=["", "views"])
def test_batches_stay_what_they_are_in_whatever_order_gradients_come(ranks, views):
    def body(rank):
        ps = parameters([(120_000,)] * 6)  # more than the buffer of the first parameters takes
        optimizer = wrapped(ps, hvd.Compression.int8, gradient_as_bucket_view=views)
        before = [[slot.parameter for slot in bundle.slots] for bundle in optimizer._wrapping.reducer._bundles]
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() for p in reversed(ps)).backward()  # so that those of the first come first
            optimizer.step()
        bundles = optimizer._wrapping.reducer._bundles
        assert len(bundles) > 1
        assert [bundle.exchange for bundle in bundles] == optimizer._wrapping.exchanges
        for bundle, members in zip(bundles, before, strict=True):
            assert all(slot.parameter is p for slot, p in zip(bundle.slots, members, strict=True))

    ranks(2, body)


# Gradients that are missing, sparse, or not finite


@pytest.mark.parametrize("views", [False, True], ids=["", "views"])
@ONE_OF_EACH
def test_parameters_without_a_gradient_count_as_zero(ranks, hook, views):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook, gradient_as_bucket_view=views)
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step, skip=(rank, 8))
        return [p.detach() for p in ps]

    expected = [
        sum(gradient(shape, rank, 0, i) for rank in range(3) if i not in (rank, 8)) / 3 + torch.zeros(shape).double()
        for i, shape in enumerate(SHAPES)
    ]
    check_all_has_come(ranks(3, body), expected)


@pytest.mark.parametrize("frozen_on", [(0, 1), (1,)], ids=str)
@ONE_OF_EACH
def test_layers_may_be_frozen_everywhere_or_on_some_ranks(ranks, hook, frozen_on):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook)
        for i in (0, 8):
            ps[i].requires_grad_(rank not in frozen_on)
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step, skip=(0, 8) if rank in frozen_on else ())
        return [p.detach() for p in ps]

    expected = [
        sum(gradient(shape, rank, 0, i) for rank in range(2) if not (i in (0, 8) and rank in frozen_on)) / 2
        + torch.zeros(shape).double()
        for i, shape in enumerate(SHAPES)
    ]
    check_all_has_come(ranks(2, body), expected)


@pytest.mark.parametrize("as_dense", [False, True], ids=["gathered", "as dense"])
@pytest.mark.parametrize("without", [None, 1], ids=["all ranks", "not on rank 1"])
@ONE_OF_EACH
def test_sparse_gradients_go_their_own_way(ranks, hook, without, as_dense):
    def body(rank):
        table = nn.Embedding.from_pretrained(torch.zeros(6, 3, dtype=torch.float64), freeze=False, sparse=True)
        ps = parameters([(5, 7), (4,)])
        sgd = torch.optim.SGD([ps[0], table.weight, ps[1]], lr=1.0)
        optimizer = hvd.DistributedOptimizer(sgd, compression=hook, sparse_as_dense=as_dense)
        for step in range(20):
            optimizer.zero_grad()
            loss = sum((p * gradient(p.shape, rank, 0, i)).sum() for i, p in enumerate(ps)) * (step < 2)
            if rank != without:
                loss = loss + table(torch.tensor([rank, 5])).sum() * (rank + 1) * (step < 2)
            loss.backward()
            optimizer.step()
            if rank != without or step > 1:
                assert table.weight.grad.is_sparse or (as_dense and rank == without)
        return [p.detach() for p in (*ps, table.weight)]

    rows = torch.zeros(6, 3, dtype=torch.float64)
    for rank in (0, 1):
        if rank != without:
            rows[[rank, 5]] += rank + 1
    expected = [sum(gradient(s, rank, 0, i) for rank in range(2)) for i, s in enumerate([(5, 7), (4,)])]
    check_all_has_come(ranks(2, body), [*expected, rows])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("value", [math.inf, math.nan])
@ONE_OF_EACH
def test_an_overflow_of_one_rank_reaches_all_and_is_forgotten_afterwards(ranks, hook, value, size):
    def body(rank):
        ps = parameters(dtype=torch.float16)
        optimizer = wrapped(ps, hook)
        before = [e.held_back.clone() for e in optimizer._wrapping.exchanges if not train(optimizer, ps, rank, 0)]
        optimizer.zero_grad()
        sum((p * (value if rank == 1 and i == 8 else 1.0)).sum() for i, p in enumerate(ps)).backward()
        assert not ps[8].grad.isfinite().all()
        for exchange, held in zip(optimizer._wrapping.exchanges, before, strict=True):
            assert torch.equal(exchange.held_back, held)
        train(optimizer, ps, rank, 1)
        return [p.grad.clone() for p in ps]

    for result in ranks(size, body):
        assert all(g.isfinite().all() for g in result)


@ONE_OF_EACH
def test_a_grad_scaler_skips_the_step_on_all_ranks(ranks, hook):
    def body(rank):
        ps = parameters([(6, 6)], torch.float32)
        optimizer = wrapped(ps, hook)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((ps[0] * (math.inf if (rank, step) == (1, 1) else 1.0)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return ps[0].detach(), scaler.get_scale()

    results = ranks(2, body)
    assert all(scale == 2.0 for _, scale in results)
    for weight, _ in results:
        assert torch.equal(weight, results[0][0])
        assert weight.isfinite().all()


# Life


@ONE_OF_EACH
def test_a_rank_that_has_joined_adds_nothing(ranks, hook):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook)
        if rank == 1:
            hvd.join()
            return []
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step)
        hvd.join()
        return [p.detach() for p in ps]

    results = ranks(3, body)
    expected = [sum(gradient(shape, rank, 0, i) for rank in (0, 2)) / 3 for i, shape in enumerate(SHAPES)]
    check_all_has_come([results[0], results[2]], expected)


@ONE_OF_EACH
def test_a_deep_copy_goes_on_where_the_original_stands(ranks, hook):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook)
        train(optimizer, ps, rank, 0)
        twin_ps, twin = copy.deepcopy((ps, optimizer))
        for one, its in ((optimizer, ps), (twin, twin_ps)):
            for step in [1, *[None] * 3]:
                train(one, its, rank, step)
        assert all(torch.equal(p, q) for p, q in zip(ps, twin_ps, strict=True))

    ranks(2, body)


@ONE_OF_EACH
def test_a_pickle_is_an_optimizer_without_ranks(ranks, hook):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook)
        train(optimizer, ps, rank, 0)
        assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.SGD
        assert pickle.loads(pickle.dumps(optimizer._wrapping.settings.compression)) == hook

    ranks(2, body)


@ONE_OF_EACH
def test_loading_a_state_begins_anew(ranks, hook):
    def body(rank):
        ps = parameters()
        optimizer = wrapped(ps, hook)
        start = copy.deepcopy(optimizer.state_dict())
        paths = []
        for _ in range(2):
            optimizer.load_state_dict(start)
            for p in ps:
                p.data.zero_()
            for step in range(2):
                train(optimizer, ps, rank, step)
            paths.append([p.detach().clone() for p in ps])
        assert all(torch.equal(first, second) for first, second in zip(*paths, strict=True))

    ranks(3, body)


@ONE_OF_EACH
def test_a_parameter_of_another_shape_begins_anew(ranks, hook):
    def body(rank):
        ps = parameters([(6, 5), (3,)])
        optimizer = wrapped(ps, hook)
        train(optimizer, ps, rank, 0)
        ps[0].grad = None
        ps[0].data = torch.zeros(4, 9, dtype=torch.float64)
        for step in [1, *[None] * 20]:
            train(optimizer, ps, rank, step)
        return [ps[0].detach()]

    check_all_has_come(ranks(2, body), [sum(gradient((4, 9), rank, 1) for rank in range(2)) / 2])


@ONE_OF_EACH
def test_added_parameters_are_compressed(ranks, hook):
    def body(rank):
        ps = parameters([(6, 5)])
        optimizer = wrapped(ps, hook)
        ps += parameters([(3, 4), (2,)])
        optimizer.add_param_group({"params": ps[1:]})
        assert len(optimizer._wrapping.exchanges) == 2
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step)
        return [p.detach() for p in ps]

    shapes = [(6, 5), (3, 4), (2,)]
    check_all_has_come(
        ranks(2, body), [sum(gradient(s, rank, 0, i) for rank in range(2)) / 2 for i, s in enumerate(shapes)]
    )


@ONE_OF_EACH
def test_a_gradient_that_was_changed_on_its_way_is_refused(ranks, hook):
    def body(rank):
        ps = parameters([(6, 5), (3,)])
        optimizer = wrapped(ps, hook, groups=[[ps[0]], [ps[1]]])
        (ps[0] * gradient((6, 5), rank, 0)).sum().backward()
        ps[0].grad.mul_(2)
        with pytest.raises(hvd.OrderError, match="'gradient.p0': the gradient was changed"):
            optimizer.step()
        optimizer.zero_grad()
        for step in [0, *[None] * 20]:
            train(optimizer, ps, rank, step)
        return [ps[1].detach()]

    check_all_has_come(ranks(2, body), [sum(gradient((3,), rank, 0, 1) for rank in range(2)) / 2])


# Refusals


def test_ranks_with_different_compression_are_told_so(ranks):
    hooks = [hvd.Compression.topk(0.1), hvd.Compression.topk(0.2), hvd.Compression.none]

    def body(rank):
        with pytest.raises(
            hvd.MismatchError,
            match=r"compression=.*TopK\(ratio=0.1\) on rank 0; TopK\(ratio=0.2\) on rank 1; NoneCompressor on rank 2",
        ):
            wrapped(parameters(), hooks[rank])

    ranks(3, body)


@ONE_OF_EACH
def test_adasum_is_refused(ranks, hook):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank else hvd.RemoteError, match="with op=Adasum: it needs op="):
            wrapped(parameters(), hook if rank else hvd.Compression.none, op=hvd.Adasum)

    ranks(2, body)


@pytest.mark.parametrize("hook", [hvd.Compression.int8, hvd.Compression.topk(0.5)], ids=str)
def test_single_tensors_are_refused(ranks, hook):
    def body(rank):
        for reduce in (hvd.allreduce, hvd.reducescatter):
            with pytest.raises(hvd.InvalidRequestError, match=r"works only as DistributedOptimizer\(compression=\)"):
                reduce(torch.ones(4), compression=hook)

    ranks(1, body)


# One's own


class Bits(CommHook):
    """Signs, and their mean size."""

    def __repr__(self):
        return "Bits()"

    def reduce(self, flat, memory, wire):
        mean = flat.abs().mean()
        self.fail()
        signs = torch.where(flat >= 0, mean, -mean)
        flat -= signs
        total = yield wire.allreduce(signs.clone())
        self.fail()
        count = yield wire.allgather(torch.ones(1, 1), last=True)
        assert len(count) == wire.size
        return total * wire.factor, None

    def fail(self):
        """Nothing."""


class Failing(Bits):
    """Raises on rank 1 in one of two places, at the first step."""

    def __init__(self, place):
        self.place, self.calls = place, 0

    def fail(self):
        if hvd.rank() == 1:
            self.calls += 1
            if self.calls == self.place:
                raise ArithmeticError("no luck")


def test_ones_own_hook_is_used(ranks):
    def body(rank):
        ps = parameters([(3,)])
        optimizer = wrapped(ps, Bits)
        for weights in ([1.0, -2.0, 3.0], [0.0] * 3):
            optimizer.zero_grad()
            (ps[0] * torch.tensor(weights) * (rank + 1)).sum().backward()
            optimizer.step()
        return ps[0].tolist()

    # Rank r sends 2 (r + 1) each, keeps -1, 0, 1 times r + 1, and sends 2/3 of r + 1 then; -0 counts as above 0.
    first, second = 1.5 * 2, 1.5 * 2 / 3
    assert ranks(2, body) == [pytest.approx([-first + second, first - second, -first - second])] * 2


@pytest.mark.parametrize("place", [1, 2])
def test_a_hook_that_raises_on_one_rank_raises_on_all_and_the_next_step_works(ranks, place):
    def body(rank):
        ps = parameters([(3,)])
        optimizer = wrapped(ps, Failing(place))
        loss = (ps[0] * torch.tensor([1.0, 1.0, 1.0])).sum()
        kind, message = (ArithmeticError, "no luck") if rank == 1 else (hvd.RemoteError, "no luck")
        with pytest.raises(kind, match=message):
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        (ps[0] * torch.tensor([1.0, 1.0, 1.0])).sum().backward()
        optimizer.step()
        return ps[0].tolist()

    assert ranks(3, body, timeout=10) == [[-1.0] * 3] * 3


def test_a_class_that_needs_arguments_is_refused_on_all_ranks(ranks):
    def body(rank):
        with pytest.raises(TypeError if rank else hvd.RemoteError, match="place"):
            wrapped(parameters(), Failing if rank else Bits)

    ranks(2, body)
