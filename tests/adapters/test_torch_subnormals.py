"""Ranks get the same bits also where the threads of some take subnormal numbers for zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.kernels import flushes_subnormals


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_thread_that_flushes_subnormals_reduces_nothing(ranks, dtype):
    least = torch.finfo(dtype).smallest_normal
    values = torch.tensor([0.25, 0.5, 0.75]).to(torch.float64) * least

    def body(rank):
        tensor = values.to(dtype)
        if rank == 0:
            assert torch.set_flush_denormal(True)
        assert flushes_subnormals() == (rank == 0)
        try:
            found = [hvd.allreduce(tensor, op=hvd.Sum, name="x") for _ in range(12)]  # negotiated, then learned
            found += [hvd.allreduce(tensor, op=hvd.Sum, name=f"y{i}") for i in range(3)]
            return [one.view(torch.uint8).numpy().tobytes() for one in found]
        finally:
            torch.set_flush_denormal(False)

    expected = (values * 2).to(dtype).view(torch.uint8).numpy().tobytes()
    assert np.count_nonzero(np.frombuffer(expected, np.uint8))
    for found in ranks(2, body):
        assert found == [expected] * 15
