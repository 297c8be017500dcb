"""Gradients to the other ranks while backward() still runs: hooks, countdowns, handles.

Knows parameters and their gradients, not the optimizer. A parameter's hook fires when
autograd has accumulated its gradient; after the last backward pass of a step that
starts an in-place allreduce, together with its neighbours. `finish()` starts what has
not been started, so that all ranks submit the same, and waits.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hvdlite import InvalidRequestError
from hvdlite.lowlevel import Handle, Item, Kind, refusing, start

from .compression import Compressor, NoneCompressor
from .ops import Reduction
from .tensors import to_same

# Gradients wait for each other until they have so many bytes, then start together: to wake the engine for each of
# the many small ones costs more time than it gains.
BATCH_BYTES = 2**20


class OrderError(InvalidRequestError, AssertionError):
    """backward(), zero_grad(), synchronize() and step() came in an order that would use wrong gradients."""


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter and where its gradient is on its way.

    Attributes:
        name: under which the gradient travels.
        left: backward passes until it starts.
        gradient: what the reduced values go to, while in flight.
        compressed: what travels, and what undoes the compression.
    """

    parameter: torch.Tensor
    name: str
    left: int
    hook: Any = None
    handle: Handle | None = None
    gradient: torch.Tensor | None = None
    compressed: tuple[torch.Tensor, Any] | None = None


@dataclass(eq=False, slots=True)
class Bundle:
    """Parameters whose gradients start together. Mostly one.

    Attributes:
        unready: members whose last backward pass of this step has not come.
    """

    slots: list[Slot]
    unready: int = field(init=False)
    started: bool = False

    def __post_init__(self) -> None:
        self.unready = len(self.slots)


