"""Calls in an unusual order, backward passes and closures that raise: nothing is reduced twice, nothing hangs."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.trips import OrderError

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])
VIEWS = pytest.mark.parametrize("views", [False, True], ids=["own", "views"])
# With a parameter that took no part, gradients are in flight until step().
UNUSED = pytest.mark.parametrize("unused", [False, True], ids=["reduced", "in flight"])


def parameters(n=2, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def loss_of(params, rank):
    """Gradients are (i + 1) * (rank + 1): their sum over two ranks is 3 * (i + 1)."""
    return sum((p * (i + 1) * (rank + 1)).sum() for i, p in enumerate(params))


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def values(params):
    return [p[0].item() for p in params]


# Between backward() and step()


def add_group(optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.full((3,), 7.0))]})


def load_own_state(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("act", [add_group, load_own_state])
@UNUSED
@VIEWS
def test_an_act_between_backward_and_step_reduces_nothing_twice(ranks, act, unused, views):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, op=hvd.Sum, gradient_as_bucket_view=views)
        for step in (1, 2):
            optimizer.zero_grad()
            loss_of(params[: 3 - unused], rank).backward()
            act(optimizer)
            optimizer.step()
            assert gradients(params) == [3.0, 6.0, 0.0 if unused else 9.0]
            assert values(params) == [-3.0 * step, 1 - 6.0 * step, 2 - (0.0 if unused else 9.0 * step)]

    ranks(2, body)


def test_new_passes_after_backward_begin_with_the_next_step(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=hvd.Sum)
        loss_of(params, rank).backward()
        optimizer.set_backward_passes_per_step(2)
        optimizer.step()
        assert values(params) == [-3.0, -5.0]
        optimizer.zero_grad()
        loss_of(params, rank).backward()
        assert gradients(params) == [rank + 1.0, 2.0 * (rank + 1)]
        loss_of(params, rank).backward()
        assert gradients(params) == [6.0, 12.0]

    ranks(2, body)


def test_new_passes_are_refused_while_gradients_are_in_flight(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, op=hvd.Sum)
        loss_of(params[:2], rank).backward()
        with pytest.raises(OrderError, match=r"set_backward_passes_per_step\(\) came after backward"):
            optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 1
        optimizer.step()
        assert gradients(params) == [3.0, 6.0, 0.0]

    ranks(2, body)


def test_parameters_added_in_flight_are_reduced_from_the_next_step_on(ranks):
    def body(rank):
        params = parameters(4)
        optimizer = wrapped(params[:3], op=hvd.Sum)
        loss_of(params[:2], rank).backward()
        optimizer.add_param_group({"params": params[3:]})
        optimizer.step()
        optimizer.zero_grad()
        loss_of(params, rank).backward()
        assert gradients(params) == [3.0, 6.0, 9.0, 12.0]

    ranks(2, body)


@VIEWS
def test_a_gradient_may_be_replaced_between_passes(ranks, views):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=2, gradient_as_bucket_view=views)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params, rank).backward()
            for p in params:
                p.grad = p.grad / 2
            loss_of(params, rank).backward()
            assert gradients(params) == [1.5 * 1.5, 2 * 1.5 * 1.5]
            optimizer.step()

    ranks(2, body)


@VIEWS
def test_skipping_synchronize_without_having_called_it_is_refused(ranks, views):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        loss_of(params[:2], rank).backward()
        with pytest.raises(OrderError, match=r"skip_synchronize.*not reduced"), optimizer.skip_synchronize():
            optimizer.step()
        assert values(params) == [0.0, 1.0, 2.0]
        optimizer.step()
        assert values(params) == [-1.5, -2.0, 2.0]

    ranks(2, body)


# Two backward passes


def twice(optimizer, params, rank):
    loss_of(params, rank).backward()
    with pytest.raises(OrderError, match="added up"):
        loss_of(params, rank).backward()


@VIEWS
def test_step_raises_again_what_backward_has_raised(ranks, views):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=hvd.Sum, gradient_as_bucket_view=views)
        twice(optimizer, params, rank)
        with pytest.raises(OrderError, match="added up"):
            optimizer.step()
        assert values(params) == [0.0, 1.0]
        optimizer.zero_grad()
        loss_of(params, rank).backward()
        optimizer.step()
        assert values(params) == [-3.0, -5.0]

    ranks(2, body)


def test_clearing_the_gradients_clears_what_backward_has_raised(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=hvd.Sum)
        for step in (1, 2):
            twice(optimizer, params, rank)
            optimizer.zero_grad()
            loss_of(params, rank).backward()
            optimizer.step()
            assert values(params) == [-3.0 * step, 1 - 6.0 * step]
            optimizer.zero_grad()

    ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_a_sum_is_not_added_up_twice_with_create_graph(ranks):
    def body(rank):
        (weight,) = params = [nn.Parameter(torch.full((2,), 1.0))]
        optimizer = wrapped(params, op=hvd.Sum)
        (weight**2 * (rank + 1)).sum().backward(create_graph=True)
        assert gradients(params) == [6.0]
        with pytest.raises(OrderError, match="added up twice"):
            (weight**2 * (rank + 1)).sum().backward(create_graph=True)
        optimizer.zero_grad()

    ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_two_passes_with_create_graph_are_averaged(ranks):
    def body(rank):
        (weight,) = params = [nn.Parameter(torch.full((2,), 1.0))]
        optimizer = wrapped(params, backward_passes_per_step=2)
        for _ in range(2):
            (weight**2 * (rank + 1)).sum().backward(create_graph=True)
        assert gradients(params) == [6.0]
        optimizer.step()
        assert values(params) == [-5.0]
        optimizer.zero_grad()

    ranks(2, body)


# Two live optimizers with some parameters in common


@pytest.mark.parametrize("options", [{"op": hvd.Sum}, {"gradient_as_bucket_view": True}], ids=["sum", "views"])
def test_two_optimizers_may_not_reduce_a_parameter_twice(ranks, options):
    def body(rank):
        params = parameters(3)
        first = wrapped(params[:2], **options)
        with pytest.raises(hvd.InvalidRequestError, match=r"shape \[2\] is in another distributed optimizer"):
            wrapped(params[1:], **options)
        loss_of(params[:2], rank).backward()  # the first one goes on
        first.step()
        scale = 1.0 if options.get("op") == hvd.Sum else 0.5
        assert gradients(params) == [3.0 * scale, 6.0 * scale, None]

    ranks(2, body)


def test_two_optimizers_may_average_a_parameter_both(ranks):
    def body(rank):
        params = parameters(3)
        one, two = wrapped(params[:2]), wrapped(params[1:])
        loss_of(params, rank).backward()
        assert gradients(params) == [1.5, 3.0, 4.5]
        one.step()
        two.step()
        assert values(params) == [-1.5, 1 - 2 * 3.0, 2 - 4.5]

    ranks(2, body)


# What an optimizer has of its own


def test_a_scheduler_of_the_original_optimizer_works_after_loading(ranks):
    def body(rank):
        params = parameters()
        original = torch.optim.SGD(params, lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(original, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(original)
        rates = []
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(params, rank).backward()
            before = values(params)[0]
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            assert before - values(params)[0] == rates[-1] * optimizer.state[params[0]]["momentum_buffer"][0].item()
            scheduler.step()
            load_own_state(optimizer)
        assert rates == [1.0, 0.5, 0.25]

    ranks(2, body)


def test_hooks_of_a_step_run_once_after_loading_and_after_the_reduction(ranks):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(("before", gradients(params))))
        optimizer.register_step_post_hook(lambda *_: seen.append(("after", values(params)[0])))
        for step in (1, 2):
            seen.clear()
            optimizer.zero_grad()
            loss_of(params[:2], rank).backward()
            optimizer.step()
            assert seen == [("before", [1.5, 3.0, 0.0]), ("after", -1.5 * step)]
            load_own_state(optimizer)

    ranks(2, body)


class Plain(torch.optim.SGD):
    """With methods that take other arguments than torch's."""

    def zero_grad(self):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self, scale):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= scale * p.grad
        return scale


