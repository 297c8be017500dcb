"""The short way of synchronous allreduces: it gives what the general way gives, and is left when it does not fit."""

import time

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.engine.engine import Engine

DTYPES = [torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture
def outcomes(monkeypatch):
    """What each call of the short way came to: True, False or "handle"."""
    seen = []
    general = Engine.allreduce_at_once

    def watched(self, *arguments):
        done = general(self, *arguments)
        seen.append(done if isinstance(done, bool) else "handle")
        return done

    monkeypatch.setattr(Engine, "allreduce_at_once", watched)
    return seen


def mine(rank, step, n=5, dtype=torch.float32):
    return (torch.arange(n) + 3 * rank + step).to(dtype)


def total(size, step, n=5, dtype=torch.float32):
    return sum(mine(rank, step, n, torch.float64) for rank in range(size)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", ["loss", None])
def test_a_repeated_allreduce_takes_the_short_way(ranks, outcomes, size, name):
    def body(rank):
        for step in range(30):
            kept = mine(rank, step)
            given = kept.clone()
            assert torch.equal(hvd.allreduce(given, name=name, op=hvd.Sum), total(size, step))
            assert torch.equal(given, kept)
        return True

    assert ranks(size, body) == [True] * size
    assert True in outcomes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 1001])
def test_dtypes_and_lengths_in_place(ranks, outcomes, dtype, n):
    def body(rank):
        for step in range(12):
            tensor = mine(rank, step, n, torch.int64).remainder(50).to(dtype)
            same = hvd.allreduce_(tensor, name="x", op=hvd.Max)
            assert same is tensor
            expected = torch.stack([mine(r, step, n, torch.int64).remainder(50) for r in range(3)]).amax(0).to(dtype)
            assert torch.equal(tensor, expected)

    ranks(3, body)
    assert True in outcomes


def test_factors_and_averages(ranks, outcomes):
    def body(rank):
        for step in range(12):
            mean = hvd.allreduce(mine(rank, step, dtype=torch.float64), name="mean")
            scaled = hvd.allreduce(
                mine(rank, step, dtype=torch.float64), name="sum", op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
            )
            assert torch.allclose(mean, total(2, step, dtype=torch.float64) / 2)
            assert torch.allclose(scaled, total(2, step, dtype=torch.float64) * 2)

    ranks(2, body)
    assert True in outcomes


def test_a_late_rank_is_waited_for(ranks, outcomes):
    def body(rank):
        for step in range(20):
            if step > 10 and rank == step % 2:
                time.sleep(0.02)
            assert torch.equal(hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum), total(2, step))

    ranks(2, body)
    assert "handle" in outcomes


@pytest.mark.parametrize("change", ["shape", "dtype", "op"])
def test_what_does_not_fit_raises_everywhere_and_the_next_call_works(ranks, change):
    def body(rank):
        for step in range(10):
            hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum)
        n, dtype = 5 + (change == "shape") * rank, torch.float64 if change == "dtype" and rank else torch.float32
        op = hvd.Max if change == "op" and rank else hvd.Sum
        with pytest.raises(hvd.MismatchError, match=change):
            hvd.allreduce(mine(rank, 0, n, dtype), name="x", op=op)
        for step in range(10):
            assert torch.equal(hvd.allreduce(mine(rank, step), name="x", op=hvd.Sum), total(2, step))

    ranks(2, body)


def test_what_is_no_plain_tensor_goes_the_general_way(ranks):
    def body(rank):
        wide = torch.zeros(5, 2)
        for step in range(12):
            wide[:, 0] = mine(rank, step)
            assert torch.equal(hvd.allreduce(wide[:, 0], name="strided", op=hvd.Sum), total(2, step))
            leaf = mine(rank, step).requires_grad_()
            hvd.allreduce(leaf, name="graph", op=hvd.Sum).sum().backward()
            assert torch.equal(leaf.grad, torch.full((5,), 2.0))
            with pytest.raises(ValueError, match=r"torch\.Tensor"):
                hvd.allreduce([1.0], name="list")

    ranks(2, body)


def test_other_operations_in_flight_keep_their_order(ranks):
    def body(rank):
        for step in range(15):
            first = hvd.allreduce_async(mine(rank, step), name="a", op=hvd.Sum)
            second = hvd.allreduce(mine(rank, step + 1), name="b", op=hvd.Sum)
            assert torch.equal(hvd.synchronize(first), total(2, step))
            assert torch.equal(second, total(2, step + 1))

    ranks(2, body)
