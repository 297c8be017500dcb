"""The learned schedule as a protocol: simulated ranks, messages delivered late and in any interleaving.

Each simulated rank has a real Inbox, Negotiator, Follower and MessageBoard, and does in one step what the engine does.
To run something holds a rank up until every rank has begun to run it, as moving data does: so a rank that runs what
another one does not is found as a job that stands still. What is enclosed with the counters holds nobody up, but
must have come from everyone by the time it is run.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Inbox, Submission
from hvdlite.messages import Kind, Request, decode_counter, nameless
from hvdlite.negotiation.board import MessageBoard, open_board
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.negotiator import Negotiator
from hvdlite.negotiation.schedule import Learner
from hvdlite.testing.ranks import run_ranks


class End:
    """One rank's end of a wire that keeps the order between each pair of ranks only."""

    def __init__(self, under_way, rank, size):
        self.under_way, self.rank, self.size = under_way, rank, size
        self.here = deque()

    def post(self, dest, message):
        self.under_way[self.rank, dest].append(message)

    def poll(self):
        return self.here.popleft() if self.here else None


class Rank:
    """An engine without its threads and its data, and the program that uses it.

    Args:
        steps: lists of Requests. The program submits one list, and waits for all of it before the next; what it
            waits for in between, because `dice` says so, it has by then.
        encloses: says which batches travel with the counters.
    """

    def __init__(self, end, steps, dice, early, encloses):
        self.end, self.steps, self.dice, self.early = end, deque(steps), dice, early
        self.inbox = Inbox()
        self.coordinator = None
        if end.rank == 0:
            self.coordinator = Coordinator(range(end.size), 1000, 0, lambda: 0.0, learner=Learner())
        self.encloses = encloses
        self.negotiator = Negotiator(end, self.coordinator, on_stall_message=None, enclosing=self)
        self.handles = []
        self.todo = deque()
        self.ran = []
        self.n_sent = 0  # how much had been run with the last that was sent
        self.n_scheduled = self.n_enclosed = 0
        self.answers = []

    def use(self):
        """Let the program go on, if it can. False if it waits or has ended."""
        if self.todo and not any(handle.awaited and not handle.poll() for handle in self.handles):
            request = self.todo.popleft()
            handle = Handle(request.name)
            self.inbox.submit([Submission(request, handle)])
            handle.awaited = self.dice.random() < self.early or not self.todo
            self.handles.append(handle)
            if not self.todo:
                for one in self.handles:
                    one.awaited = True
            return True
        if not self.todo and all(handle.poll() for handle in self.handles):
            self.answers += [handle.wait() for handle in self.handles]
            self.handles = []
            if self.steps:
                self.todo.extend(self.steps.popleft())
                return True
        return False

    def step(self):
        """Take a turn of the engine's loop. True if it had something to do."""
        negotiator = self.negotiator
        requests = self.inbox.drain()
        if requests:
            negotiator.announce(requests)
        follower = negotiator.follower
        if follower is not None:
            batch = negotiator.take()
            if batch is not None:
                self.n_scheduled += len(batch)
                self.run(batch, negotiator.enclosed)
                return True
            beyond = [name for name in follower.beyond() if self.inbox.get(name).handle.awaited]
            if not follower.is_next_whole and beyond:
                follower.break_off()
            if self.dice.random() < 0.3:
                self.use()  # on a thread of its own, between any two lines here
            if follower.broken:
                negotiator.freeze(awaited=beyond[0] if beyond else "")
        verdicts = negotiator.advance()
        for verdict in verdicts:
            for batch in negotiator.finish(verdict):
                self.run(batch, negotiator.enclosed)
            responses = negotiator.learn(verdict)
            self.inbox.follow(negotiator.follower)
            self.run(responses)
        return bool(requests or verdicts or negotiator.news)

    def enclosure(self, name):
        submission = self.inbox.get(name)
        assert submission is not None, f"rank {self.end.rank} encloses {name!r}, which it has not submitted"
        return self.values(self.end.rank, name)

    def values(self, rank, name):
        return f"{rank} gives {name!r}, and so often before: {self.ran.count(name)}".encode()

    def run(self, responses, enclosed=None):
        if enclosed is not None:
            (response,) = responses
            others = [rank for rank in range(self.end.size) if rank != self.end.rank]
            assert enclosed == {rank: self.values(rank, response.name) for rank in others}
            self.n_enclosed += 1
        for response in responses:
            assert response.refusal is None
            self.ran.append(response.name)
            submission = self.inbox.get(response.name)
            assert submission is not None, f"rank {self.end.rank} runs {response.name!r}, which it has not submitted"
            assert submission.request.shape == response.shape
            self.inbox.finish(response.name, (response.name, response.shape))
        if enclosed is None:
            self.n_sent = len(self.ran)


