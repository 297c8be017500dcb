"""The running hvdlite of this process: world, engines, process sets. All mutable module state lives here.

`Runtime` is an ordinary object. `current()` finds the one that `init()` made: of
this process, or of this thread where threads play the ranks (tests).
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvdlite import config as settings
from hvdlite._version import __version__
from hvdlite.affinity import cores_of_this_thread
from hvdlite.comm.base import Communicator
from hvdlite.config import Config
from hvdlite.engine.engine import Engine
from hvdlite.engine.handle import Handle
from hvdlite.engine.inbox import Submission
from hvdlite.engine.watchdog import Watchdog
from hvdlite.errors import (
    ConfigError,
    InvalidRequestError,
    MismatchError,
    NotInitializedError,
    NotMemberError,
    RemoteError,
    describe_ranks,
)
from hvdlite.exits import end_all_ranks
from hvdlite.kernels import Kernels
from hvdlite.messages import Kind, Knobs, Request, Response, nameless
from hvdlite.observe import log
from hvdlite.observe.instrument import Both, Instrument, LastReasons
from hvdlite.observe.metrics import Metrics, summary
from hvdlite.observe.timeline import Timeline
from hvdlite.tuning import store
from hvdlite.tuning.search import Search, grid_for
from hvdlite.tuning.tuner import Tuner

WORLD = 0  # id of the set of all ranks


@dataclass(slots=True)
class _Registered:
    """A process set in use. `engine` is None where this rank is not a member."""

    ranks: tuple[int, ...]
    engine: Engine | None
    counters: dict[str, int] = field(default_factory=dict)


class Runtime:
    """hvdlite between `init()` and `shutdown()`.

    Args:
        world: all ranks.
        config: of this process; checked to agree with the other ranks'.
        problem: why this process has no valid config; then no rank starts.
        timeline: what its engines report to; it may outlive this.
    """

    def __init__(
        self, world: Communicator, config: Config, problem: str = "", timeline: Timeline | None = None
    ) -> None:
        self.config, self.topology = config, world.topology
        self.rank, self.size = world.rank, world.size
        self.reasons, self.timeline, self.metrics = LastReasons(), timeline or Timeline(), Metrics()
        self.metrics.waits.on_waited = self.timeline.waited
        self._world = world
        self._sets: dict[int, _Registered] = {}
        self._bound: weakref.WeakSet[Any] = weakref.WeakSet()
        self._free_ids: deque[int] = deque()
        self._next_id = WORLD + 1
        self._names = threading.Lock()
        self._custom_kernels: list[tuple[Any, ...]] = []
        log.configure(self.rank, config)
        self.cores_of = _check_peers(world, config, problem)  # by rank
        self.timeline.attach(self.rank, config)
        everyone = world.create(range(world.size))
        assert everyone is not None
        self._sets[WORLD] = _Registered(tuple(range(world.size)), self._start_engine(everyone, WORLD))
        self._watchdog = self._start_watchdog()

    # Process sets

    def members_of(self, set_id: int) -> tuple[int, ...]:
        """Return the global ranks of a registered set, ascending."""
        return self._lookup(set_id).ranks

    def ranks_by_id(self) -> dict[int, list[int]]:
        """Return the global ranks of every registered set."""
        return {set_id: list(found.ranks) for set_id, found in self._sets.items()}

    def engine_of(self, set_id: int | None) -> Engine:
        """Return the engine that serves a set on this rank.

        Raises:
            InvalidRequestError: no such set.
            NotMemberError: this rank is not in it.
        """
        found = self._lookup(set_id)
        if found.engine is None:
            raise NotMemberError(
                f"rank {self.rank} is not in process set {set_id}, whose ranks are {list(found.ranks)}. "
                "Only members may call its operations: guard the call with process_set.included()."
            )
        return found.engine

    def find_engine(self, set_id: int | None) -> Engine | None:
        """Return the engine that serves a set on this rank, or None if there is none."""
        found = self._sets.get(-1 if set_id is None else set_id)
        return None if found is None else found.engine

    def id_of(self, ranks: Sequence[int]) -> int | None:
        """Return the id of the set with exactly these ranks, or None."""
        wanted = tuple(sorted(ranks))
        return next((i for i, found in self._sets.items() if found.ranks == wanted), None)

    def next_name(self, kind: str, set_id: int | None) -> str:
        """Return a name for an operation without one: the n-th of its kind on one rank meets the n-th on the others."""
        counters = self._lookup(set_id).counters
        with self._names:
            n = counters[kind] = counters.get(kind, 0) + 1
        return nameless(kind, n)

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Register a set and return its id. Collective over the world.

        Raises:
            InvalidRequestError: bad ranks, an existing set, or the ranks differ between processes.
        """
        problem = self._problem_with(ranks)
        return int(self._change_sets(Kind.ADD_PROCESS_SET, tuple(sorted(ranks)), problem))

    def refuse_process_set(self, kind: Kind, problem: str) -> None:
        """Let the other ranks' call of this kind fail, too: this rank's arguments were wrong."""
        engine = self.engine_of(WORLD)
        engine.poison([Request(kind, self.next_name(kind.value, WORLD), problem=problem)])

    def remove_process_set(self, set_id: int) -> bool:
        """Forget a set. Collective over the world. What is in flight in it raises `ShutdownError`."""
        if set_id == WORLD or set_id not in self._sets:
            return False
        return bool(self._change_sets(Kind.REMOVE_PROCESS_SET, self._sets[set_id].ranks, ""))

    def bind(self, process_set: Any, set_id: int) -> None:
        """Give a `ProcessSet` its id, until the set is removed or the runtime stops."""
        process_set.process_set_id = set_id
        self._bound.add(process_set)

    def unbind(self, set_id: int | None = None) -> None:
        """Take their id from all `ProcessSet`s of one set, or of every set: it may mean another set later."""
        for process_set in list(self._bound):
            if set_id is None or process_set.process_set_id == set_id:
                process_set.process_set_id = None
                self._bound.discard(process_set)

    # Life cycle

    def stop(self, reason: str) -> None:
        """Leave every set, which stops all ranks' engines. The world's communicator stays open."""
        for set_id in sorted(self._sets, reverse=True):  # the world last: it may still change the sets
            engine = self._sets[set_id].engine
            if engine is not None:
                engine.stop(reason)
        self._watchdog.stop()
        self.unbind()
        self._tell_summary()
        self.timeline.flush()
        log.unconfigure()

    def abandon(self, error: BaseException) -> None:
        """Leave every set on this rank alone, since other ranks are lost."""
        for found in self._sets.values():
            if found.engine is not None:
                found.engine.abandon(error)
        self.unbind()
        self.timeline.flush()
        log.unconfigure()

    def _tell_summary(self) -> None:
        if not self.config.summary or self.rank != 0:
            return
        said = self.engine_of(WORLD).last_words
        if len(said) == self.size:  # else a rank has failed, and that is the news
            print(summary(said), file=sys.stderr, flush=True)

    def abort(self, code: int) -> None:
        """End all ranks of the job now."""
        self._world.abort(code)

    @property
    def world(self) -> Communicator:
        """The transport under all sets; the world's engine thread uses it to make new ones."""
        return self._world

    def register_kernel(self, *arguments: Any) -> None:
        """Give every engine, also later ones, a faster kernel. Arguments of `Kernels.register`."""
        self._custom_kernels.append(arguments)
        for found in self._sets.values():
            if found.engine is not None:
                found.engine.kernels.register(*arguments)

    def _lookup(self, set_id: int | None) -> _Registered:
        found = self._sets.get(-1 if set_id is None else set_id)
        if found is None:
            raise InvalidRequestError(
                f"process set {set_id} is not registered (known: {sorted(self._sets)}). "
                "Pass it to hvd.init(process_sets=...) or hvd.add_process_set() on all ranks first."
            )
        return found

    def _problem_with(self, ranks: Sequence[int]) -> str:
        listed = f"process set with ranks {list(ranks)}"
        if not ranks:
            return f"{listed}: a process set needs at least one rank."
        if any(not 0 <= rank < self.size for rank in ranks):
            return f"{listed}: ranks go from 0 to {self.size - 1} here."
        if len(set(ranks)) != len(ranks):
            return f"{listed}: a rank is named twice."
        known = self.id_of(ranks)
        if known is None:
            return ""
        whose = "all ranks, for which there is hvd.global_process_set" if len(ranks) == self.size else "the same ranks"
        return f"{listed}: process set {known} has {whose}."

    def _change_sets(self, kind: Kind, ranks: tuple[int, ...], problem: str) -> Any:
        engine = self.engine_of(WORLD)
        request = Request(kind, self.next_name(kind.value, WORLD), splits=ranks, problem=problem)
        if problem:
            engine.poison([request])
            raise InvalidRequestError(problem)
        handle = Handle(request.name, driver=engine)
        engine.submit([Submission(request, handle)])
        try:
            return handle.wait()
        except (MismatchError, RemoteError) as error:
            raise InvalidRequestError(str(error)) from error

    def _on_process_set(self, response: Response) -> Any:
        """Do, on the world's engine thread, what all ranks agreed on."""
        if response.kind is Kind.REMOVE_PROCESS_SET:
            set_id = self.id_of(response.splits)
            if set_id is None:  # two threads removed the same set at the same time
                return False
            engine = self._sets.pop(set_id).engine
            if engine is not None:
                engine.stop("removed the process set")
            self._free_ids.append(set_id)
            return True
        known = self.id_of(response.splits)
        if known is not None:  # two threads added the same set at the same time
            return known
        set_id = self._free_ids.popleft() if self._free_ids else self._next_id
        self._next_id = max(self._next_id, set_id + 1)
        comm = self._world.create(response.splits)
        engine = None if comm is None else self._start_engine(comm, set_id, response.splits)
        self._sets[set_id] = _Registered(response.splits, engine)
        return set_id

    def _start_engine(self, comm: Communicator, set_id: int, members: Sequence[int] | None = None) -> Engine:
        kernels = Kernels()
        for arguments in self._custom_kernels:
            kernels.register(*arguments)
        what = "hvdlite" if set_id == WORLD else f"process set {set_id}"
        members = tuple(members or range(comm.size))
        label = "" if set_id == WORLD else f"{what}, {describe_ranks(members)}"
        tuner = self._make_tuner(comm) if set_id == WORLD else None
        listeners: Instrument = self.reasons if tuner is None else Both(self.reasons, tuner)
        instrument = self.timeline.ear_of(label, members, comm.rank, self.metrics.ear(listeners))
        on_joined = functools.partial(self._forget_names, set_id)
        engine = Engine(
            comm, members, self.config, kernels,
            self._on_process_set, on_joined, instrument, self._on_engine_failure, what, self.metrics, tuner,
        )  # fmt: skip
        engine.start()
        return engine

    def _start_watchdog(self) -> Watchdog:
        # Twice the limits: the stall watch comes first, and tells more.
        warning, shutdown = 2 * self.config.stall_warning, 2 * self.config.stall_shutdown

        def engines() -> list[Engine]:
            return [found.engine for found in list(self._sets.values()) if found.engine is not None]

        def warn(text: str) -> None:
            log.get_logger().warning("%s: it is stopped, or out of reach.", text)

        def end(text: str) -> None:
            cause = f"StallError: {text}: over twice HVDLITE_STALL_SHUTDOWN={self.config.stall_shutdown:g}"
            end_all_ranks(f"rank {self.rank} of {self.size}", cause, self.abort, 1)

        watchdog = Watchdog(warning if self.size > 1 else 0.0, shutdown, engines, warn, end)
        watchdog.start()
        return watchdog

    def _make_tuner(self, comm: Communicator) -> Tuner | None:
        """Return the tuner of the set of all ranks, on its rank 0 and if the settings want one."""
        config, path = self.config, self.config.autotune_file
        if comm.rank != 0 or comm.size == 1 or not config.may_tune:
            return None
        default, pinned = Knobs.of(config), frozenset(settings.given())
        valid_for = store.fingerprint(comm.topology)
        found = store.load(path, valid_for) if path else None
        if found is not None:
            found = found._replace(**{name: getattr(default, name) for name in pinned.intersection(Knobs._fields)})
        elif not config.autotune:
            return None

        def search_for(step_bytes: int) -> Search:
            grid = grid_for(
                default, comm.topology, backend=config.backend, shared_memory=config.shared_memory,
                pinned=pinned, step_bytes=step_bytes,
            )  # fmt: skip
            return Search(default, grid, config.autotune_bayes_opt_max_samples)

        def keep(knobs: Knobs, gain: float, step_bytes: int) -> None:
            if path:
                store.save(path, valid_for, knobs, gain, step_bytes)

        return Tuner(default, config, search_for, found, keep)

    def _forget_names(self, set_id: int) -> None:
        # Ranks that joined have made fewer calls than others; from here on the n-th call meets the n-th again.
        with self._names:
            self._sets[set_id].counters.clear()

    def _abort_unless_lost(self, code: int) -> None:
        losses = self._world.losses
        if losses is None or not (losses.has_happened and self.config.elastic_in_place):
            self.abort(code)  # else the others hear of it by MPI, and have a limit to go on in place

    def _on_engine_failure(self, error: BaseException) -> None:
        # The other ranks may be in the middle of a transfer with this one, and would wait for ever.
        # The program here has been told; if it does not end the job, this does.
        if self.size > 1:
            timer = threading.Timer(self.config.exit_grace, self._abort_unless_lost, [1])
            timer.daemon = True
            timer.start()


