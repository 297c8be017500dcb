"""The contract of a Communicator (hvdlite/comm/base.py), over threads and over MPI processes."""

from __future__ import annotations

import math
import threading
import time

import numpy as np
import pytest

from hvdlite.comm.base import Communicator
from hvdlite.dtypes import SUPPORTED
from hvdlite.errors import CommunicationError


def receive(comm: Communicator, n: int) -> list[tuple[int, bytes]]:
    """Return the next `n` control messages."""
    found: list[tuple[int, bytes]] = []
    while len(found) < n:
        message = comm.poll()
        if message is None:
            comm.wait(10.0, eager=True)
        else:
            found.append(message)
    return found


def others(comm: Communicator) -> list[int]:
    return [rank for rank in range(comm.size) if rank != comm.rank]


def pattern(comm: Communicator, source: int, dest: int, n: int, dtype: np.dtype) -> np.ndarray:
    """Values that tell sender, receiver and element apart, as far as the dtype can."""
    values = np.arange(n, dtype=np.int64) * comm.size**2 + source * comm.size + dest
    return (values % 127).astype(dtype) if dtype.itemsize < 4 else values.astype(dtype)


# Who is who.


def test_all_ranks_see_the_same_hosts(on_group):
    def body(comm):
        hosts = comm.topology.hosts
        assert (comm.topology.rank, comm.topology.size) == (comm.rank, comm.size)
        said = comm.allgather_bytes(repr((comm.rank, hosts)).encode())
        assert said == [repr((rank, hosts)).encode() for rank in range(comm.size)]
        assert comm.topology.n_hosts == 1

    on_group(body)


def test_hosts_can_be_pretended(on_group):
    names = [f"host{rank % 2}" for rank in range(on_group.size)]

    def body(comm):
        assert comm.topology.hosts == tuple(names)
        assert comm.topology.local_ranks == list(range(comm.rank % 2, comm.size, 2))

    on_group(body, names)


# Control messages.

HOSTS = pytest.mark.parametrize("n_hosts", [1, 2, 7])


def named(on_group, n_hosts):
    return [f"host{rank % n_hosts}" for rank in range(on_group.size)]


@HOSTS
def test_messages_of_each_pair_arrive_whole_and_in_order(on_group, n_hosts):
    lengths = [0, 1, 5, 2047, 2048, 2049, 70_001, 3, 0]

    def body(comm):
        for k, length in enumerate(lengths):
            for rank in others(comm):
                comm.post(rank, bytes([comm.rank, rank, k]) + bytes([k]) * length)
        found = receive(comm, len(lengths) * (comm.size - 1))
        for source in others(comm):
            mine = [message for sender, message in found if sender == source]
            assert mine == [bytes([source, comm.rank, k]) + bytes([k]) * n for k, n in enumerate(lengths)]
        assert comm.poll() is None
        comm.barrier()

    on_group(body, named(on_group, n_hosts))


@HOSTS
def test_a_large_message_is_not_overtaken(on_group, n_hosts):
    large = np.arange(2_500_000, dtype=np.uint32).tobytes()

    def body(comm):
        if comm.rank == 0:
            for rank in others(comm):
                comm.post(rank, large)
                comm.post(rank, b"after")
            receive(comm, comm.size - 1)
        else:
            assert receive(comm, 2) == [(0, large), (0, b"after")]
            comm.post(0, b"done")
        comm.barrier()

    on_group(body, named(on_group, n_hosts))


def test_a_message_longer_than_one_transfer_arrives_whole(on_group):
    def body(comm):
        comm.chunk_bytes = 1000  # of the MPI communicator; others have no limit
        text = bytes(range(256)) * 13
        for rank in others(comm):
            for length in (999, 1000, 1001, 3000, 3328):
                comm.post(rank, text[:length])
        found = receive(comm, 5 * (comm.size - 1))
        for source in others(comm):
            assert [message for sender, message in found if sender == source] == [
                text[:length] for length in (999, 1000, 1001, 3000, 3328)
            ]
        comm.barrier()

    on_group(body)