def nothing(batch):
    return False


def single_ones(batch):
    return len(batch) == 1


class Job:
    """All ranks. `programs` are the lists of steps of each."""

    def __init__(self, programs, seed=0, early=0.0, encloses=nothing):
        size = len(programs)
        self.dice = random.Random(seed)
        self.under_way = {(a, b): deque() for a in range(size) for b in range(size)}
        self.ends = [End(self.under_way, rank, size) for rank in range(size)]
        self.ranks = [Rank(end, p, self.dice, early, encloses) for end, p in zip(self.ends, programs, strict=True)]

    def deliver_one(self):
        pairs = [pair for pair, queue in self.under_way.items() if queue]
        if not pairs:
            return False
        source, dest = self.dice.choice(pairs)
        self.ends[dest].here.append((source, self.under_way[source, dest].popleft()))
        return True

    def is_held_up(self, rank):
        """Whether `rank` is in the middle of something that another one has not begun."""
        return any(len(other.ran) < rank.n_sent for other in self.ranks)

    def play(self):
        """Let everything happen that can, in random order, until all programs have ended or nothing moves."""
        idle, limit = 0, 60 * len(self.ranks)
        while idle < limit:
            what = self.dice.random()
            rank = self.dice.choice(self.ranks)
            if what < 0.4:
                moved = self.deliver_one()
            elif what < 0.7:
                moved = rank.use()
            else:
                moved = not self.is_held_up(rank) and rank.step()
            idle = 0 if moved else idle + 1

    def check(self):
        """All have ended, ran the same in the same order, and have got what they asked for."""
        for rank in self.ranks:
            assert not rank.steps and not rank.todo, "stands still"
            assert all(handle.poll() for handle in rank.handles), "stands still"
        assert all(rank.ran == self.ranks[0].ran for rank in self.ranks)
        assert not any(self.under_way.values())


def requests(*names, shape=(3,)):
    return [Request(Kind.ALLREDUCE, name, "float32", shape) for name in names]


def shuffled(dice, steps):
    return [dice.sample(step, len(step)) for step in steps]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 20])
def test_a_step_that_repeats_is_run_without_asking(size):
    steps = [requests("a", "b", "c")] * 12
    job = Job([shuffled(random.Random(rank), steps) for rank in range(size)])
    job.play()
    job.check()
    assert all(rank.n_scheduled >= 3 * (12 - 4) for rank in job.ranks)


def test_no_message_but_counters_is_sent_while_a_schedule_runs():
    job = Job([[requests("a")] * 6] * 3)
    job.play()
    for rank in job.ranks:
        rank.steps.extend([requests("a")] * 20)
        rank.end.post = lambda dest, message, end=rank.end: sent.append(message) or End.post(end, dest, message)
    sent = []
    job.play()
    job.check()
    assert {message[:1] for message in sent} == {b"C"}
    assert len(sent) == 20 * 3 * 2


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_what_is_enclosed_takes_one_message_to_everyone(size):
    job = Job([[requests("a")] * 6] * size, encloses=single_ones)
    job.play()
    for rank in job.ranks:
        rank.steps.extend([requests("a")] * 20)
        rank.end.post = lambda dest, message, end=rank.end: sent.append(message) or End.post(end, dest, message)
    sent, before = [], [rank.n_enclosed for rank in job.ranks]
    job.play()
    job.check()
    assert [rank.n_enclosed - n for rank, n in zip(job.ranks, before, strict=True)] == [20] * size
    assert {message[:1] for message in sent} == {b"C"}
    assert len(sent) == 20 * size * (size - 1)


def test_more_ranks_than_tell_each_other_directly_enclose_nothing():
    job = Job([[requests("a")] * 8] * 17, encloses=single_ones)
    job.play()
    job.check()
    assert all(rank.n_scheduled and not rank.n_enclosed for rank in job.ranks)


