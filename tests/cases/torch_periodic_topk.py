"""DiLoCo that sends the largest differences only: to the bit as a replay of all ranks in one process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_same_on_all_ranks, fill, sgd
from cases.torch_periodic import train_step
from sirtaki.bindings.errors import ParametersDifferError

FRACTION, EVERY = 0.05, 4
WIDTH = 400  # two matrices of 1,600 and 1,200 elements: tensors of fewer than 1,024 are averaged exactly
TOPK = hvd.Compression.topk(FRACTION, start=0)


def matrices(seed: int = 0) -> nn.Module:
    """Returns a model of two matrices, of which none has a bias: all sums are those of the compression."""
    layers = nn.Linear(4, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 3, bias=False)
    return fill(nn.Sequential(*layers).double(), seed)


def largest(values: Tensor) -> Tensor:
    """Returns the largest elements, and zeros in place of the others."""
    flat, kept = values.reshape(-1), torch.zeros(values.numel(), dtype=values.dtype)
    places = flat.abs().argsort(descending=True)[: ceil(FRACTION * flat.numel())]
    kept[places] = flat[places]
    return kept.view(values.shape)


class Replay:
    """All ranks in one process: what each has left out, and one copy of the parameters for all."""

    def __init__(self, size: int) -> None:
        self.models = [matrices() for _ in range(size)]
        self.optimizers = [sgd(model) for model in self.models]
        self.whole = matrices()
        self.outer = torch.optim.SGD(self.whole.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.left_out = [[torch.zeros_like(one) for one in model.parameters()] for model in self.models]

    def step(self, step: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            train_step(self.models[rank], self.optimizers[rank], rank, step)

    def average(self, indices: Sequence[int], weights: Sequence[float]) -> dict[int, Tensor]:
        """Returns the averages of the ranks' differences, and changes what they have left out."""
        found = {}
        for index in indices:
            whole = [*self.whole.parameters()][index].detach()
            total = torch.zeros_like(whole)
            for rank, (model, weight) in enumerate(zip(self.models, weights, strict=True)):
                if weight:
                    own = whole - [*model.parameters()][index].detach()
                    values = (own + self.left_out[rank][index]) * weight
                    sent = largest(values)
                    self.left_out[rank][index] = (values - sent) / weight
                    total += sent
            found[index] = total / sum(weights)
        return found

    @torch.no_grad()
    def apply(self, averages: dict[int, Tensor], alpha: float = 0.0) -> None:
        for index, parameter in enumerate(self.whole.parameters()):
            parameter.grad = averages.get(index)
        self.outer.step()
        for index in averages:
            for model in self.models:
                one = [*model.parameters()][index]
                one.copy_([*self.whole.parameters()][index].lerp(one, alpha))

    def assert_equals(self, model: nn.Module, optimizer: Any, rank: int) -> None:
        for found, expected in zip(model.parameters(), self.models[rank].parameters(), strict=True):
            assert torch.equal(found, expected)
        for index, residual in residuals(optimizer).items():
            assert torch.equal(residual, self.left_out[rank][index])


def residuals(optimizer: Any) -> dict[int, Tensor]:
    return copy.deepcopy(optimizer.state_dict()["compression"]["residuals"])


def diloco(model: nn.Module, compression: Any = TOPK, **options: Any) -> Any:
    return hvd.DiLoCo(model, sgd(model), every=EVERY, compression=compression, **options)


def take_windows(model: nn.Module, optimizer: Any, windows: range) -> None:
    for step in range(windows.start * EVERY, windows.stop * EVERY):
        train_step(model, optimizer, hvd.rank(), step)


