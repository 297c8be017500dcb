"""The part of the adapter that fits the backend of Keras, and nothing of the others: `port`.

It has `Compression`, `Reducer` (reduces the gradients of one optimizer), `dense` (a gradient that can be added up),
`concrete` (whether a value is there, or stands for one in a program that is being compiled), the operations on values,
FUNCTIONAL: whether state is handed through the step instead of being assigned, STEP_ERRORS: what errors within a
compiled step become, and `forget_compiled`.
"""

from __future__ import annotations

import importlib
from types import ModuleType

import keras

_PORTS = {"tensorflow": ".on_tensorflow", "torch": ".on_pytorch", "jax": ".on_xla"}


def backend() -> str:
    """Return the name of the backend of Keras."""
    name: str = keras.config.backend()
    return name


def _load() -> ModuleType:
    if backend() not in _PORTS:
        raise ImportError(f"hvdlite.keras: the backend {backend()!r} of Keras cannot train; use one of {list(_PORTS)}.")
    return importlib.import_module(_PORTS[backend()], __package__)


port = _load()