def test_two_groups_do_not_see_each_others_messages(on_group):
    def body(comm):
        twin = comm.create(range(comm.size))
        for rank in others(comm):
            twin.post(rank, b"twin")
            comm.post(rank, b"first")
        n = comm.size - 1
        assert {message for _, message in receive(comm, n)} <= {b"first"}
        assert {message for _, message in receive(twin, n)} <= {b"twin"}
        assert comm.poll() is None
        assert twin.poll() is None
        twin.close()

    on_group(body)


def test_a_rank_posts_to_others_only(on_group):
    def body(comm):
        with pytest.raises(ValueError, match=f"rank {comm.rank} posted a message to itself"):
            comm.post(comm.rank, b"")

    on_group(body)


# Waiting.


def test_a_wake_before_the_wait_ends_it(on_group):
    def body(comm):
        comm.wake()
        comm.wait(math.inf)

    on_group(body)


def test_another_thread_ends_a_wait(on_group):
    def body(comm):
        for _ in range(20):
            waker = threading.Thread(target=comm.wake)
            waker.start()
            comm.wait(math.inf)
            waker.join()

    on_group(body)


def test_a_ring_ends_a_wait_of_a_rank_of_the_same_host(on_group):
    def body(comm):
        segment = comm.shared_segment(0)
        for k in range(1, 30):
            segment.put(3, k)
            for rank in range(comm.size):
                if rank != comm.rank:
                    comm.ring(rank)
            while not all(segment.peek(rank, 3) >= k for rank in range(comm.size)):
                comm.wait(math.inf)
        segment.barrier()
        assert [segment.peek(rank, 3) for rank in range(comm.size)] == [29] * comm.size
        assert [segment.glimpse(comm.rank, 3, value) for value in (28, 29, 30)] == [True, True, False]
        segment.close()

    on_group(body)


@HOSTS
def test_a_message_ends_a_wait_without_time_limit(on_group, n_hosts):
    def body(comm):
        token = bytes([7])
        for _ in range(30):
            if comm.rank == 0 and comm.size > 1:
                comm.post(1, token)
            if comm.size > 1:
                while (found := comm.poll()) is None:
                    comm.wait(math.inf)
                assert found == ((comm.rank - 1) % comm.size, token)
            if comm.rank > 0:
                comm.post((comm.rank + 1) % comm.size, token)
        comm.barrier()

    on_group(body, named(on_group, n_hosts))


@HOSTS
def test_waiting_costs_no_cpu(on_group, n_hosts):
    def body(comm):
        comm.barrier()
        comm.wait(0.0)
        used, began = time.thread_time(), time.monotonic()
        while time.monotonic() - began < 0.4:
            comm.wait(0.4)
        assert time.thread_time() - used < 0.04  # a tenth: four times what the slowest poll needs
        comm.barrier()

    on_group(body, named(on_group, n_hosts))


# Data.


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_every_pair_exchanges_every_dtype(on_group, name):
    dtype = SUPPORTED[name]

    def body(comm):
        for n in (0, 1, 5, 1001):
            incoming = {rank: np.zeros(n, dtype) for rank in range(comm.size)}
            transfers = [comm.irecv(array, rank) for rank, array in incoming.items()]
            transfers += [comm.isend(pattern(comm, comm.rank, rank, n, dtype), rank) for rank in range(comm.size)]
            for transfer in transfers:
                transfer.wait()
            for rank, array in incoming.items():
                np.testing.assert_array_equal(array, pattern(comm, rank, comm.rank, n, dtype))

    on_group(body)


@pytest.mark.parametrize("n", [0, 1, 1001, 300_007])
@HOSTS
def test_sendrecv_moves_a_ring_at_once(on_group, n, n_hosts):
    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        dtype = np.dtype(np.float64)
        incoming = np.zeros(n)
        for _ in range(3):
            comm.sendrecv(pattern(comm, comm.rank, right, n, dtype), right, incoming, left)
            np.testing.assert_array_equal(incoming, pattern(comm, left, comm.rank, n, dtype))

    on_group(body, named(on_group, n_hosts))


