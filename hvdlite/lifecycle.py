"""init() and shutdown(): from an environment to a running Runtime, and back. Also what changes while it runs."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hvdlite import arrival, runtime
from hvdlite import config as settings
from hvdlite.affinity import complaint
from hvdlite.comm.base import Communicator
from hvdlite.comm.losses import Losses
from hvdlite.comm.mpi_env import library_of, misfit, mpi_environment, tolerates_losses
from hvdlite.config import Config
from hvdlite.errors import CommunicationError, ConfigError, InvalidRequestError, LaunchError
from hvdlite.exits import ExitWatch
from hvdlite.messages import Kind
from hvdlite.objects import allgather_object
from hvdlite.observe import log
from hvdlite.process_set import ProcessSet, check_process_set, global_process_set
from hvdlite.runtime import Runtime

_NOTICE = 5.0  # seconds that the watch may take to find which ranks are lost


class _Once:
    """What is done once in the life of a process."""

    lock = threading.Lock()
    watch: ExitWatch | None = None
    transport: Communicator | None = None  # of the latest runtime, for exits
    whole_job: Communicator | None = None  # of all ranks; kept for the next init(), since MPI ends with the process


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Start hvdlite on this rank. Collective over the ranks that it is to have.

    Calling it again while it runs only binds `process_sets` to what is registered.
    After `shutdown()` it starts afresh.

    Args:
        comm: None for all ranks of the job; a list of ranks of MPI_COMM_WORLD, numbered anew in the
            list's order; or an mpi4py communicator, which is duplicated.
        process_sets: sets to register, the same on every rank; they get the ids 1, 2, … "dynamic" is
            accepted and changes nothing, since sets may always come and go.

    Raises:
        InvalidRequestError: this rank is not in `comm`, or a process set is wrong. hvdlite runs in the latter case.
        LaunchError: this process is alone, but the launcher says that it should not be.
        ConfigError: a setting is wrong, or differs between ranks.
    """
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InvalidRequestError(f"process_sets={process_sets!r}: expected a list of ProcessSet, or 'dynamic'.")
        process_sets = ()
    with _Once.lock if runtime.thread_transport() is None else _no_lock():
        if not runtime.is_running():
            _start(comm)
    _bind(process_sets or ())


def shutdown() -> None:
    """Stop hvdlite on all ranks. Harmless when it does not run.

    Operations still in flight, here or on other ranks, raise `ShutdownError`; so do later ones on the other
    ranks, until those call `shutdown()` and all call `init()` again.
    """
    _stop("called hvd.shutdown()")


def is_initialized() -> bool:
    """Return whether `init()` has been called, and `shutdown()` not since, on this rank."""
    return runtime.is_running()


def _start(comm: Any) -> None:
    config, problem = _settings()
    timeline = runtime.timeline()  # first made before the watch of exits, so that it is closed after it
    with arrival.told(settings.environment(), bool(config.elastic_dir)):
        world = runtime.thread_transport() or _transport(comm, config)
        started = Runtime(world, config, problem, timeline)
    runtime.set_current(started)
    global_process_set.ranks = list(range(started.size))
    global_process_set.mpi_comm = comm if hasattr(comm, "Get_group") else None
    if runtime.thread_transport() is None:
        _Once.transport = world
        _warn_of_binding(started)


def _settings() -> tuple[Config, str]:
    """Return the settings of this process, and what is wrong with them: the other ranks must hear that first."""
    try:
        return Config.from_environment(), ""
    except ConfigError as error:
        return Config(), str(error)


def losses() -> Losses | None:
    """Return what is known of lost ranks; None where a lost rank ends the job."""
    return None if _Once.whole_job is None else _Once.whole_job.losses


def leave_lost() -> int:
    """Leave all that is under way, and make the ranks that are left the whole job. Collective over them.

    Nothing of hvdlite works then before `init()`, and nobody is at work in the memory of other ranks.

    Returns:
        How many there are.
    """
    found = losses()
    assert found is not None
    assert _Once.whole_job is not None
    while True:
        if runtime.is_running():
            running = runtime.current()
            runtime.set_current(None)
            running.abandon(CommunicationError("ranks were lost"))
        old = _Once.whole_job
        try:
            _Once.whole_job = old.survivors()
        except CommunicationError:
            if not found.noticed.wait(_NOTICE):
                raise
            continue
        old.abandon()
        return _Once.whole_job.size


def _stop(reason: str) -> None:
    if runtime.is_running():
        running = runtime.current()
        runtime.set_current(None)
        running.stop(reason)


