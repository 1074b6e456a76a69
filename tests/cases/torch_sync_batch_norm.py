"""Batch normalisation over all ranks equals the concatenated batch's: forward, backward and over time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import as_compiled, assert_alike, distributed, fill, generator, sgd

PLAIN: dict[int, type[nn.Module]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "without affine": {"affine": False},
    "without running statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
    "another momentum": {"momentum": 0.3, "eps": 0.01},
}
CHANNELS = 3
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def parts(step: int, dimensions: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Returns every rank's batch: more rows on later ranks, and none on the first if others have some."""
    extra = (2, 3, 2)[: dimensions - 2]
    rows = [3 * rank for rank in range(hvd.size())] if hvd.size() > 1 else [4]
    source = generator(50 + step)
    return [
        torch.randn(count, CHANNELS, *extra, generator=source, dtype=torch.float64).to(dtype) + 2
        for count in rows
    ]


def weighted(result: Tensor, step: int) -> Tensor:
    """Returns a loss that gives each element a gradient of its own."""
    return (result * torch.cos(torch.arange(result.numel(), dtype=result.dtype) + step).view_as(result)).sum()


def pair(dimensions: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    ours, plain = (
        hvd.SyncBatchNorm(CHANNELS, **options).double(),
        PLAIN[dimensions](CHANNELS, **options).double(),
    )
    fill(ours)
    fill(plain)
    return ours, plain


def compare(ours: nn.Module, plain: nn.Module, step: int, dimensions: int) -> None:
    mine = [part.clone().requires_grad_() for part in parts(step, dimensions)]
    whole = torch.cat(mine).detach().requires_grad_()
    result, expected = ours(mine[hvd.rank()]), plain(whole)
    slices = [part.shape[0] for part in mine]
    torch.testing.assert_close(result, expected.split(slices)[hvd.rank()], **CLOSE)
    weighted(result, step + hvd.rank()).backward()
    sum(weighted(part, step + rank) for rank, part in enumerate(expected.split(slices))).backward()
    assert whole.grad is not None
    torch.testing.assert_close(mine[hvd.rank()].grad, whole.grad.split(slices)[hvd.rank()], **CLOSE)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(hvd.allreduce(one.grad, op=hvd.Sum), other.grad, **CLOSE)
    for (name, one), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda why, name=name: f"{name}: {why}")


@case(options=OPTIONS)
def as_one_batch(options: str) -> None:
    ours, plain = pair(4, **OPTIONS[options])
    for step in range(3):
        ours.zero_grad()
        plain.zero_grad()
        compare(ours, plain, step, 4)


@case(dimensions=PLAIN)
def inputs_of_any_number_of_dimensions(dimensions: int) -> None:
    compare(*pair(dimensions), step=7, dimensions=dimensions)


@case()
def evaluation_uses_what_was_learnt_and_needs_nobody() -> None:
    ours, plain = pair(4)
    compare(ours, plain, 0, 4)
    ours.eval()
    plain.eval()
    if hvd.rank() == 0:
        one = parts(3)[-1]
        torch.testing.assert_close(ours(one), plain(one), **CLOSE)


@case()
def halves_are_computed_in_32_bits() -> None:
    mine = parts(0, dtype=torch.bfloat16)
    plain = nn.BatchNorm2d(CHANNELS)
    expected = plain(torch.cat(mine).float()).bfloat16()
    ours = hvd.SyncBatchNorm(CHANNELS)
    result = ours(mine[hvd.rank()].requires_grad_())
    assert result.dtype == torch.bfloat16
    own = expected.split([part.shape[0] for part in mine])[hvd.rank()]
    torch.testing.assert_close(result, own, rtol=0.01, atol=0.01)
    result.sum().backward()
    assert mine[hvd.rank()].grad.dtype == torch.bfloat16
    assert ours.weight.grad.dtype == torch.float32


@case(least=2)
def values_far_from_zero() -> None:
    """The variance is not lost in a difference of large numbers."""
    offset = torch.arange(8, dtype=torch.float32).view(8, 1).repeat(1, CHANNELS) + hvd.rank() * 8 + 2**20
    result = hvd.SyncBatchNorm(CHANNELS)(offset)
    everyone = torch.arange(8.0 * hvd.size())
    expected = (everyone - everyone.mean()) / everyone.var(correction=0).sqrt()
    torch.testing.assert_close(result[:, 0], expected[hvd.rank() * 8 :][:8], rtol=1e-4, atol=1e-4)


@case()
def converted_models_train_as_one_process() -> None:
    def model() -> nn.Module:
        layers = nn.Sequential(
            nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4))
        )
        return fill(layers.double())

    ours, plain = model(), model()
    weight = ours[1].weight
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(ours) is ours
    assert isinstance(ours[1], hvd.SyncBatchNorm)
    assert isinstance(ours[2][1], hvd.SyncBatchNorm)
    assert ours[1].weight is weight
    assert list(ours.state_dict()) == list(plain.state_dict())
    lone = hvd.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(5, affine=False).eval())
    assert isinstance(lone, hvd.SyncBatchNorm)
    assert not lone.training
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(lone) is lone

    optimizer, alone = distributed(ours, op=hvd.Sum), sgd(plain)
    for step in range(3):
        mine = parts(step)
        optimizer.zero_grad()
        alone.zero_grad()
        ours(mine[hvd.rank()]).pow(3).sum().mul(1e-3).backward()
        plain(torch.cat(mine)).pow(3).sum().mul(1e-3).backward()
        optimizer.step()
        alone.step()
    assert_alike(ours, plain)
    assert torch.allclose(ours[1].running_var, plain[1].running_var)


@case()
def inputs_that_do_not_fit() -> None:
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match=r"rows, channels.*1 dimension"):
        layer(torch.ones(CHANNELS))
    few = torch.ones(1 if hvd.rank() == 0 else 0, CHANNELS)
    with pytest.raises(ValueError, match=r"more than 1 value|2 values a channel"):
        layer(few)


@case(least=2)
def in_a_compiled_model() -> None:
    """The graph breaks at the layer, and the rest of the model is compiled."""

    def loss(model: Any, step: int, batch: Tensor) -> Tensor:
        return model(batch).square().sum() + step

    def model() -> nn.Module:
        return fill(nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).double())

    ours, plain = hvd.SyncBatchNorm.convert_sync_batchnorm(model()), model()
    compiled = as_compiled(ours, backend="eager")
    optimizer, alone = distributed(ours, op=hvd.Sum), sgd(plain)
    for step in range(2):
        mine = parts(step)
        optimizer.zero_grad()
        alone.zero_grad()
        loss(compiled, step, mine[hvd.rank()]).backward()
        loss(plain, step, torch.cat(mine)).backward()
        optimizer.step()
        alone.step()
    assert_alike(ours, plain)
