"""Do the ranks agree? Each difference is found, and told with the tensor, the ranks and the values."""

from __future__ import annotations

import itertools

import pytest

from hvdlite.dtypes import ReduceOp
from hvdlite.errors import HorovodInternalError, MismatchError, RemoteError
from hvdlite.messages import Kind, Request
from hvdlite.negotiation.checks import check

MEMBERS = (2, 5, 7)  # global ranks, so that a message with set ranks shows up


def requests_of(base, *changes):
    """Return one Request for each set rank, `base` changed by the keyword arguments in `changes`."""
    return {rank: base._replace(**change) for rank, change in enumerate(changes)}


ALLREDUCE = Request(Kind.ALLREDUCE, "w", "float32", (3, 4))
ALLGATHER = Request(Kind.ALLGATHER, "w", "float32", (3, 4))
ALLTOALL = Request(Kind.ALLTOALL, "w", "float32", (3, 4), splits=(1, 1, 1))
BROADCAST = Request(Kind.BROADCAST, "w", "float32", (3, 4), root=1)
REDUCESCATTER = Request(Kind.REDUCESCATTER, "w", "float32", (3, 4))
ADD_SET = Request(Kind.ADD_PROCESS_SET, "w", splits=(0, 1))

# request, change on the odd rank, what differs, value of the others, value of the odd one
MISMATCHES = [
    (ALLREDUCE, {"kind": Kind.ALLGATHER}, "operation", "ALLREDUCE", "ALLGATHER"),
    (ALLREDUCE, {"dtype": "int64"}, "dtype", "float32", "int64"),
    (ALLREDUCE, {"shape": (3, 5)}, "shape", "[3, 4]", "[3, 5]"),
    (ALLREDUCE, {"shape": (12,)}, "shape", "[3, 4]", "[12]"),
    (ALLREDUCE, {"op": ReduceOp.MAX}, "reduce op", "SUM", "MAX"),
    (ALLREDUCE, {"op": ReduceOp.AVERAGE}, "reduce op", "SUM", "AVERAGE"),
    (ALLREDUCE, {"op": ReduceOp.ADASUM}, "reduce op", "SUM", "ADASUM"),
    (ALLREDUCE, {"prescale": 0.5}, "prescale factor", "1.0", "0.5"),
    (ALLREDUCE, {"postscale": 1 + 2**-52}, "postscale factor", "1.0", "1.0000000000000002"),
    (ALLREDUCE, {"device": "cuda:0"}, "device", "cpu", "cuda:0"),
    (ALLREDUCE, {"group": "g", "group_size": 2}, "group", "no group", "g of 2"),
    (BROADCAST, {"root": 2}, "root rank", "5", "7"),
    (BROADCAST, {"shape": ()}, "shape", "[3, 4]", "[]"),
    (BROADCAST, {"dtype": "bool"}, "dtype", "float32", "bool"),
    (REDUCESCATTER, {"shape": (4, 4)}, "shape", "[3, 4]", "[4, 4]"),
    (REDUCESCATTER, {"op": ReduceOp.AVERAGE}, "reduce op", "SUM", "AVERAGE"),
    (REDUCESCATTER, {"prescale": 2.0}, "prescale factor", "1.0", "2.0"),
    (ALLGATHER, {"shape": (3, 4, 1)}, "number of dimensions", "2", "3"),
    (ALLGATHER, {"shape": (3, 5)}, "shape beyond the first dimension", "[4]", "[5]"),
    (ALLTOALL, {"shape": (3,)}, "number of dimensions", "2", "1"),
    (ALLTOALL, {"shape": (3, 5)}, "shape beyond the first dimension", "[4]", "[5]"),
    (ALLTOALL, {"dtype": "float64"}, "dtype", "float32", "float64"),
    (ADD_SET, {"splits": (0, 2)}, "ranks of the process set", "[0, 1]", "[0, 2]"),
]


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(("base", "change", "what", "usual", "strange"), MISMATCHES)
def test_a_mismatch_names_tensor_ranks_and_both_values(base, change, what, usual, strange, odd):
    requests = requests_of(base, *({} if rank != odd else change for rank in range(3)))
    response = check(requests, [], MEMBERS)
    assert response.refusal is not None
    error = response.refusal.exception()
    assert isinstance(error, MismatchError)
    assert error.tensor == "w"
    assert error.what == what
    others = [member for rank, member in enumerate(MEMBERS) if rank != odd]
    assert error.by_value == {usual: others, strange: [MEMBERS[odd]]}
    text = str(error)
    for word in (
        "Mismatched",
        what,
        "'w'",
        f"{usual} on ranks {others[0]}, {others[1]}",
        f"{strange} on rank {MEMBERS[odd]}",
    ):
        assert word in text


