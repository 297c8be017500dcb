"""local_device, metric_average and get_logger."""

from __future__ import annotations

import logging
import math

import pytest
import torch

import hvdlite.torch as hvd

# local_device


@pytest.mark.parametrize(
    ("n_visible", "expected"),
    [
        (0, ["cpu", "cpu", "cpu"]),
        (4, ["cuda:0", "cuda:1", "cuda:2"]),
        (2, ["cuda:0", "cuda:1", "cuda:0"]),
        (1, ["cuda:0", "cuda:0", "cuda:0"]),  # of its own for each rank, or one for all
    ],
)
def test_ranks_take_the_gpus_that_they_see_in_turns(ranks, monkeypatch, n_visible, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_visible)
    assert ranks(3, lambda rank: str(hvd.local_device())) == expected


# metric_average


def test_numbers_become_their_mean_and_a_float(ranks):
    def body(rank):
        return [hvd.metric_average(0.5 + rank, "loss"), hvd.metric_average(rank), hvd.metric_average(rank == 0)]

    for means in ranks(4, body):
        assert means == [2.0, 1.5, 0.25]
        assert [type(mean) for mean in means] == [float] * 3


@pytest.mark.parametrize(
    ("dtype", "result"),
    [(torch.float64, torch.float64), (torch.bfloat16, torch.bfloat16), (torch.int64, torch.float32)],
)
def test_a_tensor_becomes_a_tensor(ranks, dtype, result):
    def body(rank):
        given = torch.tensor(rank * 3, dtype=dtype, requires_grad=dtype.is_floating_point)
        mean = hvd.metric_average(given)
        assert (mean.shape, mean.dtype, mean.requires_grad) == ((), result, False)
        return float(mean)

    assert ranks(2, body) == [1.5, 1.5]


def test_a_dict_becomes_a_dict_of_the_same_kinds_in_its_order(ranks):
    def body(rank):
        given = {"loss": 1.0 + rank, "accuracy": torch.tensor(0.5 * rank), "seen": 3}
        means = hvd.metric_average(dict(sorted(given.items(), reverse=rank == 1)), "epoch")
        assert list(means) == sorted(given, reverse=rank == 1)
        assert isinstance(means["accuracy"], torch.Tensor)
        return means

    for means in ranks(2, body):
        assert means == {"loss": 1.5, "accuracy": torch.tensor(0.25), "seen": 3.0}
    assert ranks(2, lambda rank: hvd.metric_average({})) == [{}, {}]


def test_weights_make_it_a_mean_over_samples(ranks):
    # Rank 1 has no samples, and so no loss.
    def body(rank):
        losses, weights = [1.0, math.nan, 4.0], [2, 0, 1]
        return hvd.metric_average({"loss": losses[rank]}, weight=weights[rank])["loss"]

    assert ranks(3, body) == [2.0] * 3


def test_without_any_sample_there_is_no_mean(ranks):
    assert all(map(math.isnan, ranks(2, lambda rank: hvd.metric_average(5.0, weight=0))))


def test_a_process_set_averages_among_its_members(ranks):
    def body(rank):
        some = hvd.add_process_set([1, 2])
        return hvd.metric_average(float(rank), None, some) if rank else None

    assert ranks(3, body) == [None, 1.5, 1.5]


def test_a_rank_that_has_joined_does_not_count(ranks):
    def body(rank):
        mean = hvd.metric_average(float(rank), "x") if rank else None
        hvd.join()
        return mean

    assert ranks(3, body) == [None, 1.5, 1.5]


