"""Exceptions: their bases, so that Horovod scripts catch them, and their texts."""

from __future__ import annotations

import pickle

import pytest

from hvdlite import errors

RUNTIME = ["NotInitializedError", "ShutdownError", "StallError", "CommunicationError", "MismatchError", "RemoteError"]
VALUE = [
    "NotInitializedError",
    "InvalidRequestError",
    "UnsupportedDtypeError",
    "DuplicateNameError",
    "NotMemberError",
    "ConfigError",
]


def test_what_ranks_or_machines_got_wrong_is_horovods_internal_error():
    for name in RUNTIME:
        assert issubclass(getattr(errors, name), errors.HorovodInternalError)
        assert issubclass(getattr(errors, name), RuntimeError)


def test_what_the_caller_got_wrong_is_a_value_error():
    for name in VALUE:
        assert issubclass(getattr(errors, name), ValueError)


def test_all_have_one_base():
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert issubclass(kind, errors.HvdliteError), name
            assert kind.__doc__


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([2, 0], "ranks 0, 2"),
        ([3, 1, 0, 2], "ranks 0, 1, 2, 3"),
        (range(5), "ranks 0, 1, 2, 3 and 1 more"),
        ({9, 8, 7, 6, 5, 4}, "ranks 4, 5, 6, 7 and 2 more"),
        (iter([1]), "rank 1"),
    ],
)
def test_ranks_are_listed_sorted_and_not_too_many(ranks, text):
    assert errors.describe_ranks(ranks) == text


def test_a_mismatch_says_what_where_which_values_and_what_to_do():
    error = errors.MismatchError("layer4.weight", "shape", {"(512, 64)": [3, 0, 1, 2, 4, 6], "(512, 32)": [5]})
    assert str(error) == (
        "Mismatched shape for tensor 'layer4.weight' between ranks: (512, 64) on ranks 0, 1, 2, 3 and 2 more; "
        "(512, 32) on rank 5. Every rank must submit the same shape under one name."
    )
    assert error.by_value == {"(512, 64)": [0, 1, 2, 3, 4, 6], "(512, 32)": [5]}
    assert str(errors.MismatchError("w", "x", {"1": [0], "2": [1]}, "Do this.")).endswith("2 on rank 1. Do this.")


def test_a_remote_error_says_which_rank_could_not_and_why():
    error = errors.RemoteError("w", {2: "no memory", 0: "the array is read-only"})
    assert str(error) == "tensor 'w' was refused because of rank 0: the array is read-only; rank 2: no memory"
    assert error.problems == {0: "the array is read-only", 2: "no memory"}


def test_phrases_that_horovods_users_search_logs_for_are_there():
    assert "has not been initialized; use hvd.init()" in str(errors.NotInitializedError("hvd.rank()"))
    assert "same name as another tensor that is currently being processed" in str(
        errors.DuplicateNameError("w", "a.py:1")
    )
    assert "Mismatched" in str(errors.MismatchError("w", "dtype", {}))


@pytest.mark.parametrize(
    "error",
    [
        errors.NotInitializedError("hvd.rank()"),
        errors.ShutdownError("gone"),
        errors.DuplicateNameError("w", "a.py:1"),
        errors.MismatchError("w", "shape", {"[1]": [0], "[2]": [1]}, "Do this."),
        errors.RemoteError("w", {1: "no"}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exceptions_travel_between_processes(error):
    # concurrent.futures, multiprocessing and broadcast_object pickle them.
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.__dict__ == error.__dict__