@case(least=2, how=[(1, 0, 0.0), (1, 2, 0.25), (2, 0, 0.0), (2, 1, 0.25)])
def the_largest_differences_are_averaged(how: tuple[int, int, float]) -> None:
    fragments, overlap, alpha = how
    model, size = matrices(), hvd.size()
    optimizer = diloco(model, fragments=fragments, overlap=overlap, alpha=alpha)
    replay, weights = Replay(size), [1.0] * size
    pending: tuple[int, dict[int, Tensor]] | None = None
    if fragments == 2:  # the first average of the first fragment is due after half a window
        weights = [0.5] * size
    for step in range(1, 4 * EVERY + 1):
        train_step(model, optimizer, hvd.rank(), step)
        replay.step(step, range(size))
        if pending is not None and pending[0] == step:
            replay.apply(pending[1], alpha)
            pending = None
        for fragment in range(fragments):
            if step % EVERY == (fragment + 1) * EVERY // fragments % EVERY:
                averages = replay.average([0, 1] if fragments == 1 else [fragment], weights)
                weights = [1.0] * size
                pending = step + overlap, averages
                if not overlap:
                    replay.apply(averages, alpha)
        if pending is None:  # what an average leaves out is known at its end
            replay.assert_equals(model, optimizer, hvd.rank())
    assert len(residuals(optimizer)) == 2
    assert all(one.any() for one in residuals(optimizer).values())
    optimizer.synchronize()
    assert_same_on_all_ranks(model)


@case(least=2)
def ranks_that_have_ended_keep_what_they_left_out() -> None:
    """Rank r has 14 - 5r batches; a rank multiplies what it sends by its share of a window's steps."""
    model, size = matrices(), hvd.size()
    optimizer, replay = diloco(model), Replay(hvd.size())
    counts = [max(14 - 5 * rank, 0) for rank in range(size)]
    for step in range(counts[hvd.rank()]):
        train_step(model, optimizer, hvd.rank(), step)
    optimizer.synchronize()
    for window in range(0, max(counts) + 1, EVERY):
        for step in range(window, window + EVERY):
            replay.step(step, [rank for rank in range(size) if step < counts[rank]])
        weights = [min(max(count - window, 0), EVERY) / EVERY for count in counts]
        if sum(weights):
            replay.apply(replay.average([0, 1], weights))
    replay.assert_equals(model, optimizer, hvd.rank())
    assert_same_on_all_ranks(model)


