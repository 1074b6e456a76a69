"""Stale gradients: updates are those of one process that is given the same gradients in the same order."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import assert_same_on_all_ranks, generator, network, sgd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.survivors import Survivors
from sirtaki.torch.training.stale.rounds import Update


def gradients(model: nn.Module, rank: int, step: int) -> list[Tensor]:
    """Computes the gradients of a rank's step, and returns them."""
    source = generator(100 * rank + step)
    inputs, targets = (torch.randn(4, width, generator=source, dtype=torch.float64) for width in (4, 3))
    model.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    return [one.grad for one in model.parameters()]


class Trained:
    """The training of this rank, with a record of it.

    Attributes:
        bases: for each of its gradients, the number of updates with which it was computed.
        counts: for each update, the number of gradients from each rank.
        versions: the parameters after each update.
    """

    def __init__(self, staleness: int) -> None:
        self.model = network()
        self.optimizer = hvd.DistributedOptimizer(sgd(self.model), staleness=staleness)
        self.bases: list[int] = []
        self.counts: list[list[int]] = []
        self.versions = [self._parameters()]
        apply = self.optimizer._apply

        def recorded(update: Update) -> None:
            apply(update)
            self.counts.append(update.counts)
            self.versions.append(self._parameters())

        self.optimizer._apply = recorded

    def _parameters(self) -> list[Tensor]:
        return [one.detach().clone() for one in self.model.parameters()]

    def step(self) -> None:
        gradients(self.model, hvd.rank(), len(self.bases))
        self.bases.append(self.optimizer.clock())
        self.optimizer.step()


def replayed(counts: list[list[int]], bases: list[list[int]]) -> list[list[Tensor]]:
    """Returns the parameters after each update, computed in one process in the recorded order."""
    model = network()
    optimizer = sgd(model)
    parameters = list(model.parameters())
    versions = [[one.detach().clone() for one in parameters]]
    taken = [0] * len(bases)
    scratch = network()
    for update in counts:
        total = [torch.zeros_like(one) for one in parameters]
        for rank, count in enumerate(update):
            own = [torch.zeros_like(one) for one in parameters]
            for step in range(taken[rank], taken[rank] + count):
                with torch.no_grad():
                    for one, value in zip(scratch.parameters(), versions[bases[rank][step]], strict=True):
                        one.copy_(value)
                for one, gradient in zip(own, gradients(scratch, rank, step), strict=True):
                    one += gradient
            taken[rank] += count
            for one, part in zip(total, own, strict=True):
                one += part
        for one, value in zip(parameters, total, strict=True):
            one.grad = value / max(sum(update), len(bases))
        hvd.barrier()  # a plain optimizer that steps without any exchange is reported
        optimizer.step()
        versions.append([one.detach().clone() for one in parameters])
    assert taken == [len(one) for one in bases]  # each gradient is in one update
    return versions


