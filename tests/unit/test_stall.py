"""The stall watch with a clock of its own: when it asks, when it warns, when it gives up."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from hvdlite.config import Config
from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Inbox, Submission
from hvdlite.engine.stall import StallWatch
from hvdlite.errors import StallError
from hvdlite.messages import Announcement, Kind, Request, Tag, decode_json
from hvdlite.negotiation.coordinator import Coordinator

W = Request(Kind.ALLREDUCE, "w", "float32", (2, 3))
MEMBERS = (4, 6, 9)


class Post:
    """Keeps what is posted, instead of sending it."""

    def __init__(self, rank):
        self.rank, self.size = rank, len(MEMBERS)
        self.sent = deque()

    def post(self, dest, message):
        self.sent.append((dest, Tag(message[:1]), decode_json(message)))


class Watched:
    """The coordinator's watch, one member's watch, and a clock."""

    def __init__(self, **settings):
        self.now = 100.0
        self.warnings = []
        config = Config(**{"stall_warning": 10.0, **settings})
        self.coordinator = Coordinator(MEMBERS, 10, 0, lambda: self.now)
        self.posts = [Post(rank) for rank in range(3)]
        self.inboxes = [Inbox() for _ in range(3)]
        self.watches = [
            StallWatch(
                self.posts[rank], config, self.coordinator if rank == 0 else None, self.inboxes[rank],
                lambda rank=rank: f"allreduce 'number {rank}'", self.warnings.append,
            )
            for rank in range(3)
        ]  # fmt: skip

    def submit(self, rank, request=W):
        self.inboxes[rank].submit([Submission(request, Handle(request.name))])
        self.coordinator.hear(rank, Announcement(requests=[request]))

    def check(self, after):
        self.now += after
        self.watches[0].check(self.now)

    def deliver(self):
        """Let members answer."""
        for sender in range(3):
            while self.posts[sender].sent:
                dest, tag, value = self.posts[sender].sent.popleft()
                self.watches[dest].hear(sender, tag, value)


def test_nothing_is_asked_before_the_time():
    job = Watched()
    job.submit(1)
    job.check(after=9.9)
    assert not job.posts[0].sent
    job.check(after=0.1)
    assert [(dest, tag) for dest, tag, _ in job.posts[0].sent] == [(1, Tag.STALL_QUERY), (2, Tag.STALL_QUERY)]


def test_the_warning_tells_of_every_rank_by_its_global_number():
    job = Watched()
    job.submit(1)
    job.check(after=12)
    job.deliver()
    job.check(after=0.1)
    (text,) = job.warnings
    first, *ranks, advice = text.splitlines()
    assert first == "stalled for 12 s: allreduce of tensor 'w', float32[2, 3], waits for ranks 4, 9."
    assert ranks[0].startswith("  rank 4: has not submitted it; finished last: allreduce 'number 0'; is now at ")
    assert ranks[1].startswith(f"  rank 6: submitted it at {__file__}:")
    assert "finished last: allreduce 'number 1'" in ranks[1]
    assert ranks[2].startswith("  rank 9: has not submitted it")
    assert advice


def test_a_rank_that_does_not_answer_is_reported_as_silent():
    job = Watched()
    job.submit(1)
    job.check(after=12)
    job.watches[0].hear(1, Tag.STALL_REPORT, {"last": "x", "sites": {}, "now": "y"})
    job.check(after=1.9)
    assert job.warnings == []
    job.check(after=0.2)
    assert "rank 9: does not answer" in job.warnings[0]
    assert "rank 6: submitted it at ?" in job.warnings[0]


def test_what_comes_while_ranks_are_asked_is_not_warned_about():
    job = Watched()
    job.submit(1)
    job.check(after=12)
    job.submit(0)
    job.submit(2)
    job.coordinator.decide()
    job.deliver()
    job.check(after=0.1)
    assert job.warnings == []


def test_a_warning_is_repeated_only_after_the_time():
    job = Watched()
    job.submit(1)
    for _ in range(31):
        job.check(after=1)
        job.deliver()
        job.check(after=0)
    assert len(job.warnings) == 3


def test_one_inquiry_serves_all_tensors_that_are_due():
    job = Watched()
    for name in "abc":
        job.submit(1, W._replace(name=name))
    job.check(after=10)
    assert len(job.posts[0].sent) == 2
    job.deliver()
    job.check(after=0)
    assert len(job.warnings) == 3


def test_zero_turns_the_watch_off():
    job = Watched(stall_warning=0.0, stall_shutdown=20.0)
    job.submit(1)
    job.check(after=1000)
    assert not job.posts[0].sent
    assert job.coordinator.decide() is None


def test_the_second_limit_refuses_the_tensor_and_stops_the_set():
    job = Watched(stall_shutdown=25.0)
    job.submit(1)
    job.check(after=24)
    job.deliver()
    job.check(after=0)  # concludes the inquiry
    job.check(after=0.5)
    assert job.coordinator.decide() is None
    job.check(after=0.5)
    verdict = job.coordinator.decide()
    error = verdict.entries[0].refusal.exception()
    assert isinstance(error, StallError)
    for words in ("'w'", "25 s", "ranks 4, 9", "HVDLITE_STALL_SHUTDOWN=25"):
        assert words in str(error)
    assert "rank 4 gave up: tensor 'w'" in verdict.shutdown


def test_the_position_is_that_of_the_main_thread_outside_hvdlite():
    job = Watched()
    asked_from = []

    def ask():
        job.watches[1].hear(0, Tag.STALL_QUERY, ["w"])
        asked_from.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10)
    (_, tag, report) = job.posts[1].sent.pop()
    assert tag is Tag.STALL_REPORT
    assert f"{__file__}:" in report["now"]
    assert report["now"].endswith("in test_the_position_is_that_of_the_main_thread_outside_hvdlite")


@pytest.mark.parametrize("rank", [1, 2])
def test_only_the_coordinator_watches(rank):
    job = Watched()
    job.submit(1)
    job.now += 1000
    job.watches[rank].check(job.now)
    assert not job.posts[rank].sent