def _check_peers(world: Communicator, config: Config, problem: str) -> list[list[int]]:
    """Refuse to start when ranks differ in what must be equal. Collective; raises the same everywhere.

    Returns:
        The cores that each rank may use.
    """
    mine = {"version": __version__, "problem": problem, "cores": cores_of_this_thread(), **config.fingerprint()}
    everyone = [json.loads(text) for text in world.allgather_bytes(json.dumps(mine).encode())]
    cores = [one.pop("cores", []) for one in everyone]  # another version has none; that is told below
    problems: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        problems.setdefault(one.pop("problem", ""), []).append(rank)
    problems.pop("", None)
    if problems:
        raise ConfigError(" ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in problems.items()))
    versions: dict[str, list[int]] = {}
    for rank, one in enumerate(everyone):
        versions.setdefault(one.pop("version"), []).append(rank)
    if len(versions) > 1:
        raise MismatchError("hvd.init()", "hvdlite version", versions, "Install one version on all hosts.")
    settings.compare(everyone)
    return cores


# The runtime of this process, and of threads that play ranks.


class _ThreadState(threading.local):
    transport: Communicator | None = None
    runtime: Runtime | None = None
    timeline: Timeline | None = None


class _State:
    runtime: Runtime | None = None
    timeline: Timeline | None = None


_process = _State()
_thread = _ThreadState()


def current(call: str = "hvdlite") -> Runtime:
    """Return the running Runtime, or raise `NotInitializedError` naming `call`."""
    found = _thread.runtime if _thread.transport is not None else _process.runtime
    if found is None:
        raise NotInitializedError(call)
    return found


def is_running() -> bool:
    return (_thread.runtime if _thread.transport is not None else _process.runtime) is not None


def thread_transport() -> Communicator | None:
    """Return the communicator under which this thread plays a rank, or None in an ordinary process."""
    return _thread.transport


def set_current(runtime: Runtime | None) -> None:
    """Install, or remove, what `current` returns."""
    if _thread.transport is not None:
        _thread.runtime = runtime
    else:
        _process.runtime = runtime


def timeline() -> Timeline:
    """Return the timeline, which goes on over `shutdown()` and the next `init()`."""
    state = _process if _thread.transport is None else _thread
    if state.timeline is None:
        state.timeline = Timeline()
        if state is _process:
            atexit.register(state.timeline.close)
    return state.timeline


@contextmanager
def as_rank(transport: Communicator) -> Iterator[None]:
    """Let this thread play the rank of `transport`: `init()` inside starts a runtime of its own."""
    previous = _thread.transport, _thread.runtime, _thread.timeline
    _thread.transport, _thread.runtime, _thread.timeline = transport, None, None
    try:
        yield
        if _thread.runtime is not None:
            _thread.runtime.stop("has ended its program")
    finally:
        timeline().close()
        _thread.transport, _thread.runtime, _thread.timeline = previous