def test_what_is_enclosed_may_come_after_the_end_of_its_schedule():
    # Rank 1 has "a" of rank 2 still to come when it hears that the schedule has ended behind it.
    steps = [*[requests("a")] * 5, requests("b")]
    job = Job([steps] * 3, encloses=single_ones)
    rank, late = job.ranks[1], job.under_way[2, 1]

    def deliver(*pairs):
        for pair in pairs:
            while job.under_way[pair]:
                job.ends[pair[1]].here.append((pair[0], job.under_way[pair].popleft()))

    others = [(a, b) for a in range(3) for b in range(3) if (a, b) != (2, 1)]
    for _ in range(200):
        for one in job.ranks:
            while one.use():
                pass
            one.step()
        deliver(*others)
        if rank.negotiator.follower is None or not rank.n_scheduled:
            deliver((2, 1))
    assert late and rank.negotiator._ended
    n_before = len(rank.ran)
    assert not rank.step() and len(rank.ran) == n_before
    job.play()
    job.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_leaves_shows_first_what_it_has_just_submitted(seed):
    steps = []
    for n in range(6):
        steps += [*[requests("a")] * 4, requests("a", f"odd{n}")]
    job = Job([steps] * 2, seed, encloses=single_ones)
    job.play()
    job.check()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_operations_without_names_are_predicted(size):
    def step(number):
        return [
            Request(Kind.ALLREDUCE, nameless(Kind.ALLREDUCE, 2 * number + 1), "float32", (3,)),
            Request(Kind.ALLREDUCE, nameless(Kind.ALLREDUCE, 2 * number + 2), "float32", (5,)),
            Request(Kind.BARRIER, nameless(Kind.BARRIER, number + 1)),
        ]

    job = Job([[step(n) for n in range(12)]] * size)
    job.play()
    job.check()
    assert all(rank.n_scheduled >= 3 * 6 for rank in job.ranks)
    assert job.ranks[0].ran[:3] == ["allreduce.noname.1", "allreduce.noname.2", "barrier.noname.1"]
    assert sorted(job.ranks[0].ran) == sorted(request.name for n in range(12) for request in step(n))


def test_a_step_that_always_disappoints_is_given_up():
    # Two steps of one sort, then something new: a schedule would end each time it has just begun.
    steps = []
    for n in range(60):
        steps += [requests("a"), requests("a"), requests("a"), requests(f"new{n}")]
    job = Job([steps] * 2)
    job.play()
    job.check()
    eras = job.ranks[0].negotiator._era
    assert eras <= 12


def random_steps(dice):
    """Return steps of two sorts, with interludes, new shapes, and operations without names."""
    sorts = [[f"{sort}{i}" for i in range(dice.randint(1, 5))] for sort in "ab"]
    steps, number = [], 0
    for _ in range(dice.randint(4, 10)):
        names = dice.choice(sorts)
        for _ in range(dice.randint(1, 8)):
            # What does not fit may come while batches before it are whole, and run on some ranks already.
            also = ["odd" + str(len(steps))] if dice.random() < 0.15 else []
            steps.append(requests(*names, *also))
            if dice.random() < 0.3:
                number += 1
                steps.append([Request(Kind.ALLREDUCE, nameless(Kind.ALLREDUCE, number), "float32", (4,))])
            if dice.random() < 0.1:
                steps.append(requests("odd" + str(len(steps))))
            if dice.random() < 0.1:
                steps.append(requests(names[0], shape=(7,)))
            if dice.random() < 0.1 and len(names) > 1:
                steps.append(requests(*names[1:]))
    return steps


@pytest.mark.parametrize("seed", range(200))
def test_random_programs_end_with_everything_run_once_and_in_one_order(seed):
    dice = random.Random(seed)
    size = dice.choice([1, 2, 2, 3, 4, 7, 18])
    steps = random_steps(dice) if size < 18 else random_steps(dice)[:12]
    early = dice.choice([0.0, 0.0, 0.05, 0.3])
    # Ranks that wait in between must submit in one order, or two would wait for each other.
    programs = [steps if early else shuffled(dice, steps) for _ in range(size)]
    encloses = dice.choice([nothing, single_ones, lambda batch: len(batch) == 1 and batch[0].name[-1] in "02468"])
    job = Job(programs, seed, early, encloses)
    job.play()
    job.check()
    expected = sorted((request.name, request.shape) for step in steps for request in step)
    for rank in job.ranks:
        assert sorted(rank.answers) == expected


