"""DistributedOptimizer with op=Adasum: every rank takes a step of its own, and Adasum combines the steps.

Adasum of gradients would be scaled by the optimizer afterwards as if they were an average; the way that a
parameter went, its delta, is what has a length that means something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hvdlite import InvalidRequestError, ProcessSet, global_process_set, size
from hvdlite.lowlevel import GroupHandle, ReduceOp, name_for

from .compression import Compressor
from .naming import check_passes
from .ops import Reduction, start_allreduce
from .tensors import to_same
from .wrapped import Wrapped, wrap


class NoProcessSetError(InvalidRequestError, NotImplementedError):
    """Adasum of an optimizer is over all ranks."""


class NoSynchronizeError(InvalidRequestError, AssertionError):
    """There is nothing to skip: gradients are never reduced."""


def make_adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    name_of: dict[torch.Tensor, str],
    compression: type[Compressor],
    backward_passes_per_step: int,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like `optimizer` whose step() is the Adasum of the steps of all ranks.

    Args:
        name_of: the name of every parameter.
        compression: what deltas are turned into to travel.

    Raises:
        NoProcessSetError: `process_set` is not that of all ranks.
    """
    if process_set.process_set_id != global_process_set.process_set_id and size() > 1:
        raise NoProcessSetError(f"op=Adasum of an optimizer needs the global process set, not {process_set}.")
    return wrap(optimizer, _DistributedAdasum, _Wrapping(optimizer, name_of, compression, backward_passes_per_step))


class _Wrapping:
    """What an Adasum optimizer has besides what an optimizer has."""

    def __init__(
        self,
        original: torch.optim.Optimizer,
        name_of: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes: int,
    ) -> None:
        self.original, self.name_of, self.compression, self.passes = original, name_of, compression, passes
        self.name = name_for("adasum", None, global_process_set)  # parameters of two models may be called the same
        self.unscales = getattr(original, "_step_supports_amp_scaling", False)


class _DistributedAdasum(Wrapped):
    """What is put in front of an optimizer's class. Made by `make_adasum_optimizer` only."""

    _wrapping: _Wrapping
    # A GradScaler that finds an overflow on this rank must not keep it from step(), where the others wait.
    _step_supports_amp_scaling = True
    grad_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    def synchronize(self) -> None:
        """Do nothing: gradients stay those of this rank, and may be clipped."""

    def skip_synchronize(self) -> Any:
        """Raise: step() reduces, and cannot do without."""
        raise NoSynchronizeError(
            "skip_synchronize() has no meaning with op=Adasum: it is step() that reduces. Call step() alone."
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let the optimizer do its step with this rank's gradients, and combine the steps of all ranks. Collective.

        Parameters without a gradient here count as having stayed where they were. After an error the parameters are
        those from before; state such as momentum is not.

        Args:
            closure: computes the loss and its gradients; it is the optimizer that calls it.

        Returns:
            The loss of the closure.
        """
        moved = [p for group in self.param_groups for p in group["params"] if p.requires_grad or p.grad is not None]
        starts = [p.detach().clone() for p in moved]
        # A scheduler that was made for the original optimizer warns unless that has stepped.
        self._wrapping.original._opt_called = True  # type: ignore[attr-defined]
        try:
            loss = self._local_step(closure)
            self._combine(moved, starts)
        except BaseException:
            _put_back(moved, starts)
            raise
        return loss

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step() calls the hooks

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes come before step(). It is for you to make them."""
        check_passes(passes)
        self._wrapping.passes = passes

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: gradients are never reduced."""
        return nullcontext()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, under default names."""
        super().add_param_group(param_group)
        i = len(self.param_groups) - 1
        for j, p in enumerate(self.param_groups[i]["params"]):
            self._wrapping.name_of[p] = f"noname.{i}.{j}"

    def _like_this(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Any:
        mine = self._wrapping
        name_of = {twins[p]: name for p, name in mine.name_of.items()}
        return make_adasum_optimizer(optimizer, name_of, mine.compression, mine.passes)

    def _local_step(self, closure: Callable[[], Any] | None) -> Any:
        found_inf = getattr(self, "found_inf", None)  # given by a GradScaler, for the time of the step
        if found_inf is not None and not self._wrapping.unscales:
            if bool(found_inf):
                return None
            if self.grad_scale is not None:
                for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                    p.grad.div_(self.grad_scale)
            self.grad_scale = self.found_inf = None  # the optimizer would refuse them
        return super().step(closure)

    @torch.no_grad()
    def _combine(self, moved: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> None:
        """Turn where each of `moved` went from its start into where all ranks went."""
        if not moved:
            return
        compression = self._wrapping.compression
        packed = [compression.compress(p.sub_(start)) for p, start in zip(moved, starts, strict=True)]
        adasum = Reduction(ReduceOp.ADASUM, 1.0, 1.0, global_process_set)
        names = [f"{self._wrapping.name}.{self._wrapping.name_of[p]}" for p in moved]
        deltas = GroupHandle(start_allreduce([delta for delta, _ in packed], names, adasum, to_same)).wait()
        for p, start, delta, (_, context) in zip(moved, starts, deltas, packed, strict=True):
            p.copy_(start + compression.decompress(delta, context))  # delta may be p itself

    # What Horovod's has, under its names.

    @property
    def backward_passes_per_step(self) -> int:
        return self._wrapping.passes

    @property
    def op(self) -> int:
        return int(ReduceOp.ADASUM)

    @property
    def process_set(self) -> ProcessSet:
        return global_process_set

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._wrapping.name_of


@torch.no_grad()
def _put_back(moved: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]) -> None:
    for p, start in zip(moved, starts, strict=True):
        p.copy_(start)
