"""The Engine: one thread that serves one process set, from submission to finished handle.

There is one engine per process set, each with its own communicator: so sets cannot
hold each other up, and no order among them has to be agreed on.

Who *drives* it announces, listens, runs what was agreed on, and sleeps on the bell
in between. That is the engine's thread while the caller has other things to do; but a
caller that waits for an operation drives by itself, and spares two changes of threads
(each about 10 us, and 50 us where a core has fallen asleep). While nothing is in flight nobody
drives: nothing can become ready without this rank. The thread only looks now and
then whether the set is to stop or a stall is to be explained.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from hvdlite import errors
from hvdlite.affinity import cores_of_this_thread, describe_cores
from hvdlite.buffers import Buffer
from hvdlite.comm.arena import Home, Homes
from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.engine.cycle import Cycle
from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Inbox, Submission, call_site
from hvdlite.engine.short_way import ShortWay
from hvdlite.engine.stall import StallWatch
from hvdlite.engine.watchdog import UnderWay
from hvdlite.kernels import Kernels, flushes_subnormals
from hvdlite.messages import Knobs, Request, Response
from hvdlite.negotiation.board import open_board
from hvdlite.negotiation.coordinator import Coordinator
from hvdlite.negotiation.follower import Follower
from hvdlite.negotiation.negotiator import Negotiator
from hvdlite.negotiation.schedule import Learner
from hvdlite.observe.instrument import Instrument
from hvdlite.observe.log import get_logger
from hvdlite.observe.metrics import Metrics

_BUSY_WAIT = 0.25  # seconds; while something is pending, so that the stall watch looks now and then
# Seconds between two looks of an idle engine: short after work, so that shutdown is quick.
# Measured: 0.4 to 0.8 % of a core.
_SHORTEST_NAP, _LONGEST_NAP = 0.001, 0.05


class Tuning(Protocol):
    """What may want collectives to run differently: a tuner, on set rank 0."""

    def take_wish(self) -> Knobs | None:
        """Return what is wanted from now on, once; None when nothing has changed."""


class Engine:
    """Serves one process set. Make it on all members, in the same order (collective).

    Args:
        comm: of the set's members; the engine owns and closes it.
        members: global rank of each set rank.
        kernels: used by the engine thread only.
        on_process_set, on_joined: see `Cycle`.
        on_failure: called on the engine thread when it cannot go on, after everything in flight has failed.
        what: what stops when this engine does, for messages.
        metrics: told when callers wait; says at the end what set rank 0 is to know of this rank.
        tuner: asked after each batch; on set rank 0 only.
    """

    def __init__(
        self,
        comm: Communicator,
        members: Sequence[int],
        config: Config,
        kernels: Kernels,
        on_process_set: Callable[[Response], Any],
        on_joined: Callable[[], None],
        instrument: Instrument,
        on_failure: Callable[[BaseException], None],
        what: str = "hvdlite",
        metrics: Metrics | None = None,
        tuner: Tuning | None = None,
    ) -> None:
        self._metrics, self._tuner = metrics or Metrics(), tuner
        self.waits = self._metrics.waits
        self.comm, self.members, self.config, self.kernels = comm, tuple(members), config, kernels
        self.group: object = object()  # what shared buffers of this engine belong to
        self.homes = Homes()  # those that users hold as plain arrays
        self._inbox = Inbox(lambda request: instrument.heard(comm.rank, (request,)))
        self._cycle = Cycle(comm, config, kernels, self._inbox, on_process_set, on_joined, instrument)
        coordinator = None
        if comm.rank == 0:
            coordinator = Coordinator(
                members, config.cache_capacity, config.fusion_threshold, time.monotonic, instrument.heard,
                Learner() if config.learn_schedule else None,
            )  # fmt: skip
        self._coordinator, self._instrument = coordinator, instrument
        self._stall = StallWatch(
            comm, config, coordinator, self._inbox, lambda: self._cycle.last_finished, get_logger().warning
        )
        board = open_board(comm, config.shared_memory)
        self._negotiator = Negotiator(
            comm, coordinator, self._stall.hear, instrument.answered, self._metrics.last_words, board, self._cycle
        )
        self._short_way = ShortWay(self._negotiator, self._cycle, self._inbox)
        self._threshold = 0  # of fusion, as the last Verdict says
        limits = [limit / 2 for limit in (config.stall_warning, config.stall_shutdown) if limit]
        self._explained_after = min(limits, default=math.inf)
        self._leaving: str | None = None
        self._left = False
        self._failure: BaseException | None = None
        self._on_failure, self._what = on_failure, what
        self._ended = False
        self._next_watch = 0.0
        self._driving = threading.Lock()  # held by the thread that drives
        self._alarm = threading.Lock()  # released to wake the engine's thread
        self._alarm.acquire()
        self._thread = threading.Thread(target=self._main, name=f"{what} engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, submissions: Sequence[Submission]) -> None:
        """Take operations in, all or none, and return at once. From any thread.

        Then somebody has to `drive`, or to `alert` the engine's thread.
        """
        self._inbox.submit(submissions)

    def submit_repeated(self, submission: Submission) -> bool:
        """`submit` what is part of the schedule that runs. False: it is not, and nothing has been done."""
        follower = self._negotiator.follower
        return follower is not None and self._inbox.submit_repeated(submission, follower)

    @property
    def is_scheduled(self) -> bool:
        """Whether the ranks run what they have learned, without asking. From any thread."""
        return self._negotiator.follower is not None

    def allreduce_at_once(
        self, request: Request, source: NDArray[Any], target: NDArray[Any], home: Home | None = None
    ) -> Handle | bool:
        """Reduce on this thread if the ranks have learned that nothing but this comes next.

        Saves most of what `submit` and `drive` do for operations in any order.

        Args:
            source, target: flat, native-endian, of the dtype of the request.
            home: where both lie, if that is shared memory.

        Returns:
            True: `target` has the result. A handle to wait for: other ranks have not come yet. False: nothing
            has been done.
        """
        follower = self._negotiator.follower
        if follower is None or follower.encloses or self._tuner is not None or flushes_subnormals():
            return False
        if not self._driving.acquire(blocking=False):
            return False
        at_rest = True  # nothing of it is in flight
        try:
            if self._leaving is not None or self._ended:
                return False
            how = self._short_way.enter(request, source, follower)
            if how is None:
                return False
            self.waits.begin()
            error = None
            try:
                at_rest = self._short_way.run(request, how, source, target, follower, home)
            except BaseException as caught:
                at_rest, error = False, caught
            self.waits.end(goes_on=not at_rest)
            if at_rest:
                return True
            handle = Handle(request.name, driver=self)
            late = Submission(request, handle, Buffer.of(source), Buffer.of(target), site=call_site(), home=home)
            late.since = time.monotonic()
            self._inbox.leave_alone(late)
            if error is not None:
                self._fail(error)
                if not isinstance(error, Exception):  # Ctrl-C, for one
                    raise error
            return handle
        finally:
            self._driving.release()
            if at_rest and (self._is_busy() or self._ended):
                self._rouse()

    def poison(self, requests: Sequence[Request]) -> None:
        """Tell the other ranks of requests that were wrong here, so that they fail there too."""
        self._inbox.poison(requests)
        self.alert()

    def alert(self) -> None:
        """See to it that somebody drives soon, if there is reason to. From any thread; never blocks."""
        if self._inbox.attention or self._leaving is not None:
            self._rouse()

    def _rouse(self) -> None:
        # Whoever drives looks once more for work after giving the lock back, so nothing falls in between.
        if self._driving.locked():
            self.comm.wake()
        elif self._alarm.locked():
            with contextlib.suppress(RuntimeError):  # another thread released it in between
                self._alarm.release()

    def drive(self, done: Callable[[], bool], timeout: float | None = None) -> None:
        """Work on this thread until `done()`, or the time is up. Return at once if another thread does, or has to.

        An exception that a signal handler raises passes through. While this sleeps the engine's thread goes on; in
        the middle of a transfer it ends the engine.
        """
        if (
            flushes_subnormals()
        ):  # its sums would have other bits than those of ranks on whose threads they are not zero
            self.alert()
            return
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if not self._driving.acquire(blocking=False):
            self.comm.wake()  # it may sleep, and not know of what was submitted
            return
        try:
            while not done() and not self._ended:
                if self._work(True):
                    continue
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._sleep(left)
        finally:
            self._driving.release()
            if self._is_busy() or self._ended:
                self._rouse()

    @property
    def seconds(self) -> float:
        """How long operations have run, the one that does now included, whoever drove. From any thread."""
        return self._cycle.seconds

    def under_way(self) -> UnderWay | None:
        """Return what is in flight, for the watchdog; None if nothing is. From any thread."""
        oldest, running = self._inbox.oldest(), self._cycle.running_since
        if oldest is None:
            return UnderWay("an operation", (0.0, running), self._stall.at_work) if running else None
        what = f"{oldest.request.kind.value} of tensor {oldest.request.name!r}, submitted at {oldest.where},"
        return UnderWay(what, (oldest.since, running), self._stall.at_work)

    def stop(self, reason: str, timeout: float | None = None) -> bool:
        """Leave the set, which stops it on all ranks, and wait for the thread. False if that timed out.

        Operations that are still in flight, here or there, raise `ShutdownError`.
        """
        self._leaving = reason
        self.alert()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def abandon(self, error: BaseException) -> None:
        """Stop on this rank alone, since others are lost. What is in flight raises `HorovodInternalError`."""
        with self._driving:  # who drives has heard of it, and leaves
            if not self._ended:
                self._fail(error)
        self._rouse()
        self._thread.join()
        self.comm.abandon()

    @property
    def last_words(self) -> dict[int, Any]:
        """What the members said of themselves at the end, by set rank; complete on set rank 0 after `stop`."""
        return self._negotiator.last_words

    def _main(self) -> None:
        self._pin()
        nap = _SHORTEST_NAP
        while not self._ended:
            worked = self._drive_while_busy()
            nap = _SHORTEST_NAP if worked else min(2 * nap, _LONGEST_NAP)
            if not self._ended and (self._driving.locked() or not self._is_busy()):
                self._alarm.acquire(timeout=nap)
        if self._failure is None:
            self._close()

    def _drive_while_busy(self) -> bool:
        """Drive until nothing is in flight. False if there was nothing to do, or another thread drives."""
        if not self._driving.acquire(blocking=False):
            return False
        try:
            worked = self._work()
            while self._is_busy() and not self._ended:
                if not self._work():
                    self._sleep()
            return worked
        finally:
            self._driving.release()

    def _is_busy(self) -> bool:
        leaving = self._leaving is not None and not self._ended
        return self._inbox.has_work or leaving

    def _work(self, waiting: bool = False) -> bool:
        """Do what there is to do, and return whether there was anything. The caller drives.

        Args:
            waiting: on a thread that waits for an operation, and submits nothing before it is done.
        """
        try:
            return self._step(waiting)
        except BaseException as error:
            self._fail(error)
            if waiting and not isinstance(error, Exception):  # of a signal's handler, for the caller
                raise
            return True

    def _close(self) -> None:
        try:
            self._negotiator.close()
            self._cycle.close()
            self.comm.close()
        except BaseException as error:
            self._fail(error)

    def _pin(self) -> None:
        cores, place, before = self.config.thread_affinity, self.comm.topology.local_rank, cores_of_this_thread()
        if cores:
            try:
                os.sched_setaffinity(0, {cores[place]})  # 0: this thread only
            except (IndexError, OSError) as error:
                get_logger().error(
                    "HVDLITE_THREAD_AFFINITY=%s does not fit local rank %d: %s; its engine thread is not pinned.",
                    ",".join(map(str, cores)), place, error,
                )  # fmt: skip
        get_logger().info(
            "%s: the engine's thread may use core %s, the program %s.",
            self._what, describe_cores(cores_of_this_thread()), describe_cores(before),
        )  # fmt: skip

    def _step(self, waiting: bool) -> bool:
        negotiator = self._negotiator
        requests = self._inbox.drain()
        if requests:
            if self._coordinator is None:
                self._instrument.heard(self.comm.rank, requests)
            negotiator.announce(requests, waiting)
        if self._leaving is not None and not self._left:
            self._left = True
            negotiator.leave(self._leaving)
        ran = negotiator.follower is not None and self._follow(negotiator.follower)
        if ran and self._tuner is None and (self._coordinator is None or not self._coordinator.breaks):
            return True
        verdicts = negotiator.advance()
        for verdict in verdicts:
            follower = negotiator.follower
            for batch in negotiator.finish(verdict):
                assert follower is not None
                self._run(batch, follower)
            self._threshold = verdict.fusion_threshold
            if verdict.knobs is not None:
                self._cycle.tune(verdict.knobs)
            responses = negotiator.learn(verdict)
            self._inbox.follow(negotiator.follower)
            self._cycle.run(responses, verdict.fusion_threshold)
            if verdict.shutdown:
                self._close_inbox(verdict.shutdown)
                self._ended = True
                break
        if self._tuner is not None and self._coordinator is not None:
            knobs = self._tuner.take_wish()
            if knobs is not None:
                self._coordinator.retune(knobs)
        if self._coordinator is not None and self._coordinator.ledger.waiting:
            self._watch(time.monotonic())
        return bool(ran or requests or verdicts or negotiator.news)

    def _follow(self, follower: Follower) -> bool:
        """Run the next batch of the schedule if it is due. False if not; see then whether this rank must leave it."""
        batch = self._negotiator.take(spin=True)
        if batch is not None:
            self._run(batch, follower)
            return True
        if not follower.broken and self._inbox.in_flight:
            self._doubt(follower)
        if follower.broken:
            self._negotiator.freeze(self._oldest(), self._awaited_beyond(follower))
        return False

    def _run(self, batch: list[Response], follower: Follower) -> None:
        if len(batch) > 1 or not self._short_way.run_late(batch[0], follower):
            self._cycle.run(batch, self._threshold, self._negotiator.enclosed)

    def _doubt(self, follower: Follower) -> None:
        """Leave the schedule if this rank will not submit the rest of the next batch, as far as can be known.

        Also if it waits so long for others that the stall watch has to hear of it: that is blind in a schedule.
        """
        whole = follower.is_next_whole
        limit = self._explained_after if whole else follower.patience
        if self._oldest() > limit or (not whole and self._awaited_beyond(follower)):
            follower.break_off()

    def _oldest(self) -> float:
        """Return how long the oldest operation in flight has been waiting, seconds."""
        first = next(iter(self._inbox.in_flight.values()), None)
        return 0.0 if first is None else time.monotonic() - first.since

    def _awaited_beyond(self, follower: Follower) -> str:
        """Return an operation that a caller waits for although this rank has not submitted its batch whole, or ""."""
        for name in follower.beyond():
            submission = self._inbox.get(name)
            if submission is not None and submission.handle.awaited:
                return name
        return ""

    def _watch(self, now: float) -> None:
        if now >= self._next_watch:
            self._next_watch = now + self._patience()
            self._stall.check(now)

    def _sleep(self, limit: float = math.inf) -> None:
        try:
            self.comm.wait(min(self._patience(), limit), eager=True)
        except Exception as error:  # not what a signal's handler raises: the caller's own
            self._fail(error)

    def _patience(self) -> float:
        limits = [limit / 4 for limit in (self.config.stall_warning, self.config.stall_shutdown) if limit]
        return min([_BUSY_WAIT, *limits])

    def _close_inbox(self, reason: str) -> None:
        refusals = self._negotiator.late_refusals

        def error(request: Request) -> BaseException:
            refusal = refusals.pop(request.name, None)
            if refusal is not None:
                return refusal.exception()
            return errors.ShutdownError(
                f"{request.kind.value} of tensor {request.name!r}: {self._what} has been shut down: {reason}. "
                "Every rank must make the same calls; a rank without data calls hvd.join()."
            )

        self._instrument.ended()
        self._inbox.close(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        self._ended = True
        rank = self.members[self.comm.rank]
        text = f"the engine of rank {rank} stopped: {type(error).__name__}: {error}"

        # Callers, and hvdrun at the end, can tell whether this rank broke or only noticed that another one is gone.
        lost = isinstance(error, errors.CommunicationError)
        kind = errors.CommunicationError if lost else errors.HorovodInternalError

        def cause(request: Request) -> BaseException:
            failure = kind(f"{request.kind.value} of tensor {request.name!r}: {text}")
            failure.__cause__ = error
            return failure

        self._instrument.ended()
        self._inbox.close(cause)
        get_logger().error("%s", text, exc_info=error)
        self._on_failure(error)