@pytest.mark.parametrize("size", [2, 3, 16, 17, 30])
def test_counters_reach_everyone_directly_and_up_and_down_a_tree(size):
    under_way = {(a, b): deque() for a in range(size) for b in range(size)}
    boards = [MessageBoard(End(under_way, rank, size)) for rank in range(size)]
    dice = random.Random(size)

    def deliver_all():
        while pairs := [pair for pair, queue in under_way.items() if queue]:
            source, dest = dice.choice(pairs)
            assert source in boards[dest].peers
            boards[dest].hear(source, *decode_counter(under_way[source, dest].popleft()))

    *early, late = dice.sample(range(size), size)
    for rank in early:
        boards[rank].publish(1, 5)
    deliver_all()
    assert not any(board.reached(1, 0) for rank, board in enumerate(boards) if rank != late)
    boards[late].publish(1, 3)
    deliver_all()
    for rank, board in enumerate(boards):
        assert [board.reached(1, position) for position in (2, 3) if rank != late or position < 3] == (
            [True, False] if rank != late else [True]
        )
    for board in boards:
        board.publish(2, 1)  # who shows a later era says nothing of this one
    deliver_all()
    assert [[board.reached(era, 0) for era in (1, 2, 3)] for board in boards] == [[False, True, False]] * size


@pytest.mark.parametrize("size", [2, 3, 7])
def test_counters_in_shared_memory(size):
    def body(comm):
        board = open_board(comm, shared_memory=True)
        assert board.any_thread
        seen = [board.reached(1, 0)]
        comm.barrier()
        board.publish(1, 2 + comm.rank)
        comm.barrier()
        others = [rank for rank in range(size) if rank != comm.rank]
        seen += [board.reached(1, min(others) + 1), board.glimpse(1, min(others) + 2)]
        comm.barrier()
        board.publish(2, 1)
        comm.barrier()
        seen += [board.reached(era, 0) for era in (1, 2, 3)]
        board.close()
        return seen

    assert run_ranks(size, body) == [[False, True, False, False, True, False]] * size


def test_a_counter_wakes_a_rank_that_sleeps():
    def body(comm):
        board = open_board(comm, shared_memory=True)
        if comm.rank == 0:
            comm.barrier()
            board.publish(1, 1)
        else:
            comm.barrier()
            while not board.reached(1, 0):
                comm.wait(20.0)

    run_ranks(2, body, timeout=10.0)


@pytest.mark.parametrize("size", [2, 3, 7])
def test_values_are_shown_together_with_counters(size):
    def body(comm):
        board = open_board(comm, shared_memory=True)
        found = []
        for era, positions in ((1, 3), (3, 1), (5, 4)):
            board.begin()
            for position in range(positions):
                some_do_not = position == 2
                if not (some_do_not and comm.rank == 1):
                    board.show(era, position, np.full(3, 100.0 * era + 10 * comm.rank + position))
                board.publish(era, position + 1)
                comm.barrier()
                shown = board.shown(era, position, np.dtype(float), 3)
                found.append(shown and [block.tolist() for block in shown])
                comm.barrier()
        board.close()
        return found

    expected = [
        None if position == 2 else [[100.0 * era + 10 * rank + position] * 3 for rank in range(size)]
        for era, positions in ((1, 3), (3, 1), (5, 4))
        for position in range(positions)
    ]
    assert run_ranks(size, body) == [expected] * size


def test_the_last_values_of_an_era_outlast_the_first_of_the_next():
    def body(comm):
        board = open_board(comm, shared_memory=True)
        board.begin()
        board.show(1, 0, np.array([1 + comm.rank]))
        comm.barrier()
        shown = board.shown(1, 0, np.dtype(int), 1)
        comm.barrier()
        if comm.rank == 0:  # is ahead of the other one
            board.begin()
            board.show(3, 0, np.array([8]))
        comm.barrier()
        return [int(block[0]) for block in shown]

    assert run_ranks(2, body) == [[1, 2]] * 2


def test_a_board_without_room_for_values_shows_counters(monkeypatch):
    def body(comm):
        make = comm.shared_segment
        comm.shared_segment = lambda nbytes: None if nbytes else make(0)
        board = open_board(comm, shared_memory=True)
        board.begin()
        board.publish(1, 1)
        comm.barrier()
        return board.reached(1, 0), board.most_shown

    assert run_ranks(2, body) == [(True, 0)] * 2
    assert MessageBoard(End({}, 0, 1)).most_shown < 0
