"""Going on in place: when ranks are lost the others go on, in the same processes and from their commits in memory."""

from __future__ import annotations

from hvdlite import lifecycle, queries, runtime
from hvdlite.comm.losses import Losses
from hvdlite.config import Config
from hvdlite.errors import CommunicationError
from hvdlite.observe.log import get_logger

_NOTICE = 5.0  # seconds that MPI may take to say which rank is lost, after an operation has failed for that


class InPlace:
    """What this rank does about lost ranks, in a job that is to go on without them."""

    def __init__(self, losses: Losses, config: Config) -> None:
        self._losses, self._config = losses, config
        self._told = ""

    @classmethod
    def of_this_job(cls) -> InPlace | None:
        """Return None if a loss of ranks ends this job. The log tells why, if it was to go on."""
        running = runtime.current("hvd.elastic.run()")
        if not running.config.elastic_in_place or running.size == 1:
            return None
        losses = lifecycle.losses()
        if losses is not None:
            return cls(losses, running.config)
        if running.rank == 0:
            get_logger().warning(
                "cannot go on in place when ranks are lost: MPI has not been started with fault tolerance, which "
                "Open MPI has ('mpirun --with-ft ulfm')."
            )
        return None

    def has_lost(self, error: BaseException) -> bool:
        """Return whether ranks are lost. Waits for MPI to say so if that may be what `error` comes from."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, CommunicationError):
            cause = cause.__cause__
        return self._losses.noticed.wait(0.0 if cause is None else _NOTICE)

    def leave_lost(self) -> None:
        """Leave all operations, and the lost ranks. Collective over the others. hvdlite does not run afterwards.

        Raises:
            CommunicationError: too few are left.
        """
        self._told = self._losses.text
        n_left, least = lifecycle.leave_lost(), self._config.elastic_min_np
        if n_left < least:
            raise CommunicationError(
                f"{self._told}. {n_left} are left, fewer than HVDLITE_ELASTIC_MIN_NP={least}, so the job ends. "
                "Started again, it goes on from the last commit in HVDLITE_ELASTIC_DIR."
            )

    def settle(self) -> None:
        """Training is about to go on."""
        self._losses.settle()
        if self._told and queries.rank() == 0:
            get_logger().warning("goes on in place with %d ranks: %s", queries.size(), self._told)
        self._told = ""
