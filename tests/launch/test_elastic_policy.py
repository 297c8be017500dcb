"""Where the starts of a job of changing size run, and what follows when one has ended: without a clock or a process."""

from __future__ import annotations

import itertools

import pytest

from hvdlite.launch.elastic.history import ASKED, CRASHES, History, How, how
from hvdlite.launch.elastic.roster import ADDED, FOREVER, REMOVED, Placement, Roster, hosts_of, told
from hvdlite.launch.hosts import parse_hosts
from hvdlite.launch.verdict import End, Record, Verdict, judge

MOST = 1e6


def roster(text: str, **more) -> Roster:
    found = Roster(**more)
    found.see(parse_hosts(text))
    return found


def placed(text: str, *again: str) -> Placement:
    return Placement(parse_hosts(text), again)


@pytest.mark.parametrize(
    ("need", "most", "expected"),
    [
        (1, None, "a:2,b:3,c:1"),
        (6, 6, "a:2,b:3,c:1"),
        (2, 4, "a:2,b:2"),
        (1, 1, "a:1"),
        (7, None, None),
    ],
)
def test_hosts_are_filled_in_order_up_to_the_most(need, most, expected):
    assert roster("a:2,b:3,c:1").place(need, most, 0.0) == (placed(expected) if expected else None)


def test_old_hosts_keep_their_order_and_new_ones_append():
    hosts = roster("b:1,c:1")
    hosts.see(parse_hosts("a:1,c:2"))
    hosts.see(parse_hosts("a:1,b:1,c:2"))
    assert hosts.place(1, None, 0.0) == placed("b:1,c:2,a:1")


def test_a_host_set_aside_is_used_again_only_when_the_others_are_not_enough():
    hosts = roster("a:2,b:2")
    assert hosts.set_aside("a", 0.0, 0.5) == FOREVER
    assert hosts.place(2, None, MOST) == placed("b:2")
    assert hosts.place(3, None, MOST) == placed("a:2,b:2", "a")
    assert hosts.place(3, 3, MOST) == placed("a:2,b:1", "a")


def test_of_hosts_set_aside_the_one_that_may_come_back_first_is_used_first():
    hosts = roster("a:1,b:1,c:1", cooldown=(10, 100))
    hosts.set_aside("a", 5.0, 0.0)
    hosts.set_aside("b", 0.0, 0.0)
    assert hosts.place(2, None, 6.0) == placed("b:1,c:1", "b")


def test_a_host_is_set_aside_longer_each_time_and_within_the_range():
    hosts = roster("a", cooldown=(10, 70))
    assert [hosts.set_aside("a", 0.0, 0.5) for _ in range(4)] == [25, 45, 70, 70]
    assert hosts.place(1, None, 69.9) == placed("a", "a")
    assert hosts.place(1, None, 70.0) == placed("a")


def test_absent_hosts_are_left_out():
    assert roster("a:2,b:2").place(2, None, 0.0, {"a"}) == placed("b:2")
    assert roster("a:2,b:2").place(3, None, 0.0, {"a"}) is None


@pytest.mark.parametrize(
    ("now", "current", "most", "kind"),
    [
        ("a:2,b:2", "a:2,b:2", None, 0),
        ("b:2,a:2", "a:2,b:2", None, 0),
        ("a:4", "a:2", None, ADDED),
        ("a:4", "a:2", 2, 0),  # slots that nobody may use
        ("a:2,b:2", "a:2", 2, 0),
        ("a:2", "a:2,b:2", None, REMOVED),
        ("a:1", "a:2", None, REMOVED),
        ("a:2", "a:1", 1, 0),  # slots beside the ranks
        ("a:2,c:2", "a:2,b:2", None, REMOVED | ADDED),
        ("a:2,c:1", "a:2,b:2", None, REMOVED | ADDED),
        ("a:2,c:2", "a:2,b:2", 2, REMOVED),  # as many as may run are there
        ("b:1", "a:2", None, REMOVED | ADDED),
    ],
)
def test_what_is_worth_another_size(now, current, most, kind):
    hosts = roster(current)
    hosts.see(parse_hosts(now))
    assert hosts.change(placed(current), most, 0.0) == kind


def test_nothing_is_left_and_that_is_a_removal():
    hosts = roster("a:2")
    hosts.see(())
    assert hosts.change(placed("a:2"), None, 0.0) == REMOVED
    assert hosts.gone(placed("a:2")) == ("a",)


