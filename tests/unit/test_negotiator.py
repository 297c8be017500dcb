"""The protocol as a whole: simulated ranks, messages delivered late and in any interleaving.

Each simulated rank has a real Inbox and a real Negotiator, and does in one step what the
engine does. What must hold whatever the interleaving: all ranks run the same Responses in the same order, every
submission is answered once and by the request of that round, and nothing is left over.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Inbox, Submission
from hvdlite.errors import MismatchError, RemoteError
from hvdlite.messages import JOIN_NAME, Kind, Request
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.negotiator import Negotiator


class Wire:
    """Messages on their way, ordered between each pair of ranks only."""

    def __init__(self, size):
        self.under_way = {(a, b): deque() for a in range(size) for b in range(size)}
        self.here = [deque() for _ in range(size)]

    def deliver_one(self, rng):
        """Let one message arrive. False if none is under way."""
        pairs = [pair for pair, queue in self.under_way.items() if queue]
        if not pairs:
            return False
        source, dest = rng.choice(pairs)
        self.here[dest].append((source, self.under_way[source, dest].popleft()))
        return True


class End:
    """One rank's end of the wire: as much of a Communicator as a Negotiator uses."""

    def __init__(self, wire, rank, size):
        self.wire, self.rank, self.size = wire, rank, size

    def post(self, dest, message):
        self.wire.under_way[self.rank, dest].append(message)

    def poll(self):
        return self.wire.here[self.rank].popleft() if self.wire.here[self.rank] else None


class Rank:
    """What an engine does, without its thread and its data."""

    def __init__(self, wire, rank, size, capacity):
        self.rank = rank
        self.inbox = Inbox()
        self.coordinator = Coordinator(range(size), capacity, 0, lambda: 0.0) if rank == 0 else None
        self.negotiator = Negotiator(End(wire, rank, size), self.coordinator, on_stall_message=None)
        self.ran = []  # Responses in order
        self.absent = []  # names that ran without a submission of this rank
        self.stopped = ""

    def submit(self, *requests):
        """Submit as one call does; returns the handles."""
        submissions = [Submission(request, Handle(request.name)) for request in requests]
        self.inbox.submit(submissions)
        return [submission.handle for submission in submissions]

    def step(self):
        """Take a turn of the engine's loop. True if it had something to do."""
        if self.stopped:
            return False
        requests = self.inbox.drain()
        if requests:
            self.negotiator.announce(requests)
        verdicts = self.negotiator.advance()
        for verdict in verdicts:
            for response in self.negotiator.learn(verdict):
                self.run(response)
            self.stopped = self.stopped or verdict.shutdown
        return bool(requests or verdicts)

    def run(self, response):
        if response.refusal is not None:
            self.inbox.fail(response.name, response.refusal.exception())
            return
        self.ran.append(response)
        submission = self.inbox.get(response.name)
        if submission is None:
            self.absent.append(response.name)
        else:
            self.inbox.finish(response.name, (response, submission.request))


class Job:
    def __init__(self, size, capacity=1000, seed=0):
        self.rng = random.Random(seed)
        self.wire = Wire(size)
        self.ranks = [Rank(self.wire, rank, size, capacity) for rank in range(size)]

    def settle(self):
        """Let everything happen that still can, in random order."""
        idle = 0
        while idle < 20 * len(self.ranks):
            moved = self.wire.deliver_one(self.rng) if self.rng.random() < 0.5 else self.rng.choice(self.ranks).step()
            idle = 0 if moved else idle + 1

    def check_nothing_is_left(self):
        assert not self.ranks[0].coordinator.ledger.waiting
        for rank in self.ranks:
            assert not rank.inbox.in_flight
            assert rank.inbox.drain() == []
            assert not rank.negotiator.in_flight

    def check_same_everywhere(self):
        for rank in self.ranks[1:]:
            assert rank.ran == self.ranks[0].ran


def allreduce(name, n=4, **more):
    return Request(Kind.ALLREDUCE, name, "float32", (n,))._replace(**more)


def group(name, n_members, **more):
    members = [f"{name}_{i}" for i in range(n_members)]
    return [allreduce(member, group=name, group_size=n_members, **more) for member in members]


