"""State that was divided among some ranks, in a world of another size, or in none."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from cases.torch_models import assert_alike, distributed, network, own_loss, train, whole_loss
from world import world

import sirtaki.torch as hvd

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTH = 40


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def trained(shard: str, saved: dict[str, Any] | None) -> dict[str, Any]:
    """Trains on from what another world has saved, and returns what it saves itself."""
    model = network(width=WIDTH)
    optimizer = distributed(model, adam(model), shard=shard)
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # torch keeps the tensors it is given
    train(model, optimizer, own_loss)
    return {"model": model.state_dict(), "optimizer": hvd.full_state_dict(optimizer)}


@pytest.mark.parametrize("shard", ["state", "gradients"])
def test_a_checkpoint_of_three_ranks_is_loaded_by_two_and_by_one(shard: str) -> None:
    saved: dict[str, Any] | None = None
    for size in (3, 2, 1, 3):
        with world(size) as ranks:
            saved = ranks.run(trained, shard, saved)[-1]
    alone = network(width=WIDTH)
    plain = adam(alone)
    for _ in range(4):
        train(alone, plain, whole_loss)
    assert saved is not None
    model = network(width=WIDTH)
    model.load_state_dict(saved["model"])
    assert_alike(model, alone)
    loaded = adam(model)
    loaded.load_state_dict(saved["optimizer"])
    train(model, loaded, whole_loss)
    train(alone, plain, whole_loss)
    assert_alike(model, alone)


def test_slices_do_not_outlive_their_world() -> None:
    models = [network(), network()]
    optimizers: dict[int, Any] = {}

    def begin() -> None:
        optimizers[hvd.rank()] = distributed(models[hvd.rank()], shard="state")

    def go_on() -> None:
        with pytest.raises(ValueError, match="make a new optimizer, and load"):
            distributed(models[hvd.rank()], optimizers[hvd.rank()], shard="state")

    for body in (begin, go_on):
        with world(2) as ranks:
            ranks.run(body)
