"""`DistributedOptimizer`: of Keras through `hvdlite.tensorflow.keras`, and of `tf.compat.v1.train` here."""

from __future__ import annotations

import importlib
from typing import Any

import tensorflow as tf

from hvdlite import Average, InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import ReduceOp

from .autograph import plain_python
from .compression import Compression, Compressor
from .exchange import How
from .gradients import reduce_gradients, resolve, size_of
from .local import VariableSet, scaled


@plain_python
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer that reduces gradients over the ranks before it applies them.

    Args:
        optimizer: of Keras 3, where `hvdlite.tensorflow.keras.DistributedOptimizer` says more; or of
            `tf.compat.v1.train`, eager or in a `tf.function`, whose `compute_gradients()` and `minimize()` reduce.
        name, use_locking: of a v1 optimizer.
        The others are as of `DistributedGradientTape` and `hvdlite.tensorflow.keras.DistributedOptimizer`.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        keras = importlib.import_module(f"{__package__}.keras")
        return keras.DistributedOptimizer(
            optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
            sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients,
        )  # fmt: skip
    if backward_passes_per_step != 1:
        raise InvalidRequestError(
            f"backward_passes_per_step={backward_passes_per_step}: for optimizers of tf.compat.v1.train add the "
            "gradients up yourself, or take an optimizer of Keras."
        )
    how = resolve(
        op, gradient_predivide_factor, num_groups, groups, process_set, compression=compression,
        sparse_as_dense=sparse_as_dense, device_dense=device_dense, device_sparse=device_sparse,
    )  # fmt: skip
    if how.reduction.op is ReduceOp.ADASUM:
        raise InvalidRequestError("op=Adasum: for optimizers of tf.compat.v1.train there are Average and Sum.")
    return _DistributedV1Optimizer(optimizer, name, use_locking, how, scale_local_gradients)


class _DistributedV1Optimizer(tf.compat.v1.train.Optimizer):
    """Computes with the given optimizer, reduces, and lets it apply."""

    def __init__(self, optimizer: Any, name: str | None, use_locking: bool, how: How, scale_local: bool) -> None:
        super().__init__(use_locking, name or f"Distributed{type(optimizer).__name__}")
        self._optimizer, self._how, self._scale_local = optimizer, how, scale_local
        self._local = VariableSet()

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradient and variable. Collective."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        reduced = reduce_gradients(gradients, variables, self._how, self.get_name(), self._local, self._scale)
        return list(zip(reduced, variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self._local.add(var)

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As of the given optimizer."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As of the given optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As of the given optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As of the given optimizer."""
        return self._optimizer.variables(*args, **kwargs)

    def _scale(self, gradient: Any) -> Any:
        return scaled(gradient, size_of(self._how)) if self._scale_local else gradient
