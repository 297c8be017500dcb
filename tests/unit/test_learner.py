"""What is taken for a step, and how it is cut into batches."""

from __future__ import annotations

import pytest

from hvdlite.messages import Kind, Response
from hvdlite.negotiation.schedule import Learner, Numbering, Step, cut


def named(cache_id, nbytes=4, group=""):
    return Step(cache_id, Kind.ALLREDUCE, nbytes, group, {})


def nameless(number, n=1, kind=Kind.ALLREDUCE):
    return Step(Response(kind, "", "float32", (n,)), kind, 4 * n, "", {}, number)


def feed(learner, steps, waited=(), now=0.0):
    """Note `steps`, and return the slots of the batches that are learned with the last one, or None."""
    learned = None
    for step in steps:
        learner.note(step, step.slot in waited, now)
        learned = learner.learned(now)
    return learned


def slots(learned):
    return [[step.slot for step in batch] for batch in learned.batches]


def test_three_equal_windows_make_a_step_and_the_last_order_counts():
    learner = Learner()
    assert feed(learner, [named(i) for i in (1, 2, 3, 3, 1, 2)]) is None
    assert slots(feed(learner, [named(i) for i in (2, 3, 1)])) == [[2, 3, 1]]


def test_a_single_tensor_is_a_step():
    learner = Learner()
    assert feed(learner, [named(1)] * 2) is None
    assert slots(feed(learner, [named(1)])) == [[1]]


def test_a_step_is_learned_only_at_its_end():
    learner = Learner()
    feed(learner, [named(i) for i in (1, 2) * 3])
    assert feed(learner, [named(1)]) is None
    assert feed(learner, [named(2)]) is not None


def feed_together(learner, steps, now=0.0):
    """Note what has completed in one go, and return what is learned with it."""
    for step in steps:
        learner.note(step, False, now)
    return learner.learned(now)


def test_a_step_is_learned_at_its_end_also_if_windows_began_amid_it():
    learner = Learner()
    feed_together(learner, [named(3)])
    for _ in range(3):
        assert feed_together(learner, [named(i) for i in (1, 2, 3)]) is None
    assert slots(feed_together(learner, [named(i) for i in (1, 2, 3)])) == [[1, 2, 3]]


def test_patience_is_that_of_whole_windows():
    learner = Learner()
    feed_together(learner, [named(3)])
    for step in range(4):
        learned = feed_together(learner, [named(i) for i in (1, 2, 3)], now=2.0 * step)
    assert learned.patience == 8.0


def test_what_has_no_name_keeps_its_place_in_such_a_step():
    learner = Learner()
    feed_together(learner, [named(2)])
    for n in range(3):
        assert feed_together(learner, [nameless(2 * n + 1), nameless(2 * n + 2), named(1), named(2)]) is None
    learned = feed_together(learner, [nameless(7), nameless(8), named(1), named(2)])
    assert [step.number for batch in learned.batches for step in batch] == [7, 8, -1, -1]
    assert [key if isinstance(key, int) else key[1] for key in learned.keys] == [1, 2, 1, 2]


def test_windows_that_differ_are_no_step():
    learner = Learner()
    for i in range(20):
        assert feed(learner, [named(1), named(100 + i)]) is None


def test_something_that_cannot_be_scheduled_begins_the_count_anew():
    learner = Learner()
    feed(learner, [named(1)] * 2)
    learner.disturb(0.0)
    assert feed(learner, [named(1)] * 2) is None
    assert feed(learner, [named(1)]) is not None


def test_operations_without_names_repeat_in_order():
    learner = Learner()
    one_two = [nameless(1, 5), nameless(2, 7), nameless(3, 5), nameless(4, 7), nameless(5, 5)]
    assert feed(learner, one_two) is None
    learned = feed(learner, [nameless(6, 7)])
    assert [step.number for batch in learned.batches for step in batch] == [5, 6]


def test_operations_without_names_belong_to_the_step_of_those_with_names():
    learner = Learner()
    for n in range(2):
        assert feed(learner, [named(1), nameless(2 * n + 1), nameless(2 * n + 2)]) is None
    learned = feed(learner, [named(1), nameless(5), nameless(6)])
    assert [step.number for batch in learned.batches for step in batch] == [-1, 5, 6]