@case(least=2)
def bytes_are_those_of_the_largest() -> None:
    """The first two averages are exact; biases and small matrices are in all of them."""
    model = fill(nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)).double())
    optimizer, before = diloco(model, hvd.Compression.topk(FRACTION, start=2)), hvd.stats()["compression"]
    assert before["exchanges"] == 0
    plain = copy.deepcopy(model)
    exact = diloco(plain, hvd.Compression.none)
    for window in range(2):
        take_windows(model, optimizer, range(window, window + 1))
        take_windows(plain, exact, range(window, window + 1))
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
    assert hvd.stats()["compression"] == before
    take_windows(model, optimizer, range(2, 4))
    found, n = hvd.stats()["compression"], hvd.size()
    assert found["exchanges"] == 2
    assert found["exact_bytes"] == round(2 * 2 * (n - 1) / n * 8 * 7 * WIDTH)
    assert found["sent_bytes"] == 2 * (n - 1) * (8 + 12 * (7 * WIDTH // 20))  # marks, places and values
    assert 0.1 < found["relative_error"] < 1
    assert [*residuals(optimizer)] == [0, 2]
    assert_same_on_all_ranks(model)


@case(least=2)
def training_continues_with_what_was_left_out() -> None:
    model = matrices()
    optimizer = diloco(model)
    take_windows(model, optimizer, range(2))
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    take_windows(model, optimizer, range(2, 4))

    def continued(state: dict[str, Any]) -> tuple[nn.Module, Any]:
        other = matrices(seed=9)
        again = diloco(other)
        take_windows(other, again, range(1))  # what this has left out is forgotten
        other.load_state_dict(weights)
        again.load_state_dict(copy.deepcopy(state))
        return other, again

    other, again = continued(saved)
    take_windows(other, again, range(2, 4))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    of_rank_0 = hvd.broadcast_object(saved, root_rank=0)
    _, again = continued(of_rank_0)
    assert len(residuals(again)) == (2 if hvd.rank() == 0 else 0)
    assert again.state_dict()["compression"]["exchanges"] == saved["compression"]["exchanges"] == 2
    del saved["compression"]
    other, again = continued(saved)
    assert residuals(again) == {}
    take_windows(other, again, range(2, 3))
    assert_same_on_all_ranks(other)


@case(least=2)
def a_state_of_another_compression_is_refused() -> None:
    model, other = matrices(), matrices()
    optimizer, again = diloco(model), diloco(other, hvd.Compression.topk(0.5))
    take_windows(model, optimizer, range(1))
    with pytest.raises(ValueError, match="make it with the same compression"):
        again.load_state_dict(optimizer.state_dict())


@case(least=2)
def exact_averages_are_counted_alike_on_all_ranks() -> None:
    """Rank 0 alone has loaded a state, whose exact averages are over."""
    model = matrices()
    optimizer = diloco(model, hvd.Compression.topk(FRACTION, start=2))
    if hvd.rank() == 0:
        state = optimizer.state_dict()
        state["compression"]["exchanges"] = 2
        optimizer.load_state_dict(state)
    take_windows(model, optimizer, range(1))
    assert len(residuals(optimizer)) == 2
    assert_same_on_all_ranks(model)


@case(least=2, other=["none", "topk"])
def different_compressions_are_named(other: str) -> None:
    model, kinds = matrices(), {"none": hvd.Compression.none, "topk": hvd.Compression.topk(0.9)}
    optimizer = diloco(model, TOPK if hvd.rank() == 0 else kinds[other])
    with pytest.raises(ParametersDifferError, match=r"'compression=TopK\(.*' is on rank"):
        train_step(model, optimizer, hvd.rank(), 0)


@case(least=3)
def a_process_set_averages_its_own_differences() -> None:
    members, ranks = hvd.add_process_set([0, 2]), (0, 2)
    model, replay = matrices(), Replay(hvd.size())
    optimizer = diloco(model, process_set=members)
    if hvd.rank() in ranks:
        weights = [float(rank in ranks) for rank in range(hvd.size())]
        for window in range(3):
            take_windows(model, optimizer, range(window, window + 1))
            for step in range(window * EVERY, (window + 1) * EVERY):
                replay.step(step, ranks)
            replay.apply(replay.average([0, 1], weights))
        replay.assert_equals(model, optimizer, hvd.rank())
    hvd.remove_process_set(members)


@case(least=2, value=[float("inf"), float("nan")])
def what_is_not_finite_is_seen_on_all_ranks(value: float) -> None:
    model = matrices()
    optimizer = diloco(model)
    take_windows(model, optimizer, range(1))
    before = residuals(optimizer)
    for step in range(EVERY, 2 * EVERY):
        train_step(model, optimizer, hvd.rank(), step)
        if step == EVERY and hvd.rank() == hvd.size() - 1:
            with torch.no_grad():
                model[0].weight[3, 2] = value
    assert not model[0].weight.isfinite().all()
    assert all(torch.equal(one, before[index]) for index, one in residuals(optimizer).items())
    assert_same_on_all_ranks(model)


@case(least=2, dtype=[torch.float32, torch.bfloat16])
def parameters_of_fewer_bits_are_equal_on_all_ranks(dtype: torch.dtype) -> None:
    model = matrices().to(dtype)
    optimizer = diloco(model)
    for step in range(3 * EVERY):
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        optimizer.zero_grad()
        model(inputs.to(dtype)).float().square().mean().backward()
        optimizer.step()
    assert all(one.dtype == dtype for one in model.parameters())
    assert all(one.dtype == torch.float32 for one in residuals(optimizer).values())
    assert_same_on_all_ranks(model.float())


@case(least=2)
def without_error_feedback_nothing_is_left() -> None:
    model = matrices()
    optimizer = diloco(model, hvd.Compression.topk(FRACTION, start=0, error_feedback=False))
    take_windows(model, optimizer, range(2))
    assert residuals(optimizer) == {}
    assert_same_on_all_ranks(model)


@case()
def a_world_of_one_rank_leaves_nothing_out() -> None:
    if hvd.size() > 1:
        return
    model, plain = matrices(), matrices()
    optimizer, exact = diloco(model), diloco(plain, hvd.Compression.none)
    take_windows(model, optimizer, range(2))
    take_windows(plain, exact, range(2))
    assert residuals(optimizer) == {}
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
