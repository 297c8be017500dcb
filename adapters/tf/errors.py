"""The exceptions of hvdlite as exceptions of TensorFlow: programs may catch either.

    wrong arguments of this rank         InvalidArgumentError
    ranks that differ, or not started    FailedPreconditionError
    what can never work                  AbortedError
    the rest                             UnknownError

They come from eager operations. What fails inside a graph comes from TensorFlow itself, with the same text.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdlite import (
    CommunicationError,
    HorovodInternalError,
    HvdliteError,
    InvalidRequestError,
    ShutdownError,
    StallError,
)

_UNKNOWN = (ShutdownError, StallError, CommunicationError)


@contextmanager
def as_tensorflows() -> Iterator[None]:
    """Let errors of hvdlite leave as what `translate` makes of them."""
    try:
        yield
    except HvdliteError as error:
        raise translate(error) from error


def translate(error: HvdliteError) -> HvdliteError:
    """Return an error that is one of TensorFlow's as well, with the same text and attributes."""
    if issubclass(type(error), tf.errors.OpError):
        return error
    kind: Any = type(error)
    base = _base_for(error)
    both = _both(kind, base)
    translated: HvdliteError = both.__new__(both, *error.args)
    base.__init__(translated, None, None, str(error))
    translated.args = error.args
    translated.__dict__.update(error.__dict__)
    return translated


def _base_for(error: HvdliteError) -> Any:
    wrong_here = isinstance(error, InvalidRequestError)
    if wrong_here and isinstance(error, HorovodInternalError):
        return tf.errors.AbortedError
    if wrong_here:
        return tf.errors.InvalidArgumentError
    if isinstance(error, HorovodInternalError) and not isinstance(error, _UNKNOWN):
        return tf.errors.FailedPreconditionError
    return tf.errors.UnknownError


def _reduce(error: HvdliteError) -> tuple[Any, ...]:
    """Pickle the plain error: TensorFlow's part has operations of a graph, and its class is made here."""
    plain: type[HvdliteError] = type(error).__bases__[0]
    stripped = plain.__new__(plain, *error.args)
    stripped.__dict__.update({name: value for name, value in error.__dict__.items() if name not in _OF_TENSORFLOW})
    return stripped.__reduce__()


@functools.cache
def _both(plain: Any, base: Any) -> Any:
    return type(plain.__name__, (plain, base), {"__reduce__": _reduce, "__module__": plain.__module__})


_OF_TENSORFLOW = ("_node_def", "_op", "_message", "_error_code")
