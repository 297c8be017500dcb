"""Variables of Keras, told apart by identity, and lists of them that old scripts can call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvdlite import InvalidRequestError


class Members:
    """A set of variables. They compare as tensors do, so they are told apart by identity."""

    def __init__(self) -> None:
        self._members: dict[int, Any] = {}  # kept alive, so that an id is not used again

    def add(self, variable: Any) -> None:
        self._members[id(variable)] = variable

    def __contains__(self, variable: Any) -> bool:
        return id(variable) in self._members

    def __iter__(self) -> Iterator[Any]:
        return iter(self._members.values())


class Variables(list[Any]):
    """The variables of an optimizer: `optimizer.variables`, or `optimizer.variables()` in scripts of Keras 2."""

    def __call__(self) -> list[Any]:
        return self


def weights_of(layers: Any) -> list[Any]:
    """Return the trainable weights of None, a layer, or a collection of layers. They must be built."""
    if layers is None:
        return []
    listed = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    wrong = [layer for layer in listed if not hasattr(layer, "trainable_weights")]
    if wrong:
        raise InvalidRequestError(f"local_layers: expected layers of Keras, got {type(wrong[0]).__name__}.")
    return [weight for layer in listed for weight in layer.trainable_weights]
