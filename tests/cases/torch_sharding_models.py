"""Pairs of optimizers, with shard= and without, and comparisons of them to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cases.torch_models import distributed, network

SHARDS = ("state", "gradients")
WIDTH = 40  # parameters of 3 to 1,600 elements: some do not fill a block, some are cut
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda given: torch.optim.SGD(given, lr=0.05),
    "momentum": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Nesterov": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, nesterov=True, foreach=False),
    "fused SGD": lambda given: torch.optim.SGD(given, lr=0.05, momentum=0.9, fused=True),
    "Adam": lambda given: torch.optim.Adam(given, lr=0.01),
    "amsgrad": lambda given: torch.optim.Adam(given, lr=0.01, amsgrad=True, foreach=False),
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, weight_decay=0.05),
    "fused AdamW": lambda given: torch.optim.AdamW(given, lr=0.01, fused=True),
    "NAdam": lambda given: torch.optim.NAdam(given, lr=0.01),
    "RAdam": lambda given: torch.optim.RAdam(given, lr=0.01),
    "Adamax": lambda given: torch.optim.Adamax(given, lr=0.01),
    "Adadelta": lambda given: torch.optim.Adadelta(given),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.05),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda given: torch.optim.Rprop(given),
    "ASGD": lambda given: torch.optim.ASGD(given, lr=0.01),
}
WHOLE = [name for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)]


def both(shard: str, make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float64) -> Any:
    """Returns two equal models with their optimizers: with shard=, and without."""
    models = [network(width=WIDTH).to(dtype) for _ in range(2)]
    return [
        (model, distributed(model, make(model.parameters()), shard=how))
        for model, how in zip(models, (shard, None), strict=True)
    ]


def wide_network() -> nn.Module:
    return network(width=WIDTH)


def assert_same_bits(
    run: Callable[[Any, str | None], Any],
    build: Callable[[], nn.Module] = wide_network,
    shards: Sequence[str] = SHARDS,
) -> None:
    """Trains equal models, with each `shard` and with none; compares parameters and results to the bit."""
    other = build()
    expected = run(other, None)
    for shard in shards:
        model = build()
        assert run(model, shard) == expected
        assert_equal(model, other)


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    """Checks that parameters have the same bits."""
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), f"{name} differs by {(one - two).abs().max()}"


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [one for values in optimizer.state.values() for one in values.values()]
    return sum(one.numel() * one.element_size() for one in tensors if isinstance(one, Tensor))


def assert_states_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, values in other["state"].items():
        assert one["state"][number].keys() == values.keys()
        for key, value in values.items():
            ours = one["state"][number][key]
            if isinstance(value, Tensor):
                assert (ours.shape, ours.dtype, ours.stride()) == (value.shape, value.dtype, value.stride())
                assert torch.equal(ours, value), f"{key} of parameter {number}"
            else:
                assert ours == value
