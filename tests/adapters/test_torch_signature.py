"""Wrapping compares the parameters of all ranks, and says which one differs where."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd

SIZES = [2, 3, 4]


def wrap(shapes, dtypes=None, named=True, groups=None, **options):
    """Wrap an optimizer over parameters of the given names and shapes."""
    dtypes = dtypes or {}
    named_parameters = [
        (name, nn.Parameter(torch.zeros(shape, dtype=dtypes.get(name, torch.float32))))
        for name, shape in shapes.items()
    ]
    sgd = torch.optim.SGD([p for _, p in named_parameters] if groups is None else groups(named_parameters), lr=1.0)
    return hvd.DistributedOptimizer(sgd, named_parameters if named else None, **options)


def refused(*words, **arguments):
    """Wrap, and expect an error with all the words; then show that the next attempt works."""
    with pytest.raises(hvd.MismatchError) as caught:
        wrap(**arguments)
    for word in words:
        assert word in str(caught.value).replace("(", "[").replace(")", "]").replace(",]", "]")
    works()


def works():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("a", weight)])
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0] * 3


COMMON = {"layers.0.weight": (4, 3), "layers.1.weight": (5,), "layers.2.weight": ()}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("named", [True, False])
def test_a_shape_that_differs_is_told_on_all_ranks(ranks, size, named):
    def body(rank):
        shapes = {**COMMON, "layers.1.weight": (7,)} if rank == 1 else COMMON
        refused("layers.1.weight" if named else "1", "[5]", "[7]", "rank 1", shapes=shapes, named=named)

    ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_a_shape_with_as_many_elements_differs_too(ranks, size):
    def body(rank):
        shapes = {**COMMON, "layers.0.weight": (3, 4)} if rank == size - 1 else COMMON
        refused("layers.0.weight", "[4, 3]", "[3, 4]", f"rank {size - 1}", shapes=shapes)

    ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_a_dtype_that_differs_is_told_on_all_ranks(ranks, size):
    def body(rank):
        dtypes = {"layers.2.weight": torch.float64} if rank == 1 else {}
        refused("layers.2.weight", "float32", "float64", "rank 1", shapes=COMMON, dtypes=dtypes)

    ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("odd_one", [0, 1])
def test_a_name_that_differs_is_told_on_all_ranks(ranks, size, odd_one):
    def body(rank):
        shapes = {"b": (1,), ("weight.x" if rank == odd_one else "weight.y"): (2,)}
        refused("'weight.", f"rank {odd_one}", shapes=shapes)

    ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("odd_one", [0, 1])
def test_a_parameter_that_only_some_ranks_have_is_told_on_all(ranks, size, named, odd_one):
    def body(rank):
        shapes = {**COMMON, "extra": (2,)} if rank == odd_one else COMMON
        refused(*["extra"] * named, f"rank {odd_one}", shapes=shapes, named=named)

    ranks(size, body)


def test_an_optimizer_without_a_match_at_all_is_told(ranks):
    def body(rank):
        refused("model", "rank", shapes={f"model{rank}.{i}": (i,) for i in range(100)})

    ranks(3, body)


def test_the_message_is_short_for_large_models(ranks):
    def body(rank):
        with pytest.raises(hvd.MismatchError) as caught:
            wrap({f"layer{i}": (i + rank,) for i in range(500)})
        assert len(str(caught.value)) < 1000

    ranks(2, body)


def test_without_names_the_groups_must_be_the_same(ranks):
    def halves(named):
        return [{"params": [named[0][1]]}, {"params": [p for _, p in named[1:]]}]

    def body(rank):
        refused("rank", shapes={"a": (1,), "b": (2,)}, named=False, groups=halves if rank else None)

    ranks(2, body)


def test_ranks_outside_the_set_may_differ(ranks):
    def body(rank):
        pair = hvd.add_process_set([0, 2])
        optimizer = wrap({**COMMON, "extra": (rank,)} if rank == 1 else COMMON, process_set=pair)
        optimizer.step()
        hvd.barrier()

    ranks(3, body)


def test_members_of_a_set_are_named_by_their_global_ranks(ranks):
    def body(rank):
        pair = hvd.add_process_set([1, 3])
        if rank in (1, 3):
            with pytest.raises(hvd.MismatchError, match="rank 3"):
                wrap({"a": (rank,)}, process_set=pair)
        hvd.barrier()

    ranks(4, body)


def test_what_does_not_travel_may_differ(ranks):
    def body(rank):
        frozen = nn.Parameter(torch.zeros(3), requires_grad=rank == 1)
        strided = nn.Parameter(torch.zeros(2, 3) if rank else torch.zeros(3, 2).t())
        sgd = torch.optim.SGD([frozen, strided], lr=1.0 + rank, weight_decay=rank)
        optimizer = hvd.DistributedOptimizer(sgd, [("frozen", frozen), ("strided", strided)])
        (strided * torch.arange(6.0).view(2, 3) * (rank + 1)).sum().backward()
        optimizer.step()
        assert torch.equal(strided.grad, 1.5 * torch.arange(6.0).view(2, 3))

    ranks(2, body)


def test_parameters_added_later_must_be_alike_too(ranks):
    def body(rank):
        optimizer = wrap(COMMON)
        late = nn.Parameter(torch.zeros(2 + rank))
        with pytest.raises(hvd.MismatchError, match="rank 1"):
            optimizer.add_param_group({"params": [late]})
            late.sum().backward()
            optimizer.step()
        hvd.barrier()

    ranks(2, body)
