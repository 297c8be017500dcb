"""`hvd.shared_zeros` of `hvdlite.torch`: tensors that are reduced where they lie."""

from __future__ import annotations

import pytest
import torch

import hvdlite.torch as hvd


def in_place():
    return "in which the tensors live" in hvd.backend_reasons()["allreduce"]


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.bfloat16, torch.int32])
def test_tensors_and_views_of_them_are_reduced_in_place(on_ranks, dtype):
    def body(rank):
        tensor = hvd.shared_zeros((3, 30_000), dtype)
        assert tensor.dtype is (dtype or torch.get_default_dtype()) and not tensor.any()
        found = []
        for _ in range(6):  # the schedule is learned meanwhile
            tensor.copy_((torch.arange(3) + 3 * rank)[:, None].expand_as(tensor))
            assert hvd.allreduce_(tensor, op=hvd.Sum, name="whole") is tensor
            found.append((tensor[2, 6].item(), in_place()))
        tensor.fill_(rank + 1)
        hvd.synchronize(hvd.allreduce_async_(tensor[1], op=hvd.Sum))
        return found, tensor[0, 0].item(), tensor[1, 0].item(), in_place()

    for rank, found in enumerate(on_ranks(3, body)):
        assert found == ([(15, True)] * 6, rank + 1, 6, True)


@pytest.mark.parametrize("shape", [(), 0, (2, 0), 5, torch.Size([2, 2])])
def test_shapes_are_those_of_torch(on_ranks, shape):
    assert on_ranks(2, lambda rank: hvd.shared_zeros(shape).shape) == [torch.zeros(shape).shape] * 2


@pytest.mark.parametrize("shape", [-1, "12", None])
def test_what_is_no_shape_raises_on_all_ranks_and_the_next_call_works(on_ranks, shape):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank else hvd.RemoteError, match="shared_zeros"):
            hvd.shared_zeros(shape if rank else 3)
        return hvd.shared_zeros(3).tolist()

    assert on_ranks(2, body) == [[0, 0, 0]] * 2