def test_a_number_that_is_left_out_makes_no_step():
    learner = Learner()
    for n in range(8):
        assert feed(learner, [named(1), nameless(3 * n), nameless(3 * n + 2)]) is None


def test_a_known_step_is_learned_again_at_once_and_one_that_disappoints_ever_later():
    learner = Learner()
    learned = feed(learner, [named(1), named(2)] * 3)
    learner.ended(learned, 50, None, 0.0)
    learned = feed(learner, [named(2), named(1)])
    assert slots(learned) == [[2, 1]]
    learner.ended(learned, 1, None, 0.0)
    assert feed(learner, [named(1), named(2)]) is None
    learned = feed(learner, [named(1), named(2)])
    assert learned is not None
    learner.ended(learned, 0, None, 0.0)
    assert feed(learner, [named(1), named(2)] * 3) is None
    assert feed(learner, [named(1), named(2)]) is not None


def test_a_batch_ends_where_some_rank_waits():
    learner = Learner()
    learned = feed(learner, [named(i) for i in (1, 2, 3, 4)] * 3, waited=[2])
    assert slots(learned) == [[1, 2], [3, 4]]
    learner.ended(learned, 0, 3, 0.0)  # one waited for 3 before it had submitted 4
    assert slots(feed(learner, [named(i) for i in (1, 2, 3, 4)])) == [[1, 2], [3], [4]]


def test_patience_follows_the_length_of_a_step():
    learner = Learner()
    for start in (0.0, 2.0, 4.0, 6.0):
        learner.note(named(1), False, start)
        learner.note(named(2), False, start + 1.5)
    assert learner.learned(7.5).patience == 6.0


@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_program_without_end_is_not_remembered_for_ever(n):
    learner = Learner()
    for i in range(20_000):
        learner.note(named(i), True, 0.0)
    assert len(learner._window) <= 8192
    assert len(learner._waited) <= 8192 + 1 + n


# Batches


def sizes(batches):
    return [[step.nbytes for step in batch] for batch in batches]


def of(*nbytes):
    return [named(i, n) for i, n in enumerate(nbytes)]


def test_batches_are_full_and_the_last_is_small():
    steps = of(*[10] * 20)
    assert sizes(cut(steps, [False] * 20, limit=60, last=20)) == [[10] * 6, [10] * 6, [10] * 6, [10] * 2]
    assert sizes(cut(of(*[10] * 12), [False] * 12, limit=60, last=20)) == [[10] * 6, [10] * 4, [10] * 2]


def test_a_large_tensor_is_a_batch_and_nothing_is_lost():
    assert sizes(cut(of(10, 500, 10, 0), [False] * 4, limit=60, last=20)) == [[10], [500], [10, 0]]
    assert sizes(cut(of(500), [False], limit=60, last=20)) == [[500]]


def test_groups_are_not_cut():
    group = [named(i, 30, "g") for i in (1, 2, 3)]
    assert sizes(cut([named(0, 10), *group, named(4, 10)], [False] * 5, limit=60, last=20)) == [[10], [30] * 3, [10]]
    ends = [False, True, False, False, False]  # some rank waits for a member; that is waiting for all of it
    assert sizes(cut([named(0, 10), *group, named(4, 10)], ends, limit=600, last=200)) == [[10, 30, 30, 30], [10]]


def test_order_is_kept():
    steps = of(*range(1, 40))
    batches = cut(steps, [i % 7 == 0 for i in range(39)], limit=100, last=30)
    assert [step for batch in batches for step in batch] == steps


def test_numbering_is_a_bijection():
    numbering = Numbering([Kind.ALLREDUCE, Kind.BARRIER, Kind.ALLREDUCE], {"allreduce": 11, "barrier": 4})
    assert [numbering.name(Kind.ALLREDUCE, place, cycle) for cycle in (0, 1) for place in (0, 1)] == [
        f"allreduce.noname.{n}" for n in (11, 12, 13, 14)
    ]
    assert [numbering.place(Kind.ALLREDUCE, n) for n in (10, 11, 12, 15)] == [None, (0, 0), (0, 1), (2, 0)]
    assert numbering.place(Kind.BARRIER, 6) == (2, 0)
    assert numbering.place(Kind.BROADCAST, 1) is None
