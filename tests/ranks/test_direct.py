"""Tensors in memory that other ranks cannot read, as that of devices: they go through blocks all the same."""

import mmap

import numpy as np
import pytest

from hvdlite.collectives.shared_memory import SharedMemoryBackend, segment_bytes
from hvdlite.comm.arena import address_of
from hvdlite.comm.peer_memory import PeerMemory
from hvdlite.dtypes import ReduceOp
from hvdlite.errors import CommunicationError
from hvdlite.kernels import Kernels
from hvdlite.testing.ranks import run_ranks

PIECE = 4096


class Guarded(PeerMemory):
    """Cannot read or write what lies in `spans`, as the kernel does with memory of devices."""

    def __init__(self, real, spans):
        self.__dict__.update(vars(real))
        self._spans = spans

    def read(self, rank, theirs, mine, nbytes):
        self._check_place(theirs)
        super().read(rank, theirs, mine, nbytes)

    def write(self, rank, theirs, mine, nbytes):
        self._check_place(theirs)
        super().write(rank, theirs, mine, nbytes)

    def gather(self, rank, theirs, mine, nbytes):
        self._check_place(*theirs[:, 0].tolist())
        super().gather(rank, theirs, mine, nbytes)

    def scatter(self, rank, theirs, mine, nbytes):
        self._check_place(*theirs[:, 0].tolist())
        super().scatter(rank, theirs, mine, nbytes)

    def _check_place(self, *addresses):
        for address in addresses:
            if any(start <= address < start + nbytes for start, nbytes in self._spans):
                raise CommunicationError("Bad address")


def array_in_device(spans, n):
    memory = np.frombuffer(mmap.mmap(-1, n * 8), np.float64)  # apart from what malloc gives
    spans.append((address_of(memory), memory.nbytes))
    return memory


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["source", "target", "both"])
@pytest.mark.parametrize("lengths", [[5000], [7, 3000, 11]], ids=str)
def test_memory_that_others_cannot_read_is_reduced_all_the_same(size, what, lengths):
    spans = []

    def body(comm):
        segment = comm.shared_segment(segment_bytes(PIECE))
        backend = SharedMemoryBackend(comm, Kernels(), segment, PIECE, Guarded(comm.peer_memory(), spans), 1)
        odd = comm.rank == size - 1
        for step in range(4):  # in turns with what all can read
            device = odd and step % 2 == 0
            sources, targets = [], []
            for n in lengths:
                source = array_in_device(spans, n) if device and what != "target" else np.empty(n)
                source[:] = np.arange(n) * size + comm.rank + step
                sources.append(source)
                target = array_in_device(spans, n) if device and what == "target" else np.empty(n)
                targets.append(source if what == "both" else target)
            backend.allreduce(sources, targets, ReduceOp.SUM)
            for n, target in zip(lengths, targets, strict=True):
                expected = np.arange(n) * size**2 + size * (size - 1) // 2 + size * step
                np.testing.assert_array_equal(target, expected)
        backend.close()
        return True

    assert run_ranks(size, body) == [True] * size


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("what", ["source", "target"])
def test_it_is_gathered_and_sent_all_the_same(size, what):
    spans, lengths = [], [3000, 0, 7]

    def body(comm):
        segment = comm.shared_segment(segment_bytes(PIECE))
        backend = SharedMemoryBackend(comm, Kernels(), segment, PIECE, Guarded(comm.peer_memory(), spans), 1)
        for step in range(4):
            device = comm.rank == size - 1 and step % 2 == 0
            sources = [array_in_device(spans, n) if n and device and what == "source" else np.empty(n) for n in lengths]
            targets = [
                array_in_device(spans, n * size) if n and device and what == "target" else np.empty(n * size)
                for n in lengths
            ]
            for source in sources:
                source[:] = np.arange(source.size) * size + comm.rank + step
            backend.allgather(sources, [[n] * size for n in lengths], targets)
            for n, target in zip(lengths, targets, strict=True):
                expected = np.concatenate([np.arange(n) * size + rank + step for rank in range(size)])
                np.testing.assert_array_equal(target, expected)
            for root in range(size):
                sources[0][:] = np.arange(3000.0) + 10 * comm.rank
                backend.broadcast(sources[0], root)
                np.testing.assert_array_equal(sources[0], np.arange(3000.0) + 10 * root)
        backend.close()
        return True

    assert run_ranks(size, body) == [True] * size
