"""Process sets: which ranks take part in an operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdlite import runtime
from hvdlite.errors import InvalidRequestError, NotMemberError

GLOBAL_ID = 0


class ProcessSet:
    """An ordered set of ranks of the world, ascending whatever order is given.

    Args:
        ranks_or_comm: global ranks, or an mpi4py communicator, whose members are looked up at registration.

    Attributes:
        process_set_id: given by `init()` or `add_process_set()`; None before and after.
        ranks: global ranks, or None for a communicator that is not registered yet.
        mpi_comm: the communicator, if one was given.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        if not isinstance(ranks_or_comm, Iterable):
            raise InvalidRequestError(f"ProcessSet({ranks_or_comm!r}): expected ranks or an mpi4py communicator.")
        ranks = list(ranks_or_comm)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            raise InvalidRequestError(f"ProcessSet({ranks!r}): every rank must be an int.")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """Return the number of ranks; None if this set is not registered."""
        if self.process_set_id is None:
            return None
        return len(runtime.current("ProcessSet.size()").members_of(self.process_set_id))

    def rank(self) -> int | None:
        """Return this process' place in the set; None if the set is not registered.

        Raises:
            NotMemberError: this process is not in the set.
        """
        if self.process_set_id is None:
            return None
        run = runtime.current("ProcessSet.rank()")
        members = run.members_of(self.process_set_id)
        if run.rank not in members:
            raise NotMemberError(f"rank {run.rank} is not in {self}.")
        return members.index(run.rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set; None while its ranks are unknown."""
        if self.ranks is None:
            return None
        return runtime.current("ProcessSet.included()").rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def check_process_set(process_set: object) -> None:
    """Raise `InvalidRequestError` if this is no `ProcessSet`, such as None or a list of ranks."""
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(
            f"process_set={process_set!r}: expected a ProcessSet, such as hvd.global_process_set or what "
            "hvd.add_process_set() has returned."
        )


def _make_global() -> ProcessSet:
    everyone = ProcessSet([])
    everyone.process_set_id = GLOBAL_ID
    return everyone


#: The set of all ranks. Its `ranks` are empty until `init()`.
global_process_set = _make_global()
