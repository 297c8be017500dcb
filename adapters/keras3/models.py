"""Models as a whole: their state from one rank to all, and models from files, with optimizers that reduce again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import hvdlite
from hvdlite import Average, InvalidRequestError, global_process_set
from hvdlite.lowlevel import describe_ranks

from .backends import backend, port
from .optimizer import distribute
from .settings import settings_of
from .variables import Members


def broadcast_model(model: Any, root_rank: int, local_variables: Sequence[Any] = ()) -> None:
    """Set the variables of a model and of its optimizer to those of rank `root_rank`. Collective.

    The model must be built. Its optimizer is built if it is not yet.

    Args:
        local_variables: are left alone.

    Raises:
        InvalidRequestError: on all ranks, if their models or optimizers differ in shape.
    """
    _check_alike(["built" if model.built else "not built"], "broadcast_model")
    if not model.built:
        raise InvalidRequestError(
            "broadcast_model: the model has no variables yet. Give it a keras.Input, or call it once, on every rank."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    local = Members()
    for variable in local_variables:
        local.add(variable)
    # A seed or a metric may be in both lists, or in one twice.
    found = {id(v): v for v in [*model.variables, *(optimizer.variables if optimizer is not None else [])]}
    broadcast_all([v for v in found.values() if v not in local and is_numeric(v)], root_rank, "broadcast_model")


def broadcast_all(variables: Sequence[Any], root_rank: int, what: str) -> None:
    """Set variables to those of rank `root_rank`. Collective.

    Args:
        what: is being done, for messages.

    Raises:
        InvalidRequestError: on all ranks, if theirs differ in number, shape or dtype.
    """
    _check_alike([f"{tuple(v.shape)} {keras.backend.standardize_dtype(v.dtype)}" for v in variables], what)
    arrays = [np.ascontiguousarray(keras.ops.convert_to_numpy(v.value)).reshape(v.shape) for v in variables]
    # By place alone: the names of slots have the numbers of layers, which may differ between ranks.
    started = [hvdlite.broadcast_async(array, root_rank, f"broadcast_model.{i}") for i, array in enumerate(arrays)]
    for variable, handle in zip(variables, started, strict=True):
        variable.assign(hvdlite.synchronize(handle))


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = port.Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Return a model from a file, with its state, and with an optimizer that reduces gradients again.

    Args:
        filepath: of `model.save()`: .keras or .h5.
        custom_optimizers: classes of optimizers that Keras does not know.
        custom_objects: as of `keras.models.load_model`; these come first.
        compression: as of `DistributedOptimizer`. For other arguments of it, load with `keras.models.load_model`, and
            then call `DistributedOptimizer(model.optimizer, …)`.
        legacy_opts: accepted; Keras 3 has no legacy optimizers.
    """
    del legacy_opts
    known = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None:
        if str(filepath).endswith((".h5", ".hdf5")):
            optimizer = model.optimizer = _restored(optimizer, model, str(filepath))
        distribute(
            optimizer,
            settings_of(Average, 1.0, compression, False, 0, None, global_process_set, True, 1, False, None, "", ""),
        )
        if backend() == "tensorflow" and model.jit_compile:  # what "auto" was resolved to when it was saved
            model.jit_compile = False
    return model


def _restored(optimizer: Any, model: Any, filepath: str) -> Any:
    """Return the optimizer of an HDF5 file with its state.

    Keras 3.15 builds it with the variables that the model has outside of its layers, which are none: it loses its
    state, and the first step fails.
    """
    variables = model.trainable_variables
    if len(optimizer._trainable_variables) == len(variables):
        return optimizer
    import h5py  # only here; Keras brings it

    made = type(optimizer).from_config(optimizer.get_config())
    made.build(variables)
    with h5py.File(filepath, "r") as file:
        if "optimizer_weights" in file:
            group = file["optimizer_weights"]
            # Long lists of names are cut into weight_names0, weight_names1, …
            parts = ["weight_names"] if "weight_names" in group.attrs else itertools.count()
            names: list[Any] = []
            for part in parts:
                key = part if isinstance(part, str) else f"weight_names{part}"
                if key not in group.attrs:
                    break
                names += list(group.attrs[key])
            values = [group[n.decode() if isinstance(n, bytes) else n][()] for n in names]
            # set_weights() would leave out those of an optimizer within a LossScaleOptimizer.
            for variable, value in zip(made.variables, values, strict=True):
                variable.assign(np.asarray(value))
    return made


def is_numeric(variable: Any) -> bool:
    """Return whether it can be sent as an array."""
    return bool(keras.backend.standardize_dtype(variable.dtype) != "string")


def _check_alike(mine: list[str], what: str) -> None:
    """Raise on all ranks if they would send different things."""
    everyone = hvdlite.allgather_object(mine)
    different = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if not different:
        return
    theirs = everyone[different[0]]
    first = next((i for i, (a, b) in enumerate(zip(everyone[0], theirs, strict=False)) if a != b), None)
    where = (
        "" if first is None else f"; the first that differs is number {first}: {everyone[0][first]}, {theirs[first]}"
    )
    raise InvalidRequestError(
        f"{what}: the models or optimizers differ between ranks: {len(everyone[0])} variables on rank 0, "
        f"{len(theirs)} on {describe_ranks(different)}{where}. Build and compile the same model on every rank."
    )
