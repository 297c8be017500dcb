"""Compressors: what travels, and what comes back."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.torch.compression import Compressor


@pytest.mark.parametrize(
    ("compression", "wire"), [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_floats_travel_as_halves_and_come_back(compression, wire, dtype):
    tensor = torch.tensor([1.0, -2.5], dtype=dtype)
    small, ctx = compression.compress(tensor)
    assert small.dtype == wire
    restored = compression.decompress(small, ctx)
    assert restored.dtype == dtype
    assert torch.equal(restored, tensor)


@pytest.mark.parametrize("compression", [hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16])
def test_integers_travel_as_they_are(compression):
    tensor = torch.tensor([2**31 - 1, -5])
    small, ctx = compression.compress(tensor)
    assert small is tensor
    assert compression.decompress(small, ctx) is tensor


def test_the_mean_of_large_halves_does_not_overflow(ranks):
    def body(rank):
        mean = hvd.allreduce(torch.full((3,), 60000.0), compression=hvd.Compression.fp16)
        assert mean.tolist() == torch.full((3,), 60000.0).half().float().tolist()

    ranks(3, body)


class Eighths(Compressor):
    """Sends eighths as integers."""

    @staticmethod
    def compress(tensor):
        return (tensor * 8).round().to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) / 8


def test_a_users_compressor_is_used(ranks):
    def body(rank):
        assert hvd.allreduce(torch.tensor([0.51 + rank]), compression=Eighths, op=hvd.Sum).item() == 2.0
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), compression=Eighths, op=hvd.Sum)
        (weight * (0.51 + rank)).sum().backward()
        optimizer.step()
        assert weight.tolist() == [-2.0, -2.0]

    ranks(2, body)


class Broken(Compressor):
    """Has not been finished."""


REDUCING = {
    "allreduce": lambda x, c: hvd.allreduce(x, name="x", compression=c),
    "allreduce with a graph": lambda x, c: hvd.allreduce(x.requires_grad_(), name="x", compression=c),
    "grouped_allreduce": lambda x, c: hvd.grouped_allreduce([x, x + 1], name="x", compression=c),
    "reducescatter": lambda x, c: hvd.reducescatter(x, "x", compression=c),
    "grouped_reducescatter": lambda x, c: hvd.grouped_reducescatter([x, x + 1], "x", compression=c),
}


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (None, hvd.InvalidRequestError, "compression=None: expected a Compressor, such as hvd.Compression.none"),
        ("fp16", hvd.InvalidRequestError, "compression='fp16'"),
        (Broken, NotImplementedError, None),
    ],
)
@pytest.mark.parametrize("call", REDUCING)
def test_what_cannot_compress_on_one_rank_raises_on_all_and_the_next_call_works(ranks, call, wrong, kind, message):
    def body(rank):
        told = message or "NotImplementedError"
        with pytest.raises(kind if rank == 1 else hvd.RemoteError, match=message if rank == 1 else told):
            REDUCING[call](torch.ones(3), wrong if rank == 1 else hvd.Compression.none)
        return hvd.allreduce(torch.tensor(1.0 + rank), name="x").item()

    assert ranks(3, body, timeout=10) == [2.0] * 3
