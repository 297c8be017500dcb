"""One rank's mirror of what all ranks know by number."""

from __future__ import annotations

import pytest

from hvdlite.messages import Kind, Request, Response
from hvdlite.negotiation.cache import ResponseCache

REQUEST = Request(Kind.ALLREDUCE, "w", "float32", (2,))
RESPONSE = Response(Kind.ALLREDUCE, "w", "float32", (2,))


def test_only_exactly_the_same_request_is_found():
    cache = ResponseCache()
    assert cache.lookup(REQUEST) is None
    cache.insert(3, RESPONSE, REQUEST)
    assert cache.lookup(Request(*REQUEST)) == 3
    assert cache.response(3) == RESPONSE
    for change in (
        {"shape": (3,)},
        {"dtype": "int8"},
        {"prescale": 2.0},
        {"name": "v"},
        {"problem": "no"},
        {"group": "g"},
    ):
        assert cache.lookup(REQUEST._replace(**change)) is None


def test_a_name_has_one_id_the_latest():
    cache = ResponseCache()
    cache.insert(3, RESPONSE, REQUEST)
    longer = REQUEST._replace(shape=(4,))
    cache.insert(8, RESPONSE._replace(shape=(4,)), longer)
    assert len(cache) == 1
    assert cache.lookup(REQUEST) is None
    assert cache.lookup(longer) == 8
    with pytest.raises(KeyError):
        cache.response(3)


def test_an_evicted_id_is_forgotten_and_others_stay():
    cache = ResponseCache()
    other = REQUEST._replace(name="v")
    cache.insert(0, RESPONSE, REQUEST)
    cache.insert(1, RESPONSE._replace(name="v"), other)
    cache.evict(0)
    cache.evict(0)
    cache.evict(77)
    assert cache.lookup(REQUEST) is None
    assert cache.lookup(other) == 1
    assert len(cache) == 1


def test_evicting_a_replaced_id_leaves_its_successor():
    cache = ResponseCache()
    cache.insert(0, RESPONSE, REQUEST)
    cache.insert(1, RESPONSE, REQUEST)
    cache.evict(0)
    assert cache.lookup(REQUEST) == 1
