"""Hosts from which nothing is heard: when a job ends because of them, and when it does not."""

from __future__ import annotations

import pytest

from hvdlite.launch.silence import Silence
from hvdlite.launch.verdict import Record


class Job:
    """A job of four ranks on hosts a (where hvdrun is), b and c."""

    def __init__(self, limit: float = 7) -> None:
        self.record = Record(4)
        self.silence = Silence(self.record, limit, lambda host: host == "a")
        for rank, host in enumerate("abbc"):
            self.record.note(rank, "s", b"%d %s" % (70 + rank, host.encode()))
            self.silence.heard(rank)

    def late_after(self, seconds: float, *speaking: int):
        """Listen so long, in looks of a quarter of a second at each of which some ranks speak."""
        for _ in range(int(4 * seconds)):
            self.silence.listened(0.25)
            for rank in speaking:
                self.silence.heard(rank)
        return self.silence.silent()


def test_the_silent_host_is_named_with_its_ranks():
    job = Job()
    assert job.late_after(7, 3) is None
    late = job.late_after(0.25, 3)
    assert late.ranks == [1, 2]
    assert late.words.startswith("nothing was heard from b with ranks 1, 2 of 4 for 7 s: it is down, or the network")
    assert job.late_after(8).words.startswith("nothing was heard from b, c with ranks 1, 2, 3 of 4 for 8 s")


def test_a_host_lives_while_one_of_its_ranks_does():
    assert Job().late_after(100, 2, 3) is None


def test_ranks_that_have_ended_are_silent():
    job = Job()
    job.record.note(3, "x", b"0 1.0 c")
    assert job.late_after(100, 1, 2) is None


def test_no_network_leads_to_hvdruns_own_host():
    assert Job().late_after(100, 1, 2, 3) is None


def test_the_time_when_nobody_listened_does_not_count():
    job = Job()
    for _ in range(10):
        job.silence.listened(1000)  # hvdrun was stopped, or waited for its reader
    assert job.silence.silent() is None


@pytest.mark.parametrize(("limit", "ends"), [(0, False), (30, True)])
def test_the_limit_is_the_users(limit, ends):
    assert (Job(limit).late_after(31) is not None) is ends
