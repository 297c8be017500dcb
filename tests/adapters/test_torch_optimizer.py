"""DistributedOptimizer: what it is, when it reduces, and what it refuses."""

from __future__ import annotations

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.reducer import BATCH_BYTES, OrderError


def parameters(n=3, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, rank, factor=1.0):
    """Give parameter i the gradient factor * (i + 1) * (rank + 1)."""
    sum((p * (i + 1) * (rank + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


# What it is


@pytest.mark.parametrize("size", [1, 2])
def test_it_is_an_instance_of_the_wrapped_class(ranks, size):
    def body(rank):
        original = torch.optim.Adam(parameters(), lr=0.5, betas=(0.5, 0.7))
        optimizer = hvd.DistributedOptimizer(original)
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        assert type(optimizer).__module__ == "hvdlite.torch.optimizer"
        assert optimizer.param_groups is original.param_groups
        assert optimizer.defaults["betas"] == (0.5, 0.7)
        assert optimizer.state_dict()["param_groups"] == original.state_dict()["param_groups"]

    ranks(size, body)


def test_state_is_carried_over(ranks):
    def body(rank):
        params = parameters()
        original = torch.optim.Adam(params)
        backward(params, 0)
        original.step()
        optimizer = hvd.DistributedOptimizer(original)
        assert optimizer.state[params[0]]["step"] == 1
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert optimizer.state[params[0]]["step"] == 2

    ranks(2, body)


def test_classes_with_other_constructors_are_wrapped(ranks):
    class Picky(torch.optim.SGD):
        def __init__(self, needed, *, params):
            super().__init__(params, lr=needed)
            self.needed = needed

    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(Picky(0.5, params=params))
        backward(params, rank)
        optimizer.step()
        assert optimizer.needed == 0.5
        assert params[1].tolist() == [1 - 0.5 * 2 * 1.5] * 2

    ranks(2, body)


@pytest.mark.parametrize("of", ["original", "distributed"])
def test_a_scheduler_may_hold_either_optimizer(ranks, of):
    def body(rank):
        params = parameters()
        original = torch.optim.SGD(params, lr=1.0)
        schedule = torch.optim.lr_scheduler.StepLR(original, 1, 0.5) if of == "original" else None
        optimizer = hvd.DistributedOptimizer(original)
        schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params, rank)
            optimizer.step()  # warnings are errors here: the scheduler must see the step
            schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.25
        assert params[0].tolist() == [-(1.0 + 0.5) * 1.5] * 2

    ranks(2, body)


def test_step_hooks_run_once(ranks):
    def body(rank):
        params, calls = parameters(), []
        original = torch.optim.SGD(params, lr=1.0)
        original.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer = hvd.DistributedOptimizer(original)
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        backward(params, rank)
        optimizer.step()
        assert calls == ["pre", "post"]

    ranks(2, body)


def test_one_rank_has_no_hooks(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, named_parameters=[(f"p{i}", p) for i, p in enumerate(params)])
        backward(params, rank)
        optimizer.zero_grad()  # nothing is in flight
        backward(params, rank)
        backward(params, rank)
        optimizer.step()
        assert params[0].tolist() == [-2.0, -2.0]
        assert optimizer.seconds_waited == 0.0
        assert not params[0]._post_accumulate_grad_hooks

    ranks(1, body)


# What it computes


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("groups", [None, 1, 2, 100, "lists"])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 1.0),
        ({"op": hvd.Average, "gradient_predivide_factor": 4.0}, 1.0),
        ({"op": hvd.Sum}, "size"),
        ({"compression": hvd.Compression.fp16}, 1.0),
        ({"compression": hvd.Compression.bf16, "op": hvd.Sum}, "size"),
    ],
)
@pytest.mark.parametrize("batch", [0, 12, 2**20])  # bytes; a gradient has 8
def test_gradients_are_those_of_all_ranks(ranks, monkeypatch, batch, size, groups, options, factor):
    monkeypatch.setattr("hvdlite.torch.reducer.BATCH_BYTES", batch)

    def body(rank):
        params = parameters(5)
        chosen = [[params[3], params[0]], [params[1]]] if groups == "lists" else groups
        optimizer = wrapped(params, groups=chosen, **options)
        backward(params, rank)
        optimizer.synchronize()
        mean = (size + 1) / 2 * (size if factor == "size" else 1)
        assert gradients(params) == [(i + 1) * mean for i in range(5)]
        assert optimizer.seconds_waited > 0.0

    ranks(size, body)


