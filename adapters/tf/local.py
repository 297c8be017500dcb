"""Variables whose gradients stay on their rank, and how variables of TensorFlow and Keras are told apart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import InvalidRequestError

_NUMBER = re.compile(r"_\d+$")  # which Keras gives to variables without a name, counting all of this process


class VariableSet:
    """Variables or tensors, by identity: neither compares as Python values do, and Keras's have no `ref()`."""

    def __init__(self) -> None:
        self._members: dict[int, Any] = {}  # kept alive, so that an id is not used again

    def add(self, variable: Any) -> None:
        """Add one. A Keras variable and the TensorFlow variable within it are the same."""
        self._members[_identity(variable)] = variable

    def __contains__(self, variable: Any) -> bool:
        return _identity(variable) in self._members

    def __iter__(self) -> Any:
        return iter(self._members.values())

    def __bool__(self) -> bool:
        return bool(self._members)


def places_of(groups: int | Sequence[Sequence[Any]] | None, variables: Sequence[Any]) -> Any:
    """Return groups of variables as groups of places in `variables`; what is not there is left out."""
    if groups is None or isinstance(groups, int):
        return groups
    place_of = {_identity(variable): i for i, variable in enumerate(variables)}
    members = [_identity(variable) for group in groups for variable in group]
    if len(set(members)) != len(members):
        raise InvalidRequestError("groups: a variable is in more than one place; each may be in one group only.")
    return [[place_of[_identity(v)] for v in group if _identity(v) in place_of] for group in groups]


def scaled(gradient: Any, size: int) -> Any:
    """Return the gradient of a local variable divided by the ranks, as an average over them would have it."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / size, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def names_of(variables: Sequence[Any], generic: bool = False) -> list[str]:
    """Return a name for each gradient: by place, so that it does not matter how layers are numbered on a rank."""
    if generic:
        return [f"grad_{i}" for i in range(len(variables))]
    return [f"{i}.{_last_part(variable)}" for i, variable in enumerate(variables)]


def weights_of(layers: Any) -> list[Any]:
    """Return the trainable weights of what Horovod's `local_layers` may be.

    Args:
        layers: None, a layer, or a collection of layers. They must be built.
    """
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    wrong = [layer for layer in listed if not hasattr(layer, "trainable_weights")]
    if wrong:
        raise InvalidRequestError(f"local_layers: expected layers of Keras, got {type(wrong[0]).__name__}.")
    return [weight for layer in listed for weight in layer.trainable_weights]


def _last_part(variable: Any) -> str:
    try:
        name = variable.name
    except (AttributeError, ValueError):  # an eager tensor has none
        return "tensor"
    return _NUMBER.sub("", str(name).rpartition("/")[2].partition(":")[0])


def _identity(variable: Any) -> int:
    inner = getattr(variable, "value", None)
    if isinstance(inner, tf.Variable):  # of Keras
        return id(inner)
    return id(variable)