@pytest.mark.parametrize("size", [1, 2])
def test_methods_may_have_other_arguments(ranks, size):
    def body(rank):
        params = parameters()
        optimizer = hvd.DistributedOptimizer(Plain(params, lr=1.0))
        mean = (size + 1) / 2
        loss_of(params, rank).backward()
        assert optimizer.step(2.0) == 2.0
        assert values(params) == [-2 * mean, 1 - 4 * mean]
        optimizer.zero_grad()
        assert gradients(params) == [None, None]
        loss_of(params, rank).backward()
        assert optimizer.step(scale=4.0) == 4.0
        assert values(params) == [-6 * mean, 1 - 12 * mean]

    ranks(size, body)


# What raises


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_closure_that_raises_on_one_rank_raises_on_all(ranks, when, size):
    mean = (size + 1) / 2

    def body(rank):
        params = parameters()
        optimizer = wrapped(params)
        broken = rank == 0

        def closure():
            optimizer.zero_grad()
            loss = loss_of(params, rank)
            if broken and when == "before backward":
                raise ZeroDivisionError
            loss.backward()
            if broken:
                raise ZeroDivisionError
            return loss

        with pytest.raises(hvd.HorovodInternalError if rank else ZeroDivisionError):
            optimizer.step(closure)
        assert values(params) == [0.0, 1.0]
        broken = False
        optimizer.step(closure)
        assert values(params) == [-mean, 1 - 2 * mean]
        assert gradients(params) == [mean, 2 * mean]

    ranks(size, body, timeout=5.0)


