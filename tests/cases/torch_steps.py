"""Training steps that optimizers count, of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import distributed, network, own_loss, sgd, train
from sirtaki.torch import device

STEPS = 4
Make = Callable[[Any], Any]


def is_on_cpu(model: Any) -> bool:
    return device.ordinal(model[0].weight) < 0


def count_of(make: Make) -> int:
    """Returns how many steps are counted in STEPS of an optimizer."""
    model = network()
    optimizer = make(model)
    before = hvd.stats()["steps"]["count"]
    train(model, optimizer, own_loss, steps=STEPS)
    return hvd.stats()["steps"]["count"] - before


@case()
def steps_are_counted_and_timed() -> None:
    assert count_of(distributed) == STEPS
    steps = hvd.stats()["steps"]
    assert (steps["count"], steps["number"]) == (STEPS, STEPS)
    assert sum(steps["times"]["counts"]) == STEPS - 1
    assert len(steps["times"]["counts"]) == len(steps["times"]["bounds"]) + 1
    assert 0 < steps["last_seconds"] <= steps["times"]["total_seconds"]
    assert 0 < steps["productive_seconds"] <= steps["times"]["total_seconds"]
    assert steps["age_seconds"] > 0


@case()
def a_plain_optimizer_counts_nothing() -> None:
    assert count_of(sgd) == 0
    assert hvd.stats()["steps"]["exposed_seconds"] is None


@case()
def each_kind_of_optimizer_counts_its_steps() -> None:
    kinds: dict[str, Make] = {
        "adasum": lambda model: distributed(model, op=hvd.Adasum),
        "sharded": lambda model: distributed(model, shard="state"),
        "local": lambda model: hvd.LocalSGD(sgd(model), every=2),
    }
    if is_on_cpu(network()):
        kinds["overlapped"] = lambda model: distributed(model, overlap_forward=True)
        kinds["with a deadline"] = lambda model: distributed(model, deadline=60.0)
    assert {kind: count_of(make) for kind, make in kinds.items()} == dict.fromkeys(kinds, STEPS)


@case()
def an_update_that_stale_ranks_share_counts_once() -> None:
    model = network()
    optimizer = distributed(model, staleness=1)
    train(model, optimizer, own_loss, steps=STEPS)
    optimizer.synchronize()
    assert hvd.stats()["steps"]["count"] == optimizer.clock()


@case()
def a_step_with_a_closure_counts_once() -> None:
    model = network()
    optimizer = distributed(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

    def loss() -> Any:
        optimizer.zero_grad()
        value = own_loss(model, 0)
        value.backward()
        return value

    optimizer.step(loss)
    assert hvd.stats()["steps"]["count"] == 1


@case()
def only_waits_of_the_program_are_exposed() -> None:
    model = network()
    train(model, distributed(model), own_loss, steps=STEPS)
    exposed = hvd.stats()["steps"]["exposed_seconds"]
    if hvd.size() > 1 and is_on_cpu(model):
        assert exposed is not None
        assert exposed > 0
    else:  # there is nothing to wait for, or a stream waits
        assert exposed is None
