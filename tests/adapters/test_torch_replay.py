"""`--replay`: a rank that computes a batch otherwise than before, or than other ranks, is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cases.torch_models import distributed, network, own_loss  # noqa: E402
from cases.warned import warnings_of_this_rank  # noqa: E402
from torch import nn  # noqa: E402
from world import in_world, world  # noqa: E402

import sirtaki.torch as hvd  # noqa: E402
from sirtaki.common.exceptions import ParametersDifferError, ResultsDifferError  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

Err = Callable[[int, int], bool]  # whether the forward pass of a rank errs, by its rank and the call's index


class Erring(nn.Module):
    """A model whose forward pass may err in the last bit, with buffers.

    Ranks that are threads share torch's random numbers, so only a single rank has dropout.
    """

    def __init__(self, err: Err) -> None:
        super().__init__()
        self.layers, self.norm = network(), nn.BatchNorm1d(4)
        self.dropout = nn.Dropout(0.5) if hvd.size() == 1 else nn.Identity()
        self.double().err, self.calls = err, 0

    def forward(self, inputs: Any, *, scale: float) -> Any:
        self.calls += 1
        outputs = self.layers(self.dropout(self.norm(inputs))) * scale
        return outputs * (1 + 2**-50) if self.err(hvd.rank(), self.calls) else outputs


def training(err: Err, steps: int = 6, **options: Any) -> tuple[Any, list[str]]:
    """Trains, and returns the model and this rank's warnings."""
    model = Erring(err)
    source = torch.Generator().manual_seed(hvd.rank())
    optimizer = distributed(model, **options)
    with warnings_of_this_rank() as caught:
        for _ in range(steps):
            optimizer.zero_grad()
            model(
                torch.randn(8, 4, dtype=torch.float64, generator=source), scale=3.0
            ).square().mean().backward()
            optimizer.step()
    return model, caught


def never(rank: int, call: int) -> bool:
    return False


@pytest.mark.parametrize(("size", "options"), [(1, {}), (2, {}), (2, {"shard": "state"}), (2, {"groups": 1})])
def test_a_replay_changes_nothing(size: int, options: dict[str, Any]) -> None:
    """Neither the results, nor random numbers, nor the buffers."""

    def body() -> tuple[Any, int, list[str]]:
        if size == 1:
            torch.manual_seed(3)
        model, caught = training(never, **options)
        return model.state_dict(), model.calls, caught

    with world(size) as ranks:
        plain = ranks.run(body)
    with world(size, replay="2") as ranks:
        replayed = ranks.run(body)
    for (expected, calls, _), (actual, more_calls, caught) in zip(plain, replayed, strict=True):
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        assert (calls, more_calls) == (6, 6 + 2 * 3)
        assert not caught


@pytest.mark.parametrize(
    ("err", "words"),
    [
        (lambda rank, call: rank == 1 and call == 3, "a batch twice, with different bits, and"),
        (lambda rank, call: rank == 1, "other bits from the same batch and parameters than 2 of 3 ranks"),
    ],
)
@in_world(3, replay="2")
def test_a_rank_that_errs_is_named_on_all_ranks(err: Err, words: str) -> None:
    with pytest.raises(ResultsDifferError, match=rf"^rank 1 \(pid \d+ on .*\) computed {words}"):
        training(err)


def test_a_model_that_is_not_repeatable_ends_the_replays() -> None:
    def body() -> tuple[int, list[str]]:
        model, caught = training(lambda _, call: call % 2 == 1)
        return model.calls, caught

    with world(2, replay="2") as ranks:
        (calls, (text,)), (others_calls, nothing) = ranks.run(body)
    assert calls == others_calls == 6 + 2
    assert "torch.use_deterministic_algorithms(True) names it" in text
    assert not nothing


@in_world(2, replay="4")
def test_other_parameters_are_reported_as_such() -> None:
    model = network()
    optimizer = distributed(model)
    for step in range(4):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        if step == 3:
            with torch.no_grad():
                model[0].weight.add_(hvd.rank())
            with pytest.raises(ParametersDifferError, match=r"0\.weight"):
                optimizer.step()
        else:
            optimizer.step()


@in_world(1, replay="1")
def test_what_cannot_be_replayed_is_refused() -> None:
    for options in ({"overlap_forward": True}, {"op": hvd.Adasum}, {"staleness": 1}, {"deadline": 1.0}):
        with pytest.raises(ValueError, match="Leave out --replay"):
            distributed(network(), **options)
