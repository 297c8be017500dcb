"""Callbacks that commit the state of an elastic training, and count in it how far `model.fit()` is.

The order in which they are given does not matter. None of them is `async_safe`: Keras would call them in another
thread, some time after a batch.
"""

from __future__ import annotations

from typing import Any

import keras

from hvdlite import InvalidRequestError


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Commits the state after every so many batches, and after every epoch. Collective.

    It does so when what follows begins (the next batch or epoch, or the end of training), so that all callbacks have
    seen the end of what is committed.

    Args:
        state: as `KerasState`.
        batches_per_commit: how many.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        if isinstance(batches_per_commit, bool) or not isinstance(batches_per_commit, int) or batches_per_commit < 1:
            raise InvalidRequestError(
                f"CommitStateCallback(batches_per_commit={batches_per_commit!r}): expected a number of at least 1."
            )
        self.state, self.batches_per_commit = state, batches_per_commit
        self._since = 0  # batches since the last commit
        self._is_due = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._since, self._is_due = 0, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._commit_if_due()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._since += 1
        self._is_due = self._since >= self.batches_per_commit

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._commit_if_due()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._is_due = True

    def on_train_end(self, logs: Any = None) -> None:
        self._commit_if_due()

    def _commit_if_due(self) -> None:
        if self._is_due:
            self._since, self._is_due = 0, False
            self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Counts in `state.batch` the batches of this epoch that are done, and goes on within an epoch.

    Where `state.batch` is not 0 at the beginning of an epoch, that epoch is so many batches shorter, if Keras knows
    how many it has: from the data's length, or `steps_per_epoch`. At least one batch is done. Which data these are is
    the program's affair: Keras begins with the first ones it is given.

    Args:
        state: with an attribute `batch`, as `KerasState(model, batch=0)`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_counts(self, state, "batch")
        self.state = state
        self._before = 0  # batches that were done when the epoch began
        self._steps: int | None = None  # of a whole epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._before = int(self.state.batch)
        self._steps = self.params.get("steps")
        if self._steps and self._before:  # for the progress bar, among others
            self.params["steps"] = max(1, self._steps - self._before)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = done = self._before + batch + 1
        if self._steps and self._before and done >= self._steps and not self.model.stop_training:
            self.model.stop_training = _Once()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0
        self.params["steps"] = self._steps


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Counts in `state.epoch` the epochs that are done.

    Each `fit()` goes on from what `state.epoch` is when it begins, whether it counts from there (`initial_epoch=
    state.epoch`) or from 0 (`epochs=90 - state.epoch`).

    Args:
        state: with an attribute `epoch`, as `KerasState(model, epoch=0)`.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        _check_counts(self, state, "epoch")
        self.state = state
        self._before = 0
        self._first: int | None = None  # what Keras calls the first epoch of this fit()

    def on_train_begin(self, logs: Any = None) -> None:
        self._before, self._first = int(self.state.epoch), None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._before + epoch + 1 - (self._first or 0)


class _Once:
    """True when it is asked for the first time, then False: Keras asks after each batch, and after each epoch.

    As `model.stop_training` it ends the epoch. A callback that ends the training, by True in its place, still does.
    """

    def __init__(self) -> None:
        self._is_asked = False

    def __bool__(self) -> bool:
        before, self._is_asked = self._is_asked, True
        return not before


def _check_counts(callback: Any, state: Any, name: str) -> None:
    if not hasattr(state, name):
        raise InvalidRequestError(
            f"{type(callback).__name__}: the state has no attribute {name!r}. Make it with KerasState(…, {name}=0)."
        )