@pytest.mark.parametrize(
    ("value", "weight", "message"),
    [
        ("0.5", None, "got str: '0.5'"),
        ({"loss": None}, None, "got NoneType of 'loss': None"),
        (torch.ones(2), None, r"got Tensor: tensor\(\[1., 1.\]\)"),
        (torch.tensor(1j), None, "got Tensor"),
        (1.0, -1, "weight=-1: expected a number of samples"),
        (1.0, math.nan, "weight=nan"),
        (1.0, "3", "weight='3'"),
        (10**400, None, "10000.*int too large to convert to float"),
        ({"loss": 10**400}, None, "'loss': 10000.*int too large"),
        pytest.param(10**5000, None, "4300 digits", id="too long to print"),
        (torch.ones((), device="meta"), None, "meta"),
        (1.0, 10**400, "weight=10000.*int too large"),
    ],
)
def test_a_wrong_value_on_one_rank_raises_on_all_and_the_next_call_works(ranks, value, weight, message):
    def body(rank):
        with pytest.raises(hvd.InvalidRequestError if rank == 1 else hvd.RemoteError, match=f"'x'.*{message}"):
            hvd.metric_average(value if rank == 1 else 1.0, "x", weight=weight if rank == 1 else None)
        return hvd.metric_average(float(rank), "x")

    assert ranks(3, body) == [1.0] * 3


def test_before_init_it_names_itself():
    for name in (None, "loss"):
        with pytest.raises(hvd.NotInitializedError, match="metric_average: "):
            hvd.metric_average(1.0, name)


@pytest.mark.parametrize(
    ("value", "weight", "message"),
    [
        ({"los": 1.0}, None, r"keys for tensor 'x' between ranks: \['loss'\] on ranks 0, 2; \['los'\] on rank 1"),
        ({}, None, r"keys.*\[\] on rank 1"),
        (1.0, None, r"keys.*\[''\] on rank 1"),
        ({"loss": 1.0}, 2, "weight for tensor 'x' between ranks: none on ranks 0, 2; a number on rank 1"),
    ],
)
def test_differences_between_ranks_are_named_on_all_and_the_next_call_works(ranks, value, weight, message):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match=message):
            hvd.metric_average(value if rank == 1 else {"loss": 1.0}, "x", weight=weight if rank == 1 else None)
        return hvd.metric_average(float(rank), "x")

    assert ranks(3, body) == [1.0] * 3


# get_logger


@pytest.fixture
def lines():
    """What reaches the logger "story", with the level of each line."""
    logger, seen = logging.getLogger("story"), []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append((record.levelname, record.getMessage(), record.funcName))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def talk(run, size, **options):
    def body(rank):
        logger = hvd.get_logger("story", **options)
        logger.debug("nobody")
        logger.info("%d %% of %s", 100 * rank, "it")
        logger.warning("careful")

    run(size, body)


def test_one_rank_tells_the_story_and_all_warn(ranks, lines):
    talk(ranks, 3)
    assert sorted(lines) == [
        ("INFO", "[rank 0] 0 % of it", "body"),
        *(("WARNING", f"[rank {rank}] careful", "body") for rank in range(3)),
    ]


def test_other_ranks_may_tell(ranks, lines):
    talk(ranks, 3, ranks=range(1, 3))
    assert sorted(text for level, text, _ in lines if level == "INFO") == [
        "[rank 1] 100 % of it",
        "[rank 2] 200 % of it",
    ]


def test_before_init_everybody_tells_and_nobody_knows_the_rank(lines):
    hvd.get_logger("story").info("hello")
    assert [text for _, text, _ in lines] == ["[rank ?] hello"]


def test_unconfigured_it_writes_to_stderr_from_info_on(monkeypatch, capsys):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logger = logging.getLogger("fresh")
    try:
        for _ in range(2):  # asked for twice, it writes each line once
            hvd.get_logger("fresh").info("hello")
        hvd.get_logger("fresh").debug("hidden")
        err = capsys.readouterr().err
        assert err.count("\n") == 2
        assert err.endswith(" INFO fresh: [rank ?] hello\n")
    finally:
        logger.handlers.clear()
        logger.propagate, logger.level = True, logging.NOTSET
        logger.manager._clear_cache()


def test_it_is_a_logger_of_the_standard_library():
    logger = hvd.get_logger("story")
    assert isinstance(logger, logging.LoggerAdapter)
    assert logger.logger is logging.getLogger("story")
