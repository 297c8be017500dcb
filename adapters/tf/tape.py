"""`DistributedGradientTape`: a gradient tape whose gradients are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set

from .autograph import plain_python
from .compression import Compression, Compressor
from .exchange import How
from .gradients import reduce_gradients, resolve, size_of
from .local import VariableSet, scaled, weights_of

_BASE = "DistributedGradientTape"


@plain_python
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return a tape that goes on where `gradtape` stands, and whose `gradient()` is reduced over the ranks.

    `gradient()` is collective over the set, eager or in a `tf.function`. Take it instead of `gradtape` from here on.

    Args:
        compression: what gradients are turned into to travel.
        sparse_as_dense: IndexedSlices travel as dense tensors.
        op: Average, Sum, or another reduction.
        gradient_predivide_factor: of an average, how much of the division comes before the sum.
        groups: lists of sources whose gradients are reduced together, or into how many such lists to cut them.
        scale_local_gradients: gradients of local sources are divided by the number of ranks, as an average's are.

    Raises:
        InvalidRequestError: the arguments cannot be right.
    """
    how = resolve(
        op, gradient_predivide_factor, num_groups, groups, process_set,
        compression=compression, sparse_as_dense=sparse_as_dense,
        device_dense=device_dense, device_sparse=device_sparse,
    )  # fmt: skip
    return _wrap(gradtape, how, scale_local_gradients)


@plain_python
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Like `DistributedGradientTape`, with the weights of `local_layers` local to each rank.

    Args:
        local_layers: None, a layer of Keras, or a collection of them. They must be built.
    """
    local = weights_of(local_layers)
    tape = DistributedGradientTape(
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor,
        num_groups, groups, process_set, scale_local_gradients,
    )  # fmt: skip
    for weight in local:
        tape.register_local_source(weight)
    return tape


class _Distributed:
    """What the class of a distributed tape has before that of the given one. Kept apart: `_hvd`."""

    _hvd: _State

    def gradient(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False, **more: Any
    ) -> Any:
        """Return the reduced gradients, in the structure of `sources`. Collective. None stays None.

        Args:
            use_generic_names: they travel as grad_0, grad_1, …, whatever their variables are called.
        """
        flat = tf.nest.flatten(sources)
        gradients = super().gradient(target, flat, output_gradients, **more)  # type: ignore[misc]
        reduced = self._hvd.reduce(gradients, flat, use_generic_names)
        return tf.nest.pack_sequence_as(sources, reduced)

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of `source` on its rank."""
        self._hvd.local.add(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[Any]]:
        """Return the pairs (source, gradient) of local sources, scaled, and the unreduced gradients of the others."""
        gradients = super().gradient(target, list(sources), output_gradients)  # type: ignore[misc]
        pairs = list(zip(sources, gradients, strict=True))
        state = self._hvd
        local = [(source, state.scale(gradient)) for source, gradient in pairs if source in state.local]
        return local, [gradient for source, gradient in pairs if source not in state.local]


class _State:
    def __init__(self, how: How, scale_local: bool) -> None:
        self.how, self._scale_local = how, scale_local
        self.local = VariableSet()

    def scale(self, gradient: Any) -> Any:
        return scaled(gradient, size_of(self.how)) if self._scale_local else gradient

    def reduce(self, gradients: Sequence[Any], sources: Sequence[Any], generic: bool) -> list[Any]:
        return reduce_gradients(gradients, sources, self.how, _BASE, self.local, self.scale, generic)


def _wrap(gradtape: tf.GradientTape, how: How, scale_local: bool) -> Any:
    if not isinstance(gradtape, tf.GradientTape):
        raise InvalidRequestError(f"expected a tf.GradientTape, got {type(gradtape).__name__}.")
    kind = type(gradtape)
    if issubclass(kind, _Distributed):
        raise InvalidRequestError("this tape is distributed already; its gradients would be reduced twice.")
    tape: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {}))
    tape.__dict__.update(gradtape.__dict__)  # it goes on with what has been recorded
    tape._hvd = _State(how, scale_local)
    return tape
