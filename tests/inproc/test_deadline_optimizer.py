"""Optimizers with a deadline: every rank equals a simulation in one process, given the contributors.

As in test_deadlines.py, a rank is late because it waits for events, and no time decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from cases.torch_models import CLOSE, OPTIMIZERS, generator, network, sgd
from torch import Tensor, nn
from world import in_world, world

import sirtaki.torch as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.bindings.survivors import Survivors
from sirtaki.common.ops.handles import Handle
from sirtaki.common.training.shares import Share, using

PATIENCE = 60.0
AT_ONCE: dict[str, Any] = {"deadline": 0.0, "quorum": 0.5}
ALL: dict[str, Any] = {"deadline": 60.0, "quorum": 1.0}


def backward(model: nn.Module, rank: int, step: int) -> None:
    """Computes the gradients of a rank's batch of a step."""
    source = generator(100 * rank + step)
    inputs = torch.randn(4, 4, generator=source, dtype=torch.float64)
    targets = torch.randn(4, 3, generator=source, dtype=torch.float64)
    nn.functional.mse_loss(model(inputs), targets).backward()


class Simulation:
    """The training of all ranks in one process: one model, because their parameters are equal."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer], size: int, accumulates: bool) -> None:
        self.model = network()
        self.optimizer = make(self.model.parameters())
        self._size, self._accumulates = size, accumulates
        self.residuals: list[list[Tensor] | None] = [None] * size

    def step(self, step: int, contributors: Sequence[int]) -> None:
        shares = [self._share(rank, step) for rank in range(self._size)]
        self._apply([shares[rank] for rank in contributors], len(contributors))
        for rank in range(self._size):
            is_late = rank not in contributors
            self.residuals[rank] = shares[rank] if is_late and self._accumulates else None

    def flush(self) -> None:
        self._apply([rest for rest in self.residuals if rest is not None], self._size)
        self.residuals = [None] * self._size

    def _share(self, rank: int, step: int) -> list[Tensor]:
        self.optimizer.zero_grad()
        backward(self.model, rank, step)
        own = [parameter.grad.clone() for parameter in self.model.parameters()]  # type: ignore[union-attr]
        rest = self.residuals[rank]
        return own if rest is None else [one + more for one, more in zip(own, rest, strict=True)]

    def _apply(self, shares: Sequence[list[Tensor]], divisor: int) -> None:
        for parameter, *grads in zip(self.model.parameters(), *shares, strict=True):
            parameter.grad = torch.stack(grads).sum(0) / divisor
        self.optimizer.step()


def parameters_of(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().reshape(-1) for one in model.parameters()])


def train(optimizer: Any, model: nn.Module, steps: int, before: Callable[[int], None]) -> list[Any]:
    """Trains, and returns the parameters and contributors of each step. `before` may make the rank late."""
    history: list[Any] = []
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        backward(model, hvd.rank(), step)
        optimizer.step()
        history.append((parameters_of(model), list(optimizer.contributors)))
    return history


@pytest.mark.parametrize("late", ["accumulate", "drop"])
@pytest.mark.parametrize(("kind", "transport"), [("SGD", "shm"), ("Adam", "socket")])
def test_training_equals_a_simulation_given_the_contributors(late: str, kind: str, transport: str) -> None:
    """Rank 1 is late for steps 1 to 3, and rank 2 for step 6; others may be late as well."""
    events = {1: threading.Event(), 2: threading.Event()}

    def body() -> Any:
        rank, model = hvd.rank(), network()

        def before(step: int) -> None:
            if (rank, step) in ((1, 1), (2, 6)):
                assert events[rank].wait(PATIENCE)
            if step in (4, 7):  # step 3 or 6 is over
                events[1 if step == 4 else 2].set()

        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](model.parameters()), late=late, **AT_ONCE)
        history = train(optimizer, model, 9, before)
        return history, optimizer.flush(), parameters_of(model)

    with world(3, transport) as ranks:
        results = ranks.run(body)
    simulation = Simulation(OPTIMIZERS[kind], 3, late == "accumulate")
    for step, (parameters, contributors) in enumerate(results[0][0]):
        assert {1: 1, 2: 1, 3: 1, 6: 2}.get(step) not in contributors
        simulation.step(step, contributors)
        torch.testing.assert_close(parameters, parameters_of(simulation.model), **CLOSE)
        for history, _, _ in results[1:]:
            assert history[step][1] == contributors
            assert torch.equal(history[step][0], parameters)  # bit by bit
    has_rest = any(rest is not None for rest in simulation.residuals)
    assert [has_flushed for _, has_flushed, _ in results] == [has_rest] * 3
    if has_rest:
        simulation.flush()
    for _, _, parameters in results:
        assert torch.equal(parameters, results[0][2])
    torch.testing.assert_close(results[0][2], parameters_of(simulation.model), **CLOSE)


def test_flush_takes_a_step_with_what_is_left() -> None:
    go = threading.Event()

    def body() -> Any:
        rank, model = hvd.rank(), network()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **AT_ONCE)

        def before(step: int) -> None:
            if rank == 0 and step == 1:
                assert go.wait(PATIENCE)

        history = train(optimizer, model, 2, before)
        go.set()
        assert history[1][1] == [1, 2]
        assert optimizer.flush() is True
        assert optimizer.flush() is False
        return history[0][1], parameters_of(model)

    with world(3) as ranks:
        results = ranks.run(body)
    simulation = Simulation(OPTIMIZERS["SGD"], 3, accumulates=True)
    simulation.step(0, results[0][0])
    simulation.step(1, [1, 2])
    simulation.flush()
    for _, parameters in results:
        assert torch.equal(parameters, results[0][1])
    torch.testing.assert_close(results[0][1], parameters_of(simulation.model), **CLOSE)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_without_late_ranks_it_equals_the_synchronous_optimizer(op: int) -> None:
    def body() -> None:
        models = [network(), network()]
        plain = hvd.DistributedOptimizer(sgd(models[0]), op=op)
        timely = hvd.DistributedOptimizer(sgd(models[1]), op=op, **ALL)
        for step in range(3):
            for model, optimizer in zip(models, (plain, timely), strict=True):
                optimizer.zero_grad()
                backward(model, hvd.rank(), step)
                optimizer.step()
            torch.testing.assert_close(parameters_of(models[0]), parameters_of(models[1]), **CLOSE)
        assert list(timely.contributors) == list(range(hvd.size()))

    for size in (1, 2):
        with world(size) as ranks:
            ranks.run(body)


@in_world(2)
def test_parameters_that_no_pass_touches_keep_no_gradient() -> None:
    """A parameter that only rank 0 touches gets a gradient everywhere; one that none touches gets none."""
    touched, some, never = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([touched, some, never], lr=1.0), **ALL)
    loss = touched.sum() + (4 * some.sum() if hvd.rank() == 0 else 0)
    loss.backward()
    optimizer.synchronize()
    assert touched.grad is not None
    assert some.grad is not None
    assert touched.grad.tolist() == [1, 1]
    assert some.grad.tolist() == [2, 2]
    assert never.grad is None
    touched.grad.mul_(3)
    optimizer.step()  # with the gradients as they are now
    assert touched.tolist() == [-2, -2]
    assert some.tolist() == [-1, -1]
    assert never.tolist() == [1, 1]
    optimizer.zero_grad()
    (touched.sum() * (1 + hvd.rank())).backward()
    optimizer.synchronize()
    optimizer.zero_grad()  # instead of a step: the next one exchanges again
    (touched.sum() * hvd.rank()).backward()
    optimizer.step()
    assert touched.tolist() == [-2.5, -2.5]


@in_world(2)
def test_all_passes_before_a_step_add_up() -> None:
    models = [network(), network()]
    plain = hvd.DistributedOptimizer(sgd(models[0]), backward_passes_per_step=3)
    timely = hvd.DistributedOptimizer(sgd(models[1]), backward_passes_per_step=2, **ALL)
    for step in range(2):
        for model, optimizer in zip(models, (plain, timely), strict=True):
            optimizer.zero_grad()
            with optimizer.no_sync():
                backward(model, hvd.rank(), 3 * step)
            backward(model, hvd.rank(), 3 * step + 1)
            backward(model, hvd.rank(), 3 * step + 2)
            optimizer.step()
        torch.testing.assert_close(parameters_of(models[0]), parameters_of(models[1]), **CLOSE)
        timely.set_backward_passes_per_step(1)


@in_world(2)
def test_a_round_follows_new_passes_only() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum, **ALL)
    weight.sum().backward()
    optimizer.synchronize()
    optimizer.synchronize()
    optimizer.step()
    assert weight.item() == -2
    weight.sum().backward()
    with pytest.raises(ValueError, match="already been combined"):
        optimizer.step()


@in_world(2)
def test_a_pass_after_synchronize_is_exchanged() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **ALL)
    weight.sum().backward()
    optimizer.synchronize()
    (weight.sum() * 2 * hvd.rank()).backward()
    optimizer.step()
    assert weight.item() == -2


def test_an_interrupted_step_goes_on_with_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    wait, interrupted = Handle.wait, []

    def wait_or_interrupt(handle: Handle[Any]) -> Any:
        if hvd.rank() == 1 and not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return wait(handle)

    def body() -> Tensor:
        model = network()
        optimizer = hvd.DistributedOptimizer(sgd(model), **ALL)
        for step in range(3):
            optimizer.zero_grad()
            backward(model, hvd.rank(), step)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                optimizer.step()
        return parameters_of(model)

    with world(2) as ranks:
        expected, _ = ranks.run(body)
        monkeypatch.setattr(Handle, "wait", wait_or_interrupt)
        assert all(torch.equal(found, expected) for found in ranks.run(body))
    assert interrupted


def _double_and_single() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": hvd.Adasum}, "op=Average or op=Sum"),
        ({"op": hvd.Max}, "op=Average or op=Sum"),
        ({"compression": hvd.Compression.fp16}, "cannot be combined with compression"),
        ({"compression": hvd.Compression.powersgd()}, "cannot be combined with compression"),
        ({"groups": 2}, "cannot be combined with"),
        ({"gradient_predivide_factor": 2.0}, "cannot be combined with"),
        ({"sparse_as_dense": True}, "cannot be combined with"),
        ({"late": "never"}, "'accumulate' or 'drop'"),
        ({"deadline": -1.0}, "deadline is -1.0"),
        ({"quorum": 0}, "quorum is 0"),
    ],
)
@in_world(2)
def test_other_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.DistributedOptimizer(sgd(network()), **{"deadline": 0.1, **options})


@in_world(2)
def test_what_needs_all_ranks_in_a_step_is_refused() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        hvd.DistributedOptimizer(torch.optim.SGD(_double_and_single(), lr=1.0), deadline=1)
    context, survivors = current(), current().survivors
    context.survivors = Survivors()
    with pytest.raises(ValueError, match="elastic job"):
        hvd.DistributedOptimizer(sgd(network()), deadline=1)
    context.survivors = survivors
    model = nn.Sequential(nn.Linear(4, 4), hvd.SyncBatchNorm(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **ALL)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer, deadline=1)
    with pytest.raises(ValueError, match="SyncBatchNorm waits for all ranks"):
        model(torch.ones(3, 4))
    with pytest.raises(ValueError, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="add the parameters before"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    table = nn.Embedding(3, 2, sparse=True, _weight=torch.ones(3, 2))
    sparse = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1), **ALL)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match="is sparse"):
        sparse.step()


@in_world(2)
def test_one_batch_that_is_split_is_refused() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(model), **ALL)
    backward(model, hvd.rank(), 0)
    with using(Share(current(), 8)), pytest.raises(ValueError, match="one batch that is split"):
        optimizer.step()


@in_world(2)
def test_ranks_that_begin_with_other_parameters_are_told() -> None:
    model = network(seed=hvd.rank())
    optimizer = hvd.DistributedOptimizer(sgd(model), **ALL)
    backward(model, hvd.rank(), 0)
    with pytest.raises(ParametersDifferError):
        optimizer.step()


@in_world(2)
def test_ranks_that_begin_with_other_learning_rates_are_told() -> None:
    model = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1 + hvd.rank()), **ALL)
    backward(model, hvd.rank(), 0)
    with pytest.raises(ParametersDifferError, match="lr"):
        optimizer.step()


@in_world(2)
def test_torch_tensors_have_deadlines() -> None:
    result, contributors = hvd.allreduce(torch.full((3,), float(hvd.rank())), **ALL)
    assert result.tolist() == [0.5] * 3
    assert contributors == [0, 1]
    with pytest.raises(ValueError, match="neither compresses nor is differentiated"):
        hvd.allreduce(torch.ones(3, requires_grad=True), **ALL)
