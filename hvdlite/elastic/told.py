"""Errors of hvdlite inside a compiled step: the framework raises one of its own, which has ours as text."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from hvdlite import errors
from hvdlite.errors import HorovodInternalError


def with_own_errors(func: Callable[..., Any], kinds: tuple[type[BaseException], ...]) -> Callable[..., Any]:
    """Return `func` with exceptions of `kinds` that tell of a failed operation turned into that failure's class."""

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except HorovodInternalError:  # which may be one of the framework's as well
            raise
        except kinds as error:
            own = told_by(str(error))
            if own is None:
                raise
            raise own from error

    return wrapper


def told_by(text: str) -> HorovodInternalError | None:
    """Return the failure that the text of a framework's exception tells of, with its message; None if there is none.

    Frameworks write the name of the class, without or with its module, a colon, and the message; tracebacks come
    before or after it.
    """
    found = _OURS.search(text)
    if found is None:
        return None
    kind: type[HorovodInternalError] = getattr(errors, found["kind"])
    return kind.__new__(kind, found["message"].strip())  # constructors want facts, which are in the message


def _internal_errors() -> list[str]:
    return [
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HorovodInternalError)
    ]


_OURS = re.compile(
    rf"(?<!\w)(?P<kind>{'|'.join(_internal_errors())}): (?P<message>.+?)(?=\n\s*(?:Traceback \(|\[\[\{{\{{)|\n\n|\Z)",
    re.DOTALL,
)
