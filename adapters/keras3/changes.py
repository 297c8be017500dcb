"""What the first distributed optimizer of a process changes in Keras itself, which has no other way to be told.

- A `LossScaleOptimizer` around a distributed optimizer, as `model.compile()` makes it for mixed_float16, becomes
  distributed instead. It looks for overflows in gradients; were they not reduced by then, a rank with an overflow
  would skip the step and leave the others waiting.
- `compile(experimental_run_tf_function=False)`, which scripts written for Horovod have, is accepted.
- `jit_compile="auto"` of a model with a distributed optimizer means False on TensorFlow, whose XLA cannot call Python.
"""

from __future__ import annotations

import functools
from typing import Any

import keras

from .backends import backend

_MARK = "_changed_by_hvdlite"


def change_keras() -> None:
    """Make the changes, if they are not made yet."""
    scaler: Any = keras.optimizers.LossScaleOptimizer
    if not hasattr(scaler, _MARK):
        scaler.__init__ = _with_hoisting(scaler.__init__)
        setattr(scaler, _MARK, True)
    trainer: Any = next((one for one in keras.Model.__mro__ if "_resolve_auto_jit_compile" in vars(one)), None)
    if trainer is None or hasattr(trainer, _MARK):
        return
    trainer.compile = _with_old_argument(trainer.compile)
    if backend() == "tensorflow":
        trainer._resolve_auto_jit_compile = _without_xla(trainer._resolve_auto_jit_compile)
    setattr(trainer, _MARK, True)


def _with_hoisting(plain: Any) -> Any:
    @functools.wraps(plain)
    def __init__(self: Any, inner_optimizer: Any, *arguments: Any, **named: Any) -> None:
        from .optimizer import is_distributed, share  # it imports this module

        plain(self, inner_optimizer, *arguments, **named)
        if is_distributed(inner_optimizer):
            share(self, inner_optimizer._hvd)

    return __init__


def _without_xla(plain: Any) -> Any:
    @functools.wraps(plain)
    def _resolve_auto_jit_compile(self: Any) -> bool:
        from .optimizer import is_distributed  # it imports this module

        return not is_distributed(getattr(self, "optimizer", None)) and bool(plain(self))

    return _resolve_auto_jit_compile


def _with_old_argument(plain: Any) -> Any:
    @functools.wraps(plain)
    def compile(self: Any, *arguments: Any, experimental_run_tf_function: Any = None, **named: Any) -> Any:
        del experimental_run_tf_function
        return plain(self, *arguments, **named)

    return compile
