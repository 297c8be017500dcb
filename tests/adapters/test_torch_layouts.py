"""Strides and dtypes of gradients are kept, and parameters that share memory or layers are reduced once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

OPTIONS = pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 1},
        {"compression": hvd.Compression.fp16},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "groups": 2},
    ],
    ids=["own", "groups", "fp16", "views", "views and groups"],
)
# How a tensor of consecutive values becomes a parameter's.
LAYOUTS = {
    "contiguous": lambda t: t.clone(),
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.transpose(0, 3).contiguous().transpose(0, 3),
    "permuted": lambda t: t.permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1),
    "with gaps": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "one column": lambda t: t[:, :1].contiguous(memory_format=torch.channels_last),
    "empty": lambda t: t[:, :0],
}


def strides_of(tensor):
    """Return the strides that matter."""
    return [stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def pattern_of(tensor):
    return torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@OPTIONS
def test_gradients_keep_their_strides(ranks, size, layout, options):
    def body(rank):
        weight = nn.Parameter(LAYOUTS[layout](torch.zeros(4, 3, 2, 5)))
        other = nn.Parameter(torch.zeros(3))
        strides, pattern = weight.stride(), pattern_of(weight)
        alone = weight.detach().clone().requires_grad_()  # clone keeps the strides of what is dense
        (alone * pattern).sum().backward()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight, other], lr=1.0), op=hvd.Sum, **options)
        for _ in range(2):
            optimizer.zero_grad()
            ((weight * pattern).sum() * (rank + 1) + (other * pattern_of(other)).sum()).backward()
            assert torch.equal(weight.grad, pattern * size * (size + 1) / 2)
            assert torch.equal(other.grad, pattern_of(other) * size)
            assert strides_of(weight.grad) == strides_of(alone.grad)
            optimizer.step()
        assert weight.stride() == strides
        assert torch.equal(weight.data, -pattern * size * (size + 1))

    ranks(size, body)


@OPTIONS
def test_gradients_of_expanded_parameters_are_whole(ranks, options):
    def body(rank):
        weight = nn.Parameter(torch.zeros(1, 3).expand(4, 3))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
        (weight * pattern_of(weight) * (rank + 1)).sum().backward()
        optimizer.synchronize()  # step() cannot write to such a parameter
        assert torch.equal(weight.grad, 1.5 * pattern_of(weight))

    ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"gradient_as_bucket_view": True}], ids=str)
def test_gradients_put_in_by_hand_with_odd_strides_are_reduced(ranks, options):
    def body(rank):
        params = [nn.Parameter(torch.zeros(4, 3)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)
        params[0].grad = torch.full((3, 4), rank + 1.0).t()
        params[1].grad = torch.full((8, 3), rank + 1.0)[::2]
        optimizer.step()
        assert all(torch.equal(p.data, torch.full((4, 3), -1.5)) for p in params)

    ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["own", "views"])
def test_parameters_of_any_dtype_are_reduced(ranks, dtype, options):
    def body(rank):
        weight = nn.Parameter(torch.zeros(3, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **options)
        (weight * (rank + 1)).real.sum().backward()
        optimizer.step()
        assert weight.grad.dtype == dtype
        assert weight.tolist() == [-1.5] * 3

    ranks(2, body)


@pytest.mark.parametrize("size", [2, 3])
@OPTIONS
def test_a_model_may_mix_dtypes(ranks, size, options):
    dtypes = [torch.bfloat16, torch.float64, torch.float32, torch.bfloat16, torch.float64]

    def body(rank):
        params = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in zip((3, 1, 0, 8, 5), dtypes, strict=True)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), op=hvd.Sum, **options)
        sum((p * (i + 1) * (rank + 1)).sum().double() for i, p in enumerate(params)).backward()
        optimizer.step()
        assert [p.grad.dtype for p in params] == dtypes
        total = size * (size + 1) / 2
        assert [p.tolist() for p in params] == [[-(i + 1) * total] * p.numel() for i, p in enumerate(params)]

    ranks(size, body)


# Shared


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)
        self.embedding.weight.data.copy_(torch.linspace(-1, 1, 15).view(5, 3))
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return nn.functional.cross_entropy(self.head(self.embedding(ids[:-1])), ids[1:])


@pytest.mark.parametrize("named", [True, False])
@OPTIONS
def test_tied_weights_are_reduced_once(ranks, named, options):
    ids = torch.tensor([[0, 3, 1, 4, 2], [2, 2, 0, 1, 3]])
    alone = Tied()
    sum(alone(mine) for mine in ids).backward()

    def body(rank):
        model = Tied()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters() if named else None,
            op=hvd.Sum,
            **options,
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(ids[rank]).backward()
            rough = 1e-2 if "compression" in options else 1e-12
            torch.testing.assert_close(model.head.weight.grad, alone.head.weight.grad, rtol=rough, atol=rough)
        optimizer.step()

    ranks(2, body)


def test_tied_weights_may_be_named_twice(ranks):
    def body(rank):
        model = Tied()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters(remove_duplicate=False), op=hvd.Sum
        )
        (model.head.weight * (rank + 1)).sum().backward()
        optimizer.step()
        assert model.embedding.weight.grad.unique().tolist() == [3.0]

    ranks(2, body)


@OPTIONS
def test_a_layer_that_is_used_several_times_is_reduced_once(ranks, options):
    def body(rank):
        weight = nn.Parameter(torch.full((3,), 1.0))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, **options)
        (weight * 2 * (rank + 1) + weight * 3 + weight).sum().backward()
        optimizer.step()
        assert weight.grad.tolist() == [14.0] * 3

    ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"gradient_as_bucket_view": True}], ids=str)
def test_parameters_with_one_incoming_gradient_are_reduced_apart(ranks, options):
    def body(rank):
        params = [nn.Parameter(torch.full((2,), float(i))) for i in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), **options)
        (params[0] + params[1]).backward(torch.full((2,), rank + 1.0))
        optimizer.step()
        assert [p.grad.tolist() for p in params] == [[1.5, 1.5]] * 2

    ranks(2, body)


def test_the_gradient_that_backward_was_given_is_not_changed(ranks):
    def body(rank):
        weight = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        given = torch.full((2,), rank + 1.0)
        weight.backward(given)
        optimizer.step()
        assert given.tolist() == [rank + 1.0] * 2
        assert weight.tolist() == [-1.5, -1.5]

    ranks(2, body)
