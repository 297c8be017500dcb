"""Several backward passes per step, no_sync(), and clearing gradients at any time."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.trips import OrderError

OPS = pytest.mark.parametrize("op", [hvd.Average, hvd.Sum], ids=["average", "sum"])


def parameters(n=3, length=2):
    return [nn.Parameter(torch.full((length,), float(i))) for i in range(n)]


def wrapped(params, **options):
    return hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)


def backward(params, rank, factor=1.0):
    """Add factor * (i + 1) * (rank + 1) to the gradient of parameter i. All values are exact."""
    sum((p * (i + 1) * (rank + 1) * factor).sum() for i, p in enumerate(params)).backward()


def gradients(params):
    return [None if p.grad is None else p.grad[0].item() for p in params]


def clear(how, params, optimizer):
    if how == "by hand":
        for p in params:
            p.grad = None
    else:
        owner, set_to_none = how
        (nn.ParameterList(params) if owner == "model" else optimizer).zero_grad(set_to_none=set_to_none)


# Passes


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("groups", [None, 2])
@OPS
def test_gradients_of_several_passes_are_summed_and_reduced_in_the_last(ranks, size, groups, op):
    mean = (size + 1) / 2 * (size if op == hvd.Sum else 1)

    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=3, groups=groups, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            local = 0.0
            for factor in (1.0, 10.0):
                backward(params, rank, factor)
                local += factor * (rank + 1)
                assert gradients(params) == [local, 2 * local, 3 * local]
            backward(params, rank, 100.0)
            assert gradients(params) == [111.0 * mean, 222.0 * mean, 333.0 * mean]  # before step()
            optimizer.step()
            assert gradients(params) == [111.0 * mean, 222.0 * mean, 333.0 * mean]
        return [p[0].item() for p in params]

    assert ranks(size, body) == [[i - 2 * (i + 1) * 111.0 * mean for i in range(3)]] * size


def test_the_number_of_passes_may_be_changed_between_steps(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=2)
        for passes in (2, 1, 3):
            optimizer.set_backward_passes_per_step(passes)
            assert optimizer.backward_passes_per_step == passes
            optimizer.zero_grad()
            for _ in range(passes):
                backward(params, rank)
            assert gradients(params) == [1.5 * passes, 3.0 * passes, 4.5 * passes]
            optimizer.step()

    ranks(2, body)


@pytest.mark.parametrize("last", [1, 2, 3])
@OPS
def test_the_last_group_of_an_epoch_may_be_short(ranks, last, op):
    mean = {hvd.Average: 1.5, hvd.Sum: 3.0}[op]

    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=4, op=op)
        for _epoch in range(2):
            for passes in (4, last):
                optimizer.zero_grad()
                for _ in range(passes):
                    backward(params, rank)
                optimizer.step()
                assert gradients(params) == [passes * mean * i for i in (1, 2, 3)]

    ranks(2, body)


def test_ranks_may_have_different_numbers_of_passes_in_the_last_group(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=2)
        for _ in range(2):
            optimizer.zero_grad()
            for _ in range((2, 1, 0)[rank]):
                backward(params, rank)
            optimizer.step()
            assert gradients(params) == pytest.approx([4 / 3 * i for i in (1, 2, 3)])  # (2 * 1 + 1 * 2 + 0 * 3) / 3

    ranks(3, body)


def test_a_further_pass_adds_its_average(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=2)
        for _ in range(2):
            optimizer.zero_grad()
            for factor, total in ((1.0, None), (10.0, 11.0), (100.0, 111.0), (1000.0, 1111.0)):
                backward(params, rank, factor)
                if total is not None:
                    assert gradients(params) == [1.5 * total, 3.0 * total, 4.5 * total]
            optimizer.step()
        assert [p[0].item() for p in params] == [i - 2 * (i + 1) * 1.5 * 1111 for i in range(3)]

    ranks(2, body)


def test_a_further_pass_of_a_sum_is_refused_and_the_next_step_works(ranks):
    def body(rank):
        params = parameters()
        names = [("a", params[0]), ("b", params[1]), ("c", params[2])]
        optimizer = wrapped(params, named_parameters=names, op=hvd.Sum)
        backward(params, rank)
        with pytest.raises(OrderError, match=r"'gradient.[abc]'.*backward_passes_per_step") as caught:
            backward(params, rank)
            optimizer.step()
        assert isinstance(caught.value, AssertionError)
        assert isinstance(caught.value, ValueError)
        hvd.barrier()
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [3.0, 6.0, 9.0]

    ranks(2, body)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("how", [("model", True), ("optimizer", True), ("optimizer", False), "by hand"], ids=str)
@OPS
def test_a_step_begins_anew_when_gradients_are_cleared(ranks, passes, how, op):
    mean = {hvd.Average: 1.5, hvd.Sum: 3.0}[op]

    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=passes, op=op)
        for before in (1, 2, 0):  # as many passes, or half of them, or none are thrown away
            for _ in range(min(before, passes)):
                backward(params, rank, 1000.0)
            clear(how, params, optimizer)
            for _ in range(passes):
                backward(params, rank)
            assert gradients(params) == [passes * mean * i for i in (1, 2, 3)]
            optimizer.step()
            clear(how, params, optimizer)

    ranks(2, body)


# Clearing


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("length", [2, 300_001])
def test_gradients_in_flight_may_be_cleared(ranks, set_to_none, length):
    def body(rank):
        params = parameters(3, length)
        optimizer = wrapped(params)
        backward(params[:2], rank, 1000.0)  # the third is missing: step() would have to finish the others
        optimizer.zero_grad(set_to_none=set_to_none)
        assert gradients(params)[:2] == ([None, None] if set_to_none else [0.0, 0.0])
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]
        assert [p[-1].item() for p in params] == [-1.5, 1 - 3.0, 2 - 4.5]

    ranks(2, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_may_be_cleared_at_any_time(ranks, set_to_none):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.zero_grad(set_to_none)
            backward(params, rank)
            optimizer.synchronize()
            optimizer.zero_grad(set_to_none=set_to_none)
            assert gradients(params) == ([None, None] if set_to_none else [0.0, 0.0])
            backward(params, rank)
            optimizer.step()
            assert gradients(params) == [1.5, 3.0]
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.zero_grad()
        assert [p[0].item() for p in params] == [-3.0, 1 - 6.0]

    ranks(2, body)


@pytest.mark.parametrize("zero_grad_first", [True, False])
def test_an_order_that_skips_a_step_causes_no_warning(ranks, zero_grad_first):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params)
        backward(params, rank)
        optimizer.synchronize()  # and no step: a scaler found infinities
        (optimizer if zero_grad_first else nn.ParameterList(params)).zero_grad()
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [1.5]

    ranks(2, body)


def test_clipping_an_unfinished_sum_is_refused_and_the_next_step_works(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params, backward_passes_per_step=3)
        backward(params, rank, 100.0)
        nn.utils.clip_grad_norm_(params, 1.0)  # each rank would clip its own
        with pytest.raises(OrderError, match=r"synchronize\(\)"):
            optimizer.step()
        optimizer.zero_grad()
        backward(params, rank)
        optimizer.synchronize()
        assert gradients(params) == [1.5, 3.0, 4.5]
        nn.utils.clip_grad_norm_(params, 100.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    ranks(2, body)


# no_sync


@pytest.mark.parametrize("size", [1, 2, 3])
@OPS
def test_passes_within_no_sync_are_summed_and_reduced_with_the_next(ranks, size, op):
    mean = (size + 1) / 2 * (size if op == hvd.Sum else 1)

    def body(rank):
        params = parameters()
        optimizer = wrapped(params, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                for factor in (1.0, 10.0):
                    backward(params, rank, factor)
            assert gradients(params) == [11.0 * (rank + 1) * i for i in (1, 2, 3)]
            backward(params, rank, 100.0)
            assert gradients(params) == [111.0 * mean * i for i in (1, 2, 3)]
            optimizer.step()
        return [p[0].item() for p in params]

    assert ranks(size, body) == [[i - 2 * (i + 1) * 111.0 * mean for i in range(3)]] * size


def test_step_reduces_what_no_sync_has_left(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params)
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(params, rank)
                backward(params, rank, 10.0)
            optimizer.step()
            assert gradients(params) == [11 * 1.5, 11 * 3.0, 11 * 4.5]

    ranks(2, body)


def test_ranks_talk_to_nobody_within_no_sync(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params)
        with optimizer.no_sync():
            for _ in range(2 * rank + 1):  # nobody would match the passes of rank 1
                backward(params, rank)
        backward(params, rank)
        optimizer.step()
        assert gradients(params) == [(2 * 1 + 4 * 2) / 2 * i for i in (1, 2, 3)]

    ranks(2, body)


def test_no_sync_ends_when_its_block_raises(ranks):
    def body(rank):
        params = parameters()
        optimizer = wrapped(params)
        with pytest.raises(ZeroDivisionError), optimizer.no_sync():
            backward(params, rank)
            raise ZeroDivisionError
        optimizer.zero_grad()
        backward(params, rank)
        assert gradients(params) == [1.5, 3.0, 4.5]
        optimizer.step()
        assert gradients(params) == [1.5, 3.0, 4.5]

    ranks(2, body)


# Synchronizing by hand


@OPS
def test_step_after_synchronize_warns_and_does_not_reduce_again(ranks, op):
    def body(rank):
        params = parameters(1)
        optimizer = wrapped(params, op=op)
        backward(params, rank)
        optimizer.synchronize()
        with torch.no_grad():
            params[0].grad *= 2.0 + rank  # had they been reduced again, the ranks would agree
        optimizer.step()
        return params[0].tolist()

    with pytest.warns(UserWarning, match=r"optimizer.step\(\) called without optimizer.skip_synchronize\(\)") as caught:
        first, second = ranks(2, body)
    assert len(caught) == 2
    reduced = {hvd.Average: 1.5, hvd.Sum: 3.0}[op]
    assert (first, second) == ([-2 * reduced] * 2, [-3 * reduced] * 2)


@OPS
def test_synchronize_then_skip_synchronize_reduces_once(ranks, op):
    def body(rank):
        params = parameters(2)
        optimizer = wrapped(params, op=op)
        for _ in range(2):
            optimizer.zero_grad()
            backward(params[:1], rank)
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
            assert gradients(params) == [{hvd.Average: 1.5, hvd.Sum: 3.0}[op], 0.0]

    ranks(2, body)
