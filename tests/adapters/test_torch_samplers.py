"""Which samples each rank gets."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.data import DataLoader, distributed

import hvdlite.torch as hvd

LENGTHS = [0, 1, 2, 3, 5, 10]
SIZES = [1, 2, 3, 4, 7]


def dealt(shares, length):
    """Check that shares are equally long, and return the indices in the order in which ranks take turns."""
    assert len({len(share) for share in shares}) == 1
    return [index for turn in zip(*shares, strict=True) for index in turn]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_distributed_sampler_takes_this_ranks_place(ranks, size, length, drop_last):
    options = {"seed": 5, "drop_last": drop_last}

    def body(rank):
        sampler = hvd.DistributedSampler(range(length), **options)
        expected = distributed.DistributedSampler(range(length), size, rank, **options)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            expected.set_epoch(epoch)
            assert list(sampler) == list(expected)
        assert len(sampler) == len(expected)
        return list(sampler)

    indices = dealt(ranks(size, body), length)
    if drop_last:
        assert len(indices) == len(set(indices)) == length // size * size
    else:
        assert set(indices) == set(range(length))
        assert len(indices) == math.ceil(length / size) * size


def test_the_distributed_sampler_takes_another_place_if_told(ranks):
    def body(rank):
        sampler = hvd.DistributedSampler(range(6), num_replicas=3, rank=2, shuffle=False)
        with pytest.raises(ValueError, match="Invalid rank 5"):
            hvd.DistributedSampler(range(6), rank=5)
        return list(sampler)

    assert ranks(2, body) == [[2, 5]] * 2


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", SIZES)
def test_the_elastic_sampler_deals_out_everything_equally(ranks, size, length):
    def body(rank):
        sampler = hvd.elastic.ElasticSampler(range(length), seed=3)
        assert len(list(sampler)) == len(sampler) == sampler.num_samples
        return list(sampler)

    indices = dealt(ranks(size, body), length)
    assert set(indices) == set(range(length))
    assert len(indices) == math.ceil(length / size) * size
    assert indices == (indices[:length] * size)[: len(indices)]  # padded with the first ones, as often as it takes


def test_one_sample_goes_to_all_of_four_ranks(ranks):
    assert ranks(4, lambda rank: list(hvd.elastic.ElasticSampler(range(1)))) == [[0]] * 4


def test_the_elastic_sampler_leaves_out_what_is_done(ranks):
    def body(rank):
        sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
        first = list(sampler)
        sampler.record_batch(0, 2)
        assert (sampler.processed_num, list(sampler)) == (6, first)  # the epoch under way goes on
        sampler.reset()
        assert (len(sampler), sampler.total_size, sampler.remaining_indices) == (2, 6, [6, 7, 8, 9])
        return first, list(sampler)

    firsts, rests = zip(*ranks(3, body), strict=True)
    assert dealt(firsts, 10) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    assert dealt(rests, 4) == [6, 7, 8, 9, 6, 7]


def test_a_state_from_three_ranks_goes_on_with_two(ranks):
    def before(rank):
        sampler = hvd.elastic.ElasticSampler(range(10), seed=7)
        sampler.set_epoch(4)
        done = list(sampler)[:2]
        sampler.record_batch(0, 2)
        return done, sampler.state_dict()

    results = ranks(3, before)
    done = {index for indices, _ in results for index in indices}
    state = results[0][1]
    assert state == {"epoch": 4, "processed_num": 6}

    def after(rank):
        sampler = hvd.elastic.ElasticSampler(range(10), seed=7)
        sampler.load_state_dict(state)
        return list(sampler)

    rest = dealt(ranks(2, after), 4)
    assert sorted(rest) == sorted(set(range(10)) - done)


def test_nothing_is_left_when_more_is_recorded_than_there_was(ranks):
    def body(rank):
        sampler = hvd.elastic.ElasticSampler(range(5))
        for i in range(2):
            sampler.record_batch(i, 2)  # the last batch is not full, and counts as such
        sampler.reset()
        return list(sampler), len(sampler)

    assert ranks(2, body) == [([], 0)] * 2


def test_epochs_differ_and_repeat(ranks):
    def body(rank):
        sampler = hvd.elastic.ElasticSampler(range(20), seed=1)
        orders = []
        for epoch in (0, 1, 0):
            sampler.record_batch(0, 3)
            sampler.set_epoch(epoch)
            orders.append(list(sampler))
        assert orders[0] == orders[2] != orders[1]
        assert orders[0] != list(hvd.elastic.ElasticSampler(range(20), seed=2))

    ranks(2, body)


def test_samplers_serve_a_data_loader(ranks):
    data = torch.arange(10) * 10

    def body(rank):
        for sampler in (hvd.DistributedSampler(data), hvd.elastic.ElasticSampler(data)):
            batches = list(DataLoader(data, batch_size=2, sampler=sampler))
            assert torch.cat(batches).tolist() == [10 * index for index in sampler]

    ranks(2, body)


@pytest.mark.parametrize(
    "make", [lambda: hvd.DistributedSampler(range(3)), lambda: hvd.elastic.ElasticSampler(range(3))]
)
def test_samplers_need_init(make):
    with pytest.raises(hvd.NotInitializedError):
        make()