class GradientReducer:
    """Keeps the gradients of some parameters equal on all ranks of a set.

    Args:
        bundles: every parameter once. Those that do not require grad are left alone until they do.
        passes: backward passes per step; their gradients are added up.
    """

    def __init__(
        self, bundles: Sequence[Bundle], reduction: Reduction, compression: type[Compressor], passes: int
    ) -> None:
        self.seconds_waited = 0.0
        self._reduction, self._compression, self._passes = reduction, compression, passes
        self._error: Exception | None = None
        self._batch: list[tuple[Slot, Item]] = []
        self._batch_bytes = 0
        self._bundles: list[Bundle] = []
        self.add(bundles)

    def add(self, bundles: Sequence[Bundle]) -> None:
        """Take further parameters on."""
        self._bundles.extend(bundles)
        self._reset()
        self._attach_hooks()

    def set_passes(self, passes: int) -> None:
        """Change the number of backward passes per step, before the first of a step."""
        self._refuse_in_flight("set_backward_passes_per_step()")
        self._passes = passes
        self._reset()

    @property
    def in_flight(self) -> list[str]:
        """Names of the gradients that are on their way, or about to be."""
        return [slot.name for bundle in self._bundles for slot in bundle.slots if slot.gradient is not None]

    def finish(self) -> None:
        """Return once every gradient is reduced. Collective.

        Raises:
            HorovodInternalError, InvalidRequestError: the first of what went wrong, after all have been waited for.
        """
        self._attach_hooks()
        for bundle in self._bundles:
            if not bundle.started:
                self._start(bundle)
        self._flush()
        error = self._wait()
        if error is not None:
            raise error

    def forget(self) -> None:
        """Wait for what is in flight, whatever becomes of it, and begin a new step. Collective, like `finish`."""
        self._flush()
        self._wait()

    def refuse_clearing(self) -> None:
        """Raise if clearing gradients now would disturb those in flight."""
        self._refuse_in_flight("zero_grad()")

    def _attach_hooks(self) -> None:
        for bundle in self._bundles:
            for slot in bundle.slots:
                # A hook needs a parameter that requires grad; one may be unfrozen in the course of training.
                if slot.hook is None and slot.parameter.requires_grad:
                    slot.hook = slot.parameter.register_post_accumulate_grad_hook(self._make_hook(bundle, slot))

    def _make_hook(self, bundle: Bundle, slot: Slot) -> Callable[[torch.Tensor], None]:
        # Weak: the parameter outlives the optimizer, and a new optimizer may be made for it.
        find = weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            reducer = find()
            if reducer is not None:
                reducer._on_gradient(bundle, slot)

        return on_gradient

    def _on_gradient(self, bundle: Bundle, slot: Slot) -> None:
        if slot.left <= 0 or slot.gradient is not None:
            raise OrderError(
                f"{slot.name!r}: more than {self._passes} backward passes before step(). "
                "Say backward_passes_per_step=k to accumulate over k of them."
            )
        slot.left -= 1
        if slot.left == 0:
            bundle.unready -= 1
            if bundle.unready == 0:
                self._start(bundle)

    def _start(self, bundle: Bundle) -> None:
        """Let the gradients of a bundle go: several as one group, a single one with its neighbours."""
        bundle.started = True
        travellers = self._travellers([slot for slot in bundle.slots if slot.parameter.requires_grad])
        if len(bundle.slots) > 1:
            self._submit(travellers, grouped=True)
            return
        self._batch += travellers
        self._batch_bytes += sum(item.source.nbytes for _, item in travellers)
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        self._submit(batch, grouped=False)

    def _travellers(self, slots: Sequence[Slot]) -> list[tuple[Slot, Item]]:
        """Return what travels for parameters; nothing after telling the other ranks why one of them cannot."""
        try:
            with refusing(Kind.ALLREDUCE, [slot.name for slot in slots], self._reduction.process_set):
                return [(slot, to_same(self._outgoing(slot))) for slot in slots]
        except Exception as error:
            self._note(error)
            return []

    def _submit(self, travellers: Sequence[tuple[Slot, Item]], grouped: bool) -> None:
        if not travellers:
            return
        op, prescale, postscale, process_set = self._reduction
        names, items = [slot.name for slot, _ in travellers], [item for _, item in travellers]
        try:
            handles = start(
                Kind.ALLREDUCE, names, items, process_set,
                op=op, prescale=prescale, postscale=postscale, grouped=grouped,
            )  # fmt: skip
        except Exception as error:
            self._note(error)
            return
        handles[-1].alert()
        for (slot, _), handle in zip(travellers, handles, strict=True):
            slot.handle = handle

    def _note(self, error: Exception) -> None:
        # The other ranks wait for our other gradients, so backward() must go on. finish() raises it.
        self._error = self._error or error

    def _outgoing(self, slot: Slot) -> torch.Tensor:
        """Return the tensor that travels for a parameter: its gradient, a compressed copy, or zeros."""
        parameter = slot.parameter
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        slot.gradient = gradient = parameter.grad
        if self._compression is NoneCompressor:
            return gradient
        with torch.no_grad():
            slot.compressed = self._compression.compress(gradient)
        # A compressor may hand its argument back, which then is reduced in place.
        return slot.compressed[0]

    def _wait(self) -> Exception | None:
        """Wait for everything in flight, begin a new step, and return the first error of this one."""
        started = time.perf_counter()
        for bundle in self._bundles:
            for slot in bundle.slots:
                if slot.handle is not None:
                    try:
                        self._receive(slot, slot.handle.wait())
                    except Exception as error:
                        self._note(error)
        self.seconds_waited += time.perf_counter() - started
        first_error, self._error = self._error, None
        self._reset()
        return first_error

    def _receive(self, slot: Slot, reduced: torch.Tensor) -> None:
        gradient = slot.gradient
        if gradient is None or slot.parameter.grad is not gradient:
            raise OrderError(
                f"{slot.name!r}: the gradient was cleared or replaced while it was being reduced, after backward() and "
                "before step(). Call optimizer.synchronize() first, then 'with optimizer.skip_synchronize():' step()."
            )
        if slot.compressed is not None:
            with torch.no_grad():
                restored = self._compression.decompress(reduced, slot.compressed[1])
                if restored is not gradient:
                    gradient.copy_(restored)

    def _reset(self) -> None:
        for bundle in self._bundles:
            bundle.unready, bundle.started = len(bundle.slots), False
            for slot in bundle.slots:
                slot.left, slot.handle, slot.gradient, slot.compressed = self._passes, None, None, None

    def _refuse_in_flight(self, call: str) -> None:
        names = self.in_flight
        if names:
            raise OrderError(
                f"{call} came after backward() and before step() or synchronize(): {len(names)} gradients are being "
                f"reduced, {names[0]!r} among them, and would be lost or mixed."
            )