def _transport(comm: Any, config: Config) -> Communicator:
    """Return the world of this process: MPI where there is reason to, else a world of one rank."""
    announced = settings.launcher_size()
    wants_mpi = comm is not None or settings.started_by_launcher() or "mpi4py.MPI" in sys.modules
    if not wants_mpi:
        from hvdlite.comm.loopback import loopback_group

        return loopback_group(1, on_abort=sys.exit)[0]
    if comm is not None:
        return _mpi_world(comm, config)
    if _Once.whole_job is None:
        _Once.whole_job = _mpi_world(None, config)
    size = _Once.whole_job.size
    found = losses()
    is_left = found is not None and found.has_happened
    if announced is not None and size == 1 < announced[0] and not is_left and not config.allow_size_mismatch:
        raise LaunchError(_alone(*announced))
    return _Once.whole_job


def _mpi_world(comm: Any, config: Config) -> Communicator:
    if "mpi4py.MPI" not in sys.modules and not config.allow_size_mismatch:
        _refuse_other_launcher()
    settings.apply_environment(mpi_environment(settings.environment()))
    from hvdlite.comm import mpi  # starts MPI, which reads the environment

    _watch_exits(*mpi.start(), mpi.abort)
    if comm is None or hasattr(comm, "Get_group"):
        may_lose = comm is None and tolerates_losses(settings.environment())
        return mpi.world(comm=comm, config=config, may_lose=may_lose)
    if not isinstance(comm, Iterable):
        raise InvalidRequestError(f"init(comm={comm!r}): expected None, a list of ranks, or an mpi4py communicator.")
    return mpi.world(ranks=list(comm), config=config)


def _refuse_other_launcher() -> None:
    """Raise LaunchError where MPI would end this process, or let it run alone. It has to be known before MPI starts."""
    try:
        found = importlib.util.find_spec("mpi4py.MPI")  # finds the library, and does not start it
    except (ImportError, RuntimeError):  # no mpi4py or no MPI, which the import tells
        return
    library, environ = library_of(found.origin if found else None), settings.environment()
    launcher, announced = misfit(environ, library), settings.launcher_size(environ)
    if launcher and announced:
        raise LaunchError(
            f"{announced[1]}={announced[0]} says that {launcher}'s launcher started {announced[0]} ranks, but mpi4py "
            f"loads {library} here ({sys.executable}), which finds no rank by it. Use the mpirun of the same "
            "installation, which 'hvdrun' finds by itself, or a Python whose mpi4py loads the launcher's MPI. "
            "To start all the same, set HVDLITE_ALLOW_SIZE_MISMATCH=1."
        )


def _watch_exits(rank: int, size: int, abort: Callable[[int], None]) -> None:
    """From now on a failure of this rank ends all ranks, also one while init() is under way."""

    def describe() -> str:
        transport = _Once.transport
        return f"rank {rank} of {size}" if transport is None else f"rank {transport.rank} of {transport.size}"

    if size > 1 and _Once.watch is None:
        _Once.watch = ExitWatch(describe, abort, _end_in_peace)
        _Once.watch.install()
        os.register_at_fork(after_in_child=functools.partial(runtime.set_current, None))


def _warn_of_binding(running: Runtime) -> None:
    """Open MPI's mpirun binds each of two ranks to one core. The first rank of each host says so, for all of it."""
    local = running.topology.local_ranks
    if running.rank == local[0]:
        cores = [running.cores_of[rank] for rank in local]
        problem = complaint(cores, local, os.cpu_count() or 1, running.config.thread_affinity)
        if problem:
            log.get_logger().warning("%s", problem)


def _alone(size: int, variable: str) -> str:
    from hvdlite.comm import mpi

    library = " ".join(mpi.library_version().splitlines()[0].split(",")[0].split())  # MPICH says twelve lines
    return (
        f"{variable}={size} says that this job has {size} ranks, but {library} gave this process "
        "a world of 1: each rank would train alone. The launcher and the MPI library do not fit together. "
        "Under Slurm use 'srun --mpi=pmix' with Open MPI or 'srun --mpi=pmi2' with MPICH ('srun --mpi=list' shows "
        "what there is); else use the mpirun of the same installation, which 'hvdrun' finds by itself. "
        "To let this process run alone all the same, set HVDLITE_ALLOW_SIZE_MISMATCH=1."
    )