def raise_once():
    """Return a hook of a tensor that raises when it is first called."""
    calls = []

    def hook(_):
        calls.append(None)
        if len(calls) == 1:
            raise ZeroDivisionError

    return hook


def backward_with(hook, params, rank):
    """The gradient of the second parameter is there when `hook` is called, that of the first one is not."""
    hidden = params[0].clone()
    if hook is not None:
        hidden.register_hook(hook)
    loss_of([hidden, params[1]], rank).backward()


@OPS
@VIEWS
@pytest.mark.parametrize("size", [2, 3])
def test_a_backward_that_raises_on_one_rank_ends_the_step_of_all(ranks, size, views, op):
    total = size * (size + 1) / 2 / (1 if op == hvd.Sum else size)

    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=op, gradient_as_bucket_view=views)
        hook = raise_once() if rank == 0 else None
        for step in range(3):
            optimizer.zero_grad()
            if step or rank:
                backward_with(hook, params, rank)
            else:
                with pytest.raises(ZeroDivisionError):
                    backward_with(hook, params, rank)
                continue
            if step == 0:
                with pytest.raises(hvd.HorovodInternalError, match="backward.*raised on rank 0, so"):
                    optimizer.step()
            else:
                optimizer.step()
                assert gradients(params) == [total, 2 * total]
        assert values(params) == [-2 * total, 1 - 4 * total]

    ranks(size, body, timeout=5.0)


@VIEWS
def test_clearing_without_a_step_forgets_that_another_rank_raised(ranks, views):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        hook = raise_once() if rank == 0 else None
        with contextlib.suppress(ZeroDivisionError):
            backward_with(hook, params, rank)
        for _ in range(2):
            optimizer.zero_grad()
            backward_with(hook, params, rank)
            optimizer.step()
            assert gradients(params) == [1.5, 3.0]

    ranks(2, body, timeout=5.0)


