"""What is done when a rank is lost, with communicators that only take notes."""

from __future__ import annotations

import math
import threading

import pytest

from hvdlite.comm.losses import Losses
from hvdlite.errors import CommunicationError


class Group:
    def __init__(self, ranks):
        self.ranks, self.size = ranks, len(ranks)

    @staticmethod
    def Translate_ranks(group, ranks, other):
        return [other.ranks.index(rank) for rank in group.ranks]


class Comm:
    """Of ranks with these names, some of which are dead once somebody has made progress."""

    def __init__(self, *ranks):
        self.ranks, self.size = ranks, len(ranks)
        self.dead, self.known, self.revoked = [], [], 0

    def Iprobe(self):
        self.known = self.dead

    def Get_group(self):
        return Group(self.ranks)

    def Get_failed(self):
        return Group(self.known)

    def Revoke(self):
        self.revoked += 1

    def Shrink(self):
        return Comm(*(rank for rank in self.ranks if rank not in self.dead))


@pytest.fixture
def base():
    return Comm("a", "b", "c", "d")


@pytest.fixture
def losses(base):
    return Losses(base, math.inf, lambda code: None)


def test_while_nobody_is_lost_nothing_happens(losses):
    group = Comm("a", "b")
    losses.guard("group", [group], lambda: pytest.fail("woken"))
    losses.look()
    losses.check()
    assert not losses.noticed.is_set()
    assert not group.revoked


def test_a_loss_ends_every_wait(losses, base):
    groups, woken = [Comm("a", "b"), Comm("a", "c")], []
    losses.guard("both", groups, lambda: woken.append("both"))
    losses.guard("closed", [Comm("a")], lambda: pytest.fail("woken"))
    losses.release("closed")
    base.dead = ["b", "d"]
    losses.look()
    assert [group.revoked for group in groups] == [1, 1]
    assert woken == ["both"]
    assert losses.noticed.is_set()
    with pytest.raises(CommunicationError, match=r"^ranks 1, 3 of 4 died or cannot be reached\.$"):
        losses.check()


def test_a_group_that_is_made_after_the_loss_is_of_no_use_either(losses, base):
    base.dead = ["b"]
    losses.look()
    group, woken = Comm("a", "b"), []
    losses.guard("late", [group], lambda: woken.append("late"))
    assert (group.revoked, woken) == (1, ["late"])


def test_after_shrink_only_new_losses_count(losses, base):
    base.dead = ["b"]
    losses.look()
    losses.shrink()
    losses.check()
    assert losses.base.ranks == ("a", "c", "d")
    assert not losses.noticed.is_set()
    assert losses.has_happened
    losses.base.dead = ["d"]
    losses.look()
    with pytest.raises(CommunicationError, match="rank 2 of 3 died"):
        losses.check()


@pytest.mark.parametrize("settles", [False, True])
def test_who_does_not_settle_in_time_ends_the_job(base, settles, monkeypatch):
    aborted, killed = threading.Event(), []
    monkeypatch.setattr("hvdlite.comm.losses._ABORT_WAIT", 0.0)
    monkeypatch.setattr("hvdlite.comm.losses._LAST_WORDS", 0.0)
    monkeypatch.setattr("os.kill", lambda pid, number: killed.append(number))
    losses = Losses(base, 0.0, lambda code: aborted.set())
    base.dead = ["c"]
    losses.look()
    losses.shrink()
    if settles:
        losses.settle()
    losses.end_if_late()
    assert bool(killed) is not settles
    assert settles or aborted.wait(10)
