"""Equal starts on every rank: parameters, buffers and optimizer state of one rank for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    OPTIMIZERS,
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    network,
    own_loss,
    train,
    whole_loss,
)


def roots() -> range:
    return range(hvd.size())


def model_with_buffers(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(4, 2).to(torch.bfloat16))
    model.register_buffer("mask", torch.tensor([seed % 2 == 0, True]))
    model[1].running_mean += seed
    model[1].num_batches_tracked += seed
    return model


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


@case(what=["state_dict", "named_parameters", "list"])
def parameters_of_one_rank_for_all(what: str) -> None:
    for root in roots():
        mine, theirs = model_with_buffers(hvd.rank()), model_with_buffers(root)
        with torch.no_grad():  # ranks that are threads share torch's generator
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                one.fill_(hvd.rank())
                other.fill_(root)
        if what == "state_dict":
            hvd.broadcast_parameters(mine.state_dict(), root)
            assert same_state(mine.state_dict(), theirs.state_dict())
        else:
            named = mine.named_parameters() if what == "named_parameters" else list(mine.parameters())
            hvd.broadcast_parameters(named, root)
            for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(one, other)


@case()
def tied_and_overlapping_and_odd_tensors() -> None:
    weights = torch.full((4, 4), float(hvd.rank()))
    tensors = {
        "weight": weights,
        "tied": weights,
        "row": weights[1],
        "column": torch.full((4, 4), float(hvd.rank()))[:, 2],
        "transposed": torch.full((3, 4), float(hvd.rank())).t(),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(hvd.rank()),
    }
    hvd.broadcast_parameters(tensors, hvd.size() - 1)
    assert all((tensor == hvd.size() - 1).all() for tensor in tensors.values())
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)


@case(kind=OPTIMIZERS)
def optimizer_state_where_only_the_root_has_some(kind: str) -> None:
    """Only the root has loaded a checkpoint."""
    root = hvd.size() - 1
    model, plain = network(), network()
    optimizer, alone = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](plain.parameters())
    train(plain, alone, whole_loss, steps=2)
    alone.param_groups[0]["lr"] *= 0.5
    if hvd.rank() == root:
        model.load_state_dict(plain.state_dict())
        optimizer.load_state_dict(alone.state_dict())
        for state in optimizer.state.values():  # torch would share the tensors otherwise
            state.update(
                {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}
            )
    optimizer = distributed(model, optimizer)
    hvd.broadcast_parameters(model.state_dict(), root)
    hvd.broadcast_optimizer_state(optimizer, root)
    train(model, optimizer, own_loss, steps=3)
    train(plain, alone, whole_loss, steps=3)
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case()
def optimizer_state_that_the_root_does_not_have() -> None:
    model = network()
    optimizer = OPTIMIZERS["Adam"](model.parameters())
    if hvd.rank() != 0:
        train(model, optimizer, whole_loss, steps=1)
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert not optimizer.state


@case()
def options_of_every_kind() -> None:
    model = network()
    mine = float(hvd.rank() + 1)
    optimizer = torch.optim.Adam(
        [{"params": model[0].parameters(), "betas": (0.5 / mine, 0.9)}, {"params": model[2].parameters()}],
        lr=torch.tensor(0.1 * mine),
        amsgrad=hvd.rank() == 0,
    )
    optimizer.param_groups[1]["note"] = {"rank": hvd.rank(), "list": [hvd.rank(), None]}
    if hvd.rank() > 0:
        optimizer.param_groups[0]["extra"] = 1
    hvd.broadcast_optimizer_state(optimizer, 0)
    first, second = optimizer.param_groups
    assert first["betas"] == (0.5, 0.9)
    assert torch.equal(first["lr"], torch.tensor(0.1))
    assert first["amsgrad"] is True
    assert "extra" not in first
    assert second["note"] == {"rank": 0, "list": [0, None]}
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2]
    assert first["params"][0] is model[0].weight


@case()
def state_keeps_its_tensors_where_they_fit() -> None:
    model = network()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    train(model, optimizer, own_loss, steps=1)
    buffers = [optimizer.state[one]["momentum_buffer"] for one in model.parameters()]
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert all(
        optimizer.state[one]["momentum_buffer"] is kept
        for one, kept in zip(model.parameters(), buffers, strict=True)
    )


@case()
def objects() -> None:
    sent = {"epoch": 3, "rank": hvd.rank(), "tensor": torch.arange(3)}
    received = hvd.broadcast_object(sent, root_rank=hvd.size() - 1, name="checkpoint")
    assert received["rank"] == hvd.size() - 1
    assert torch.equal(received["tensor"], torch.arange(3))
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
