"""Control messages: what is written is what is read."""

from __future__ import annotations

import math

import pytest

from hvdlite import errors
from hvdlite.dtypes import ReduceOp
from hvdlite.messages import (
    Announcement,
    Kind,
    Knobs,
    Refusal,
    Request,
    Response,
    Tag,
    Verdict,
    decode_announcement,
    decode_json,
    decode_verdict,
    encode_announcement,
    encode_json,
    encode_verdict,
)

# Every field differs from its default and from the others of its type.
FULL_REQUEST = Request(
    Kind.ALLTOALL,
    "größe/重み",
    "bfloat16",
    (3, 0, 5),
    ReduceOp.PRODUCT,
    2,
    0.1,
    -7.5,
    (1, 0, 2),
    "cuda:1",
    "g#2",
    4,
    "why\n",
)
FULL_RESPONSE = Response(
    Kind.ALLGATHER, "größe/重み", "uint16", (3, 0, 5), ReduceOp.MAX, 2, 0.1, -7.5, (4, 6), "cuda:1", "g#2",
    (8, 0, 9), (1, 3), 5, Refusal("mismatch", "größe/重み", "shape", {"[1, 2]": [0, 2], "[]": [1]}, "do this"),
)  # fmt: skip


@pytest.mark.parametrize("request_", [FULL_REQUEST, Request(Kind.BARRIER, "b")], ids=["full", "defaults"])
def test_a_request_arrives_as_it_was(request_):
    (arrived,) = decode_announcement(encode_announcement(Announcement(requests=[request_]))).requests
    assert arrived == request_
    assert [type(field) for field in arrived] == [type(field) for field in request_]
    assert hash(arrived) == hash(request_)  # it becomes part of a set


@pytest.mark.parametrize("response", [FULL_RESPONSE, Response(Kind.JOIN, "join")], ids=["full", "defaults"])
def test_a_response_arrives_as_it_was(response):
    (arrived,) = decode_verdict(encode_verdict(Verdict([response]))).entries
    assert arrived == response
    assert [type(field) for field in arrived] == [type(field) for field in response]


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_arrives_as_it_was(kind):
    (arrived,) = decode_announcement(encode_announcement(Announcement(requests=[Request(kind, "x")]))).requests
    assert arrived.kind is kind


@pytest.mark.parametrize("op", list(ReduceOp))
def test_every_reduction_arrives_as_it_was(op):
    (arrived,) = decode_announcement(
        encode_announcement(Announcement(requests=[Request(Kind.ALLREDUCE, "x", op=op)]))
    ).requests
    assert arrived.op is op


@pytest.mark.parametrize("factor", [0.1, -0.0, 1 / 3, 1e308, 5e-324, math.inf, -math.inf, math.nan])
def test_factors_keep_every_bit(factor):
    said = Announcement(requests=[Request(Kind.ALLREDUCE, "x", prescale=factor)])
    assert decode_announcement(encode_announcement(said)).requests[0].prescale.hex() == factor.hex()


@pytest.mark.parametrize("ids", [[], [0], [7, 0, 2**31 - 1, 7]])
@pytest.mark.parametrize("requests", [[], [FULL_REQUEST], [FULL_REQUEST, Request(Kind.JOIN, "join")]])
def test_ids_and_requests_travel_together(ids, requests):
    assert decode_announcement(encode_announcement(Announcement(ids, requests))) == Announcement(ids, requests)


def test_known_requests_cost_four_bytes_each():
    one, many = (len(encode_announcement(Announcement(list(range(n))))) for n in (1, 101))
    assert many - one == 400
    one, many = (len(encode_verdict(Verdict(list(range(n)), fusion_threshold=2**40))) for n in (1, 101))
    assert many - one == 400


def test_a_verdict_keeps_its_order_and_all_fields():
    second = FULL_RESPONSE._replace(name="second", refusal=None)
    verdict = Verdict([4, FULL_RESPONSE, 9, 1, second], {"second": 11, "größe/重み": 12}, [3, 8], "rank 1 left", 2**40)
    assert decode_verdict(encode_verdict(verdict)) == verdict


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict(),
        Verdict(evicted=[1]),
        Verdict(shutdown="bye"),
        Verdict([5], fusion_threshold=0),
        Verdict([5], knobs=Knobs(1, 2, 3, 4, False)),
    ],
)
def test_a_verdict_may_lack_anything(verdict):
    assert decode_verdict(encode_verdict(verdict)) == verdict


@pytest.mark.parametrize("tag", list(Tag))
def test_rare_messages_carry_their_tag_and_value(tag):
    value = {"last": "größe", "sites": {"x": "a.py:1"}, "n": [1, None]}
    message = encode_json(tag, value)
    assert Tag(message[:1]) is tag
    assert decode_json(message) == value


def test_the_first_byte_tells_announcements_from_verdicts():
    assert Tag(encode_announcement(Announcement([1]))[:1]) is Tag.ANNOUNCE
    assert Tag(encode_verdict(Verdict([1]))[:1]) is Tag.VERDICT


@pytest.mark.parametrize(
    ("refusal", "kind", "words"),
    [
        (
            Refusal("mismatch", "w", "shape", {"[2]": [0, 2], "[3]": [1]}),
            errors.MismatchError,
            ["shape", "'w'", "[2]", "ranks 0, 2", "[3]", "rank 1"],
        ),
        (Refusal("remote", "w", by_value={"no memory": [1]}), errors.RemoteError, ["'w'", "rank 1", "no memory"]),
        (Refusal("stall", "w", "waited too long"), errors.StallError, ["waited too long"]),
        (Refusal("other", "w", "the root has joined"), errors.HorovodInternalError, ["the root has joined"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Refusal) else "",
)
def test_a_refusal_becomes_the_exception_that_says_it(refusal, kind, words):
    error = refusal.exception()
    assert type(error) is kind
    for word in words:
        assert word in str(error)
    assert refusal.exception() is not error  # each handle raises its own