def raises(handle):
    assert handle.poll()
    with pytest.raises(Exception) as caught:
        handle.wait()
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("capacity", [0, 1, 3, 1000])
@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_run_the_same_in_the_same_order(size, capacity, seed):
    job = Job(size, capacity, seed)
    rng = job.rng
    for round_ in range(6):
        # The same calls on every rank, each rank in an order of its own; some shapes change from round to round.
        calls = [[allreduce(name, n=2 + round_ // rng.choice([1, 9]))] for name in "abcde"[: rng.randrange(1, 6)]]
        calls += [group("g", 3), group("h", 2, prescale=float(round_ // 2 + 1))][: rng.randrange(3)]
        calls += [[allreduce(f"fresh{round_}")], [Request(Kind.BARRIER, f"barrier{round_}")]]
        todo = [rng.sample(calls, len(calls)) for _ in range(size)]
        handles = [[] for _ in range(size)]
        while any(todo):
            rank = rng.randrange(size)
            if todo[rank] and rng.random() < 0.5:
                handles[rank] += job.ranks[rank].submit(*todo[rank].pop())
            elif rng.random() < 0.5:
                job.wire.deliver_one(rng)
            else:
                job.ranks[rng.randrange(size)].step()
        job.settle()
        for rank in range(size):
            for handle in handles[rank]:
                assert handle.poll(), f"{handle.name} of rank {rank} was lost"
                response, request = handle.wait()
                assert (response.shape, response.prescale) == (request.shape, request.prescale)
    job.check_same_everywhere()
    job.check_nothing_is_left()
    assert not any(rank.absent for rank in job.ranks)
    for one in job.ranks:
        assert len({cache_size(rank) for rank in job.ranks}) == 1, one
        assert cache_size(one) <= capacity


def cache_size(rank):
    return len(rank.negotiator._cache)


class Calls:
    """Each rank calls each name `rounds` times, one after the other; some of the calls are wrong, some differ.

    Each round of each name has a shape of its own, so that a call which meets another round's shows up.
    """

    rounds, names = 12, "ab"

    def __init__(self, job):
        self.job, self.size = job, len(job.ranks)
        every = [(rank, name, k) for rank in range(self.size) for name in self.names for k in range(self.rounds)]
        self.wrong = {call for call in every if job.rng.random() < 0.15}
        self.odd = {call for call in every if job.rng.random() < 0.1}
        self.next_round = dict.fromkeys(((rank, name) for rank, name, _ in every), 0)
        self.waiting, self.outcomes, self.n = {}, {}, len(every)

    def shape(self, rank, name, k):
        return (k // 3 + 2 + 100 * ((rank, name, k) in self.odd),)

    def advance(self, rank, name):
        """Take the result of this rank's call, if there is one, and make the next call."""
        k = self.next_round[rank, name]
        handle = self.waiting.get((rank, name))
        if handle is not None:
            if not handle.poll():
                return
            del self.waiting[rank, name]
            self.outcomes[rank, name, k - 1] = self.outcome(handle)
        if k < self.rounds:
            self.next_round[rank, name] += 1
            self.call(rank, name, k)

    def call(self, rank, name, k):
        if (rank, name, k) in self.wrong:
            self.job.ranks[rank].inbox.poison([Request(Kind.ALLREDUCE, name, problem="wrong here")])
            self.outcomes[rank, name, k] = "raised here"
        else:
            request = allreduce(name)._replace(shape=self.shape(rank, name, k))
            (self.waiting[rank, name],) = self.job.ranks[rank].submit(request)

    @staticmethod
    def outcome(handle):
        try:
            return handle.wait()[0].shape
        except Exception as error:
            return type(error)

    def run(self):
        rng, ranks = self.job.rng, self.job.ranks
        while len(self.outcomes) < self.n:
            before = len(self.outcomes)
            for _ in range(200):
                rng.choice(
                    [
                        lambda: self.advance(*rng.choice(list(self.next_round))),
                        lambda: self.job.wire.deliver_one(rng),
                        lambda: rng.choice(ranks).step(),
                    ]
                )()
            if len(self.outcomes) == before:  # perhaps only bad luck
                self.job.settle()
                for rank, name in self.next_round:
                    self.advance(rank, name)
                assert len(self.outcomes) > before, f"stuck: {self.waiting}, {self.next_round}"
        self.job.settle()

    def expected(self, rank, name, k):
        everyone = range(self.size)
        if any((r, name, k) in self.wrong for r in everyone):
            return "raised here" if (rank, name, k) in self.wrong else RemoteError
        shapes = {self.shape(r, name, k) for r in everyone}
        return MismatchError if len(shapes) > 1 else shapes.pop()


@pytest.mark.parametrize("seed", range(60))
def test_refused_calls_never_shift_later_ones(seed):
    job = Job(3, capacity=(0, 1, 2, 1000)[seed % 4], seed=seed)
    calls = Calls(job)
    calls.run()
    assert calls.outcomes == {call: calls.expected(*call) for call in calls.outcomes}
    job.check_same_everywhere()
    job.check_nothing_is_left()
    assert not any(rank.absent for rank in job.ranks)


def test_a_retry_is_not_taken_for_the_refused_first_try():
    # Rank 1 fails locally and tries again at once, before rank 0 has come at all.
    job = Job(2)
    job.ranks[1].inbox.poison([Request(Kind.ALLREDUCE, "w", problem="wrong here")])
    (retry,) = job.ranks[1].submit(allreduce("w"))
    job.settle()
    (first,) = job.ranks[0].submit(allreduce("w"))
    job.settle()
    assert isinstance(raises(first), RemoteError)
    assert not retry.poll()
    (second,) = job.ranks[0].submit(allreduce("w"))
    job.settle()
    assert second.wait()[0] == retry.wait()[0]
    job.check_nothing_is_left()
    assert not any(rank.absent for rank in job.ranks)


def evict(job, *names):
    """Make the job forget ids by using fresh names."""
    for name in names:
        for rank in job.ranks:
            rank.submit(allreduce(name))
        job.settle()


def test_an_id_evicted_while_another_rank_announces_it_is_announced_in_full():
    job = Job(2, capacity=1)
    evict(job, "w")  # now known
    zero, one = job.ranks
    (late,) = one.submit(allreduce("w"))
    one.step()  # the id is under way to rank 0 …
    fresh = [zero.submit(allreduce("x"))[0], one.submit(allreduce("x"))[0]]
    one.step()
    message_with_id = job.wire.under_way[1, 0].popleft()
    job.settle()  # … which meanwhile evicts it
    job.wire.under_way[1, 0].append(message_with_id)
    job.settle()
    assert all(handle.poll() for handle in fresh)
    (mine,) = zero.submit(allreduce("w"))
    job.settle()
    assert mine.wait()[0] == late.wait()[0]
    job.check_nothing_is_left()
    assert not any(rank.absent for rank in job.ranks)


def test_an_id_answered_in_full_is_not_announced_again_when_it_is_evicted():
    # Rank 0 announces by id, rank 1 a changed request: both are refused, and the matter is closed.
    job = Job(2, capacity=1)
    evict(job, "w")
    (known,) = job.ranks[0].submit(allreduce("w"))
    (changed,) = job.ranks[1].submit(allreduce("w", n=5))
    job.settle()
    assert isinstance(raises(known), MismatchError)
    assert isinstance(raises(changed), MismatchError)
    evict(job, "x")
    job.check_nothing_is_left()


def test_an_id_answered_while_another_rank_has_joined_is_closed_too():
    job = Job(2, capacity=1)
    evict(job, "w")
    (join,) = job.ranks[1].submit(Request(Kind.JOIN, JOIN_NAME))
    (alone,) = job.ranks[0].submit(allreduce("w"))
    job.settle()
    assert alone.wait()[0].joined == (1,)
    assert job.ranks[1].absent == ["w"]
    (last,) = job.ranks[0].submit(Request(Kind.JOIN, JOIN_NAME))
    job.settle()
    assert join.poll()
    assert last.poll()
    evict(job, "x")
    job.check_nothing_is_left()


def test_a_group_whose_member_was_forgotten_comes_back_whole():
    for seed in range(20):
        job = Job(2, capacity=3, seed=seed)
        for rank in job.ranks:
            rank.submit(*group("g", 3))
        job.settle()
        for rank in job.ranks:  # one member is evicted while the group is under way again
            rank.submit(allreduce("x"))
            rank.submit(*group("g", 3))
            if seed % 2:
                rank.step()
        job.settle()
        evict(job, "y", "z")
        job.check_same_everywhere()
        job.check_nothing_is_left()
        assert [r.name for r in job.ranks[0].ran].count("g_0") == 2


def test_ranks_that_disagree_about_a_group_all_raise_and_go_on():
    for seed in range(20):
        job = Job(3, seed=seed)
        handles = [
            *job.ranks[0].submit(allreduce("a", group="ab", group_size=2), allreduce("b", group="ab", group_size=2)),
            *job.ranks[1].submit(allreduce("a", group="ac", group_size=2), allreduce("c", group="ac", group_size=2)),
            *job.ranks[2].submit(allreduce("a", group="ab", group_size=2), allreduce("b", group="ab", group_size=2)),
        ]
        job.settle()
        for handle in handles:
            raises(handle)
        job.check_nothing_is_left()
        evict(job, "a", "b", "c")
        job.check_same_everywhere()


def test_a_rank_that_leaves_stops_all():
    job = Job(3)
    job.ranks[2].negotiator.leave("had enough")
    job.settle()
    assert [rank.stopped for rank in job.ranks] == ["rank 2 had enough"] * 3


def test_steady_state_sends_one_message_up_and_one_down():
    job = Job(3)
    names = [f"w{i}" for i in range(50)]
    for _ in range(2):
        for rank in job.ranks:
            rank.submit(*map(allreduce, names))
        job.settle()
    for rank in job.ranks:
        rank.submit(*map(allreduce, names))
    for rank in job.ranks:
        rank.step()
    assert [len(job.wire.under_way[rank, 0]) for rank in (1, 2)] == [1, 1]
    assert len(job.wire.under_way[1, 0][0]) < 4 * len(names) + 20
    while job.wire.deliver_one(job.rng):
        pass
    job.ranks[0].step()
    assert [len(job.wire.under_way[0, rank]) for rank in (1, 2)] == [1, 1]
    assert len(job.wire.under_way[0, 1][0]) < 4 * len(names) + 20
