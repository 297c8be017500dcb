"""Waiting for what an `_async` function started."""

from __future__ import annotations

from typing import Any

from hvdlite import InvalidRequestError
from hvdlite.lowlevel import GroupHandle, Handle

AnyHandle = Handle | GroupHandle


def synchronize(handle: AnyHandle) -> Any:
    """Wait for an `_async` operation and return its result, or raise its error. As often as you like.

    The result is a tensor; of a grouped operation a tuple of them; of alltoall the pair (tensor, received splits).
    """
    return _checked(handle, "synchronize").wait()


def poll(handle: AnyHandle) -> bool:
    """Return whether `synchronize(handle)` would return at once. Not collective."""
    return _checked(handle, "poll").poll()


def _checked(handle: AnyHandle, call: str) -> AnyHandle:
    if not isinstance(handle, Handle | GroupHandle):
        raise InvalidRequestError(f"hvd.{call}({handle!r}): expected what an hvd..._async() function returned.")
    return handle
