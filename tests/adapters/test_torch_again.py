"""The shorter way of asynchronous allreduces: it gives what the general way gives, and is left when it does not fit."""

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.engine.engine import Engine

LENGTHS = [5, 0, 1, 1001, 70000]


@pytest.fixture
def taken(monkeypatch):
    """Whether each submission of the shorter way was taken."""
    seen = []
    general = Engine.submit_repeated

    def watched(self, submission):
        seen.append(general(self, submission))
        return seen[-1]

    monkeypatch.setattr(Engine, "submit_repeated", watched)
    return seen


def mine(rank, what, step, dtype):
    return (torch.arange(LENGTHS[what]).remainder(50) + 3 * rank + step + 7 * what).to(dtype)


def total(size, what, step, dtype):
    return sum(mine(rank, what, step, torch.float64) for rank in range(size)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("named", [True, False])
def test_repeated_steps_take_the_shorter_way(ranks, taken, size, named):
    def body(rank):
        for step in range(12):
            tensors = [mine(rank, what, step, torch.float32) for what in range(len(LENGTHS))]
            kept = [tensor.clone() for tensor in tensors]
            begin = hvd.allreduce_async_ if step % 2 else hvd.allreduce_async
            handles = [
                begin(tensor, name=f"t{what}" if named else None, op=hvd.Sum) for what, tensor in enumerate(tensors)
            ]
            for what, handle in enumerate(handles):
                reduced = hvd.synchronize(handle)
                assert torch.equal(reduced, total(size, what, step, torch.float32))
                assert (reduced is tensors[what]) == bool(step % 2)
                assert step % 2 or torch.equal(tensors[what], kept[what])
        return True

    assert ranks(size, body) == [True] * size
    assert True in taken


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes_factors_and_averages(ranks, taken, dtype):
    def body(rank):
        for step in range(10):
            factors = {"prescale_factor": 2.0, "postscale_factor": 0.5} if dtype is torch.float64 else {}
            mean = hvd.allreduce_async(mine(rank, 0, step, dtype), name="mean")
            largest = hvd.allreduce_async(mine(rank, 1, step, dtype), name="max", op=hvd.Max)
            scaled = hvd.allreduce_async(mine(rank, 2, step, dtype), name="sum", op=hvd.Sum, **factors)
            expected = total(2, 0, step, torch.float64) / 2
            assert torch.equal(
                hvd.synchronize(mean), (expected.trunc() if dtype is torch.int64 else expected).to(dtype)
            )
            assert torch.equal(hvd.synchronize(largest), mine(1, 1, step, dtype))
            assert torch.equal(hvd.synchronize(scaled), total(2, 2, step, dtype))

    ranks(2, body)
    assert True in taken


def test_another_shape_is_negotiated_and_a_mismatch_raises_everywhere(ranks, taken):
    def body(rank):
        for step in range(20):
            n = 6 if step == 9 else (rank + 2 if step == 14 else 4)
            handle = hvd.allreduce_async(torch.full((n,), float(rank + step)), name="x", op=hvd.Sum)
            if step == 14:
                with pytest.raises(hvd.MismatchError):
                    hvd.synchronize(handle)
            else:
                assert hvd.synchronize(handle).tolist() == [2.0 * step + 1] * n

    ranks(2, body)
    assert True in taken
    assert False in taken
