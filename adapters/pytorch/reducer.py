"""Gradients to the other ranks while backward() still runs: hooks, countdowns, rounds.

Knows parameters and their gradients, not the optimizer. A parameter's hook fires when
autograd has accumulated its gradient; after the last backward pass of a step that starts
an in-place allreduce, together with its neighbours. A *round* reduces each parameter
once. Where every parameter of every rank got its gradient, a round ends with backward():
`p.grad` is reduced when that returns. Otherwise backward() does not wait, for other
ranks may have other things to do before their step(), and `finish()` ends the round.
"""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from hvdlite import HorovodInternalError, rank
from hvdlite.lowlevel import ReduceOp, describe_ranks, seconds_busy

from .compression import Compressor
from .cores import has_spare_cores
from .fleet import Fleet
from .ops import Reduction, start_allgather
from .order import ReadyOrder
from .overlap import Overlap
from .pulse import News, Pulse
from .slots import Bundle, GradientHook, Slot, detach_older
from .trips import CHANGED, OrderError


class GradientReducer:
    """Keeps the gradients of some parameters equal on all ranks of a set.

    Args:
        name: of the optimizer, for what travels besides gradients.
        bundles: every parameter once. Those that do not require grad are left alone until they do.
        passes: backward passes per step; their gradients are added up.
        sparse_as_dense: sparse gradients travel as dense ones.
        regroup: is called once, with the slots in the order in which their gradients become ready, the same on all
            ranks. Returns bundles of them to go on with, or None if that would change nothing. Collective.

    Attributes:
        rounds: since the last step.
        ended: the gradients of this round are reduced.
        overlap: where the time went.
    """

    def __init__(
        self,
        name: str,
        bundles: Sequence[Bundle],
        reduction: Reduction,
        compression: type[Compressor],
        passes: int,
        sparse_as_dense: bool = False,
        regroup: Callable[[list[Slot]], list[Bundle] | None] | None = None,
    ) -> None:
        self.overlap = Overlap(0, 0.0, 0.0, 0.0)
        self._busy, self._hidden, self._waited = 0.0, 0.0, 0.0  # of this round; busy: when it began
        self.rounds = 0
        self._name, self._reduction, self._passes = name, reduction, passes
        self._bundles: list[Bundle] = []
        self._places: list[tuple[Bundle, int]] = []  # of slots, as hooks number them
        self._paused = False
        self._awaiting: set[int] = set()  # the backward() whose ends we shall hear of, unless they raise
        self._fresh, self.ended = True, False  # fresh: nothing has come in this round
        self._pulse: Pulse | None = None
        self._fleet = Fleet(reduction, compression, sparse_as_dense, has_spare_cores())
        self._round_passes = passes
        self.add(bundles)
        # Weak: whoever regroups holds this, and both are to be freed at once.
        self._regroup = None if regroup is None else weakref.WeakMethod(regroup)
        self._order = None if regroup is None else ReadyOrder(len(self._places))

    def add(self, bundles: Sequence[Bundle]) -> None:
        """Take further parameters on. Those that are there already go on."""
        detach_older([slot.parameter for bundle in bundles for slot in bundle.slots], self._may_share)
        for bundle in bundles:
            bundle.begin(self._passes)
            for i, slot in enumerate(bundle.slots):
                GradientHook(self, len(self._places)).attach(slot.parameter)
                self._places.append((bundle, i))
            self._bundles.append(bundle)

    def parameters(self) -> list[torch.Tensor]:
        return [slot.parameter for slot in self._slots()]

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, from the next round on."""
        if self.in_flight:
            raise OrderError("set_backward_passes_per_step() came after backward() and before step() or synchronize().")
        self._passes = passes
        if self._fresh:
            self._round_passes = passes

    @property
    def in_flight(self) -> bool:
        """Whether gradients are on their way, or about to be."""
        return not self.ended and (self._pulse is not None or self._fleet.under_way)

    @property
    def unreduced(self) -> bool:
        """Whether there are gradients of this rank alone."""
        return not self.ended and not self._fresh

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
        if not self.ended:
            self._open()
            for bundle in self._bundles:
                if not bundle.started and bundle.wanted():
                    changed = bundle.changed()
                    if changed:
                        self._fleet.note(OrderError(f"{changed!r}: {CHANGED}"))
                    self._fleet.start(bundle)
            self._send_pulse(incomplete=False, failed=bool(self._awaiting), alert=False)
            self._land()
        if self._fleet.error is not None:
            error, self._fleet.error = self._fleet.error, None
            self.begin_step()
            raise error

    def begin_step(self) -> None:
        """The gradients have been used: what comes now belongs to the next step."""
        self.rounds = 0
        self.begin_round()

    def clear(self) -> None:
        """The gradients are to be cleared: end what is under way. Collective then."""
        if self._awaiting:
            self.abandon()
        elif self.in_flight:
            with suppress(OrderError):  # wrong gradients may be cleared
                self.finish()
        error, self._fleet.error = self._fleet.error, None  # of gradients that nobody will use
        if error is None or isinstance(error, OrderError):
            self.begin_round()
        else:
            self.begin_step()  # as `finish` does, on ranks that it was raised on
        for bundle in self._bundles:
            bundle.release()

    def forget(self) -> None:
        """End what is in flight, whatever becomes of it. Collective, like `finish`."""
        if self.in_flight:
            with suppress(Exception):
                self.finish()

    def abandon(self) -> None:
        """This rank will not get its gradients: end the round, and let the others hear of it. Collective."""
        self._awaiting.add(-1)  # for an end that never came
        with suppress(Exception):  # whoever called knows
            self.finish()
        self.begin_round()

    # Within backward()

    def before_gradient(self, number: int) -> None:
        """Autograd is about to add to the gradient of slot `number`."""
        bundle, i = self._places[number]
        slot = bundle.slots[i]
        if self._awaiting and torch._C._current_graph_task_id() not in self._awaiting and not _is_nested():
            self._clean_up()
        gradient = slot.parameter.grad
        slot.cleared = gradient is None or (
            # Sums must not be added up twice, so look closely: model.zero_grad(set_to_none=False) may have been here.
            self.ended and self._reduction.op is ReduceOp.SUM and slot.changed() and not gradient.any()
        )

    def on_gradient(self, number: int) -> None:
        """Autograd has added to the gradient of slot `number`. Called by its hook, within backward()."""
        bundle, i = self._places[number]
        slot = bundle.slots[i]
        backward = torch._C._current_graph_task_id()
        if self.ended:
            self._begin_again(slot)
        self._open()
        if bundle.started or (slot.left <= 0 and bundle.single):
            self._refuse(
                f"{slot.name!r}: backward() again while gradients of {self._passes} backward passes are being reduced, "
                "before step(). Say backward_passes_per_step=k to accumulate over k of them; add several losses up, or "
                "use no_sync() for all but the last; or clear the gradients with optimizer.zero_grad()."
            )
        bundle.take(i, self._round_passes)
        if self._paused:
            bundle.keep(i)
            return
        slot.left -= 1
        if slot.left != 0:
            bundle.keep(i)
            return
        if self._order is not None:
            self._order.note(number)
        bundle.unready -= 1
        if bundle.unready == 0:
            self._fleet.start(bundle)
        elif backward == -1:
            bundle.keep(i)
        if backward not in self._awaiting:
            self._hear_of_end(backward)

    def _clean_up(self) -> None:
        """The last backward() raised, and the program cleared gradients without telling us, which may be in flight."""
        cleared = [parameter for parameter in self.parameters() if parameter.grad is None]
        self.abandon()
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for parameter in cleared:
            parameter.grad = None

    def _open(self) -> None:
        """The first gradient of a round comes, or its end: see which parameters are frozen in it."""
        if self._fresh:
            self._fresh = False
            self._busy, self._hidden = seconds_busy(self._reduction.process_set), 0.0
            for bundle in self._bundles:
                bundle.begin(self._round_passes)

    def _begin_again(self, slot: Slot) -> None:
        """A gradient after a round has ended, and no step since: either all were cleared, or this one adds up."""
        if slot.cleared:
            self.begin_round()
        elif self._reduction.op is not ReduceOp.SUM:
            self.begin_round()
            self._round_passes = 1  # the average of averages, and of what has been added here, is right
        else:
            self._refuse(
                f"{slot.name!r}: backward() again after gradients have been added up over the ranks, and before step() "
                "or zero_grad(): they would be added up twice. Say backward_passes_per_step=k, or use no_sync()."
            )

    def _refuse(self, text: str) -> NoReturn:
        error = OrderError(text)
        self._fleet.note(error)  # the gradient is spoilt already: step() must not use it
        raise error

    def _hear_of_end(self, backward: int) -> None:
        if backward != -1:  # compiled autograd cannot tell; step() waits
            self._awaiting.add(backward)
            ended = self._after_nested_backward if _is_nested() else self._after_backward
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(ended, backward))

    def _after_backward(self, backward: int) -> None:
        self._awaiting.discard(backward)
        if not self.ended:
            self._hidden = seconds_busy(self._reduction.process_set) - self._busy
        self._keep_unstarted()
        self._end_round()

    def _keep_unstarted(self) -> None:
        """The program goes on with gradients that are still here: notice if it changes them."""
        for bundle in self._bundles:
            if not bundle.started:
                bundle.keep_all()

    def _end_round(self) -> None:
        """Wait for gradients, if every rank has all of them."""
        first, incomplete = self._pulse is None, self._incomplete()
        self._send_pulse(incomplete, failed=False, alert=incomplete or not first)
        if first and not incomplete and not self._wait_for_news().incomplete:
            self._land()

    def _after_nested_backward(self, backward: int) -> None:
        """A reentrant checkpoint ends. Others, and the backward() around them, may have gradients for us."""
        self._awaiting.discard(backward)
        self._keep_unstarted()
        if self._incomplete():
            self._fleet.flush()
        else:
            self._end_round()

    def _incomplete(self) -> bool:
        return any(not bundle.started and bundle.wanted() for bundle in self._bundles)

    # Ending

    def _send_pulse(self, incomplete: bool, failed: bool, alert: bool) -> None:
        """Let go what waits for neighbours, and with it what this rank says of this round."""
        if self._pulse is not None:  # one per round, for ranks may differ in how many backward() they need
            self._fleet.flush(alert)
            return
        self.rounds += 1
        frozen = [slot.name for slot in self._slots() if not slot.wanted]
        self._pulse = Pulse(self._name, incomplete, failed, self.rounds, frozen)
        self._fleet.send(self._pulse, alert)

    def _wait_for_news(self) -> News:
        """Return what the ranks say of this round; nothing remarkable if that failed, as the gradients will."""
        started = time.perf_counter()
        try:
            if self._pulse is not None and self._pulse.handle is not None:
                return self._pulse.news()
        except Exception as error:
            self._fleet.note(error)
        finally:
            self._waited += time.perf_counter() - started
        return News(False, False, False, False)

    def _land(self) -> None:
        """Wait for everything in flight, and end the round."""
        news = self._wait_for_news()
        started = time.perf_counter()
        if news.failed or news.rounds_differ:
            self._fleet.note(self._what_went_wrong())
        if news.frozen_differ:
            self._include_frozen()
        self._fleet.land()
        if news.frozen_differ:
            self._fleet.give_to_frozen()
            for bundle in self._bundles:
                if bundle.bucket is not None:
                    bundle.bucket.give()
        self.ended = True
        if self._order is not None:
            self._learn(self._order)
        if self._reduction.op is ReduceOp.SUM:
            for slot in self._slots():
                slot.see()
        self._waited += time.perf_counter() - started
        reducing = seconds_busy(self._reduction.process_set) - self._busy
        before = self.overlap
        self.overlap = Overlap(
            before.rounds + 1, before.reducing + reducing, before.hidden + self._hidden, before.waited + self._waited
        )
        self._waited = 0.0

    def _learn(self, order: ReadyOrder) -> None:
        """After the first round: let gradients travel together that become ready together."""
        self._order = None
        numbered = [bundle.slots[i] for bundle, i in self._places]
        try:
            agreed = order.agree(f"{self._name}.order", self._reduction.process_set)
            regroup = None if self._regroup is None else self._regroup()
            if agreed is None or len(agreed) != len(numbered) or regroup is None:
                return
            bundles = regroup([numbered[number] for number in agreed])
        except Exception as error:
            self._fleet.note(error)
            return
        if bundles is not None:
            self._bundles = bundles
            at = {id(slot): (bundle, i) for bundle in bundles for i, slot in enumerate(bundle.slots)}
            self._places = [at[id(slot)] for slot in numbered]

    def _what_went_wrong(self) -> Exception:
        """Return an error that names the ranks. All ranks know that something did, so this may be collective."""
        assert self._pulse is not None
        mine = torch.tensor([[rank(), self.rounds, self._pulse.failed]])
        try:
            rows = start_allgather([mine], [f"{self._name}.rounds"], self._reduction.process_set)[0].wait().tolist()
        except Exception as error:
            return error
        failed = [who for who, _, raised in rows if raised]
        if failed:
            return HorovodInternalError(
                f"{self._name}: backward(), or a closure, raised on {describe_ranks(failed)}, so that this step has no "
                "gradients on any rank. Clear them with optimizer.zero_grad() and go on with the next batch."
            )
        by_rounds: dict[int, list[int]] = {}
        for who, rounds, _ in rows:
            by_rounds.setdefault(rounds, []).append(who)
        sides = "; ".join(f"{rounds} on {describe_ranks(ranks)}" for rounds, ranks in sorted(by_rounds.items()))
        return OrderError(
            f"{self._name}: ranks have reduced gradients a different number of times since their last step(): {sides}. "
            "Every rank must run backward() equally often before step(); or use no_sync()."
        )

    def _include_frozen(self) -> None:
        """Let parameters take part that are frozen here, and not on every rank."""
        for bundle in self._bundles:
            if not bundle.started:
                for slot in bundle.slots:
                    slot.wanted = True
                self._fleet.start(bundle)
        self._fleet.flush()

    def _slots(self) -> Iterator[Slot]:
        return (slot for bundle in self._bundles for slot in bundle.slots)

    def begin_round(self) -> None:
        """What comes now is another set of gradients, within the same step."""
        if not self._fresh:
            self._fresh, self.ended, self._pulse = True, False, None
            self._awaiting.clear()
            self._fleet.begin()
        self._round_passes = self._passes

    def _may_share(self, older: GradientReducer) -> bool:
        """Return whether this and an older reducer may both reduce a parameter."""
        same = self._reduction.process_set is older._reduction.process_set
        averages = self._reduction.op is older._reduction.op is ReduceOp.AVERAGE
        views = any(b.bucket is not None and b.bucket.views for one in (self, older) for b in one._bundles)
        return same and averages and not views


def _is_nested() -> bool:
    """Return whether the backward() that runs was called by another one, as a reentrant checkpoint does."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code is torch.autograd.backward.__code__
    return depth > 1
