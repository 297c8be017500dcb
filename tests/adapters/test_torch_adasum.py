"""DistributedOptimizer with op=Adasum against single optimizers whose steps are combined by the reference."""

from __future__ import annotations

import copy

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.collectives.reference import reduce_in_rank_order
from hvdlite.kernels import NO_FINISH
from hvdlite.lowlevel import ReduceOp
from hvdlite.torch.adasum_optimizer import make_adasum_optimizer

MAKERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.05),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.05, foreach=True),
    "fused": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5, fused=True),
}


@pytest.fixture
def model():
    """Odd shapes, and a parameter without elements."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0)))
    return model


def batch_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4 + rank, 3, generator=generator) + rank


def loss_of(model, rank, step):
    return (model(batch_of(rank, step)) ** 2).mean() + model.empty.sum()


def wrap(optimizer, model, compression=hvd.Compression.none, passes=1, **options):
    names = {p: name for name, p in model.named_parameters()}
    return make_adasum_optimizer(optimizer, names, compression, passes, **options)


def combine(vectors):
    """Adasum of one tensor of each rank, by the oracle."""
    arrays = [vector.reshape(-1).numpy() for vector in vectors]
    return torch.from_numpy(reduce_in_rank_order(arrays, ReduceOp.ADASUM, 1.0, NO_FINISH)).view(vectors[0].shape)


def expected_parameters(model, make, size, steps, passes=1, has_gradient=lambda rank, name: True):
    """Train one copy of the model for each rank, and combine their steps."""
    models = [copy.deepcopy(model) for _ in range(size)]
    optimizers = [make(one.parameters()) for one in models]
    for step in range(steps):
        starts = [p.detach().clone() for p in models[0].parameters()]
        for rank, (one, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            backward(one, optimizer, rank, step, passes)
            for name, p in one.named_parameters():
                p.grad = p.grad if has_gradient(rank, name) else None
            optimizer.step()
        for start, *ps in zip(starts, *(one.parameters() for one in models), strict=True):
            end = start + combine([p.detach() - start for p in ps])
            for p in ps:
                p.data.copy_(end)
    return [p.detach() for p in models[0].parameters()]


def backward(model, optimizer, rank, step, passes):
    optimizer.zero_grad()
    for i in range(passes):
        loss_of(model, rank, 10 * step + i).backward()


def check(ranks, model, make, size, steps=3, passes=1, has_gradient=lambda rank, name: True):
    expected = expected_parameters(model, make, size, steps, passes, has_gradient)
    copies = [copy.deepcopy(model) for _ in range(size)]

    def body(rank):
        mine = copies[rank]
        optimizer = wrap(make(mine.parameters()), mine, passes=passes)
        for step in range(steps):
            backward(mine, optimizer, rank, step, passes)
            for name, p in mine.named_parameters():
                p.grad = p.grad if has_gradient(rank, name) else None
            optimizer.step()
        return [p.detach() for p in mine.parameters()]

    first, *others = ranks(size, body)
    torch.testing.assert_close(first, expected, rtol=1e-5, atol=1e-6)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_steps_of_all_ranks_are_combined(ranks, model, size):
    check(ranks, model, MAKERS["sgd"], size)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_does_with_every_kind_of_optimizer(ranks, model, make):
    check(ranks, model, make, 2)


def test_gradients_of_several_passes_are_added_up(ranks, model):
    check(ranks, model, MAKERS["sgd"], 2, passes=3)


def test_a_parameter_without_gradient_on_some_ranks_stays_there(ranks, model):
    check(ranks, model, MAKERS["sgd"], 3, has_gradient=lambda rank, name: name != "2.bias" or rank == 1)
    check(ranks, model, MAKERS["adam"], 2, has_gradient=lambda rank, name: name != "0.weight")


@pytest.mark.parametrize(("gradients", "moved"), [([(1, 0), (1, 1)], (1.25, 0.75)), ([(2, 3), (2, 3)], (2, 3))])
def test_worked_values(ranks, gradients, moved):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = make_adasum_optimizer(torch.optim.SGD([p], lr=1.0), {p: "p"}, hvd.Compression.none, 1)
        p.grad = -torch.tensor(gradients[rank], dtype=torch.float32)
        optimizer.step()
        return tuple(p.tolist())

    assert ranks(2, body) == [moved] * 2


@pytest.mark.parametrize("compression", [hvd.Compression.fp16, hvd.Compression.bf16])
def test_deltas_travel_compressed_and_parameters_keep_their_dtype(ranks, model, compression):
    expected = expected_parameters(model, MAKERS["sgd"], 2, 1)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        mine = copies[rank]
        optimizer = wrap(MAKERS["sgd"](mine.parameters()), mine, compression)
        backward(mine, optimizer, rank, 0, 1)
        optimizer.step()
        return [p.detach() for p in mine.parameters()]

    first, second = ranks(2, body)
    torch.testing.assert_close(first, expected, rtol=1e-2, atol=1e-3)
    assert not all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(first, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_of_any_dtype_and_strides(ranks):
    def body(rank):
        half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        double = torch.nn.Parameter(torch.ones(2, 4, 3, 3, dtype=torch.float64).to(memory_format=torch.channels_last))
        ps = [half, double]
        optimizer = make_adasum_optimizer(
            torch.optim.SGD(ps, lr=0.5), {half: "half", double: "double"}, hvd.Compression.none, 1
        )
        for p in ps:
            p.grad = torch.ones_like(p)  # equal on all ranks: the mean
        optimizer.step()
        assert double.is_contiguous(memory_format=torch.channels_last)
        return [set(p.flatten().tolist()) for p in ps]

    assert ranks(2, body) == [[{0.5}, {0.5}]] * 2


def test_a_closure_gives_the_loss_and_the_gradients(ranks, model):
    expected = expected_parameters(model, MAKERS["sgd"], 2, 1)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        mine = copies[rank]
        optimizer = wrap(MAKERS["sgd"](mine.parameters()), mine)

        def closure():
            optimizer.zero_grad()
            loss = loss_of(mine, rank, 0)
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        assert loss.item() == loss_of(copies[rank + 2], rank, 0).item()
        return [p.detach() for p in mine.parameters()]

    copies += [copy.deepcopy(model) for _ in range(2)]
    torch.testing.assert_close(ranks(2, body)[1], expected)


def test_lbfgs_takes_its_own_steps(ranks):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = make_adasum_optimizer(torch.optim.LBFGS([p]), {p: "p"}, hvd.Compression.none, 1)
        goal = torch.eye(2)[rank] * 3

        def closure():
            optimizer.zero_grad()
            loss = ((p - goal) ** 2).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return p.detach()

    for p in ranks(2, body):  # orthogonal ways are added
        torch.testing.assert_close(p, torch.tensor([3.0, 3.0]))


def test_it_is_an_optimizer_of_its_class_that_shares_groups_and_state(ranks, model):
    copies = [copy.deepcopy(model) for _ in range(2)]

    def body(rank):
        original = torch.optim.Adam(copies[rank].parameters(), lr=0.5)
        optimizer = wrap(original, copies[rank], passes=2)
        scheduler = torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.1)
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert (optimizer.backward_passes_per_step, optimizer.op) == (2, hvd.Adasum)
        backward(copies[rank], optimizer, rank, 0, 2)
        optimizer.step()
        scheduler.step()  # without a warning that the original has not stepped
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=False)
        optimizer.set_backward_passes_per_step(1)
        with pytest.raises(ValueError, match="backward_passes_per_step=0"):
            optimizer.set_backward_passes_per_step(0)

    ranks(2, body)


def test_synchronizing_does_nothing_and_cannot_be_skipped(ranks):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = make_adasum_optimizer(torch.optim.SGD([p], lr=1.0), {p: "p"}, hvd.Compression.none, 1)
        p.grad = torch.full((2,), float(rank))
        optimizer.synchronize()
        assert p.grad.tolist() == [rank, rank]
        with pytest.raises(AssertionError, match="it is step\\(\\) that reduces"), optimizer.skip_synchronize():
            pass
        with pytest.raises(hvd.InvalidRequestError):
            optimizer.skip_synchronize()

    ranks(2, body)


def test_a_group_that_is_added_is_reduced_too(ranks):
    def body(rank):
        p, q = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
        optimizer = make_adasum_optimizer(torch.optim.SGD([p], lr=1.0), {p: "p"}, hvd.Compression.none, 1)
        optimizer.add_param_group({"params": [q]})
        q.grad = -torch.eye(2)[rank]
        optimizer.step()
        return q.tolist()

    assert ranks(2, body) == [[1.0, 1.0]] * 2


def test_two_optimizers_of_one_kind_of_model_do_not_meet(ranks):
    def body(rank):
        results = []
        ps = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3)]
        made = [make_adasum_optimizer(torch.optim.SGD([p], lr=1.0), {p: "w"}, hvd.Compression.none, 1) for p in ps]
        for p, optimizer in zip(ps, made, strict=True):
            p.grad = torch.ones_like(p)
            optimizer.step()
            results.append(p.tolist())
        return results

    assert ranks(2, body) == [[[-1.0] * 2, [-1.0] * 3]] * 2


@pytest.mark.parametrize("make", [MAKERS["sgd"], MAKERS["fused"]], ids=["sgd", "fused"])
@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_on_one_rank_leaves_the_step_to_the_others(ranks, make, unscale):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        optimizer = make_adasum_optimizer(make([p]), {p: "p"}, hvd.Compression.none, 1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale((p * torch.tensor([1.0, float("inf") if rank == 0 else 2.0])).sum()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return p.tolist()

    for p in ranks(2, body):
        assert p == pytest.approx([-0.1, -0.2])


def test_a_process_set_is_refused_where_there_is_more_than_one_rank(ranks):
    def body(rank):
        p = torch.nn.Parameter(torch.zeros(2))
        half = hvd.add_process_set([0])
        with pytest.raises(NotImplementedError, match=r"needs the global process set, not ProcessSet\(.*ranks=\[0\]"):
            make_adasum_optimizer(torch.optim.SGD([p]), {p: "p"}, hvd.Compression.none, 1, half)

    ranks(2, body)


def test_ranks_that_train_different_parameters_are_told_and_parameters_stay(ranks):
    def body(rank):
        ps = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        names = {p: f"p{i}" for i, p in enumerate(ps)}
        optimizer = make_adasum_optimizer(torch.optim.SGD(ps, lr=1.0), names, hvd.Compression.none, 1)
        ps[2].requires_grad_(rank == 1)
        ps[0].grad = torch.ones(2)
        with pytest.raises(hvd.MismatchError, match="group for tensor .* of 2 on rank 0; .* of 3 on rank 1"):
            optimizer.step()
        assert [p.tolist() for p in ps] == [[1.0, 1.0]] * 3
        ps[2].requires_grad_()
        optimizer.step()
        return ps[0].tolist()

    assert ranks(2, body) == [[0.0, 0.0]] * 2


def test_a_shape_that_differs_raises_on_all_and_parameters_stay(ranks):
    def body(rank):
        p = torch.nn.Parameter(torch.ones(2 + rank))
        optimizer = make_adasum_optimizer(torch.optim.SGD([p], lr=1.0), {p: "p"}, hvd.Compression.none, 1)
        p.grad = torch.ones_like(p)
        with pytest.raises(hvd.MismatchError, match=r"shape for tensor 'adasum.noname.1.p'.*\[2\] on rank 0; \[3\]"):
            optimizer.step()
        return p.tolist()

    assert ranks(2, body) == [[1.0] * 2, [1.0] * 3]
