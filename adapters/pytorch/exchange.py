"""Batches of gradients that a `CommHook` reduces, and what it held back of them.

A batch is fixed when the optimizer is wrapped, so that all ranks mean the same by it. Its gradients
are gathered in one flat tensor, on top of what earlier steps held back. Each round of its operations is
started where the result of the one before is found: when another batch leaves, or at the end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from hvdlite import MismatchError
from hvdlite.lowlevel import Handle, Kind, ReduceOp, refusing

from .compression.hook import CommHook, Steps
from .ops import Reduction, start_reducescatter
from .slots import Bundle, Slot, refuse_sparse
from .trips import CHANGED, OrderError
from .wire import NamedWire

BATCH_BYTES = 4 * 2**20  # of gradients that travel together: smaller ones share the cost of an operation


class _Piece(NamedTuple):
    """One gradient of a batch under way.

    Attributes:
        owner: whose gradient it is; None of one that is frozen here.
        dense: what is reduced, in place.
        version: of `gradient`, when it left.
    """

    slot: Slot
    owner: torch.Tensor | None
    gradient: torch.Tensor
    dense: torch.Tensor
    version: int

    def untouched(self) -> bool:
        return self.owner is None or (self.owner.grad is self.gradient and self.gradient._version == self.version)

    def put(self, reduced: torch.Tensor) -> None:
        """Let the gradient be `reduced`, which is flat."""
        self.dense.copy_(reduced.view(self.dense.shape))
        if self.owner is not None and self.gradient.is_sparse:
            self.owner.grad = self.dense.to_sparse(self.gradient.sparse_dim())


class Exchange:
    """One batch: its hook, and what stays from step to step.

    Args:
        name: under which it travels.
        factor: what the sum over the ranks is multiplied by.
    """

    def __init__(self, name: str, hook: CommHook, reduction: Reduction) -> None:
        self.name = name
        self._hook, self.process_set = hook, reduction.process_set
        size = reduction.process_set.size()
        assert size is not None  # only members reduce
        self._size = size
        self._factor = reduction.prescale * reduction.postscale / (size if reduction.op is ReduceOp.AVERAGE else 1)
        self.reset()

    def reset(self) -> None:
        """Forget what was held back."""
        self._shapes: list[tuple[int, ...]] = []
        self._order: list[int] = []
        self._held = self._work = torch.empty(0)
        self._memory: Any = None

    def take_over(self, other: Exchange) -> None:
        """Go on where another one stands."""
        self._shapes, self._order = list(other._shapes), list(other._order)
        self._held, self._work = other._held.clone(), torch.empty_like(other._work)
        self._memory = copy.deepcopy(other._memory)

    @property
    def held_back(self) -> torch.Tensor:
        """What is added to the next gradients. Flat, in the order of the hook."""
        return self._held

    def wire(self) -> NamedWire:
        return NamedWire(self.name, self.process_set, self._factor)

    def begin(self, gradients: Sequence[torch.Tensor], wire: NamedWire) -> Steps:
        """Return the hook's steps for these gradients. Another shape than before, and it starts anew."""
        dtype = torch.float64 if gradients[0].dtype is torch.float64 else torch.float32
        shapes = [tuple(gradient.shape) for gradient in gradients]
        if shapes != self._shapes or dtype is not self._held.dtype:
            self._make_room(shapes, dtype)
        flat = [gradients[i].detach().reshape(-1) for i in self._order]
        n = sum(len(one) for one in flat)
        work = self._work
        torch.cat(flat, out=work[:n])
        work[n:] = 0.0
        work += self._held
        return self._hook.reduce(work, self._memory, wire)

    def end(self, reduced: torch.Tensor, memory: Any, pieces: Sequence[_Piece]) -> None:
        """Put the result in place, and keep what was held back unless the result is not finite."""
        start = 0
        for i in self._order:
            n = pieces[i].dense.numel()
            pieces[i].put(reduced[start : start + n])
            start += n
        if math.isfinite(reduced.sum().item()):
            self._held, self._work = self._work, self._held
            self._memory = memory

    def _make_room(self, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._order = shapes, self._hook.order(shapes)
        n = self._hook.length(sum(math.prod(shape) for shape in shapes), self._size)
        self._held, self._work = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
        ordered = [shapes[i] for i in self._order]
        self._memory = self._hook.remember(self.name, ordered, dtype, self._size)


class _Journey:
    """One batch under way."""

    def __init__(self, bundle: Bundle, exchange: Exchange, pieces: list[_Piece]) -> None:
        self.bundle = bundle
        self._exchange, self._pieces, self._wire = exchange, pieces, exchange.wire()
        self._handle: Handle | None = None
        self._steps = exchange.begin([piece.dense for piece in pieces], self._wire)

    def ready(self) -> bool:
        """Return whether `go_on` would not wait."""
        return self._handle is None or self._handle.poll()

    def go_on(self) -> bool:
        """Wait for what was started last, and start what comes next. Return False at the end."""
        arrived = None if self._handle is None else _wait(self._handle)
        try:
            with torch.no_grad():
                self._handle = self._steps.send(arrived)
        except StopIteration as stop:
            self._end(*stop.value)
            return False
        except Exception as error:
            self._tell(error)
            raise
        return True

    def _end(self, reduced: torch.Tensor, memory: Any) -> None:
        touched = [piece for piece in self._pieces if not piece.untouched()]
        if touched:
            raise OrderError(f"{touched[0].slot.name!r}: {CHANGED}")
        with torch.no_grad():
            self._exchange.end(reduced, memory, self._pieces)

    def _tell(self, error: Exception) -> None:
        """Let the other ranks hear that this one starts nothing more, if they wait for it."""
        if not self._wire.done:
            with suppress(Exception), refusing(Kind.ALLREDUCE, [self._wire.next_name], self._exchange.process_set):
                raise error


class _Announcement:
    """Says that some gradient of a batch is sparse here, under the name of what the others start."""

    def __init__(self, bundle: Bundle, exchange: Exchange) -> None:
        self.bundle = bundle
        sums = Reduction(ReduceOp.SUM, 1.0, 1.0, exchange.process_set)
        # What no hook starts, so that it fails where others have dense gradients. Where all announce, it succeeds.
        self._handle = start_reducescatter([torch.empty(0)], [exchange.wire().next_name], sums)[0]
        self._handle.alert()

    def ready(self) -> bool:
        return False

    def go_on(self) -> bool:
        _wait(self._handle)
        raise _SparseInBatchError


class Exchanges:
    """The batches of one round that are under way.

    Args:
        sparse_as_dense: sparse gradients travel as dense ones.
        note: gets what goes wrong. The other ranks wait for our other gradients, so nothing is raised.
    """

    def __init__(self, sparse_as_dense: bool, note: Callable[[Exception], None]) -> None:
        self._sparse_as_dense, self._note = sparse_as_dense, note
        self._under_way: list[_Journey | _Announcement] = []
        self._apart: list[Slot] = []  # of batches that turned out to have sparse gradients

    def __bool__(self) -> bool:
        return bool(self._under_way)

    def begin(self) -> None:
        """Nothing is under way."""
        self._under_way, self._apart = [], []

    def depart(self, bundle: Bundle, spare: list[tuple[Slot, torch.Tensor]]) -> list[Slot]:
        """Let a batch go, and return the slots that are no part of it, since their gradients are sparse.

        Args:
            spare: gets those that are frozen here.
        """
        exchange = bundle.exchange
        assert exchange is not None
        self._under_way = [one for one in self._under_way if not one.ready() or self._goes_on(one)]
        apart = [] if self._sparse_as_dense else [slot for slot in bundle.slots if slot.sparse]
        try:
            with refusing(Kind.ALLREDUCE, [exchange.wire().next_name], exchange.process_set):
                pieces = self._pieces(bundle, spare)
                journey: _Journey | _Announcement
                if pieces is None:
                    journey = _Announcement(bundle, exchange)
                elif not any(piece.dense.numel() for piece in pieces):
                    return apart
                else:
                    journey = _Journey(bundle, exchange, pieces)
        except Exception as error:
            self._note(error)
            return apart
        if isinstance(journey, _Announcement) or self._goes_on(journey):
            self._under_way.append(journey)
        return apart

    def land(self) -> list[Slot]:
        """Wait for everything under way, and put it in place.

        Returns:
            Slots whose gradients have not travelled: some rank has a sparse one in their batch.
        """
        while self._under_way:
            # All of them by one round each, so that the operations of one batch run while another one is computed.
            self._under_way = [one for one in self._under_way if self._goes_on(one)]
        apart, self._apart = self._apart, []
        return apart

    def _goes_on(self, journey: _Journey | _Announcement) -> bool:
        try:
            return journey.go_on()
        except _SparseInBatchError:
            self._apart += [slot for slot in journey.bundle.slots if not slot.sparse]
        except Exception as error:
            self._note(error)
        return False

    def _pieces(self, bundle: Bundle, spare: list[tuple[Slot, torch.Tensor]]) -> list[_Piece] | None:
        """Return what travels of a batch, or None if a gradient is sparse that nobody knows of yet."""
        if bundle.bucket is not None:
            if not self._sparse_as_dense:
                refuse_sparse(bundle.slots)
            bundle.bucket.fill([slot.wanted for slot in bundle.slots])
            return [
                _Piece(slot, slot.parameter if slot.parameter.grad is place else None, place, place, place._version)
                for slot, place in zip(bundle.slots, bundle.bucket.places, strict=True)
            ]
        pieces = []
        for slot in bundle.slots:
            if slot.sparse and not self._sparse_as_dense:
                continue
            owner: torch.Tensor | None = slot.parameter
            gradient = slot.parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(slot.parameter, requires_grad=False)
                if slot.wanted:
                    slot.parameter.grad = gradient
                else:  # frozen; but its batch needs it
                    spare.append((slot, gradient))
                    owner = None
            if gradient.is_sparse and not self._sparse_as_dense:
                return None
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            pieces.append(_Piece(slot, owner, gradient, dense, gradient._version))
        return pieces


def cut_into_batches(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """Split lists of parameters so that each batch has one dtype, the last parameters first.

    Lists of one are neighbours that may share a batch; longer ones were meant to stay together.
    """
    batches: list[list[torch.Tensor]] = []
    open_batches: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameters in reversed(lists):
        if len(parameters) > 1:
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for p in parameters:
                by_dtype.setdefault(p.dtype, []).append(p)
            batches.extend(by_dtype.values())
            continue
        (p,) = parameters
        batch = open_batches.get(p.dtype)
        if batch is None or sum(one.nbytes for one in batch) + p.nbytes > BATCH_BYTES:
            batch = open_batches[p.dtype] = []
            batches.append(batch)
        batch.append(p)
    return batches


def _wait(handle: Handle) -> Any:
    try:
        return handle.wait()
    except MismatchError as error:
        if Kind.REDUCESCATTER.name in error.by_value:
            raise _SparseInBatchError from error
        raise


class _SparseInBatchError(Exception):
    """Some gradient of the batch is sparse on some rank."""
