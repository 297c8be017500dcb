"""Every exception that hvdlite raises on purpose, and how ranks are named in a message.

The bases are those that Horovod scripts already catch: what the caller got wrong
is a `ValueError`, what the ranks or the machine got wrong is a `RuntimeError`
named `HorovodInternalError`. A message says what, where (ranks), what was found,
and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_LISTED = 4  # ranks written out before a message says "and N more"


class HvdliteError(Exception):
    """Base of all exceptions of hvdlite. They can be pickled, whatever their constructors take."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[HvdliteError], args: tuple[Any, ...]) -> HvdliteError:
    return kind.__new__(kind, *args)


class HorovodInternalError(HvdliteError, RuntimeError):
    """An agreed operation could not be done. Elastic training may recover from it."""


class NotInitializedError(HorovodInternalError, ValueError):
    """A call that needs `init()` came before it, or after `shutdown()`."""

    def __init__(self, call: str = "hvdlite") -> None:
        self.call = call
        super().__init__(f"{call}: hvdlite has not been initialized; use hvd.init() first.")


class ShutdownError(HorovodInternalError):
    """The process set stopped while, or before, the operation ran."""


class StallError(HorovodInternalError):
    """A tensor waited longer than the shutdown limit for ranks that never submitted it."""


class CommunicationError(HorovodInternalError):
    """A transfer between ranks failed below hvdlite."""


class HostsUpdatedInterrupt(HvdliteError, RuntimeError):
    """The hosts of an elastic job have changed, or it is to leave. Not an error: `hvd.elastic.run` takes care of it.

    Attributes:
        skip_sync: hosts were only removed, so that all ranks have the state already.
        is_written: the state was committed just before.
    """

    def __init__(self, skip_sync: bool = False, is_written: bool = False) -> None:
        self.skip_sync, self.is_written = skip_sync, is_written
        super().__init__(skip_sync)


class InvalidRequestError(HvdliteError, ValueError):
    """The arguments of an operation cannot be right on this rank."""


class UnsupportedDtypeError(InvalidRequestError, TypeError):
    """The dtype, or this operation on this dtype, has no meaning here."""


class DuplicateNameError(InvalidRequestError):
    """A second submission of a name that is still in flight on this rank."""

    def __init__(self, tensor: str, where: str) -> None:
        self.tensor = tensor
        super().__init__(
            f"tensor {tensor!r} has the same name as another tensor that is currently being processed "
            f"(submitted at {where}). Wait for it first, or give this one another name."
        )


class NotMemberError(InvalidRequestError):
    """This rank does not belong to the process set."""


class ConfigError(HvdliteError, ValueError):
    """A setting is unknown, cannot be parsed, or differs between ranks."""


class LaunchError(HvdliteError, RuntimeError):
    """The job was not started the way its surroundings say it was meant to be."""


class RankFailedError(LaunchError):
    """A rank of `hvdlite.run()` failed. Its exception is the `__cause__`, if it could be brought here.

    Attributes:
        rank: which; the first one to fail. None if no rank could say anything.
        remote_traceback: its traceback, as text; "" if it could not say anything.
    """

    def __init__(self, message: str, rank: int | None = None, remote_traceback: str = "") -> None:
        self.rank, self.remote_traceback = rank, remote_traceback
        super().__init__(message + (f"\n\n{remote_traceback}" if remote_traceback else ""))


class MismatchError(HorovodInternalError):
    """The ranks asked for different things under one tensor name.

    Raised on every rank of the process set, so that no rank is left waiting.
    """

    def __init__(self, tensor: str, what: str, by_value: Mapping[str, Iterable[int]], remedy: str = "") -> None:
        self.tensor, self.what = tensor, what
        self.by_value = {value: sorted(ranks) for value, ranks in by_value.items()}
        sides = "; ".join(f"{value} on {describe_ranks(ranks)}" for value, ranks in self.by_value.items())
        super().__init__(
            f"Mismatched {what} for tensor {tensor!r} between ranks: {sides}. "
            + (remedy or f"Every rank must submit the same {what} under one name.")
        )


class RemoteError(HorovodInternalError):
    """Another rank could not take part; raised on the ranks that could."""

    def __init__(self, tensor: str, problems: Mapping[int, str]) -> None:
        self.tensor, self.problems = tensor, dict(problems)
        sides = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(self.problems.items()))
        super().__init__(f"tensor {tensor!r} was refused because of {sides}")


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return `rank 3`, `ranks 0, 2` or `ranks 0, 1, 2, 3 and 2 more`."""
    known = sorted(ranks)
    if len(known) == 1:
        return f"rank {known[0]}"
    shown = ", ".join(map(str, known[:_LISTED]))
    more = len(known) - _LISTED
    return f"ranks {shown} and {more} more" if more > 0 else f"ranks {shown}"
