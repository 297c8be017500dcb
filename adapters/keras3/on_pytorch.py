"""Keras on torch: gradients take the way of `hvdlite.torch`, all of them under way at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from keras import ops

import hvdlite.torch as hvd
from hvdlite import ProcessSet
from hvdlite.lowlevel import KeptName

from .settings import Settings, bundles_of, factors_of, n_ranks, name_at, takes_part
from .variables import Members


class Compression:
    """What comes with hvdlite."""

    none = hvd.Compression.none
    fp16 = hvd.Compression.fp16
    bf16 = hvd.Compression.bf16


init = hvd.init
FUNCTIONAL = False
STEP_ERRORS: tuple[type[Exception], ...] = ()


class Reducer:
    """Reduces the gradients of one optimizer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = KeptName(settings.name or "keras_optimizer")
        self.local = Members()

    # torch.compile may compile the step around it: the exchange itself is not for a compiler.
    @torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
    @torch.no_grad()
    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. Collective. Those of local variables are scaled. A sparse one becomes dense."""
        settings, local = self._settings, self.local
        size = n_ranks(settings.process_set) if settings.scale_local else 1
        results = [
            None if g is None else g / size if v in local else g for g, v in zip(gradients, variables, strict=True)
        ]
        shared = [i for i, g in enumerate(gradients) if g is not None and variables[i] not in local]
        if not takes_part(settings.process_set) or not shared:
            return results
        base = self._name.get(settings.process_set)
        names = {i: f"{base}.{name_at(i, variables[i])}" for i in shared}
        sent = {i: settings.compression.compress(dense(gradients[i], settings)) for i in shared}
        started: list[tuple[list[int], Any]] = []
        for bundle in bundles_of(shared, settings.groups, variables):
            started.append((bundle, _start([sent[i][0] for i in bundle], names[bundle[0]], settings)))
        for bundle, reduced in _all_of(started):
            for i, tensor in zip(bundle, reduced, strict=True):
                results[i] = settings.compression.decompress(tensor, sent[i][1])
        return results


def _start(tensors: list[torch.Tensor], name: str, settings: Settings) -> Any:
    if len(tensors) == 1:
        return hvd.allreduce_async(tensors[0], name=name, **factors_of(settings))
    return hvd.grouped_allreduce_async(tensors, name=name, **factors_of(settings))


def _all_of(started: list[tuple[list[int], Any]]) -> list[tuple[list[int], list[torch.Tensor]]]:
    """Wait for all, also when one fails, so that nothing is in flight afterwards."""
    results, first_error = [], None
    for bundle, handle in started:
        try:
            done = hvd.synchronize(handle)
        except Exception as error:
            first_error = first_error or error
        else:
            results.append((bundle, [done] if len(bundle) == 1 else list(done)))
    if first_error is not None:
        raise first_error
    return results


def forget_compiled() -> None:
    """Forget compiled steps beyond those that the model has: the exchange is in none of them."""


def dense(gradient: Any, settings: Settings) -> Any:
    """Return a gradient that can be added up."""
    del settings
    return gradient.to_dense() if gradient.is_sparse else gradient


def concrete(value: Any) -> bool:
    """Return whether `value` is there to be looked at."""
    del value
    return True


def compressed(value: Any, compression: Any, reduce: Callable[[Any], Any]) -> Any:
    """Return what `reduce`, on tensors of the backend, makes of a value that travels compressed."""
    tensor, context = compression.compress(ops.convert_to_tensor(value))
    return compression.decompress(reduce(tensor), context)


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float) -> Any:
    return hvd.allreduce(value, name=name, op=op, prescale_factor=prescale, postscale_factor=postscale)


def allgather(value: Any, name: str | None, process_set: ProcessSet) -> Any:
    return hvd.allgather(ops.convert_to_tensor(value), name=name, process_set=process_set)


def broadcast(value: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    return hvd.broadcast(ops.convert_to_tensor(value), root_rank, name=name, process_set=process_set)


def reducescatter(value: Any, name: str | None, op: int, process_set: ProcessSet) -> Any:
    return hvd.reducescatter(ops.convert_to_tensor(value), name=name, op=op, process_set=process_set)