def assert_replayed(trained: Trained, staleness: int) -> None:
    """Compares a finished training with its replay, bit for bit, and its gradients with the promise."""
    bases = hvd.allgather_object(trained.bases)
    counts = hvd.allgather_object(trained.counts)
    assert counts == [trained.counts] * hvd.size()
    for ours, theirs in zip(trained.versions, replayed(trained.counts, bases), strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
    for rank, of_rank in enumerate(bases):
        included = 0
        for number, update in enumerate(trained.counts):
            for base in of_rank[included : included + update[rank]]:
                assert number - base <= staleness
            included += update[rank]
        for step, base in enumerate(of_rank):  # all but the last ones were in an update when it was computed
            assert step - sum(update[rank] for update in trained.counts[:base]) <= staleness


@case(2, staleness=[1, 3])
def updates_are_those_of_one_process(staleness: int) -> None:
    """Pauses of random lengths give many orders; each has to be replayed exactly."""
    trained, pauses = Trained(staleness), random.Random(hvd.rank())
    while trained.optimizer.clock() < 12:
        time.sleep(pauses.choice((0, 0, 0.002, 0.006)))
        trained.step()
    trained.optimizer.synchronize()
    assert_replayed(trained, staleness)
    assert_same_on_all_ranks(trained.model)


@case(2)
def ranks_with_fewer_steps_do_not_stop_the_others() -> None:
    """Rank r has 9 - 4r batches, the third one one, or none; the training goes on after the end of all."""
    trained = Trained(2)
    for _ in range(max(9 - 4 * hvd.rank(), 0)):
        trained.step()
    trained.optimizer.synchronize()
    assert_same_on_all_ranks(trained.model)
    for _ in range(3):
        trained.step()
    trained.optimizer.synchronize()
    trained.optimizer.synchronize()  # changes nothing
    assert_replayed(trained, 2)


@case(2)
def a_parameter_without_gradients_stays() -> None:
    """As on one device; if only some ranks have a gradient, those of the others count as zeros."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in ("never", "sometimes")})
    inner = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), staleness=1)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        (2 * model["sometimes"].sum()).backward()
    optimizer.step()
    hvd.barrier()  # a rank that has ended would leave the update to the others
    optimizer.synchronize()
    assert model["never"].tolist() == [1, 1]
    assert optimizer.clock() == 1
    torch.testing.assert_close(model["sometimes"].data, torch.full((2,), 0.5 - 2 / hvd.size()))


@case(2)
def hyper_parameters_follow_the_updates() -> None:
    model = network()
    inner = sgd(model)
    optimizer = hvd.DistributedOptimizer(inner, staleness=1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    rates: list[float] = []
    optimizer.register_step_post_hook(lambda *_: rates.append(inner.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    while optimizer.clock() < 5:
        gradients(model, hvd.rank(), len(rates))
        optimizer.step()
    optimizer.synchronize()
    assert rates == [0.05 * 0.5 ** (update // 2) for update in range(len(rates))]
    assert_same_on_all_ranks(model)


@case(2)
def different_hyper_parameters_are_refused() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), staleness=1)
    optimizer.param_groups[0]["lr"] = 0.1 + hvd.rank()

    def train() -> None:
        for step in range(20):
            gradients(model, hvd.rank(), step)
            optimizer.step()
        optimizer.synchronize()

    with pytest.raises(ParametersDifferError, match=r"ranks . and . have applied .*register_step_post_hook"):
        train()


@case(2)
def unequal_starts_are_refused() -> None:
    model = network(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model), staleness=1)
    gradients(model, hvd.rank(), 0)
    with pytest.raises(ParametersDifferError, match="broadcast_parameters"):
        optimizer.step()


@case()
def no_staleness_is_the_synchronous_training() -> None:
    results = []
    for arguments in ({}, {"staleness": 0}):
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), **arguments)
        for step in range(4):
            gradients(model, hvd.rank(), step)
            optimizer.step()
        results.append((type(optimizer).__mro__[1], list(model.parameters())))
    assert results[0][0] is results[1][0]
    assert all(torch.equal(one, two) for one, two in zip(results[0][1], results[1][1], strict=True))


@case(2, fused=[False, True])
def gradients_are_handed_over_without_their_loss_scale(fused: bool) -> None:
    """Each rank has a scale of its own, and skips its own overflow: other ranks never see it."""
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)
    optimizer = hvd.DistributedOptimizer(inner, staleness=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (10 + hvd.rank()))
    for step in range(6):
        optimizer.zero_grad()
        inputs = torch.randn(4, 4, generator=generator(step), dtype=torch.float64)
        loss = model(inputs).square().mean()
        has_overflow = step == 2 and hvd.rank() == 1
        scaler.scale(loss * float("inf") if has_overflow else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.synchronize()
    assert scaler.get_scale() == 2.0 ** (10 if hvd.rank() == 1 else 10 + hvd.rank())
    assert_same_on_all_ranks(model)
    plain = network()
    assert all(
        (one - two).abs().max() < 0.5 for one, two in zip(model.parameters(), plain.parameters(), strict=True)
    )


@case()
def a_closure_and_own_gradients_work_as_on_one_device() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), staleness=2)
    with optimizer.no_sync():
        own = [one.clone() for one in gradients(model, hvd.rank(), 0)]
    assert optimizer.step(lambda: torch.tensor(3.0)) == 3
    assert all(torch.equal(p.grad, one) for p, one in zip(model.parameters(), own, strict=True))
    hvd.barrier()  # a rank that has ended would leave the update to the others
    optimizer.synchronize()
    assert optimizer.clock() == 1
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_on_all_ranks(model)


@case(2)
def a_state_is_not_loaded_between_updates() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), staleness=2)
    gradients(model, hvd.rank(), 0)
    optimizer.step()
    with pytest.raises(ValueError, match=r"call optimizer\.synchronize"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()


@case(2)
def staleness_is_refused_where_it_has_no_meaning() -> None:
    model, current_set = network(), hvd.add_process_set([0])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"staleness": -1}, "number of updates"),
        ({"staleness": True}, "number of updates"),
        ({"op": hvd.Sum}, "op=hvd.Average"),
        ({"op": hvd.Adasum}, "op=hvd.Average"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
        ({"compression": hvd.Compression.bf16}, "leave out compression"),
        ({"compression": hvd.Compression.powersgd()}, "leave out compression"),
        ({"backward_passes_per_step": 2}, "leave out backward_passes_per_step"),
        ({"groups": 2}, "leave out groups"),
        ({"process_set": current_set}, "leave out process_set"),
    ]
    for arguments, text in refused:
        with pytest.raises(ValueError, match=text):
            hvd.DistributedOptimizer(sgd(model), **{"staleness": 1, **arguments})
    with pytest.raises(ValueError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters()), staleness=1)
    scheduled = sgd(model)
    torch.optim.lr_scheduler.StepLR(scheduled, step_size=2)
    with pytest.raises(ValueError, match="make the scheduler after"):
        hvd.DistributedOptimizer(scheduled, staleness=1)
    layers = nn.Sequential(nn.Linear(2, 2), hvd.SyncBatchNorm(2))
    with pytest.raises(ValueError, match="use BatchNorm"):
        hvd.DistributedOptimizer(sgd(layers), layers.named_parameters(), staleness=1)
    optimizer = hvd.DistributedOptimizer(sgd(model), staleness=1)
    with pytest.raises(ValueError, match="nothing to skip"):
        optimizer.skip_synchronize()
    with pytest.raises(ValueError, match="add the parameters before"):
        optimizer.add_param_group({"params": []})


@case(2)
def sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(3, 2, sparse=True)
    hvd.broadcast_parameters(layer.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(layer), layer.named_parameters(), staleness=1)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="'weight' is sparse"):
        optimizer.step()


@case()
def staleness_is_refused_in_elastic_jobs() -> None:
    context, model = current(), network()
    context.survivors = Survivors()
    try:
        with pytest.raises(ValueError, match="not available in an elastic job"):
            hvd.DistributedOptimizer(sgd(model), staleness=1)
    finally:
        context.survivors = None
