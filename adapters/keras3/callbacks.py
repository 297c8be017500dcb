"""Callbacks of `model.fit()` for training on several ranks. Each must be given on all ranks, in the same order."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hvdlite
from hvdlite import InvalidRequestError
from hvdlite.lowlevel import describe_ranks

from .models import broadcast_model
from .optimizer import is_distributed

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Sets the variables of the model and of its optimizer to those of one rank, before the first batch. Once.

    A model that only its first batch builds gets them after that batch. Rank 0 warns if the optimizer does not reduce
    gradients, as that of a model which `keras.models.load_model()` or a copy has made.

    Args:
        root_rank: whose variables.
        device: accepted; it changes nothing.
        local_variables: None, a variable, or a collection of variables that are left alone.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        del device
        self.root_rank = root_rank
        self.broadcast_done = False
        self._local = _listed(local_variables)

    def register_local_var(self, var: Any) -> None:
        """Leave `var` alone."""
        self._local.append(var)

    def on_train_begin(self, logs: Any = None) -> None:
        if hvdlite.rank() == 0 and hvdlite.size() > 1 and _trains_alone(self.model):
            warnings.warn(
                "the optimizer of this model does not reduce gradients, so each rank trains a model of its own. Wrap "
                "it: hvd.DistributedOptimizer(model.optimizer), before the first step; models from files come with "
                "one from hvd.load_model().",
                stacklevel=2,
            )
        if not self.broadcast_done and all(hvdlite.allgather_object(bool(self.model.built))):
            self._broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_model(self.model, self.root_rank, self._local)
        self.broadcast_done = True


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Averages the metrics of each epoch over all ranks, `val_…` included, so that all ranks decide alike.

    It changes `logs`: put it before the callbacks that read them. It raises on all ranks if they have taken different
    numbers of steps in an epoch.

    Args:
        device: accepted; it changes nothing.
    """

    async_safe = True  # it does not read the logs of a batch, for which Keras would have to wait

    def __init__(self, device: str = "") -> None:
        super().__init__()
        del device
        self._steps = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is None:
            logs = {}
        # A rank whose data have ended takes part in the others' steps until theirs have; then all see that they differ.
        hvdlite.join()
        mine = {key: _mean_of(value) for key, value in logs.items()}
        everyone, steps = zip(*hvdlite.allgather_object((mine, self._steps)), strict=True)
        _check_steps(steps, epoch)
        _check_keys([sorted(theirs) for theirs in everyone])
        for key in logs:
            logs[key] = float(np.mean([theirs[key] for theirs in everyone]))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Sets the learning rate to `initial_lr * multiplier(epoch)` from `start_epoch` on, up to before `end_epoch`.

    Args:
        initial_lr: the rate that is multiplied.
        multiplier: a function of the epoch, or a number m, which stands for m ** (epoch - start_epoch).
        staircase: the rate is set at the beginning of each epoch; else before each batch, and the epoch that
            `multiplier` gets is a fraction.
        momentum_correction: when the rate changes, the velocity of SGD or RMSprop changes in proportion, as it would
            be had it been gathered at the new rate (Goyal et al., arXiv:1706.02677, section 2.1).
        steps_per_epoch: for staircase=False; known already where the data have a length.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidRequestError(f"{type(self).__name__}: initial_lr is None; give the rate that is multiplied.")
        self.initial_lr = float(initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier if callable(multiplier) else self._power_of(multiplier)
        self.current_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise InvalidRequestError(
                f"{type(self).__name__}: the data do not say how many batches an epoch has; give steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch or 0
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            self._set(epoch + batch / float(self.steps_per_epoch or 1))
        elif batch == 0:
            self._set(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["lr"] = _rate_of(self.model.optimizer)

    def _set(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old, new = _rate_of(optimizer), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and new != old:
            _scale_velocity(optimizer, new / old)

    def _power_of(self, factor: float) -> Callable[[float], float]:
        return lambda epoch: float(factor ** (epoch - self.start_epoch))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate, batch by batch, from `initial_lr / size` to `initial_lr` in the first epochs.

    Args:
        initial_lr: the rate after the warm-up.
        warmup_epochs: how many.
        momentum_correction, steps_per_epoch: as of `LearningRateScheduleCallback`.
        verbose: above 0, rank 0 says when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(initial_lr, self._warm, 0, warmup_epochs, False, momentum_correction, steps_per_epoch)
        self.verbose = verbose
        self.warmup_epochs = warmup_epochs

    def _warm(self, epoch: float) -> float:
        size = hvdlite.size()
        # The rate after the batch, so that the last one of the warm-up runs at the full rate.
        epoch += 1.0 / float(self.steps_per_epoch or 1)
        return 1.0 / size * (epoch * (size - 1) / self.warmup_epochs + 1)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvdlite.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {_rate_of(self.model.optimizer):g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc, unused-ignore]
    """Saves the model whenever it is the best so far, to the path that is put into `filepath` before training."""

    _NO_PATH = "no_path_given"

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        suffix = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            self._NO_PATH + suffix, monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip

    def on_train_begin(self, logs: Any = None) -> None:
        if str(self.filepath).startswith(self._NO_PATH):
            raise InvalidRequestError(
                "BestModelCheckpoint: put the path into its attribute `filepath` before training."
            )
        super().on_train_begin(logs)


def _rate_of(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _scale_velocity(optimizer: Any, factor: float) -> None:
    """Multiply the velocities of an optimizer with momentum.

    That comes to the same as a momentum of `factor` times as much for one batch, which Keras 3 cannot have: its
    momentum is a number within the compiled step.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(inner, "momentum", 0):
        return
    for velocity in getattr(inner, "momentums", None) or getattr(inner, "_momentums", None) or ():
        if velocity is not None:
            velocity.assign(velocity * keras.ops.cast(factor, velocity.dtype))


def _listed(variables: Any) -> list[Any]:
    if variables is None:
        return []
    listed = list(variables) if isinstance(variables, list | tuple | set) else [variables]
    wrong = [one for one in listed if not hasattr(one, "assign")]
    if wrong:
        raise InvalidRequestError(f"local_variables: expected variables, got {type(wrong[0]).__name__}.")
    return listed


def _mean_of(value: Any) -> float:
    if keras.ops.is_tensor(value):  # what Keras could not make a float of: bfloat16 on TensorFlow
        value = keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))
    return float(np.asarray(value).mean())


def _trains_alone(model: Any) -> bool:
    """Return whether nothing that hvdlite knows reduces gradients in `fit`; a step of its own may."""
    plain_step = getattr(type(model), "train_step", None) is keras.Model.train_step
    return plain_step and not is_distributed(getattr(model, "optimizer", None))


def _check_steps(steps: Sequence[int], epoch: int) -> None:
    if len(set(steps)) == 1:
        return
    by_steps = {n: describe_ranks([rank for rank, one in enumerate(steps) if one == n]) for n in sorted(set(steps))}
    raise InvalidRequestError(
        f"MetricAverageCallback: the ranks took different numbers of steps in epoch {epoch + 1}: "
        f"{', '.join(f'{n} on {who}' for n, who in by_steps.items())}. Some averaged gradients are of fewer ranks, and "
        "the models differ now. Give every rank as many batches, or repeat the data and give steps_per_epoch."
    )


def _check_keys(everyone: list[list[str]]) -> None:
    different = [rank for rank, keys in enumerate(everyone) if keys != everyone[0]]
    if different:
        raise InvalidRequestError(
            f"MetricAverageCallback: the metrics differ between ranks: {everyone[0]} on rank 0, "
            f"{everyone[different[0]]} on {describe_ranks(different)}. Every rank must have the same metrics and, in "
            "the same epochs, validation data."
        )
