"""Optimizers with overlap_forward=True: calls besides those of a step, and what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import as_compiled, distributed, network, own_loss
from cases.torch_overlap_models import alike, assert_equal, both, in_flight, plain_step
from cases.warned import warnings_of_this_rank
from sirtaki.common.exceptions import HorovodInternalError, MismatchError
from sirtaki.torch._private import has_compiled


@case()
def state_that_is_saved_and_loaded() -> None:
    (model, optimizer), (other, plain) = both()
    for step in range(3):
        plain_step(model, optimizer, step)
        plain_step(other, plain, step)
        saved, expected = copy.deepcopy(optimizer.state_dict()), plain.state_dict()
        assert saved["param_groups"] == expected["param_groups"]
        for number, values in expected["state"].items():
            assert all(torch.equal(value, saved["state"][number][name]) for name, value in values.items())
    plain_step(model, optimizer, 3)
    copied = copy.deepcopy(optimizer)
    assert type(copied) is torch.optim.Adam
    optimizer.load_state_dict(saved)
    plain.load_state_dict(expected)
    model.load_state_dict(other.state_dict())
    alike([(model, optimizer), (other, plain)], plain_step)


@case()
def parameters_that_are_added_or_frozen() -> None:
    pairs = []
    for overlap in (True, False):
        model = network()
        optimizer = torch.optim.Adam(model[:2].parameters(), lr=0.01)
        pairs.append((model, hvd.DistributedOptimizer(optimizer, overlap_forward=overlap)))
    alike(pairs, plain_step, steps=2)
    for model, optimizer in pairs:
        plain_step(model, optimizer, 2)
        optimizer.add_param_group({"params": model[2:].parameters(), "lr": 0.1})
    alike(pairs, plain_step, steps=3)
    for model, optimizer in pairs:
        plain_step(model, optimizer, 3)
        model[0].weight.requires_grad_(False)
    alike(pairs, plain_step, steps=3)


@case()
def an_optimizer_that_is_dropped() -> None:
    (model, optimizer), (other, plain) = both()
    plain_step(model, optimizer, 0)
    plain_step(other, plain, 0)
    del optimizer
    assert_equal(model, other)
    assert not in_flight(model)


@case()
def threads_that_use_a_parameter_at_once() -> None:
    (model, optimizer), (other, plain) = both()
    for step in range(4):
        plain_step(model, optimizer, step)
        plain_step(other, plain, step)
        found: list[Tensor] = []

        def use(into: list[Tensor] = found) -> None:
            into.append(model[2].weight.detach().clone())

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert all(torch.equal(one, other[2].weight.detach()) for one in found)


@case(least=2)
def a_failed_step() -> None:
    model = network(width=5 if hvd.rank() else 6)
    optimizer = distributed(model, overlap_forward=True)
    own_loss(model, 0).backward()
    optimizer.step()
    with pytest.raises(MismatchError, match="shape"):
        model(torch.ones(1, 4, dtype=torch.float64))
    assert not in_flight(model)
    optimizer.zero_grad()
    with pytest.raises(HorovodInternalError, match="an earlier step has failed"):
        own_loss(model, 1).backward()


@case(is_whole=[True, False])
def a_compiled_model(is_whole: bool) -> None:
    pairs = both(has_compiled=has_compiled)
    compiled = {id(model): as_compiled(model, backend="eager", fullgraph=is_whole) for model, _ in pairs}

    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        own_loss(compiled[id(model)], number).backward()
        assert not in_flight(model)
        optimizer.step()

    with warnings_of_this_rank() as texts:
        alike(pairs, step)
    told = [text for text in texts if "torch.compile" in text]
    assert len(told) == (1 if hvd.rank() == 0 and hvd.size() > 1 else 0), texts


@case()
def what_is_refused() -> None:
    def refused(words: str, optimizer: Any = None, **options: Any) -> None:
        model = network()
        with pytest.raises(ValueError, match=words):
            distributed(model, optimizer and optimizer(model), overlap_forward=True, **options)

    refused("Adasum", op=hvd.Adasum)
    refused("one by one", compression=hvd.Compression.powersgd())
    refused("groups", groups=2)
    refused("overlap_forward cannot be combined|overlap_forward", shard="state")
    refused("overlap_forward", staleness=1)
    refused("overlap_forward", deadline=0.1)
    refused("not LBFGS", lambda model: torch.optim.LBFGS(model.parameters()))
    refused("differentiable", lambda model: torch.optim.SGD(model.parameters(), differentiable=True))
    if hvd.size() > 1:
        embedding = nn.Embedding(5, 3, sparse=True).double()
        optimizer = distributed(
            embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), overlap_forward=True
        )
        with pytest.raises(ValueError, match="sparse"):
            embedding(torch.tensor([1])).sum().backward()
        optimizer.zero_grad()
    plain = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"torch\.nn\.Parameter"):
        hvd.DistributedOptimizer(torch.optim.SGD([plain], lr=0.1), overlap_forward=True)
