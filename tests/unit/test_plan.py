"""Which tensors travel together."""

from __future__ import annotations

import random

import pytest

from hvdlite.dtypes import SUPPORTED, ReduceOp
from hvdlite.fusion.plan import plan_fusion, response_bytes
from hvdlite.messages import Kind, Response


def allreduce(name, n=4, dtype="float32", **more):
    return Response(Kind.ALLREDUCE, name, dtype, (n,), **more)


def names(plans):
    return [[response.name for response in plan.responses] for plan in plans]


def test_tensors_share_a_plan_up_to_the_threshold():
    responses = [allreduce(name, 16) for name in "abcde"]  # 64 bytes each
    assert names(plan_fusion(responses, 64)) == [["a"], ["b"], ["c"], ["d"], ["e"]]
    assert names(plan_fusion(responses, 128)) == [["a", "b"], ["c", "d"], ["e"]]
    assert names(plan_fusion(responses, 10**6)) == [["a", "b", "c", "d", "e"]]


def test_padding_counts():
    plans = plan_fusion([allreduce("a", 1), allreduce("b", 17)], 191)
    assert [plan.nbytes for plan in plans] == [64, 128]
    assert [plan.nbytes for plan in plan_fusion([allreduce("a", 1), allreduce("b", 17)], 192)] == [192]


def test_zero_turns_fusion_off():
    assert names(plan_fusion([allreduce("a"), allreduce("b", 0), allreduce("c")], 0))[0] == ["a"]
    assert all(len(plan.responses) == 1 for plan in plan_fusion([allreduce(str(i)) for i in range(9)], 0))


def test_a_tensor_above_the_threshold_travels_alone():
    plans = plan_fusion([allreduce("a"), allreduce("big", 10**6), allreduce("b")], 128)
    assert ["big"] in names(plans)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float64"},
        {"op": ReduceOp.MAX},
        {"prescale": 2.0},
        {"postscale": 0.5},
        {"device": "cuda:0"},
        {"kind": Kind.REDUCESCATTER},
    ],
)
def test_only_tensors_of_one_sort_are_joined(change):
    other = allreduce("b")._replace(**change)
    assert names(plan_fusion([allreduce("a"), other, allreduce("c"), other._replace(name="d")], 10**6)) == [
        ["a", "c"],
        ["b", "d"],
    ]


@pytest.mark.parametrize("kind", [Kind.BROADCAST, Kind.ALLTOALL, Kind.BARRIER, Kind.JOIN, Kind.ADD_PROCESS_SET])
def test_kinds_that_cannot_share_travel_alone(kind):
    responses = [Response(kind, name, "float32", (2,)) for name in "ab"]
    assert names(plan_fusion(responses, 10**6)) == [["a"], ["b"]]


def test_allgathers_of_different_widths_are_joined_by_what_arrives():
    responses = [
        Response(Kind.ALLGATHER, "a", "float32", (1, 3), sizes=(1, 5)),
        Response(Kind.ALLGATHER, "b", "float32", (7,), sizes=(7, 0)),
    ]
    assert [response_bytes(response) for response in responses] == [6 * 3 * 4, 7 * 4]
    assert names(plan_fusion(responses, 192)) == [["a", "b"]]
    assert names(plan_fusion(responses, 191)) == [["a"], ["b"]]


def test_groups_apart_are_fused_only_within_the_group():
    responses = [
        allreduce("a", group="g"),
        allreduce("x"),
        allreduce("b", group="g"),
        allreduce("c", group="h"),
        allreduce("y"),
    ]
    assert names(plan_fusion(responses, 10**6, groups_apart=True)) == [["a", "b"], ["x"], ["c"], ["y"]]
    assert names(plan_fusion(responses, 10**6)) == [["a", "x", "b", "c", "y"]]


@pytest.mark.parametrize("seed", range(30))
def test_any_list_is_planned_once_each_within_the_threshold_and_in_order(seed):
    rng = random.Random(seed)
    responses = [
        Response(
            rng.choice([Kind.ALLREDUCE, Kind.ALLGATHER, Kind.BROADCAST]),
            str(i), rng.choice(["float32", "bfloat16", "int64"]), (rng.choice([0, 1, 5, 100]), 3),
            rng.choice([ReduceOp.SUM, ReduceOp.MAX]), sizes=(2, rng.choice([0, 9])),
        )
        for i in range(rng.randrange(40))
    ]  # fmt: skip
    threshold = rng.choice([0, 64, 1000, 10**9])
    plans = plan_fusion(responses, threshold)
    planned = [response.name for plan in plans for response in plan.responses]
    assert sorted(planned) == sorted(response.name for response in responses)
    for plan in plans:
        order = [int(response.name) for response in plan.responses]
        assert order == sorted(order)
        assert plan.nbytes == sum(-(-response_bytes(r) // 64) * 64 for r in plan.responses)
        assert plan.nbytes <= threshold or len(plan.responses) == 1
        assert len({(r.kind, r.dtype, r.op if r.kind is Kind.ALLREDUCE else None) for r in plan.responses}) == 1
    firsts = [int(plan.responses[0].name) for plan in plans]
    assert firsts == sorted(firsts)


def test_bytes_are_those_of_the_dtype():
    for name, dtype in SUPPORTED.items():
        assert response_bytes(allreduce("a", 3, name)) == 3 * dtype.itemsize
    assert response_bytes(allreduce("a")._replace(shape=())) == 4
    assert response_bytes(Response(Kind.BARRIER, "b")) == 0
