"""DistributedOptimizer: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import ReduceOp, name_for, resolve_op

from .compression import Compression, Compressor
from .naming import Groups, bundle_parameters, name_parameters, resolve_groups
from .ops import Reduction
from .reducer import Bundle, GradientReducer, OrderError, Slot

_STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "This can cause training slowdown: the gradients are reduced a second time. "
    "Use 'with optimizer.skip_synchronize(): optimizer.step()'."
)
_LATER = "comes with a later version of hvdlite"


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like `optimizer` that reduces gradients over the ranks before each step.

    It is an instance of the class of `optimizer`, and shares its parameter groups and its state.
    Reducing starts while backward() runs; step() waits for it. A parameter that got no gradient on
    some rank counts as zero there.

    Args:
        named_parameters: `model.named_parameters()`. Without, gradients are matched by position.
        compression: what gradients are turned into to travel.
        backward_passes_per_step: gradients of so many backward passes are added up before they are reduced.
        op: Average or Sum.
        gradient_predivide_factor: divides gradients before they are added up, and multiplies the sum. Average only.
        num_groups: the old name of `groups`.
        groups: gradients that are reduced together: a number of groups of neighbours, or lists of parameters.
        sparse_as_dense: accepted; sparse gradients are refused for now.
        process_set: the ranks that train together. Others keep their own gradients.

    Raises:
        InvalidRequestError: an argument is wrong.
    """
    _check(optimizer, backward_passes_per_step, op, gradient_predivide_factor)
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups.", DeprecationWarning, stacklevel=2)
    groups = resolve_groups(num_groups, groups)
    name_of = name_parameters(optimizer.param_groups, named_parameters)
    bundles = bundle_parameters(list(name_of), groups)

    base = type(optimizer)
    made: Any = type(base.__name__, (_Distributed, base), {"__module__": __name__, "__doc__": base.__doc__})
    # Not made by its constructor, whose arguments nobody knows: it takes over what the optimizer has.
    distributed = made.__new__(made)
    inherited = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler's wrapper
    distributed.__dict__.update(inherited)
    reduction = Reduction(resolve_op(op, None), 1 / gradient_predivide_factor, gradient_predivide_factor, process_set)
    distributed._take_over(optimizer, name_of, bundles, reduction, compression, backward_passes_per_step)
    distributed.sparse_as_dense = sparse_as_dense
    return distributed


class _Distributed(torch.optim.Optimizer):
    """What is put in front of an optimizer's class. Made by `DistributedOptimizer` only."""

    backward_passes_per_step: int
    op: int
    gradient_predivide_factor: float
    process_set: ProcessSet
    sparse_as_dense: bool

    def _take_over(
        self,
        original: torch.optim.Optimizer,
        name_of: dict[torch.Tensor, str],
        bundles: Sequence[Sequence[torch.Tensor]],
        reduction: Reduction,
        compression: type[Compressor],
        passes: int,
    ) -> None:
        self._original = original
        self.backward_passes_per_step, self.op = passes, int(reduction.op)
        self.gradient_predivide_factor, self.process_set = reduction.postscale, reduction.process_set
        self._synchronized, self._skipping = False, False
        self._reducer: GradientReducer | None = None
        if self.process_set.included() and self.process_set.size() != 1:
            self._reducer = GradientReducer(
                [self._bundle(one, name_of) for one in bundles], reduction, compression, passes
            )

    @property
    def seconds_waited(self) -> float:
        """Seconds that step() and synchronize() have waited for other ranks, all together."""
        return 0.0 if self._reducer is None else self._reducer.seconds_waited

    def synchronize(self) -> None:
        """Return once all gradients are reduced. Collective.

        To change gradients before the step (clip them): synchronize(), change, then step() within
        `skip_synchronize()`.
        """
        if self._reducer is not None:
            self._reducer.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, step() does not synchronize, because you have."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronize, and let the optimizer do its step. Collective.

        Args:
            closure: computes the loss and its gradients anew; these are reduced each time.
        """
        if not self._skipping and closure is None:
            if self._synchronized and not self._in_flight():
                warnings.warn(_STEP_AFTER_SYNCHRONIZE, stacklevel=2)
            self.synchronize()
        elif self._in_flight():
            if self._skipping:
                raise OrderError("step() within skip_synchronize(), but gradients are in flight: synchronize() first.")
            self.synchronize()
        self._synchronized = False
        # A scheduler that was made for the original optimizer warns unless that has stepped.
        self._original._opt_called = True  # type: ignore[attr-defined]
        return super().step(closure if closure is None or self._skipping else self._reducing(closure))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, which must not be in flight."""
        if self._reducer is not None:
            self._reducer.refuse_clearing()
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up, from the next step on."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.set_passes(passes)
        self.backward_passes_per_step = passes

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, and begin a new step."""
        if self._reducer is not None:
            self._reducer.forget()
        self._synchronized = False
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced under default names."""
        super().add_param_group(param_group)
        if self._reducer is not None:
            i = len(self.param_groups) - 1
            name_of = {p: f"noname.{i}.{j}" for j, p in enumerate(self.param_groups[i]["params"])}
            self._reducer.add([self._bundle([p], name_of) for p in name_of])

    def _bundle(self, parameters: Sequence[torch.Tensor], name_of: dict[torch.Tensor, str]) -> Bundle:
        names = [_travel_name(name_of[p], self.process_set) for p in parameters]
        slots = [Slot(p, name, self.backward_passes_per_step) for p, name in zip(parameters, names, strict=True)]
        return Bundle(slots)

    def _in_flight(self) -> bool:
        return self._reducer is not None and bool(self._reducer.in_flight)

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def reduced() -> Any:
            loss = closure()
            self.synchronize()
            self._synchronized = False
            return loss

        return reduced


def _travel_name(name: str, process_set: ProcessSet) -> str:
    """Return a name that no other optimizer uses: parameters of two models are often called the same.

    Counted per name, so that an optimizer that only some ranks make disturbs those of other names only.
    """
    n = int(name_for(f"gradient.{name}", None, process_set).rpartition(".")[2])
    return f"gradient.{name}" if n == 1 else f"gradient.{name}.{n}"


def _check(optimizer: Any, passes: int, op: int, predivide: float) -> None:
    if isinstance(optimizer, _Distributed):
        raise InvalidRequestError("this optimizer is distributed already; wrap the original one, once.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if resolve_op(op, None) not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        later = f"; Adasum of an optimizer {_LATER}" if op == ReduceOp.ADASUM else ""
        raise InvalidRequestError(f"op={ReduceOp(op).name.title()}: expected Average or Sum{later}.")
    if predivide != 1.0 and op != ReduceOp.AVERAGE:
        raise InvalidRequestError(
            f"gradient_predivide_factor={predivide} with op={ReduceOp(op).name.title()}: it needs op=Average."
        )
    _check_passes(passes)


def _check_passes(passes: int) -> None:
    if not isinstance(passes, int) or passes <= 0:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r}: expected a positive number.")
