"""What a reducer keeps of each parameter, and which of them travel together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .buckets import Bucket


class Slot:
    """One parameter.

    Attributes:
        name: under which its gradient travels.
        left: backward passes until that starts.
        counted: its hook is waited for in this round.
        fired: it got a gradient in this round.
        sparse: on some rank its gradients are sparse.
    """

    __slots__ = ("_seen", "_version", "counted", "fired", "left", "name", "parameter", "sparse")

    def __init__(self, parameter: torch.Tensor, name: str, sparse: bool = False) -> None:
        self.parameter, self.name, self.sparse = parameter, name, sparse
        self.left, self.counted, self.fired = 1, True, False
        self._seen: weakref.ref[torch.Tensor] | None = None
        self._version = 0

    def see(self) -> None:
        """Remember which gradient there is, and its state. Weakly, for it may be large."""
        gradient = self.parameter.grad
        self._seen = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def kept(self) -> bool:
        """Return whether the gradient is the tensor that was last seen: it was not cleared since."""
        return self._seen is not None and self._seen() is self.parameter.grad

    def changed(self) -> bool:
        """Return whether this round's gradient was changed in place since it was last seen."""
        return (
            self.fired
            and self.kept()
            and self.parameter.grad is not None
            and self.parameter.grad._version != self._version
        )

    def zeros(self) -> torch.Tensor:
        """Return a gradient of a parameter that took no part."""
        parameter = self.parameter
        if not self.sparse:
            return torch.zeros_like(parameter, requires_grad=False)
        indices, values = torch.empty((1, 0), dtype=torch.int64), torch.empty((0, *parameter.shape[1:]))
        return torch.sparse_coo_tensor(indices, values.to(parameter.dtype), parameter.shape, check_invariants=False)


class Bundle:
    """Parameters whose gradients start together. Mostly one.

    Attributes:
        bucket: the buffer that their gradients are views into.
        unready: how many are still waited for in this round.
    """

    __slots__ = ("bucket", "name", "slots", "started", "unready")

    def __init__(self, slots: Sequence[Slot], bucket: Bucket | None = None) -> None:
        self.slots, self.bucket = slots, bucket
        self.name = slots[0].name if bucket is None else f"{slots[0].name}+{len(slots) - 1}"
        self.started, self.unready = False, len(slots)

    def wanted(self) -> bool:
        """Return whether any of it takes part in training."""
        return any(slot.parameter.requires_grad for slot in self.slots)

    def ready(self) -> bool:
        return all(slot.left <= 0 or not slot.parameter.requires_grad for slot in self.slots)

    def begin(self, passes: int) -> None:
        self.started, self.unready = False, 0
        for slot in self.slots:
            slot.left, slot.counted, slot.fired = passes, slot.parameter.requires_grad, False
            self.unready += slot.counted

    def take(self, i: int, passes: int) -> None:
        """Member i has a further gradient; the first of `passes` if the one before was cleared."""
        slot = self.slots[i]
        if slot.left < passes and not slot.kept():
            self.unready += slot.counted and slot.left <= 0
            slot.left = passes
        slot.fired = True
        if self.bucket is not None:
            self.bucket.adopt(i)
            for one in self.slots:  # they share their buffer's version
                one.see()
        else:
            slot.see()


class GradientHook:
    """Called with each gradient of a parameter. It does not keep the reducer alive: the parameter lives longer."""

    def __init__(self, reducer: Any, bundle: Bundle, i: int) -> None:
        self._find, self._bundle, self._i = weakref.ref(reducer), bundle, i

    def __call__(self, _: torch.Tensor) -> None:
        reducer = self._find()
        if reducer is not None:
            reducer.on_gradient(self._bundle, self._i)

    def attach(self) -> None:
        """Hear of the parameter's gradients, also of one that is frozen now: it may not stay so.

        The hook of an older optimizer no longer does: gradients are to be reduced once.
        """
        parameter = self._bundle.slots[self._i].parameter
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[key]
        frozen = not parameter.requires_grad
        if frozen and not parameter.is_floating_point():
            return
        parameter.requires_grad_(True)
        parameter.register_post_accumulate_grad_hook(self)
        parameter.requires_grad_(not frozen)
