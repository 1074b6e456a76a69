"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from sirtaki.bindings.context import find
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.training.shares import refuse_derivative
from sirtaki.torch._private import BatchNormBase
from sirtaki.torch.ops.autograd import AllGather, AllReduce, CollectiveScope


class SyncBatchNorm(BatchNormBase):
    """Normalises each channel by its mean and variance over the batches of all ranks.

    While training, all ranks must run their layers in the same order, forward and backward; batches may
    differ in everything but the number of channels, and be empty. The layer then behaves like
    `torch.nn.BatchNorm1d` (2d, 3d) on the concatenated batches of the ranks: forward, backward, and in its
    running statistics. In evaluation, and in a world of one, nothing is exchanged.

    The arguments are those of `torch.nn.BatchNorm2d`, and `process_set`: the ranks among which it
    synchronises; on other ranks it is the plain layer. The input has at least 2 dimensions, (rows, channels,
    ...), and a floating dtype; 16-bit elements are computed in 32 bits. It can be differentiated once.

    Raises:
        ValueError: an input with fewer than 2 dimensions, or fewer than 2 values per channel on all ranks.
        MismatchError: ranks disagree about the number of channels.
        PeerLostError: a rank died.

    Example:
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2))
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)  # or hvd.SyncBatchNorm(16) as a layer
        loss_of(model, inputs, targets).backward()
    """

    def __init__(
        self, num_features: int, *options: Any, process_set: ProcessSet = global_process_set, **named: Any
    ) -> None:
        super().__init__(num_features, *options, **named)
        self.process_set = process_set

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002  # torch's name
        if input.dim() < 2:
            raise ValueError(
                f"SyncBatchNorm takes (rows, channels, ...), but the input has {input.dim()} dimension(s)"
            )

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name
        self._check_input_dim(input)
        context = find() if self.training else None
        if context is not None:
            scope = CollectiveScope(context, None, self.process_set)
            if not scope.has_no_peers:
                if context.steps.may_be_late:
                    raise ValueError(
                        "SyncBatchNorm waits for all ranks in every step, so it cannot be combined with an "
                        "optimizer that has a deadline: use torch.nn.BatchNorm2d"
                    )
                return self._over_all_ranks(input, scope)
        return super().forward(input)

    def _over_all_ranks(self, batch: Tensor, scope: CollectiveScope) -> Tensor:
        if torch.is_grad_enabled():
            refuse_derivative()
        result, mean, variance, count = _Normalise.apply(batch, self.weight, self.bias, self.eps, scope)
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return result

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        if self.running_mean is None or self.running_var is None:
            return
        share = self.momentum
        if share is None:  # the mean over all batches so far
            share = 1.0 / float(self.num_batches_tracked or 1)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(variance.to(self.running_var.dtype), share)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet | None = None
    ) -> torch.nn.Module:
        """Replaces all batch normalisation layers of a module; they keep their parameters and buffers.

        Returns `module` itself, changed in place, or its replacement if it is such a layer.
        """
        if isinstance(module, BatchNormBase) and not isinstance(module, cls):
            return cls._replacing(module, process_set or global_process_set)
        for name, child in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(child, process_set))
        return module

    @classmethod
    def _replacing(cls, layer: BatchNormBase, process_set: ProcessSet) -> SyncBatchNorm:
        options = layer.eps, layer.momentum, layer.affine, layer.track_running_stats
        new = cls(layer.num_features, *options, process_set=process_set)
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        new.training = layer.training
        return new


def _over_rows(tensor: Tensor) -> list[int]:
    """Returns all dimensions except that of the channels."""
    return [dimension for dimension in range(tensor.dim()) if dimension != 1]


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    """Returns a value per channel, in the dtype in which `like` is computed, shaped to broadcast with it."""
    return values.to(_wide(like)).view(1, -1, *[1] * (like.dim() - 2))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _statistics(batch: Tensor, scope: CollectiveScope) -> tuple[Tensor, Tensor, Tensor]:
    """Returns mean, variance and number of values of each channel over all ranks; all in float64.

    They are combined from each rank's count, mean and sum of squared deviations: T. F. Chan, G. H. Golub and
    R. J. LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    channels = batch.shape[1]
    count = batch.numel() // channels if channels else 0
    own = torch.zeros(1, 1 + 2 * channels, dtype=torch.float64, device=batch.device)
    if count:
        variance, mean = torch.var_mean(batch.to(_wide(batch)), _over_rows(batch), correction=0)
        own[0, 0] = count
        own[0, 1:] = torch.cat([mean.double(), variance.double() * count])
    parts = AllGather(scope).of(own)
    counts, means, squares = parts.split([1, channels, channels], dim=1)
    total = counts.sum()
    if count < 2 and float(total) < 2:  # checked only if possible: the host would wait for a GPU
        raise ValueError(
            "batch normalisation needs 2 values a channel while training, and all ranks together have "
            f"{float(total):.0f}"
        )
    mean = (counts * means).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return mean, variance, total


class _Normalise(Function):
    """Normalises by the statistics of all ranks; also returns them."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        scope: CollectiveScope,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _statistics(batch, scope)
        ctx.scope = scope
        deviation = (variance + eps).rsqrt()
        ctx.save_for_backward(batch, weight, mean, deviation, count)
        ctx.mark_non_differentiable(mean, variance, count)
        scale = deviation if weight is None else deviation * weight
        result = (batch - _by_channel(mean, batch)) * _by_channel(scale, batch)
        if bias is not None:
            result += _by_channel(bias, batch)
        return result.to(batch.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        batch, weight, mean, deviation, count = ctx.saved_tensors
        rows, wide = _over_rows(batch), gradient.to(_wide(batch))
        centred = batch - _by_channel(mean, batch)
        sums = torch.stack([wide.sum(rows), (wide * centred).sum(rows)]).double()
        for_bias, for_weight = sums[0], sums[1] * deviation
        mean_gradient, slope = AllReduce(ctx.scope).of(sums) / count
        slope = slope * deviation.square()
        scale = deviation if weight is None else deviation * weight
        inner = wide - _by_channel(mean_gradient, batch) - centred * _by_channel(slope, batch)
        for_batch = (inner * _by_channel(scale, batch)).to(batch.dtype)
        if weight is None:
            return for_batch, None, None, None, None
        return for_batch, for_weight.to(weight.dtype), for_bias.to(weight.dtype), None, None
