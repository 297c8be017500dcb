"""AutoGraph rewrites what a `tf.function` calls, so that `if` and `for` may depend on tensors. Ours never do."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

P = ParamSpec("P")
R = TypeVar("R")


def plain_python(function: Callable[P, R]) -> Callable[P, R]:
    """Let AutoGraph leave a public function, and what it calls, as it is."""
    kept: Callable[P, R] = tf.autograph.experimental.do_not_convert(function)
    return kept
