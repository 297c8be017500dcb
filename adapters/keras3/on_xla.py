"""Keras on JAX: one ordered callback of the compiled step hands all gradients to the host and gets them back.

Ordered, because ranks that run callbacks in different orders would wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from numpy.typing import NDArray

import hvdlite as hvd
from hvdlite import ProcessSet
from hvdlite.lowlevel import KeptName

from .settings import Settings, bundles_of, factors_of, n_ranks, name_at, takes_part
from .variables import Members

init = hvd.init
FUNCTIONAL = True
STEP_ERRORS = (jax.errors.JaxRuntimeError,)


class Compressor:
    """What `compression=` may be: this class, or one of your own, with these two static methods."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        """Return what travels and is reduced, and what `decompress` needs to undo it."""
        return tensor, None

    @staticmethod
    def decompress(tensor: jax.Array, ctx: Any) -> jax.Array:
        """Return the reduced tensor in its old form."""
        return tensor if ctx is None else tensor.astype(ctx)


class FP16Compressor(Compressor):
    """Sends float16: 11 significant bits, but nothing above 65504."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        return _cast(tensor, jnp.float16)


class BF16Compressor(Compressor):
    """Sends bfloat16: float32's range, but 8 significant bits."""

    @staticmethod
    def compress(tensor: jax.Array) -> tuple[jax.Array, Any]:
        return _cast(tensor, jnp.bfloat16)


class Compression:
    """What comes with hvdlite."""

    none = Compressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class Reducer:
    """Reduces the gradients of one optimizer."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = KeptName(settings.name or "keras_optimizer")
        self.local = Members()

    def __call__(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the reduced gradients. Collective. Those of local variables are scaled."""
        settings, local = self._settings, self.local
        size = n_ranks(settings.process_set) if settings.scale_local else 1
        results = [
            None if g is None else g / size if v in local else g for g, v in zip(gradients, variables, strict=True)
        ]
        shared = [i for i, g in enumerate(gradients) if g is not None and variables[i] not in local]
        if not takes_part(settings.process_set) or not shared:
            return results
        base = self._name.get(settings.process_set)
        names = [f"{base}.{name_at(i, variables[i])}" for i in shared]
        place_of = {place: k for k, place in enumerate(shared)}
        bundles = [[place_of[i] for i in one] for one in bundles_of(shared, settings.groups, variables)]

        def exchange(*arrays: Any) -> list[NDArray[Any]]:
            return _exchange([np.asarray(array) for array in arrays], names, bundles, settings)

        sent = [settings.compression.compress(jnp.asarray(gradients[i])) for i in shared]
        for i, array, (_, context) in zip(shared, on_host(exchange, [one for one, _ in sent]), sent, strict=True):
            results[i] = settings.compression.decompress(array, context)
        return results


def on_host(function: Callable[..., list[NDArray[Any]]], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return what `function` makes of NumPy arrays: as many, of the same shapes and dtypes."""
    if all(concrete(array) for array in arrays):
        return [jnp.asarray(array) for array in function(*arrays)]
    made_of: Any = jax.ShapeDtypeStruct  # it has no types
    shapes = [made_of(array.shape, array.dtype) for array in arrays]
    return list(io_callback(function, shapes, *arrays, ordered=True))


def _exchange(
    arrays: Sequence[NDArray[Any]], names: Sequence[str], bundles: Sequence[Sequence[int]], settings: Settings
) -> list[NDArray[Any]]:
    """Reduce all, under way at once."""
    started = []
    for bundle in bundles:
        if len(bundle) == 1:
            handle = hvd.allreduce_async(arrays[bundle[0]], name=names[bundle[0]], **factors_of(settings))
        else:
            group = [arrays[k] for k in bundle]
            handle = hvd.grouped_allreduce_async(group, name=names[bundle[0]], **factors_of(settings))
        started.append((bundle, handle))
    results, first_error = list(arrays), None
    for bundle, handle in started:
        try:
            done = hvd.synchronize(handle)
        except Exception as error:  # the others are waited for, so that nothing is in flight afterwards
            first_error = first_error or error
            continue
        for k, array in zip(bundle, [done] if len(bundle) == 1 else done, strict=True):
            results[k] = array
    if first_error is not None:
        raise first_error
    return results


def forget_compiled() -> None:
    """Forget compiled steps: JAX keeps them by the method that they are of, and another model.fit() has the same."""
    clear: Any = jax.clear_caches  # it has no types
    clear()


def dense(gradient: Any, settings: Settings) -> Any:
    """Return a gradient that can be added up."""
    del settings
    return gradient


def concrete(value: Any) -> bool:
    """Return whether `value` is there to be looked at."""
    return not isinstance(value, jax.core.Tracer)


def compressed(value: Any, compression: Any, reduce: Callable[[Any], Any]) -> Any:
    """Return what `reduce`, on tensors of the backend, makes of a value that travels compressed."""
    tensor, context = compression.compress(jnp.asarray(value))
    return compression.decompress(reduce(tensor), context)


def allreduce(value: Any, name: str | None, op: int, prescale: float, postscale: float) -> Any:
    array = np.asarray(value)
    return jnp.asarray(hvd.allreduce(array, name=name, op=op, prescale_factor=prescale, postscale_factor=postscale))


def allgather(value: Any, name: str | None, process_set: ProcessSet) -> Any:
    return jnp.asarray(hvd.allgather(np.asarray(value), name=name, process_set=process_set))


def broadcast(value: Any, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
    return jnp.asarray(hvd.broadcast(np.asarray(value), root_rank, name=name, process_set=process_set))


def reducescatter(value: Any, name: str | None, op: int, process_set: ProcessSet) -> Any:
    return jnp.asarray(hvd.reducescatter(np.asarray(value), name=name, op=op, process_set=process_set))


def _cast(tensor: jax.Array, dtype: Any) -> tuple[jax.Array, Any]:
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        return tensor, None
    return tensor.astype(dtype), tensor.dtype
