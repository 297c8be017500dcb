"""What the loopback transport does beyond the contract (tests/conformance/test_communicator.py)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdlite.comm.loopback import loopback_group
from hvdlite.errors import CommunicationError
from hvdlite.testing.ranks import run_ranks

BLOCKED = {
    "barrier": lambda comm: comm.barrier(),
    "exit_barrier": lambda comm: comm.exit_barrier(),
    "allgather_bytes": lambda comm: comm.allgather_bytes(b""),
    "create": lambda comm: comm.create([0]),
    "wait": lambda comm: comm.wait(math.inf) or comm.wait(math.inf),
    "recv": lambda comm: comm.recv(np.zeros(1), 1),
    "send": lambda comm: comm.send(np.zeros(1), 1),
    "shared_segment": lambda comm: comm.shared_segment(8),
}


@pytest.mark.parametrize("call", list(BLOCKED))
def test_an_abort_ends_what_others_wait_in(call):
    def body(comm):
        if comm.rank == 1:
            comm.abort(3)
            return "aborted"
        with pytest.raises(CommunicationError, match=r"rank 1 aborted all ranks with exit status 3"):
            BLOCKED[call](comm)
        return "raised"

    assert run_ranks(3, body, timeout=10) == ["raised", "aborted", "raised"]


def test_an_abort_ends_a_wait_in_a_segment_of_another_group():
    def body(comm):
        group = comm.create([2, 0])
        if comm.rank == 1:
            comm.abort(1)
            return
        segment = group.shared_segment(8)
        if group.rank == 0:
            with pytest.raises(CommunicationError, match="rank 1 aborted"):
                segment.await_rank(1, 0, 1)

    def tolerant(comm):
        try:
            body(comm)
        except CommunicationError as error:  # the abort came before the segment was there
            assert "rank 1 aborted" in str(error)

    run_ranks(3, tolerant, timeout=10)


def test_after_an_abort_every_call_raises():
    first, second = loopback_group(2)
    second.abort(1)
    for call in (first.poll, lambda: first.post(1, b""), lambda: first.isend(np.zeros(1), 1), lambda: first.wait(0)):
        with pytest.raises(CommunicationError, match="rank 1 aborted"):
            call()


def test_a_process_alone_decides_what_an_abort_does():
    codes = []
    (comm,) = loopback_group(1, on_abort=codes.append)
    comm.abort(5)
    assert codes == [5]


@pytest.mark.parametrize("size", [1, 2])
def test_a_missing_rank_makes_the_last_barrier_give_up(size):
    comms = loopback_group(size)
    assert comms[0].exit_barrier(timeout=0.01) is (size == 1)


def test_a_send_is_done_when_the_receiver_has_the_data():
    first, second = loopback_group(2)
    outgoing, incoming = np.arange(3), np.zeros(3, np.int64)
    leaving = first.isend(outgoing, 1)
    arriving = second.irecv(incoming, 0)
    outgoing[:] = -1  # the copy is made when both sides are known
    leaving.wait()
    arriving.wait()
    arriving.wait()
    assert incoming.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("n", "dtype"), [(4, np.int64), (3, np.int32)])
def test_sides_that_do_not_fit_are_both_told(n, dtype):
    first, second = loopback_group(2)
    leaving = first.isend(np.arange(3), 1)
    arriving = second.irecv(np.zeros(n, dtype), 0)
    for side in (leaving, arriving):
        with pytest.raises(CommunicationError, match=r"rank 0 sent 3 elements of int64, but rank 1 receives \d of int"):
            side.wait()


def test_a_rank_outside_the_group_is_refused():
    (comm,) = loopback_group(1)
    for call in (lambda: comm.post(1, b""), lambda: comm.isend(np.zeros(1), 1), lambda: comm.irecv(np.zeros(1), -1)):
        with pytest.raises(ValueError, match="is not in a group of 1 ranks"):
            call()


def test_hosts_must_be_named_for_all_ranks_or_none():
    with pytest.raises(ValueError, match=r"size=2, hosts=\['a'\]"):
        loopback_group(2, ["a"])
    with pytest.raises(ValueError, match="size=0"):
        loopback_group(0)