def test_large_gradients_start_during_backward(ranks):
    def body(rank):
        params = parameters(2, length=BATCH_BYTES // 4)
        optimizer = wrapped(params)
        backward(params, rank)
        handles = [slot.handle for bundle in optimizer._reducer._bundles for slot in bundle.slots]
        for handle in handles:
            handle.wait()
        assert gradients(params) == [1.5, 3.0]  # without step()
        optimizer.step()
        assert gradients(params) == [1.5, 3.0]

    ranks(2, body)


def test_parameters_with_one_incoming_gradient_are_reduced_apart(ranks):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params, groups=1)
        (params[0] + params[1]).backward(torch.full((2,), rank + 1.0))
        optimizer.step()
        assert gradients(params) == [1.5, 1.5]

    ranks(2, body)


def test_a_gradient_scaler_follows_the_recipe(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale((params[0] * (rank + 1) * factor).sum()).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1000.0)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
        assert params[0].tolist() == [-1.5 - 3.0] * 2  # the infinite one was skipped on all ranks

    ranks(2, body)


def test_gradients_of_several_passes_are_summed(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=3)
        for _ in range(2):
            optimizer.zero_grad()
            for factor in (1.0, 10.0, 100.0):
                backward(params, rank, factor)
            optimizer.synchronize()
            assert gradients(params) == [111.0 * (i + 1) * 1.5 for i in range(3)]
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.set_backward_passes_per_step(1)
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]

    ranks(2, body)


def test_fewer_passes_than_declared_are_reduced_by_step(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=4)
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]

    ranks(2, body)


def test_more_passes_than_declared_are_refused(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params, named_parameters=[("weight", params[0])])
        backward(params, rank)
        with pytest.raises(OrderError, match="'gradient.weight': more than 1 backward passes"):
            backward(params, rank)
        optimizer.synchronize()

    ranks(2, body)


def test_clipping_sees_reduced_gradients(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank, 10.0)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(params, 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(params[0].data, torch.full((2,), -(0.5**0.5)))

    ranks(2, body)


def test_synchronizing_twice_warns(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank)
        optimizer.synchronize()
        if rank == 0:
            with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)"):
                optimizer.step()
        hvd.barrier()
        return params[0].tolist()

    def other_ranks_warn_too(rank):
        if rank == 0:
            return body(rank)
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank)
        optimizer.synchronize()
        optimizer._synchronized = False  # one thread catches warnings, which is global to the process
        optimizer.step()
        hvd.barrier()
        return params[0].tolist()

    assert ranks(2, other_ranks_warn_too) == [[-1.5, -1.5]] * 2


def test_a_scaler_that_skips_a_step_causes_no_warning(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank)
        optimizer.synchronize()  # and no step: the scaler found infinities
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5]

    ranks(2, body)


def test_unused_parameters_count_as_zero(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, groups=[[params[0], params[1]]])
        (params[rank] * 4).sum().backward()  # parameter 2 is used by nobody
        optimizer.step()
        assert gradients(params) == [2.0, 2.0, 0.0]

    ranks(2, body)


def test_frozen_parameters_are_left_alone(ranks):
    def body(rank):
        params = parameters(3)
        params[1].requires_grad_(False)
        optimizer = wrapped(params, groups=2)
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, None, 4.5]

    ranks(2, body)


