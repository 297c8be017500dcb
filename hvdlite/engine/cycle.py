"""From a Verdict to finished handles: plan, choose, run. Engine thread only.

Each kind of operation is one method that gathers the memory of its submissions,
calls a backend, and hands the results over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.collectives.select import make_backends
from hvdlite.collectives.shared_memory import SharedMemoryBackend
from hvdlite.comm.arena import Home
from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.dtypes import SUPPORTED, ReduceOp
from hvdlite.engine.inbox import Inbox, Submission
from hvdlite.engine.ways import How, Ways, finish_of, wire_op
from hvdlite.fusion.plan import FusionPlan, plan_fusion
from hvdlite.kernels import Kernels, quiet_caller
from hvdlite.messages import Kind, Knobs, Response
from hvdlite.observe.instrument import Instrument, Operation
from hvdlite.observe.log import get_logger

Array = NDArray[Any]


class Cycle:
    """Runs what the ranks of one process set agreed on.

    Args:
        on_process_set: does what an ADD_PROCESS_SET or REMOVE_PROCESS_SET asks, and returns the handle's value.
        on_joined: called when all ranks have joined, before their calls return.
    """

    def __init__(
        self,
        comm: Communicator,
        config: Config,
        kernels: Kernels,
        inbox: Inbox,
        on_process_set: Callable[[Response], Any],
        on_joined: Callable[[], None],
        instrument: Instrument,
    ) -> None:
        self._comm, self._config, self._kernels, self._inbox = comm, config, kernels, inbox
        self._quietly = quiet_caller()
        self._instrument = instrument
        self._last: Response | None = None
        self._started = 0.0  # of what runs
        self._seconds, self._running = 0.0, False
        self._n_shared, self._told_of_room = 0, False
        self._backends = make_backends(
            comm,
            kernels,
            shared_memory=config.shared_memory,
            hierarchical=config.hierarchical,
            piece_bytes=config.shared_memory_piece,
            chunk_bytes=config.ring_chunk,
            peer_memory=config.peer_memory,
            tunable=config.may_tune,
            small_bytes=config.small_message,
        )
        self.ways = Ways(comm, config, self._backends)
        self._warn_without_shared_memory()
        self._on_process_set, self._on_joined = on_process_set, on_joined
        self._run: dict[Kind, Callable[[FusionPlan], None]] = {
            Kind.ALLREDUCE: self._allreduce,
            Kind.REDUCESCATTER: self._reducescatter,
            Kind.ALLGATHER: self._allgather,
            Kind.BROADCAST: self._broadcast,
            Kind.ALLTOALL: self._alltoall,
            Kind.BARRIER: self._barrier,
            Kind.JOIN: self._join,
            Kind.ADD_PROCESS_SET: self._change_process_sets,
            Kind.REMOVE_PROCESS_SET: self._change_process_sets,
            Kind.SHARED_BUFFER: self._share,
        }

    def _warn_without_shared_memory(self) -> None:
        place, topology = self._config.shared_memory_dir, self._comm.topology
        if topology.n_hosts > 1 or self._comm.size == 1 or not self._config.shared_memory:
            return
        if self._comm.rank == 0 and not self._backends.shared_memory_available:
            get_logger().warning(
                "no shared memory: %r is missing, not writable or too small, so the ranks of this host exchange data "
                "through MPI, which is slower. Enlarge it (docker run --shm-size), or set HVDLITE_SHARED_MEMORY_DIR.",
                place,
            )

    def run(
        self, responses: Sequence[Response], fusion_threshold: int, enclosed: Mapping[int, bytes] | None = None
    ) -> None:
        """Run `responses`; refused ones fail on every rank, and the rest goes on.

        Args:
            enclosed: what the other ranks give to them, by set rank, if these are what `encloses` said yes to.
        """
        agreed = []
        for response in responses:
            if response.refusal is None:
                agreed.append(response)
            else:
                self._inbox.fail(response.name, response.refusal.exception())
        for plan in plan_fusion(agreed, fusion_threshold, groups_apart=self._config.disable_group_fusion):
            self._instrument.began(plan.responses)
            self._started = time.perf_counter()
            self._running = True
            if enclosed is None:
                self._run[plan.kind](plan)
            else:
                self._allreduce_enclosed(plan, enclosed)
            self._running = False
            self._seconds += time.perf_counter() - self._started

    def allreduce_one(
        self,
        response: Response,
        how: How,
        source: Array,
        target: Array,
        shown: Sequence[Array] | None,
        home: Home | None = None,
    ) -> None:
        """Run an allreduce that is a batch of its own. Its memory need not be in the inbox, nor any handle.

        Args:
            source, target: flat.
            shown: the values of all ranks, if they have shown them.
            home: where both lie, if that is shared memory.
        """
        responses = (response,)
        self._instrument.began(responses)
        self._started = time.perf_counter()
        self._running = True
        self._instrument.activity(how.way.activity)
        backend, reason, op, prescale = how.way.backend, how.way.reason, how.op, response.prescale
        # The Response has a home only if the tensors of all ranks lie there.
        if shown is None and response.home and home and how.cost < math.inf:
            assert isinstance(backend, SharedMemoryBackend)
            starts, lengths = (home.start,), (source.size,)
            backend.allreduce_in_place(home.blocks, how.dtype, starts, lengths, op, prescale, how.finish)
            reason = f"{reason}, {_IN_PLACE}"
        elif shown is None:
            backend.allreduce([source], [target], op, prescale, how.finish)
        else:
            values = list(shown)
            values[self._comm.rank] = source  # if that is the target, too, less is read, and fewer lines of the cache
            self._quietly(self._kernels.fold, op, values, target, prescale, how.finish)
        self._last = response
        self._instrument.operation(Operation(Kind.ALLREDUCE, responses, how.nbytes, reason, self._started))
        self._running = False
        self._seconds += time.perf_counter() - self._started

    def encloses(self, batch: Sequence[Response]) -> bool:
        """Return whether `batch` is one allreduce so small that its values travel with the ranks' counters."""
        return len(batch) == 1 and self.ways.is_tiny(batch[0])

    def enclosure(self, name: str) -> bytes:
        """Return the values that this rank has submitted under `name`."""
        submission = self._inbox.get(name)
        assert submission is not None and submission.source is not None
        return submission.source.host().tobytes()

    def _allreduce_enclosed(self, plan: FusionPlan, enclosed: Mapping[int, bytes]) -> None:
        """Reduce in rank order, as the tree does, what has come with the counters."""
        (response,) = plan.responses
        submission = self._mine(response)
        assert submission is not None and submission.source is not None and submission.target is not None
        dtype, op = SUPPORTED[response.dtype], wire_op(response.op)
        way = self.ways.choose(response.kind, plan.nbytes, dtype, op)
        self._instrument.activity(way.activity)
        mine, target = submission.source.host(), submission.target.host()
        values = [
            np.frombuffer(enclosed[rank], np.uint8).view(dtype) if rank in enclosed else mine
            for rank in range(self._comm.size)
        ]
        finish = finish_of(response, dtype, self._comm.size)
        self._kernels.reduce(op, values, target, response.prescale, finish)
        self._hand_over(plan, f"{way.reason}; they travel with the news that a rank is ready", [submission])

    @property
    def running_since(self) -> float:
        """When what runs has started, seconds of a clock; 0 if nothing does. From any thread."""
        return self._started if self._running else 0.0

    @property
    def seconds(self) -> float:
        """How long operations have run, the one that does now included. From any thread."""
        return self._seconds + (time.perf_counter() - self._started if self._running else 0.0)

    def tune(self, knobs: Knobs) -> None:
        """Run differently from here on. Collective: all ranks do this between the same two collectives."""
        self._backends.tune(knobs)
        self.ways.tune(knobs)

    @property
    def last_finished(self) -> str:
        """What ran last here, for a stall warning."""
        return "nothing yet" if self._last is None else f"{self._last.kind.value} {self._last.name!r}"

    def close(self) -> None:
        """Give memory back. Collective."""
        self._backends.close()

    def _allreduce(self, plan: FusionPlan) -> None:
        first = plan.responses[0]
        dtype, op = SUPPORTED[first.dtype], wire_op(first.op)
        if first.home and self._reduce_in_place(plan, dtype, op):
            return
        submissions, sources, targets = [], [], []
        for response in plan.responses:
            submission = self._mine(response)
            if submission is None:
                absent = self._absent(response, prod(response.shape))
                sources.append(absent)
                targets.append(absent)
            else:
                assert submission.source is not None and submission.target is not None
                submissions.append(submission)
                sources.append(submission.source.host())
                targets.append(submission.target.host())
        way = self.ways.choose(first.kind, plan.nbytes, dtype, op)
        self._instrument.activity(way.activity)
        way.backend.allreduce(sources, targets, op, first.prescale, finish_of(first, dtype, self._comm.size))
        self._hand_over(plan, way.reason, submissions)

    def _reduce_in_place(self, plan: FusionPlan, dtype: np.dtype[Any], op: ReduceOp) -> bool:
        """Reduce tensors whose results lie in one shared buffer. False if their backend cannot do that."""
        first = plan.responses[0]
        way = self.ways.choose(first.kind, plan.nbytes, dtype, op)
        if op is ReduceOp.ADASUM or not isinstance(way.backend, SharedMemoryBackend):
            return False
        submissions = [s for s in map(self._mine, plan.responses) if s is not None]
        homes = [submission.home for submission in submissions]
        assert homes[0] is not None and None not in homes
        starts = [response.home[1] for response in plan.responses]
        lengths = [prod(response.shape) for response in plan.responses]
        self._instrument.activity(way.activity)
        finish = finish_of(first, dtype, self._comm.size)
        sources = [s.source.host() if s.source and s.source is not s.target else None for s in submissions]
        way.backend.allreduce_in_place(homes[0].blocks, dtype, starts, lengths, op, first.prescale, finish, sources)
        self._hand_over(plan, f"{way.reason}, {_IN_PLACE}", submissions)
        return True

    def _reducescatter(self, plan: FusionPlan) -> None:
        first = plan.responses[0]
        dtype, op = SUPPORTED[first.dtype], wire_op(first.op)
        submissions, sources, targets, counts = [], [], [], []
        for response in plan.responses:
            rows = split_rows(response.shape[0], self._comm.size)
            width = prod(response.shape[1:])
            counts.append([n * width for n in rows])
            submission = self._mine(response)
            if submission is None:
                sources.append(self._absent(response, prod(response.shape)))
                targets.append(np.empty(counts[-1][self._comm.rank], dtype))
            else:
                assert submission.source is not None and submission.target is not None
                submissions.append(submission)
                sources.append(submission.source.host())
                targets.append(submission.target.host())
        way = self.ways.choose(first.kind, plan.nbytes, dtype, op)
        self._instrument.activity(way.activity)
        finish = finish_of(first, dtype, self._comm.size)
        way.backend.reducescatter(sources, counts, targets, op, first.prescale, finish)
        self._hand_over(plan, way.reason, submissions)

    def _allgather(self, plan: FusionPlan) -> None:
        dtype = SUPPORTED[plan.responses[0].dtype]
        self._instrument.activity("ALLOCATE_OUTPUT")
        submissions, sources, targets, counts = [], [], [], []
        for response in plan.responses:
            width = prod(response.shape[1:])
            counts.append([n * width for n in response.sizes])
            submission = self._mine(response)
            if submission is None:
                sources.append(np.empty(0, dtype))
                targets.append(np.empty(sum(counts[-1]), dtype))
            else:
                assert submission.source is not None and submission.allocate is not None
                submissions.append(submission)
                sources.append(submission.source.host())
                target, submission.value = submission.allocate((sum(response.sizes), *response.shape[1:]))
                targets.append(target)
        way = self.ways.choose(Kind.ALLGATHER, plan.nbytes, dtype)
        self._instrument.activity(way.activity)
        way.backend.allgather(sources, counts, targets)
        self._hand_over(plan, way.reason, submissions)

    def _broadcast(self, plan: FusionPlan) -> None:
        (response,) = plan.responses
        dtype = SUPPORTED[response.dtype]
        submission = self._mine(response)
        if submission is None:
            array = np.empty(prod(response.shape), dtype)
        else:
            assert submission.source is not None and submission.target is not None
            array = submission.target.host()
            if response.root == self._comm.rank and submission.source is not submission.target:
                np.copyto(array, submission.source.host())
        way = self.ways.choose(Kind.BROADCAST, plan.nbytes, dtype)
        self._instrument.activity(way.activity)
        way.backend.broadcast(array, response.root)
        self._hand_over(plan, way.reason, [submission] if submission else [])

    def _alltoall(self, plan: FusionPlan) -> None:
        (response,) = plan.responses
        dtype, size = SUPPORTED[response.dtype], self._comm.size
        submission = self._mine(response)
        rows = np.zeros(size, np.int64) if submission is None else np.array(submission.request.splits, np.int64)
        received = np.empty(size, np.int64)
        exchange = self.ways.choose(Kind.ALLTOALL, 8 * size, received.dtype).backend
        exchange.alltoall(rows, [1] * size, received, [1] * size)
        width, shape = prod(response.shape[1:]), (int(received.sum()), *response.shape[1:])
        if submission is None:
            source, target = np.empty(0, dtype), np.empty(prod(shape), dtype)
        else:
            assert submission.source is not None and submission.allocate is not None
            source = submission.source.host()
            target, value = submission.allocate(shape)
            submission.value = (value, received)
        # The sizes of one rank say nothing about the others', so all choose by what they agreed on: the dtype.
        way = self.ways.choose(Kind.ALLTOALL, _LARGE, dtype)
        self._instrument.activity(way.activity)
        sent = [int(n) * width for n in rows]
        way.backend.alltoall(source[: sum(sent)], sent, target, [int(n) * width for n in received])
        self._hand_over(plan, way.reason, [submission] if submission else [], received=shape[0])

    def _barrier(self, plan: FusionPlan) -> None:
        # Every rank has entered once the Verdict exists: that is what a barrier promises.
        submissions = [submission for response in plan.responses if (submission := self._mine(response))]
        self._hand_over(plan, "negotiation is the barrier", submissions)

    def _join(self, plan: FusionPlan) -> None:
        self._on_joined()
        self._note(plan, "every rank has joined")
        self._inbox.finish(plan.responses[0].name, plan.responses[0].last_joined)

    def _change_process_sets(self, plan: FusionPlan) -> None:
        (response,) = plan.responses
        value = self._on_process_set(response)
        self._note(plan, "process sets change in one order on all ranks")
        if self._mine(response) is not None:
            self._inbox.finish(response.name, value)

    def _share(self, plan: FusionPlan) -> None:
        """Make the memory of a shared buffer; the callers get its number and blocks, or None."""
        for response in plan.responses:
            way = self.ways.choose(Kind.ALLREDUCE, response.shape[0], SUPPORTED[response.dtype], ReduceOp.SUM)
            blocks = None
            if isinstance(way.backend, SharedMemoryBackend):
                blocks = self._comm.shared_blocks(response.shape[0])
                self._warn_without_room(response.shape[0], blocks is None)
            self._n_shared += 1
            self._note(plan, "all ranks of one host share the memory")
            if self._mine(response) is not None:
                self._inbox.finish(response.name, blocks and (self._n_shared, blocks))

    def _warn_without_room(self, nbytes: int, failed: bool) -> None:
        if failed and self._comm.rank == 0 and not self._told_of_room:
            self._told_of_room = True
            get_logger().warning(
                "no room in %r for %d shared bytes on each of %d ranks, so these tensors stay in private memory and "
                "are copied to be reduced. Enlarge it (docker run --shm-size), or set HVDLITE_SHARED_MEMORY_DIR.",
                self._config.shared_memory_dir, nbytes, self._comm.size,
            )  # fmt: skip

    def _mine(self, response: Response) -> Submission | None:
        """Return what this rank has submitted for `response`: nothing if it takes part because it has joined."""
        return None if self._comm.rank in response.joined else self._inbox.get(response.name)

    def _absent(self, response: Response, n: int) -> Array:
        """Return what this rank, which has joined, contributes: what changes nothing."""
        dtype = SUPPORTED[response.dtype]
        return np.full(n, self._kernels.identity(wire_op(response.op), dtype), dtype)

    def _hand_over(self, plan: FusionPlan, reason: str, submissions: Sequence[Submission], received: int = 0) -> None:
        self._note(plan, reason, received)
        for submission in submissions:
            self._inbox.finish(submission.request.name, submission.value)

    def _note(self, plan: FusionPlan, reason: str, received: int = 0) -> None:
        """Say that `plan` has run, before its callers go on: they may ask for it at once."""
        self._last = plan.responses[-1]
        self._instrument.operation(Operation(plan.kind, plan.responses, plan.nbytes, reason, self._started, received))


_LARGE = 2**30
_IN_PLACE = "in which the tensors live"  # after the reason of a backend in shared memory


def split_rows(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each rank keeps: the first `rows % size` ranks get one more."""
    each, more = divmod(rows, size)
    return [each + (rank < more) for rank in range(size)]