@VIEWS
def test_different_numbers_of_backward_passes_are_told_with_the_ranks(ranks, views):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        loss_of(params, rank).backward()
        if rank:
            optimizer.step()
            optimizer.zero_grad()
        loss_of(params, rank).backward()
        with pytest.raises(OrderError, match="1 on ranks 1, 2; 2 on rank 0. Every rank must run backward"):
            optimizer.step()
        optimizer.zero_grad()
        loss_of(params, rank).backward()
        optimizer.step()
        assert gradients(params) == [2.0, 4.0]

    ranks(3, body, timeout=10.0)


@OPS
@VIEWS
@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_goes_on_after_a_backward_that_raises_on_all_ranks(ranks, op, views, set_to_none):
    total = 3.0 if op == hvd.Sum else 1.5

    def body(rank):
        params = parameters()
        model = nn.ParameterList(params)
        optimizer = wrapped(params, op=op, gradient_as_bucket_view=views)
        hook = raise_once()
        with pytest.raises(ZeroDivisionError):
            backward_with(hook, params, rank)
        for step in (1, 2):
            model.zero_grad(set_to_none=set_to_none)
            backward_with(hook, params, rank)
            assert gradients(params) == [total, 2 * total]
            optimizer.step()
            assert values(params) == [-total * step, 1 - 2 * total * step]

    ranks(2, body, timeout=5.0)


@VIEWS
def test_a_sum_of_which_no_step_was_made_may_be_set_to_zero(ranks, views):
    def body(rank):
        params = parameters()
        model = nn.ParameterList(params)
        optimizer = wrapped(params, op=hvd.Sum, gradient_as_bucket_view=views)
        for step in range(4):
            model.zero_grad(set_to_none=False)
            (loss_of(params, rank) * (float("nan") if step == 1 else 1.0)).backward()
            if step == 1:
                assert all(p.grad.isnan().all() for p in params)
                continue
            assert gradients(params) == [3.0, 6.0]
            optimizer.step()
        assert values(params) == [-9.0, -17.0]

    ranks(2, body)


# What is left behind


@VIEWS
@UNUSED
def test_models_and_optimizers_that_are_deleted_are_freed(ranks, views, unused):
    def body(rank):
        params = parameters(3)
        optimizer = wrapped(params, gradient_as_bucket_view=views)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(params[: 3 - unused], rank).backward()
            optimizer.step()
        left = [weakref.ref(one) for one in (params[0], params[-1], params[0].grad, optimizer)]
        del params, optimizer
        gc.collect()
        return [one() for one in left]

    assert ranks(2, body) == [[None] * 4] * 2


# Wrong arguments


def wrong():
    return {
        r"gradient_predivide_factor=0: ": lambda ps: wrapped(ps, gradient_predivide_factor=0),
        r"gradient_predivide_factor=nan: ": lambda ps: wrapped(ps, gradient_predivide_factor=float("nan")),
        r"gradient_predivide_factor=inf: ": lambda ps: wrapped(ps, gradient_predivide_factor=float("inf")),
        r"compression='fp16': expected a Compressor": lambda ps: wrapped(ps, compression="fp16"),
        r"parameter 'noname\.0\.0' has no shape yet": lambda _: wrapped([nn.UninitializedParameter()]),
    }


@pytest.mark.parametrize("message", list(wrong()))
@pytest.mark.parametrize("on_one", [False, True], ids=["all", "one"])
def test_wrong_arguments_raise_on_all_ranks_even_if_one_has_them(ranks, message, on_one):
    def body(rank):
        params = parameters()
        if rank == 1 or not on_one:
            with pytest.raises(hvd.InvalidRequestError, match=message):
                wrong()[message](params)
        else:
            with pytest.raises(hvd.RemoteError, match=message):
                wrapped(params)
        optimizer = wrapped(params)
        loss_of(params, rank).backward()
        optimizer.step()
        assert gradients(params) == [2.0, 4.0]

    ranks(3, body, timeout=5.0)