def test_parameters_may_be_frozen_and_unfrozen(ranks):
    def body(rank):
        params = parameters(2)
        params[1].requires_grad_(False)
        optimizer = wrapped(params)
        for frozen in (1, 0, 1, 0):
            optimizer.zero_grad()
            params[frozen].requires_grad_(False)
            params[1 - frozen].requires_grad_(True)
            backward(params, rank)
            optimizer.step()
            assert gradients(params)[frozen] is None
            assert gradients(params)[1 - frozen] == 1.5 * (2 - frozen)

    ranks(2, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_has_both_modes(ranks, set_to_none):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            assert gradients(params) == [None, None] or not set_to_none
            backward(params, rank)
            optimizer.step()
            assert gradients(params) == [1.5, 3.0]

    ranks(2, body)


def test_gradients_in_flight_may_not_be_cleared_or_replaced(ranks):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        backward(params, rank)
        with pytest.raises(OrderError, match=r"zero_grad\(\) came after backward\(\)"):
            optimizer.zero_grad()
        with pytest.raises(OrderError, match="set_backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(2)
        with pytest.raises(OrderError, match="synchronize"), optimizer.skip_synchronize():
            optimizer.step()
        params[1].grad = None
        with pytest.raises(OrderError, match="'gradient.noname.0.1': the gradient was cleared or replaced"):
            optimizer.step()
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0]

    ranks(2, body)


def test_a_closure_is_reduced_each_time(ranks):
    def body(rank):
        x = nn.Parameter(torch.tensor([5.0, -3.0], dtype=torch.float64))
        optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS([x], lr=1.0, max_iter=4))
        target = torch.tensor([1.0, 2.0]) + rank

        def closure():
            optimizer.zero_grad()
            loss = ((x - target) ** 2).sum()
            loss.backward()
            return hvd.allreduce(loss.detach())

        for _ in range(3):
            optimizer.step(closure)
        torch.testing.assert_close(x.data, torch.tensor([1.5, 2.5], dtype=torch.float64))
        return x.tolist()

    first, second = ranks(2, body)
    assert first == second


def test_parameters_added_later_are_reduced(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params[:1], named_parameters=[("first", params[0])])
        optimizer.add_param_group({"params": params[1:], "lr": 0.5})
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]
        assert [p[0].item() for p in params] == [-1.5, 1 - 1.5, 2 - 2.25]

    ranks(2, body)