def _bind(process_sets: Iterable[ProcessSet]) -> None:
    """Give each set its id, registering it if needed. Collective."""
    running = runtime.current("init()")
    everyone = list(range(running.size))
    bound: list[list[int]] = [everyone]
    duplicates = []
    for process_set in process_sets:
        if process_set.mpi_comm is not None:
            _bind_communicator(running, process_set)
        elif process_set.ranks in bound:
            process_set.process_set_id = None
            duplicates.append(process_set)
        else:
            running.bind(process_set, _id_for(running, process_set.ranks or []))
        bound.append(process_set.ranks or [])
    if duplicates:
        raise InvalidRequestError(
            f"init(process_sets=...): the same ranks are given twice, or are those of all ranks: {duplicates}. "
            "hvdlite runs; these sets are not registered."
        )


def _id_for(running: Runtime, ranks: Sequence[int]) -> int:
    known = running.id_of(ranks)
    return running.add_process_set(ranks) if known is None else known


def _bind_communicator(running: Runtime, process_set: ProcessSet) -> None:
    """Register the members of an mpi4py communicator as a set. Collective over the world.

    One Split makes several communicators at once; each rank's ProcessSet becomes the one that it is in.
    """
    from hvdlite.comm import mpi

    process_set.ranks = sorted(mpi.ranks_within(running.world, process_set.mpi_comm))
    for ranks in sorted(set(map(tuple, allgather_object(process_set.ranks)))):
        set_id = _id_for(running, ranks)
        if list(ranks) == process_set.ranks:
            running.bind(process_set, set_id)


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks while hvdlite runs. Collective over all ranks, members or not.

    Returns:
        The set, with its id. Ids of removed sets are used again, the first freed first.

    Raises:
        InvalidRequestError: ranks are out of range, named twice, differ between processes, or are already a set.
    """
    running = runtime.current("hvd.add_process_set()")
    if not isinstance(process_set, ProcessSet):
        try:
            process_set = ProcessSet(process_set)
        except InvalidRequestError as error:
            running.refuse_process_set(Kind.ADD_PROCESS_SET, str(error))
            raise
    if process_set.mpi_comm is not None:
        raise NotImplementedError("a process set over an MPI communicator can only be given to hvd.init().")
    running.bind(process_set, running.add_process_set(process_set.ranks or []))
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set. Collective over all ranks, members or not.

    What is in flight in it raises `ShutdownError`.

    Returns:
        False if it was not registered, or is the set of all ranks.

    Raises:
        InvalidRequestError: this is no `ProcessSet` here, or on another rank.
    """
    running = runtime.current("hvd.remove_process_set()")
    try:
        check_process_set(process_set)
    except InvalidRequestError as error:
        running.refuse_process_set(Kind.REMOVE_PROCESS_SET, str(error))
        raise
    set_id = process_set.process_set_id
    if set_id is None or set_id == global_process_set.process_set_id:
        return False
    removed = running.remove_process_set(set_id)
    running.unbind(set_id)
    return removed


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Record into `file_path` from now on what hvdlite does when, as a Chrome trace. Not collective.

    Rank 0 writes the file, and on the other ranks this does nothing; where the name contains `{rank}`, each rank that
    calls this writes one. A file that was being written is ended; giving its name again changes `mark_cycles` only. If
    the file cannot be written, one warning says so, and training goes on.

    Args:
        file_path: is emptied if it exists.
        mark_cycles: mark the moments at which the ranks have agreed on what runs next.
    """
    running = runtime.current("hvd.start_timeline()")
    path = file_path if isinstance(file_path, str) else getattr(file_path, "__fspath__", lambda: None)()
    if not isinstance(path, str) or not path or "\0" in path:
        raise InvalidRequestError(f"start_timeline(file_path={file_path!r}): expected the name of a file.")
    running.timeline.start(path, mark_cycles)


def stop_timeline() -> None:
    """End the file that `start_timeline()` or `HVDLITE_TIMELINE` began. Not collective.

    What ran before is in it. Where nothing is being recorded, this only logs that (level info).
    """
    runtime.current("hvd.stop_timeline()").timeline.stop()


class _no_lock:
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: object) -> None: ...


def _end_in_peace() -> None:
    """At a normal end: leave, then wait for the other ranks without using the CPU, as MPI_Finalize would."""
    try:
        _stop("has ended its program")
    finally:
        if _Once.transport is not None:
            _Once.transport.exit_barrier()
            found = _Once.transport.losses
            if found is not None and found.has_happened:
                from hvdlite.comm import mpi

                mpi.never_finalize()
