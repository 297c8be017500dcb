"""Batch normalization with the mean and the variance of the batches of all ranks.

    collectives    one allgather of 1 + 2 C float64 per forward, one allreduce of 2 C float64 per backward

Ranks tell their means and squared deviations, not sums of squares, whose difference loses all digits where the
mean is large. Source of the merge: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlite import InvalidRequestError, ProcessSet, global_process_set
from hvdlite.lowlevel import KeptName, Kind, ReduceOp, check_process_set, refusing

from .ops import Reduction, start_allgather, start_allreduce
from .tensors import describe, to_new


class SyncBatchNorm(_BatchNorm):
    """Like `torch.nn.BatchNorm1d`, 2d and 3d, with the statistics of the batches of all ranks together.

    In training mode forward and backward are collective: every rank must call both, with a batch of any length, also
    an empty one. In evaluation mode, and with one rank, it is plain batch normalization and talks to nobody.

    Its input is (batch, num_features, …) of any floating-point dtype; half types are accumulated in float32. Gradients
    of the input are those of the sum of all ranks' losses; gradients of weight and bias are this rank's share, which
    `DistributedOptimizer` averages. They cannot be differentiated again.

    Args:
        num_features, eps, momentum, affine, track_running_stats: as of `torch.nn.BatchNorm2d`.
        process_set: the ranks whose batches count as one. Training on another rank raises `NotMemberError`.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        check_process_set(process_set)
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set
        self._travel_name = KeptName("sync_batch_norm")  # given by the first forward: now may be before init()

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set) -> Any:
        """Replace every batch normalization within `module`, which is changed, and return the result. Not collective.

        Parameters and buffers go over as they are, so an optimizer may exist already. If `module` itself is a batch
        normalization, only the result is synchronized.
        """
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._from(module, process_set)
        for name, child in module._modules.items():  # not named_children(), which shows a layer used twice once
            if child is not None:
                module._modules[name] = cls.convert_sync_batchnorm(child, process_set)
        return module

    @classmethod
    def _from(cls, plain: _BatchNorm, process_set: ProcessSet) -> SyncBatchNorm:
        # Memory for nothing: the tensors are replaced.
        with torch.device("meta"):
            made = cls(
                plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats,
                process_set=process_set,
            )  # fmt: skip
        for name in ("weight", "bias"):
            made._parameters[name] = plain._parameters[name]
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            made._buffers[name] = plain._buffers[name]
        return made.train(plain.training)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize. Collective in training mode.

        Raises:
            InvalidRequestError: the input is not a floating-point tensor (batch, num_features, …) in host memory, or
                there is no more than one value per feature on all ranks together. All ranks raise.
        """
        if not self.training or self.process_set.size() == 1:
            return super().forward(input)
        travel_name = self._travel_name.get(self.process_set)
        name = f"{travel_name}.moments"
        with refusing(Kind.ALLGATHER, [name], self.process_set):
            self._check_input_dim(input)
            if input.device.type != "cpu":
                raise InvalidRequestError(
                    f"SyncBatchNorm: {describe(input)} is on device {str(input.device)!r}; this version synchronizes "
                    "in host memory."
                )
            mine = local_moments(input.detach())
        everyone = start_allgather([mine], [name], self.process_set)[0].wait()
        moments = merge_moments(everyone)
        if moments.n_values <= 1:
            raise InvalidRequestError(
                f"SyncBatchNorm {travel_name!r}: {moments.n_values:.0f} values per feature on all ranks "
                f"together, here {describe(input)}; training needs more than one."
            )
        self._track(moments)
        output: torch.Tensor = _Normalize.apply(
            input, self.weight, self.bias, moments, self.eps, f"{travel_name}.gradient", self.process_set
        )
        return output

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.ndim < 2 or input.shape[1] != self.num_features or not input.is_floating_point():
            raise InvalidRequestError(
                f"SyncBatchNorm({self.num_features}): expected a floating-point tensor "
                f"(batch, {self.num_features}, …), got {describe(input)}."
            )

    def _track(self, moments: Moments) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = moments.variance * (moments.n_values / (moments.n_values - 1))
        self.running_mean.lerp_(moments.mean.to(self.running_mean), share)
        self.running_var.lerp_(unbiased.to(self.running_var), share)


class Moments(NamedTuple):
    """Statistics per feature, float64."""

    n_values: float
    mean: torch.Tensor
    variance: torch.Tensor  # biased


def local_moments(batch: torch.Tensor) -> torch.Tensor:
    """Return one row for the allgather: count, then means, then sums of squared deviations. Shape (1, 1 + 2 C)."""
    features = batch.shape[1]
    row = torch.zeros(1, 1 + 2 * features, dtype=torch.float64)
    count = batch.numel() // features if features else 0
    if count:
        # Twice over the batch: torch.var_mean takes five times as long on the CPU.
        dims = _all_but_features(batch)
        mean = batch.to(_accumulator(batch.dtype)).mean(dims)
        centred = _centred(batch, mean)
        rest = centred.mean(dims).double()  # what rounding has left out of the mean
        row[0, 0] = count
        row[0, 1 : 1 + features] = mean.double() + rest
        row[0, 1 + features :] = (centred.square_().sum(dims).double() - count * rest**2).clamp_(min=0)
    return row


def merge_moments(rows: torch.Tensor) -> Moments:
    """Return the moments of everything, from one row of each rank."""
    counts, (means, squares) = rows[:, :1], rows[:, 1:].chunk(2, dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    variance = (squares + counts * (means - mean) ** 2).sum(0) / count
    return Moments(float(count), mean, variance)


class _Normalize(Function):
    @staticmethod
    def forward(
        ctx: Any,
        batch: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        name: str,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.save_for_backward(batch, weight)
        ctx.n_values, ctx.mean, ctx.inverse = moments.n_values, moments.mean, (moments.variance + eps).rsqrt()
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.name, ctx.process_set = name, process_set
        scale = ctx.inverse if weight is None else ctx.inverse * weight
        shift = torch.zeros_like(scale) if bias is None else bias
        scaled = torch.addcmul(_along_features(shift, batch), _centred(batch, ctx.mean), _along_features(scale, batch))
        return scaled.to(batch.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        batch, weight = ctx.saved_tensors
        centred = _centred(batch, ctx.mean)
        wide = gradient.to(centred.dtype)
        dims = _all_but_features(batch)
        sums = torch.stack([wide.sum(dims), (wide * centred).sum(dims)]).double()
        # Also where this rank needs no gradient of its input: others may.
        total = Reduction(ReduceOp.SUM, 1.0, 1.0, ctx.process_set)
        of_gradient, of_product = start_allreduce([sums], [ctx.name], total, to_new)[0].wait() / ctx.n_values
        scale = ctx.inverse if weight is None else ctx.inverse * weight
        shift, slope = -scale * of_gradient, -scale * of_product * ctx.inverse**2
        back = torch.addcmul(_along_features(shift, batch), wide, _along_features(scale, batch))
        back.addcmul_(centred, _along_features(slope, batch))
        of_weight = None if weight is None else (sums[1] * ctx.inverse).to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else sums[0].to(ctx.bias_dtype)
        return back.to(batch.dtype), of_weight, of_bias, None, None, None, None


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize > 2 else torch.float32


def _all_but_features(batch: torch.Tensor) -> list[int]:
    return [0, *range(2, batch.ndim)]


def _along_features(values: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    """Return one value per feature so that it broadcasts over `batch`."""
    return values.to(_accumulator(batch.dtype)).view(-1, *[1] * (batch.ndim - 2))


def _centred(batch: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return batch - _along_features(mean, batch)
