"""DistributedOptimizer: an optimizer whose gradients are those of all ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import Kind, ReduceOp, name_for, refusing, resolve_op

from .adasum_optimizer import make_adasum_optimizer
from .autograd import allreduce
from .compression import (
    CommHook,
    Compression,
    Compressor,
    resolve_compression,
)
from .naming import Groups, bundle_parameters, check_passes, name_parameters, resolve_groups
from .overlap import Overlap
from .signature import check_signature, signature_of
from .trips import OrderError
from .wrapped import Wrapped, wrap
from .wrapping import Settings, Wrapping

_STEP_AFTER_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
    "The gradients are not reduced again. Use 'with optimizer.skip_synchronize(): optimizer.step()'."
)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Any = None,
    compression: type[Compressor] | CommHook | type[CommHook] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    gradient_as_bucket_view: bool = False,
) -> Any:
    """Return an optimizer like `optimizer` that reduces gradients over the ranks before each step. Collective.

    It is an instance of the class of `optimizer`, and shares its parameter groups and its state.
    Reducing starts while backward() runs. When every parameter of every rank got its last gradient of the step,
    backward() returns with reduced gradients, so that they can be clipped. Otherwise synchronize(), step() and a
    GradScaler's unscale_() wait for them; a parameter that got no gradient on some rank counts as zero there.

    Args:
        named_parameters: `model.named_parameters()`. Without, gradients are matched by position.
        compression: what gradients are turned into to travel. Sparse and complex ones travel as they are.
        backward_passes_per_step: gradients of so many backward passes are added up before they are reduced.
        op: Average, Sum or Adasum. Adasum combines not gradients, but what a step of `optimizer` changes.
        gradient_predivide_factor: divides gradients before they are added up, and multiplies the sum. Average only.
        num_groups: the old name of `groups`.
        groups: gradients that are reduced together: a number of groups of neighbours, or lists of parameters.
        sparse_as_dense: sparse gradients travel as dense ones. Without, their entries go to every rank.
        process_set: the ranks that train together. Others keep their own gradients.
        gradient_as_bucket_view: gradients are views into a few flat buffers, one for each of `groups`, so that nothing
            is copied to reduce them together. One of 1 MiB or more that is in no group is a buffer by itself.

    Raises:
        InvalidRequestError: an argument is wrong; the other ranks raise `RemoteError`.
        MismatchError: ranks have different parameters or arguments. It says which.
        NotImplementedError: Adasum over a process set.
    """
    if num_groups:
        warnings.warn("num_groups is deprecated; use groups.", DeprecationWarning, stacklevel=2)
    groups = resolve_groups(num_groups, groups)
    asked = name_for("DistributedOptimizer", None, process_set)
    together = process_set.included() and process_set.size() != 1
    with refusing(Kind.ALLGATHER, [asked], process_set) if together else nullcontext():
        settings = Settings(
            resolve_op(op, None), gradient_predivide_factor, resolve_compression(compression), backward_passes_per_step,
            process_set, sparse_as_dense, gradient_as_bucket_view,
        )  # fmt: skip
        _check(optimizer, settings)
        name_of = name_parameters(optimizer.param_groups, named_parameters)
        lists = bundle_parameters(list(name_of), groups)
        options = {"optimizer": type(optimizer).__name__, **settings.described()}
        if groups is not None:
            options["groups"] = f"{len(lists)} groups"
        signature = signature_of(name_of, options)
    if together:
        check_signature(signature, asked, process_set)
    if settings.op is ReduceOp.ADASUM:
        assert not isinstance(settings.compression, CommHook)  # checked
        return make_adasum_optimizer(optimizer, name_of, settings.compression, backward_passes_per_step, process_set)
    return _distributed(optimizer, settings, name_of, lists)


def _distributed(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    name_of: dict[torch.Tensor, str],
    lists: Sequence[Sequence[torch.Tensor]],
) -> Any:
    return wrap(optimizer, _Distributed, Wrapping(optimizer, settings, name_of, lists))


class _Distributed(Wrapped):
    """What is put in front of an optimizer's class. Made by `DistributedOptimizer` only."""

    _wrapping: Wrapping

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups. A GradScaler that comes for them finds gradients reduced: `unscale_()` is collective."""
        reducer = self._wrapping.reducer
        # Nobody else: programs look up the learning rate on one rank, when others have things to do before step().
        if reducer is not None and reducer.unreduced and sys._getframe(1).f_code.co_name == "_unscale_grads_":
            reducer.finish()
        groups: list[dict[str, Any]] = self.__dict__["param_groups"]
        return groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @property
    def overlap(self) -> Overlap:
        """Where the time for reducing gradients went on this rank, since the optimizer was wrapped.

        Seconds of reducing, how many of them were hidden behind backward(), and how long the program waited. The
        difference of two of them is about what lies between.
        """
        reducer = self._wrapping.reducer
        return Overlap(0, 0.0, 0.0, 0.0) if reducer is None else reducer.overlap

    @property
    def seconds_waited(self) -> float:
        """Seconds that backward(), step() and synchronize() have waited for other ranks, all together."""
        return self.overlap.waited

    def synchronize(self) -> None:
        """Return once all gradients are reduced. Collective.

        To use or change gradients before the step (clip them) where parameters may have taken no part in
        backward(): synchronize(), change, then step() within `skip_synchronize()`.
        """
        if self._wrapping.reducer is not None:
            self._wrapping.reducer.finish()
            self._wrapping.synchronized = self._wrapping.reducer.rounds

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within, step() does not synchronize, because you have."""
        self._wrapping.skipping = True
        try:
            yield
        finally:
            self._wrapping.skipping = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Within, gradients add up on this rank. The next backward() outside, or step(), reduces the sum."""
        reducer = self._wrapping.reducer
        return nullcontext() if reducer is None else reducer.paused()

    def step(self, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Synchronize, and let the optimizer do its step. Collective.

        Args:
            closure: computes the loss and its gradients anew. The gradients are reduced each time, and the loss
                is averaged over the ranks, so that all come to the same decisions.
            args, kwargs: further arguments of the optimizer's own step().
        """
        wrapping, reducer = self._wrapping, self._wrapping.reducer
        evaluates = callable(closure)
        if reducer is not None:
            if wrapping.skipping and reducer.unreduced:
                raise OrderError(
                    "step() within skip_synchronize(), but gradients are not reduced: synchronize() first."
                )
            if wrapping.synchronized == reducer.rounds > 0 and not wrapping.skipping and not evaluates:
                warnings.warn(_STEP_AFTER_SYNCHRONIZE, stacklevel=2)
            if reducer.in_flight or not (evaluates or wrapping.skipping):
                reducer.finish()
            reducer.begin_step()
        wrapping.synchronized = 0
        # A scheduler that was made for the original optimizer warns unless that has stepped.
        wrapping.original._opt_called = True  # type: ignore[attr-defined]
        if closure is None and not args:
            return super().step(**kwargs)
        if reducer is not None and closure is not None and evaluates and not wrapping.skipping:
            closure = self._reducing(closure)
        return super().step(closure, *args, **kwargs)

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step() calls the hooks, after reducing

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, after those in flight have arrived (collective then). Arguments as for the optimizer."""
        reducer = self._wrapping.reducer
        try:
            if reducer is not None:
                reducer.clear()
        finally:
            super().zero_grad(*args, **kwargs)
            self._wrapping.synchronized = 0

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes are added up, from the next step on."""
        check_passes(passes)
        if self._wrapping.reducer is not None:
            self._wrapping.reducer.set_passes(passes)
        self._wrapping.settings = self._wrapping.settings._replace(passes=passes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, after gradients in flight have arrived (collective then)."""
        if self._wrapping.reducer is not None:
            self._wrapping.reducer.forget()
        for exchange in self._wrapping.exchanges:
            exchange.reset()
        self._wrapping.synchronized = 0
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, whose gradients are reduced under default names. Collective: ranks compare them."""
        super().add_param_group(param_group)
        wrapping, i = self._wrapping, len(self.param_groups) - 1
        added = {p: f"noname.{i}.{j}" for j, p in enumerate(self.param_groups[i]["params"])}
        if wrapping.reducer is not None:
            process_set = wrapping.settings.process_set
            check_signature(signature_of(added, {}), name_for("add_param_group", None, process_set), process_set)
        wrapping.name_of.update(added)
        lists = [[p] for p in added]
        wrapping.lists = [*wrapping.lists, *lists]
        if wrapping.reducer is not None:
            wrapping.reducer.add(wrapping.bundles(lists))

    def _like_this(self, optimizer: torch.optim.Optimizer, twins: dict[torch.Tensor, torch.Tensor]) -> Any:
        wrapping = self._wrapping
        name_of = {twins[p]: name for p, name in wrapping.name_of.items()}
        lists = [[twins[p] for p in one] for one in wrapping.lists]
        twin = _distributed(optimizer, wrapping.settings, name_of, lists)
        for mine, theirs in zip(wrapping.exchanges, twin._wrapping.exchanges, strict=False):
            theirs.take_over(mine)
        return twin

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        wrapping, reducer = self._wrapping, self._wrapping.reducer
        assert reducer is not None

        def reduced() -> Any:
            name, process_set = f"{wrapping.name}.loss", wrapping.settings.process_set
            try:
                loss = closure()
            except Exception:
                if not reducer.ended:
                    reducer.abandon()
                    raise
                with refusing(Kind.ALLREDUCE, [name], process_set):  # the others are there already
                    raise
            reducer.finish()
            reducer.begin_round()
            return _mean_over_ranks(loss, name, process_set)

        return reduced

    # What Horovod's has, under its names.

    @property
    def backward_passes_per_step(self) -> int:
        return self._wrapping.settings.passes

    @property
    def op(self) -> int:
        return int(self._wrapping.settings.op)

    @property
    def gradient_predivide_factor(self) -> float:
        return self._wrapping.settings.predivide

    @property
    def sparse_as_dense(self) -> bool:
        return self._wrapping.settings.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        return self._wrapping.settings.process_set

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return self._wrapping.name_of

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        return {p for p in self._wrapping.name_of if p.requires_grad}


_DistributedOptimizer = _Distributed  # the name that other packages look for


def _mean_over_ranks(loss: Any, name: str, process_set: ProcessSet) -> Any:
    """Return the mean of the losses that a closure returned on the ranks: a tensor or a number, as it was given."""
    if isinstance(loss, torch.Tensor):
        return allreduce(loss.detach(), op=Average, name=name, process_set=process_set)
    if isinstance(loss, int | float):
        return allreduce(torch.tensor(loss, dtype=torch.float64), op=Average, name=name, process_set=process_set).item()
    return loss


def _check(optimizer: Any, settings: Settings) -> None:
    if isinstance(optimizer, Wrapped):
        raise InvalidRequestError("this optimizer is distributed already; wrap the original one, once.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(
            f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}. Wrap the optimizer, not the model."
        )
    op = settings.op.name.title()
    if settings.op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
        raise InvalidRequestError(f"op={op}: expected Average, Sum or Adasum.")
    if settings.op is ReduceOp.ADASUM and isinstance(settings.compression, CommHook):
        raise InvalidRequestError(
            f"compression={settings.compression!r} with op=Adasum: it needs op=Average or Sum. For Adasum take "
            "hvd.Compression.fp16 or bf16."
        )
    if not 0 < settings.predivide < float("inf"):
        raise InvalidRequestError(f"gradient_predivide_factor={settings.predivide!r}: expected a number above 0.")
    if settings.predivide != 1.0 and settings.op is not ReduceOp.AVERAGE:
        raise InvalidRequestError(f"gradient_predivide_factor={settings.predivide} with op={op}: it needs op=Average.")
    if settings.views and settings.op is ReduceOp.ADASUM:
        raise InvalidRequestError("gradient_as_bucket_view=True with op=Adasum, which does not reduce gradients.")
    check_passes(settings.passes)