def test_send_and_recv_pass_a_token_around(on_group):
    def body(comm):
        token = np.zeros(3, np.int32)
        if comm.size > 1:
            if comm.rank == 0:
                comm.send(token, 1)
            comm.recv(token, (comm.rank - 1) % comm.size)
            token += 1
            if comm.rank > 0:
                comm.send(token, (comm.rank + 1) % comm.size)
            assert token[0] == (comm.rank if comm.rank else comm.size)

    on_group(body)


def test_transfers_of_a_pair_match_in_order(on_group):
    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        inboxes = [np.zeros(k, np.int16) for k in range(20)]
        waiting = [comm.irecv(array, left) for array in inboxes]
        waiting += [comm.isend(np.full(k, 100 * comm.rank + k, np.int16), right) for k in range(20)]
        for transfer in reversed(waiting):
            transfer.wait()
        for k, array in enumerate(inboxes):
            np.testing.assert_array_equal(array, np.full(k, 100 * left + k, np.int16))

    on_group(body)


@pytest.mark.parametrize("nbytes", [1000, 1001, 9999, 100_003])
def test_a_transfer_longer_than_one_message_arrives_whole(on_group, nbytes):
    def body(comm):
        comm.chunk_bytes = 1000
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        incoming = np.zeros(nbytes, np.uint8)
        comm.sendrecv(pattern(comm, comm.rank, right, nbytes, incoming.dtype), right, incoming, left)
        np.testing.assert_array_equal(incoming, pattern(comm, left, comm.rank, nbytes, incoming.dtype))

    on_group(body)


def test_data_and_control_do_not_mix(on_group):
    def body(comm):
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        incoming = np.zeros(7, np.uint8)
        arriving = comm.irecv(incoming, left)
        for rank in others(comm):
            comm.post(rank, b"control")
        leaving = comm.isend(np.full(7, comm.rank, np.uint8), right)
        assert {message for _, message in receive(comm, comm.size - 1)} <= {b"control"}
        arriving.wait()
        leaving.wait()
        assert incoming.tolist() == [left] * 7

    on_group(body)


# Set-up.


def test_allgather_bytes_keeps_lengths_and_order(on_group):
    def body(comm):
        for length in (0, 1, 1000):
            expected = [bytes([rank]) * (length * rank) for rank in range(comm.size)]
            assert comm.allgather_bytes(expected[comm.rank]) == expected

    on_group(body)


def test_the_barrier_at_the_end_meets_all(on_group):
    def body(comm):
        assert comm.exit_barrier()
        assert comm.exit_barrier(timeout=20.0)

    on_group(body)


def test_a_new_group_has_the_given_order(on_group):
    def body(comm):
        backwards = comm.create(range(comm.size - 1, -1, -1))
        assert (backwards.rank, backwards.size) == (comm.size - 1 - comm.rank, comm.size)
        expected = [str(rank).encode() for rank in range(comm.size - 1, -1, -1)]
        assert backwards.allgather_bytes(str(comm.rank).encode()) == expected
        incoming = np.zeros(1, np.int64)
        right, left = (backwards.rank + 1) % comm.size, (backwards.rank - 1) % comm.size
        backwards.sendrecv(np.array([comm.rank]), right, incoming, left)
        assert incoming[0] == (comm.rank + 1) % comm.size
        backwards.close()

    on_group(body)


def test_others_than_the_members_get_no_group(on_group):
    def body(comm):
        even = list(range(0, comm.size, 2))
        group = comm.create(even)
        assert (group is None) == (comm.rank % 2 == 1)
        if group is not None:
            assert group.allgather_bytes(bytes([comm.rank])) == [bytes([rank]) for rank in even]
            last = group.create([group.size - 1])
            assert (last is not None) == (group.rank == group.size - 1)
            if last is not None:
                last.barrier()
                last.close()
            group.close()
        comm.barrier()

    on_group(body)


def test_the_topology_follows_into_a_new_group(on_group):
    names = [f"host{rank % 2}" for rank in range(on_group.size)]

    def body(comm):
        mine = [rank for rank in range(comm.size) if names[rank] == names[comm.rank]]
        first = comm.create([rank for rank in range(comm.size) if rank % 2 == 0])
        second = comm.create([rank for rank in range(comm.size) if rank % 2 == 1] or [0])
        group = first if comm.rank % 2 == 0 else second
        assert group.topology.hosts == (names[comm.rank],) * len(mine)
        segment = group.shared_segment(8)
        assert segment is not None
        segment.close()
        for each in (first, second):
            if each is not None:
                each.close()

    on_group(body, names)