def test_loading_a_state_begins_a_new_step(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        state = copy.deepcopy(optimizer.state_dict())
        backward(params, rank)
        state["param_groups"][0]["lr"] = 0.25
        optimizer.load_state_dict(state)
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert params[0].tolist() == [-0.375, -0.375]

    ranks(2, body)


def test_ranks_outside_the_set_keep_their_gradients(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        params = parameters(2)
        optimizer = wrapped(params, process_set=pair)
        backward(params, rank**2)
        optimizer.step()
        assert gradients(params) == ([2.0, 4.0] if rank == 1 else [3.0, 6.0])

    ranks(3, body)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_gradients_of_any_layout_are_reduced_in_place(ranks, memory_format):
    def body(rank):
        weight = nn.Parameter(torch.zeros(4, 3, 2, 2).contiguous(memory_format=memory_format))
        pattern = torch.arange(48.0).reshape(4, 3, 2, 2)
        optimizer = wrapped([weight])
        (weight * pattern * (rank + 1)).sum().backward()
        optimizer.step()
        assert torch.equal(weight.data, -1.5 * pattern)
        assert weight.grad.is_contiguous(memory_format=memory_format)

    ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_parameters_of_any_dtype_are_reduced(ranks, dtype):
    def body(rank):
        weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = wrapped([weight])
        (weight * (rank + 1)).real.sum().backward()
        optimizer.step()
        assert weight.grad.dtype == dtype
        assert weight.tolist() == [-1.5] * 3

    ranks(2, body)


# Several optimizers


@pytest.mark.parametrize("named", [True, False])
def test_two_optimizers_with_equal_names_do_not_meet(ranks, named):
    def body(rank):
        first, second = parameters(2), parameters(3, length=5)
        names = (lambda ps: [(f"{i}.weight", p) for i, p in enumerate(ps)]) if named else (lambda ps: None)
        one = wrapped(first, named_parameters=names(first))
        two = wrapped(second, named_parameters=names(second))
        backward(first, rank)
        backward(second, rank, 10.0)
        two.step()
        one.step()
        assert gradients(first) == [1.5, 3.0]
        assert gradients(second) == [15.0, 30.0, 45.0]

    ranks(2, body)


def test_an_optimizer_that_is_gone_no_longer_listens(ranks):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank)
        optimizer.step()
        del optimizer
        gc.collect()
        again = wrapped(params)
        again.zero_grad()
        backward(params, rank)
        again.step()
        assert gradients(params) == [1.5]

    ranks(2, body)


# What it refuses


def cases():
    p, q = parameters(2)
    sgd = lambda: torch.optim.SGD([p, q], lr=1.0)  # noqa: E731
    return {
        "expected a torch.optim.Optimizer, got int": lambda: hvd.DistributedOptimizer(3),
        "distributed already": lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())),
        r"backward_passes_per_step=0": lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0),
        "needs op=Average": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0),
        "op=Min: expected Average or Sum": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Min),
        "op=Adasum: expected Average or Sum; .* later version": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum),
        r"groups=0: expected a positive number": lambda: hvd.DistributedOptimizer(sgd(), groups=0),
        r"groups='x'.*list of lists": lambda: hvd.DistributedOptimizer(sgd(), groups="x"),
        r"groups=\[tensor": lambda: hvd.DistributedOptimizer(sgd(), groups=[torch.ones(1)]),
        "some members are not tensors": lambda: hvd.DistributedOptimizer(sgd(), groups=[[1]]),
        "in more than one place": lambda: hvd.DistributedOptimizer(sgd(), groups=[[p, q], [p]]),
        "more than once: a": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[("a", p), ("a", q)]),
        r"parameter 1 of group 0": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[("a", p)]),
        r"expected \(name, parameter\) pairs": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=[p, q]),
        r"expected \(name, parameter\) pairs; see": lambda: hvd.DistributedOptimizer(sgd(), named_parameters=5),
    }


@pytest.mark.parametrize("message", list(cases()))
def test_wrong_arguments_are_refused(ranks, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            cases()[message]()

    ranks(1, body)


def test_num_groups_is_the_old_name_of_groups(ranks):
    def body(rank):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(parameters(), num_groups=2)
        assert [str(one.message) for one in caught] == ["num_groups is deprecated; use groups."]

    ranks(1, body)


def test_it_needs_init():
    with pytest.raises(hvd.NotInitializedError):
        wrapped(parameters())


def test_sparse_gradients_are_refused_on_all_ranks(ranks):
    def body(rank):
        table, weight = nn.Embedding(4, 2, sparse=rank == 1), parameters(1)[0]
        optimizer = wrapped([table.weight, weight])
        (table(torch.tensor([1])).sum() + weight.sum() * (rank + 1)).backward()
        error = (hvd.RemoteError, hvd.InvalidRequestError)[rank]
        with pytest.raises(error, match="sparse"):
            optimizer.step()
        assert weight.grad.tolist() == [1.5, 1.5]  # the other gradients came through
        hvd.barrier()

    ranks(2, body)


def test_gradients_that_differ_between_ranks_raise_on_all(ranks):
    def body(rank):
        params = [nn.Parameter(torch.zeros(2 + rank)), nn.Parameter(torch.zeros(2))]
        optimizer = wrapped(params, named_parameters=[("a", params[0]), ("b", params[1])])
        backward(params, rank)
        with pytest.raises(hvd.MismatchError, match=r"'gradient.a'.*\[2\] on rank 0; \[3\] on rank 1"):
            optimizer.step()
        hvd.barrier()

    ranks(2, body)
