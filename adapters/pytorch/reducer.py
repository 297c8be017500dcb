"""Gradients to the other ranks while backward() still runs: hooks, countdowns, rounds.

Knows parameters and their gradients, not the optimizer. A parameter's hook fires when
autograd has accumulated its gradient; after the last backward pass of a step that starts
an in-place allreduce, together with its neighbours. A *round* reduces each parameter
once. Where every parameter of every rank got its gradient, a round ends with backward():
`p.grad` is reduced when that returns. Otherwise backward() does not wait, for other
ranks may have other things to do before their step(), and `finish()` ends the round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from hvdlite import InvalidRequestError
from hvdlite.lowlevel import Kind, ReduceOp, refusing, start

from .compression import Compressor
from .ops import Reduction, start_allgather
from .pulse import News, Pulse
from .slots import Bundle, GradientHook, Slot
from .sparse import start_sparse_allreduce
from .trips import CHANGED, Announcement, DenseTrip, DensifiedTrip, OrderError, SparseElsewhere, SparseTrip, Trip

_Batched = DenseTrip | DensifiedTrip | Pulse

# Gradients wait for each other until they have so many bytes, then start together: to wake the engine for each of
# a hundred small ones costs more than the rest of the reduction.
BATCH_BYTES = 2**20


class GradientReducer:
    """Keeps the gradients of some parameters equal on all ranks of a set.

    Args:
        name: of the optimizer, for what travels besides gradients.
        bundles: every parameter once. Those that do not require grad are left alone until they do.
        passes: backward passes per step; their gradients are added up.
        sparse_as_dense: sparse gradients travel as dense ones.

    Attributes:
        rounds: since the last step.
        seconds_waited: for other ranks.
    """

    def __init__(
        self,
        name: str,
        bundles: Sequence[Bundle],
        reduction: Reduction,
        compression: type[Compressor],
        passes: int,
        sparse_as_dense: bool = False,
    ) -> None:
        self.seconds_waited = 0.0
        self._name, self._reduction, self._compression = name, reduction, compression
        self._passes, self._sparse_as_dense = passes, sparse_as_dense
        self._bundles: list[Bundle] = []
        self._paused = False
        self._backward = -1  # the backward() whose end we shall hear of
        self.rounds = 0
        self._fresh = self._ended = False  # nothing has come in this round; all is reduced
        self._error: Exception | None = None
        self._pulse: Pulse | None = None
        self._trips: list[Trip] = []
        self._batch: list[DenseTrip | DensifiedTrip | Pulse] = []
        self._batch_bytes = 0
        self.add(bundles)

    def add(self, bundles: Sequence[Bundle]) -> None:
        """Take further parameters on."""
        self._bundles.extend(bundles)
        for bundle in bundles:
            for i in range(len(bundle.slots)):
                GradientHook(self, bundle, i).attach()
        self._begin(self._passes)

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, before the first of a step."""
        if self.in_flight:
            raise OrderError("set_backward_passes_per_step() came after backward() and before step() or synchronize().")
        self._passes = passes
        self._begin(self._passes)

    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way, or about to be."""
        return not self._ended and (self._pulse is not None or bool(self._trips or self._batch))

    @property
    def unreduced(self) -> bool:
        """Whether there are gradients of this rank alone."""
        return not self._ended and not self._fresh

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, gradients add up and stay here."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def finish(self) -> None:
        """Return once every gradient is reduced. Collective.

        Raises:
            HorovodInternalError, InvalidRequestError: the first of what went wrong, after all have been waited for.
                The next call begins a new round.
        """
        if not self._ended:
            for bundle in self._bundles:
                if not bundle.started and bundle.wanted():
                    self._check_unchanged(bundle)
                    self._start(bundle)
            self._send_pulse(incomplete=False)
            self._land()
        if self._error is not None:
            error, self._error = self._error, None
            self.begin_step()
            raise error

    def begin_step(self) -> None:
        """The gradients have been used: what comes now belongs to the next step."""
        self.rounds = 0
        self._begin(self._passes)

    def begin_round(self) -> None:
        """The gradients have been cleared, or are to be computed anew within the same step."""
        if not self._fresh:
            self._begin(self._passes)

    def forget(self) -> None:
        """Wait for what is in flight, whatever becomes of it, and begin a new step. Collective, like `finish`."""
        if self.in_flight:
            with suppress(Exception):
                self.finish()
        self._error = None
        self.begin_step()

    # Within backward()

    def on_gradient(self, bundle: Bundle, i: int) -> None:
        """Autograd has added to the gradient of member i. Called by its hook, within backward()."""
        slot = bundle.slots[i]
        self._fresh = False
        if self._ended:
            self._begin_again(slot)
        if bundle.started:
            raise OrderError(
                f"{slot.name!r}: backward() again while gradients of {self._passes} backward passes are being reduced, "
                "before step(). Say backward_passes_per_step=k to accumulate over k of them, or use no_sync()."
            )
        bundle.take(i, self._passes)
        if self._paused:
            return
        slot.left -= 1
        if slot.left == 0:
            bundle.unready -= slot.counted
            if bundle.unready <= 0 and bundle.ready():
                self._start(bundle)
                if self._batch_bytes >= BATCH_BYTES:
                    self._flush()
            self._hear_of_end()

    def _begin_again(self, slot: Slot) -> None:
        """A gradient after a round has ended, and no step since: either all were cleared, or this one adds up."""
        if not slot.kept():
            self._begin(self._passes)
        elif self._reduction.op is not ReduceOp.SUM:
            self._begin(1)  # the average of averages, and of what has been added here, is right
        else:
            raise OrderError(
                f"{slot.name!r}: backward() again after gradients have been added up over the ranks, and before step() "
                "or zero_grad(): they would be added up twice. Say backward_passes_per_step=k, or use no_sync()."
            )

    def _hear_of_end(self) -> None:
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:  # a backward() that failed never ends
            self._backward = backward
            ended = self._after_nested_backward if _is_nested() else self._after_backward
            torch.autograd.Variable._execution_engine.queue_callback(ended)

    def _after_backward(self) -> None:
        if self._pulse is not None:
            self._flush()
            return  # one pulse per round, for ranks may differ in how many backward() they need
        incomplete = self._incomplete()
        self._send_pulse(incomplete)
        if not incomplete and not self._wait_for_news().incomplete:
            self._land()

    def _after_nested_backward(self) -> None:
        """A reentrant checkpoint ends. Others, and the backward() around them, may have gradients for us."""
        if self._incomplete():
            self._flush()
        else:
            self._after_backward()

    def _incomplete(self) -> bool:
        return any(not bundle.started and bundle.wanted() for bundle in self._bundles)

    # Starting

    def _check_unchanged(self, bundle: Bundle) -> None:
        """Note it if somebody changed gradients that were still to be added to, or to be reduced."""
        for slot in bundle.slots:
            if slot.changed():
                self._note(OrderError(f"{slot.name!r}: {CHANGED}"))

    def _start(self, bundle: Bundle, also_frozen: bool = False) -> None:
        """Let the gradients of a bundle go: several as one group, a single one or a buffer with its neighbours."""
        bundle.started = True
        slots = [slot for slot in bundle.slots if also_frozen or slot.parameter.requires_grad]
        names = [slot.name for slot in slots] if bundle.bucket is None else [bundle.name]
        try:
            with refusing(Kind.ALLREDUCE, names, self._reduction.process_set):
                trips: list[_Batched] = []
                if bundle.bucket is not None:
                    if not self._sparse_as_dense:
                        _refuse_sparse(slots)
                    owners = bundle.bucket.fill()
                    trips.append(DenseTrip(bundle.name, owners, bundle.bucket.memory, self._compression))
                else:
                    for slot in slots:
                        trips += self._dense_trips(slot)
        except Exception as error:
            self._note(error)
            return
        if bundle.bucket is None and len(bundle.slots) > 1:
            self._submit(trips, grouped=True)
        else:
            self._batch += trips
            self._batch_bytes += sum(slot.parameter.nbytes for slot in slots)

    def _dense_trips(self, slot: Slot) -> list[_Batched]:
        """Return the trip of a gradient that travels dense; start that of one that does not."""
        parameter = slot.parameter
        if parameter.grad is None:
            parameter.grad = slot.zeros()
        if self._sparse_as_dense and parameter.grad.is_sparse:
            return [DensifiedTrip(slot.name, parameter, self._compression)]
        if slot.sparse and not self._sparse_as_dense:
            self._start_sparse(slot)
        elif parameter.grad.is_sparse:
            self._announce_sparse(slot)
        else:
            return [DenseTrip(slot.name, [(parameter, parameter.grad)], parameter.grad, self._compression, slot)]
        return []

    def _announce_sparse(self, slot: Slot) -> None:
        """Tell the ranks that do not know yet. What they send under this name fails, and then they do."""
        nothing = torch.empty(0, dtype=slot.parameter.dtype)
        handle = start_allgather([nothing], [slot.name], self._reduction.process_set)[0]
        handle.alert()
        self._trips.append(Announcement(slot.name, handle, slot))

    def _start_sparse(self, slot: Slot) -> None:
        gradient = slot.parameter.grad
        assert gradient is not None
        if not gradient.is_sparse:
            slot.parameter.grad = gradient = gradient.to_sparse(1)
        handle = start_sparse_allreduce(gradient, slot.name, self._reduction)
        handle.alert()
        self._trips.append(SparseTrip(slot.name, slot.parameter, handle))

    def _send_pulse(self, incomplete: bool) -> None:
        """Submit what waits for neighbours, and with it what this rank says of this round."""
        if self._pulse is None:
            self.rounds += 1
            frozen = [slot.name for slot in self._slots() if not slot.parameter.requires_grad]
            self._pulse = Pulse(self._name, incomplete, self.rounds, frozen)
            self._batch.append(self._pulse)
        self._flush()

    def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._submit(batch, grouped=False)

    def _submit(self, batch: Sequence[_Batched], grouped: bool) -> None:
        if not batch:
            return
        op, prescale, postscale, process_set = self._reduction
        names = [one.name for one in batch]
        try:
            with refusing(Kind.ALLREDUCE, names, process_set):
                items = [one.item() for one in batch]
            handles = start(
                Kind.ALLREDUCE, names, items, process_set,
                op=op, prescale=prescale, postscale=postscale, grouped=grouped,
            )  # fmt: skip
        except Exception as error:
            self._note(error)
            return
        handles[-1].alert()
        for one, handle in zip(batch, handles, strict=True):
            one.handle = handle
            if not isinstance(one, Pulse):
                self._trips.append(one)

    def _note(self, error: Exception) -> None:
        # The other ranks wait for our other gradients, so backward() must go on. finish() raises it.
        self._error = self._error or error

    # Ending

    def _wait_for_news(self) -> News:
        """Return what the ranks say of this round; nothing remarkable if that failed, as the gradients will."""
        started = time.perf_counter()
        try:
            if self._pulse is not None and self._pulse.handle is not None:
                return self._pulse.news()
        except Exception as error:
            self._note(error)
        finally:
            self.seconds_waited += time.perf_counter() - started
        return News(False, False, False)

    def _land(self) -> None:
        """Wait for everything in flight, and end the round."""
        news = self._wait_for_news()
        started = time.perf_counter()
        if news.rounds_differ:
            self._note(
                OrderError(f"{self._name}: ranks have run different numbers of backward() since their last step().")
            )
        if news.frozen_differ:
            for bundle in self._bundles:
                if not bundle.started:
                    self._start(bundle, also_frozen=True)
                elif bundle.bucket is not None:
                    bundle.bucket.give()
            self._flush()
        for slot in self._land_trips():
            slot.sparse = True
            self._start_sparse(slot)
        self._land_trips()
        self._ended = True
        for slot in self._slots():
            slot.see()
        self.seconds_waited += time.perf_counter() - started

    def _land_trips(self) -> list[Slot]:
        """Wait for what is in flight, and return whose gradients have turned out to be sparse."""
        trips, self._trips = self._trips, []
        sparse = []
        for trip in trips:
            try:
                trip.land()
            except SparseElsewhere as found:
                sparse.append(found.slot)
            except Exception as error:
                self._note(error)
        return sparse

    def _slots(self) -> Iterator[Slot]:
        return (slot for bundle in self._bundles for slot in bundle.slots)

    def _begin(self, passes: int) -> None:
        self._fresh, self._ended, self._pulse = True, False, None
        self._trips, self._batch, self._batch_bytes = [], [], 0
        for bundle in self._bundles:
            bundle.begin(passes)


def _is_nested() -> bool:
    """Return whether the backward() that runs was called by another one, as a reentrant checkpoint does."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code is torch.autograd.backward.__code__
    return depth > 1


def _refuse_sparse(slots: Sequence[Slot]) -> None:
    for slot in slots:
        if slot.parameter.grad is not None and slot.parameter.grad.is_sparse:
            raise InvalidRequestError(
                f"{slot.name!r}: a sparse gradient cannot be a view into a buffer: "
                "pass sparse_as_dense=True, or gradient_as_bucket_view=False."
            )