@pytest.mark.parametrize("wrong", [[], [0, 0], [-1], [100]])
def test_a_wrong_group_is_refused_on_all_ranks(on_group, wrong):
    def body(comm):
        with pytest.raises(ValueError, match="a group needs distinct ranks from 0 to"):
            comm.create(wrong)
        comm.barrier()

    on_group(body)


def test_ranks_that_disagree_about_a_group_all_hear_of_it(on_group):
    def body(comm):
        if comm.size == 1:
            return
        with pytest.raises(CommunicationError, match=r"different groups: \[0\] on rank 0, \[1\] on rank 1"):
            comm.create([min(comm.rank, 1)])
        comm.barrier()

    on_group(body)


# Shared memory.


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 100_003])
def test_a_segment_is_zeroed_and_seen_by_all(on_group, nbytes):
    def body(comm):
        segment = comm.shared_segment(nbytes)
        assert (segment.rank, segment.size) == (comm.rank, comm.size)
        for rank in range(comm.size):
            block = segment.block(rank)
            assert block.shape == (nbytes,)
            assert not block.any()
            assert block.ctypes.data % 4096 == 0 or nbytes == 0
        segment.barrier()  # nobody writes while another still looks for zeros
        segment.block(comm.rank)[:] = comm.rank + 1
        segment.barrier()
        for rank in range(comm.size):
            assert (segment.block(rank) == rank + 1).all()
        segment.barrier()
        segment.close()

    on_group(body)


def test_a_thousand_barriers_show_what_was_written_before(on_group):
    def body(comm):
        segment = comm.shared_segment(64)
        words = [segment.block(rank).view(np.int64) for rank in range(comm.size)]
        for k in range(500):
            words[comm.rank][k % 8] = k
            segment.barrier()
            assert all(word[k % 8] == k for word in words)
            segment.barrier()
        segment.close()

    on_group(body)


def test_flags_let_a_value_travel_from_rank_to_rank(on_group):
    def body(comm):
        segment = comm.shared_segment(8)
        words = [segment.block(rank).view(np.int64) for rank in range(comm.size)]
        for k in range(1, 201):
            slot = k % 8
            if comm.rank > 0:
                segment.await_rank(comm.rank - 1, slot, k)
                words[comm.rank][0] = words[comm.rank - 1][0] + 1
            else:
                words[0][0] = k
            segment.publish(slot, k)
            segment.await_all(slot, k)
            assert words[comm.size - 1][0] == k + comm.size - 1
            segment.barrier()
        segment.close()

    on_group(body)


def test_a_flag_may_run_ahead(on_group):
    def body(comm):
        segment = comm.shared_segment(1)
        segment.publish(3, 10 + comm.rank)
        segment.await_all(3, 10)
        segment.await_rank(comm.size - 1, 3, 10 + comm.size - 1)
        segment.await_all(0, 0)
        segment.barrier()
        segment.close()

    on_group(body)


def test_a_sleeper_in_a_segment_leaves_its_messages_moving(on_group):
    # Rank 0 posts what needs its help to arrive, and sleeps until the others have it.
    def body(comm):
        segment = comm.shared_segment(1)
        if comm.rank == 0:
            for rank in others(comm):
                comm.post(rank, b"x" * 3_000_001)
        else:
            assert len(receive(comm, 1)[0][1]) == 3_000_001
        segment.barrier()
        segment.close()
        comm.barrier()

    on_group(body)


def test_there_is_no_segment_across_hosts(on_group):
    def body(comm):
        if comm.size > 1:
            assert comm.shared_segment(8) is None
        comm.barrier()

    on_group(body, [f"host{rank % 2}" for rank in range(on_group.size)])


def test_ranks_that_disagree_about_a_length_all_hear_of_it(on_group):
    def body(comm):
        if comm.size > 1:
            with pytest.raises(CommunicationError, match="shared blocks of different lengths"):
                comm.shared_segment(comm.rank)
        comm.barrier()

    on_group(body)
