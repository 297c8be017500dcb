"""Short messages through shared memory: in order, none lost, none twice, whatever the reader does."""

import mmap
import random

import pytest

from hvdlite.comm.mailbox import LONGEST, Mailboxes, mailbox_bytes


def mailboxes(size):
    nbytes = mailbox_bytes(size)
    mapping = mmap.mmap(-1, size * nbytes + 4096)
    return [Mailboxes(rank, size, mapping, 4096, nbytes) for rank in range(size)]


@pytest.mark.parametrize("length", [0, 1, 7, LONGEST])
def test_a_message_arrives_as_it_was_sent(length):
    left, right = mailboxes(2)
    message = bytes(range(256))[:length]
    assert left.post(1, message) == 0
    assert right.take() == (0, message)
    assert right.take() is None
    assert left.take() is None


def test_a_long_message_comes_another_way_and_keeps_its_place():
    left, right = mailboxes(2)
    assert [left.post(1, m) for m in (b"a", b"b" * (LONGEST + 1), b"c")] == [0, 2, 0]
    assert right.take() == (0, b"a")
    assert right.take() == (0, None)
    right.hand_in(0, 2, b"long")
    assert [right.take() for _ in range(3)] == [(0, b"long"), (0, b"c"), None]


def test_what_finds_no_room_comes_another_way_and_keeps_its_place():
    left, right = mailboxes(2)
    numbers = [left.post(1, b"%d" % i) for i in range(1, 12)]
    assert numbers == [0] * 8 + [9, 10, 11]
    for number in (10, 9, 11):  # early, and not even in their own order
        right.hand_in(0, number, b"%d" % number)
    assert [right.take()[1] for _ in range(11)] == [b"%d" % i for i in range(1, 12)]
    assert left.post(1, b"again") == 0


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_every_pair_keeps_its_own_order(size, seed):
    # Message j from rank i to rank k is "i k j": a message that is lost, doubled or misdelivered shows up.
    chance = random.Random(seed)
    boxes = mailboxes(size)
    sent = {(i, k): 0 for i in range(size) for k in range(size) if i != k}
    got, elsewhere = dict.fromkeys(sent, 0), {pair: [] for pair in sent}

    def read(k):
        found = boxes[k].take()
        if found is None:
            return False
        source, message = found
        if message is None:
            boxes[k].hand_in(source, *elsewhere[source, k].pop(0))
        else:
            assert message == b"%d %d %d" % (source, k, got[source, k])
            got[source, k] += 1
        return True

    for _ in range(2000):
        i, k = chance.choice(list(sent))
        if chance.random() < 0.6:
            message = b"%d %d %d" % (i, k, sent[i, k])
            sent[i, k] += 1
            if number := boxes[i].post(k, message):
                elsewhere[i, k].append((number, message))
        else:
            read(k)
    for k in range(size):
        while read(k):
            pass
    assert all(sent.values())
    assert got == sent


def test_too_many_ranks_have_no_mailboxes():
    assert mailbox_bytes(1) == 0
    assert mailbox_bytes(32) > 0
    assert mailbox_bytes(33) == 0