def test_a_host_set_aside_adds_nothing_until_it_comes_back():
    hosts = roster("a:2,b:2", cooldown=(10, 100))
    hosts.set_aside("a", 0.0, 0.0)
    assert hosts.change(placed("b:2"), None, 19.0) == 0
    assert hosts.change(placed("b:2"), None, 20.0) == ADDED


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, ["a", "b.example"]),  # in the order of the ranks
        ({1: "a", 2: "b"}, ["a", "b.example"]),
        ({1: "a.cluster", 2: "other"}, ["a", "b.example"]),
        ({1: "b", 2: "b"}, ["b.example"]),  # placed otherwise than hvdrun thought
    ],
)
def test_the_host_of_a_rank_is_known_by_what_it_calls_itself(reported, expected):
    assert hosts_of([1, 2], placed("a:2,b.example:2"), reported) == expected


def test_a_placement_is_told_in_words():
    assert told(placed("a:2,b:1", "a"), False) == (
        "3 ranks on a:2,b:1 (a in spite of the failure there: the others are not enough)"
    )
    assert told(placed("a:1", "a"), True) == "1 rank on this machine"


def record(*codes: int | None, marks: str = "") -> Record:
    """Return what is known of ranks that ended so (None: nothing), and rank 0 told `marks`."""
    found = Record(len(codes))
    for rank, code in enumerate(codes):
        found.note(rank, "s", b"%d h" % (100 + rank))
        if code is not None:
            found.ends[rank] = End(code, float(rank), "h")
    for mark in marks:
        found.note(0, "i", mark.encode())
    return found


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (record(0, 0, marks="+-cd"), How.DONE),
        (record(0, 0, marks="+-cl"), How.RESIZE),
        (record(0, 0, marks="+-clp"), How.ASKED),
        (record(0, 1, marks="+-cl"), How.FAILED),
        (record(0, None, marks="+-cd"), How.FAILED),  # Open MPI may end with 0 then
        (record(0, -9), How.FAILED),
    ],
)
def test_how_a_start_ended_is_what_the_ranks_told(found, expected):
    assert how(found) is expected


def after(history: History, found: Record, received: int = 0, **more):
    history.starts += 1
    return history.after(found, judge(found, "mpirun", 1, received), received, **more)


def test_a_job_that_fails_goes_on_and_says_why():
    history = History()
    follows = after(history, record(0, -9))
    assert follows.code is None
    assert follows.words.startswith("rank 1 of 2 on h was killed by signal 9 (SIGKILL)")


def test_a_crash_loop_is_cut_and_the_first_cause_told_again():
    history = History()
    codes = itertools.count(3)
    follows = [after(history, record(0, next(codes))) for _ in range(CRASHES)]
    assert [one.code for one in follows] == [None, None, 5]
    assert "rank 1 of 2 on h ended with exit code 5" in follows[-1].words
    assert follows[-1].words.endswith("The first one: start 1: rank 1 of 2 on h ended with exit code 3")


def test_commits_between_failures_are_progress():
    history = History()
    for _ in range(3 * CRASHES):
        assert after(history, record(0, 3, marks="c")).code is None
    assert [after(history, record(0, 4)).code for _ in range(2)] == [None, 4]
    assert history.first_cause.startswith(f"start {3 * CRASHES}: ")


@pytest.mark.parametrize("failed", [True, False])
def test_the_limit_of_resets_ends_a_job(failed):
    history = History(resets=1)
    found = record(7, 7, marks="c") if failed else record(0, 0, marks="cl")
    assert after(history, found).code is None
    follows = after(history, found)
    assert follows.code == (7 if failed else 1)
    assert "--reset-limit 1" in follows.words


def test_who_was_asked_to_leave_is_not_started_again():
    assert after(History(), record(0, 0, marks="cp")).code == ASKED
    assert after(History(), record(0, 0, marks="cp"), is_asked=True).code == ASKED
    assert after(History(), record(0, 0, marks="l"), is_asked=True).code == ASKED
    assert after(History(), record(-10, -10), is_asked=True).code == ASKED  # it came before they could take it
    assert after(History(), record(0, 0, marks="cp"), received=15).code == 143


def test_a_job_that_was_told_to_end_is_not_started_again():
    assert after(History(), record(0, None), received=2).code == 130
    assert after(History(), record(0, 0, marks="l"), received=15).code == 143
    assert after(History(), record(0, 0), received=15).code == 0  # it was done all the same


def test_a_launcher_that_starts_nothing_is_asked_once():
    found = Record(2)
    history = History(starts=1)
    assert history.after(found, Verdict(3, "no rank was started")).code == 3
