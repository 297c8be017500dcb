"""What a training loop has to remember to go on after a failure: kept in memory at each commit, and on disk.

A state lives through failures: `save()` remembers, `restore()` goes back to what was remembered, `sync()` gives all
ranks what rank 0 has. `to_commit()` and `from_commit()` carry what was remembered over a new start of the job.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Iterable
from typing import Any

import hvdlite
from hvdlite.elastic.link import Link
from hvdlite.errors import HostsUpdatedInterrupt, InvalidRequestError
from hvdlite.observe.log import get_logger

REMOVED = 1  # a kind of change of the hosts; 2 is added, 3 both


class State:
    """Base of all states. A subclass has `save`, `restore` and `sync`.

    For a job that is started again it also has `to_commit` and `from_commit`.

    Args:
        bcast_object: gives all ranks the object of rank 0; collective, as `hvd.broadcast_object` is.
        get_rank: returns this process' rank.

    Attributes:
        n_commits: how often `commit()` was called.
    """

    def __init__(
        self, bcast_object: Callable[..., Any] | None = None, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object or hvdlite.broadcast_object
        self._get_rank = get_rank or hvdlite.rank
        self._messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_update = 0.0
        self.n_commits = 0
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._link: Link | None = None

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Have these called, in order, when the ranks have changed: hvdlite runs again, the state is not synced yet."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Called by `run` when hvdlite runs again after a failure."""
        self._messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Note that hosts have changed; the next check on rank 0 tells all ranks. Any thread may call it.

        Args:
            timestamp: when, seconds; later than at the last call.
            update_res: 1 removed, 2 added, 3 both.
        """
        self._messages.put((timestamp, int(update_res)))

    def commit(self) -> None:
        """Remember the state as it is now, and look whether hosts have changed. Collective.

        With HVDLITE_ELASTIC_DIR rank 0 writes it to the disk before this returns.

        Raises:
            HostsUpdatedInterrupt: they have; `run` takes care of it.
            InvalidRequestError: what rank 0 has saved cannot be pickled for the disk. All ranks raise it.
        """
        self.save()
        problem = self._write()
        self.n_commits += 1
        self._check(problem, is_written=True)

    def check_host_updates(self) -> None:
        """Look whether hosts have changed, without a commit. Collective: all ranks call it equally often.

        Raises:
            HostsUpdatedInterrupt: they have; `run` takes care of it.
        """
        self._check("", is_written=False)

    def save(self) -> None:
        """Remember the state as it is now, in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was remembered last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all ranks the state of rank 0. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Do what is needed when the ranks have changed, before the callbacks; nothing here."""

    def to_commit(self) -> Any:
        """Return what `save()` has remembered, to be pickled; None if it cannot be carried over to another process."""
        return None

    def from_commit(self, content: Any) -> None:
        """Take over what `to_commit()` returned in an earlier start of the job, as if it had been saved here."""
        raise NotImplementedError

    def linked(self, link: Link) -> None:
        """Take part in a job that may be started again. Called by `run`; goes on from the commit that there is."""
        self._link = link
        if link.is_restartable and type(self).to_commit is State.to_commit and self._get_rank() == 0:
            get_logger().warning(
                "%s has no to_commit(), so that a new start of the job begins at the beginning", type(self).__name__
            )
        content = link.read_commit()
        if content is not None:
            self.from_commit(content)
            self.restore()

    def leave(self, is_written: bool) -> None:
        """End this start of the job, with all that has been done. Called by `run`; does not return."""
        assert self._link is not None
        if not is_written:
            self.save()
            if problem := self._write():
                raise InvalidRequestError(problem)
        hvdlite.shutdown()
        self._link.leave()

    def _write(self) -> str:
        """Write what is saved, where that is asked for. Returns why it cannot be: all ranks have to hear of it."""
        content = self.to_commit() if self._link and self._link.is_restartable else None
        if content is not None:
            assert self._link is not None
            try:
                self._link.write_commit(content)
            except InvalidRequestError as error:
                return f"rank {self._get_rank()}: {error}"
        return ""

    def _check(self, problem: str, is_written: bool) -> None:
        newest, kinds = self._last_update, 0
        messages = [] if self._link is None else [news] if (news := self._link.news()) else []
        while not self._messages.empty():
            messages.append(self._messages.get())
        for timestamp, kind in messages:
            if timestamp > self._last_update:
                newest, kinds = max(newest, timestamp), kinds | kind
        asked = self._link is not None and self._link.is_asked_to_leave
        told = self._bcast_object((self._last_update, newest, kinds, asked, problem))
        previous, self._last_update, kinds, asked, problem = told
        if problem:
            raise InvalidRequestError(problem)
        if asked and self._link is not None:
            self._link.is_asked_to_leave = True
        if asked or self._last_update > previous:
            raise HostsUpdatedInterrupt(kinds == REMOVED, is_written)


class ObjectState(State):
    """A state of plain Python objects, which become its attributes.

        state = hvd.elastic.ObjectState(epoch=0, best=None)
        state.epoch += 1

    `save()` copies them deeply. `sync()` gives all ranks the attributes as they are on rank 0 at that moment.

    Args:
        kwargs: attributes and their first values. They have to be picklable.
    """

    def __init__(
        self,
        bcast_object: Callable[..., Any] | None = None,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(bcast_object, get_rank)
        refuse_names_of_methods(self, kwargs)
        self._names = list(kwargs)
        for name, value in kwargs.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        ObjectState.save(self)

    def save(self) -> None:
        self._saved = {name: _copied(value) for name, value in self._objects().items()}

    def restore(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, _copied(value))

    def sync(self) -> None:
        if self._names:
            for name, value in self._bcast_object(self._objects()).items():
                setattr(self, name, value)
            ObjectState.save(self)

    def to_commit(self) -> Any:
        return self._saved

    def from_commit(self, content: Any) -> None:
        self._saved.update({name: value for name, value in content.items() if name in self._names})

    def _objects(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}


def refuse_names_of_methods(state: State, names: Iterable[str]) -> None:
    """Raise InvalidRequestError if an attribute of one of these names would hide, or be hidden by, a method."""
    for name in names:
        if hasattr(type(state), name):
            raise InvalidRequestError(
                f"{type(state).__name__}({name}=...): {name!r} is a method of states. Give it another name."
            )


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # of whatever class: it stays the same object, as all do for Horovod
        return value