def test_all_equal_requests_become_the_response():
    response = check(requests_of(ALLREDUCE._replace(prescale=0.5, op=ReduceOp.MIN), {}, {}, {}), [], MEMBERS)
    assert response.refusal is None
    assert (response.kind, response.name, response.dtype, response.shape) == (Kind.ALLREDUCE, "w", "float32", (3, 4))
    assert (response.op, response.prescale, response.postscale) == (ReduceOp.MIN, 0.5, 1.0)
    assert response.sizes == response.joined == ()


def test_an_allgather_may_differ_in_the_first_dimension():
    response = check(requests_of(ALLGATHER, {"shape": (3, 4)}, {"shape": (0, 4)}, {"shape": (5, 4)}), [], MEMBERS)
    assert response.refusal is None
    assert response.sizes == (3, 0, 5)
    assert response.shape[1:] == (4,)


def test_an_alltoall_may_differ_in_rows_and_splits():
    response = check(requests_of(ALLTOALL, {}, {"shape": (9, 4), "splits": (4, 0, 5)}, {}), [], MEMBERS)
    assert response.refusal is None
    assert response.splits == ()  # each rank uses its own


def test_the_order_of_submission_does_not_change_the_answer():
    requests = requests_of(ALLGATHER, {"shape": (3, 4)}, {"shape": (0, 4)}, {"shape": (5, 4)})
    answers = {
        check({rank: requests[rank] for rank in order}, [], MEMBERS).sizes for order in itertools.permutations(range(3))
    }
    assert answers == {(3, 0, 5)}


def test_a_problem_of_one_rank_is_told_to_all_and_comes_before_differences():
    requests = {
        0: ALLREDUCE,
        1: Request(Kind.ALLREDUCE, "w", problem="the array is read-only"),
        2: ALLREDUCE._replace(shape=(1,)),
    }
    error = check(requests, [], MEMBERS).refusal.exception()
    assert isinstance(error, RemoteError)
    assert error.problems == {5: "the array is read-only"}
    assert "rank 5: the array is read-only" in str(error)


def test_equal_problems_of_all_ranks_are_a_refusal_too():
    wrong = Request(Kind.ALLREDUCE, "w", problem="no")
    assert check(dict.fromkeys(range(3), wrong), [], MEMBERS).refusal is not None


@pytest.mark.parametrize("base", [ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER])
def test_joined_ranks_are_named_in_the_response(base):
    response = check({1: base}, [2, 0], MEMBERS)
    assert response.refusal is None
    assert set(response.joined) == {0, 2}


def test_joined_ranks_give_no_rows_to_an_allgather():
    response = check({0: ALLGATHER, 2: ALLGATHER._replace(shape=(6, 4))}, [1], MEMBERS)
    assert response.refusal is None
    assert response.sizes == (3, 0, 6)


def test_a_joined_rank_cannot_be_the_root():
    error = check({0: BROADCAST, 2: BROADCAST}, [1], MEMBERS).refusal.exception()
    assert isinstance(error, HorovodInternalError)
    assert "'w'" in str(error)
    assert "rank 5 has joined" in str(error)


def test_a_root_that_submitted_before_it_joined_is_a_root():
    assert check({0: BROADCAST, 1: BROADCAST, 2: BROADCAST}, [1], MEMBERS).refusal is None


def test_the_differing_kind_is_reported_before_the_differing_dtype():
    requests = requests_of(ALLREDUCE, {}, {"kind": Kind.BARRIER, "dtype": "", "shape": ()}, {})
    assert check(requests, [], MEMBERS).refusal.what == "operation"
