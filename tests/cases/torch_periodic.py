"""Local SGD and DiLoCo: every rank equals its replica in a simulation of all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

Average = Callable[[list[Tensor]], Tensor]
CLOSE = {"rtol": 1e-11, "atol": 1e-13}


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Returns a rank's batch of a step."""
    source = generator(100 * rank + step)
    inputs = torch.randn(4, 4, generator=source, dtype=torch.float64)
    return inputs, torch.randn(4, 3, generator=source, dtype=torch.float64)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    inputs, targets = data(rank, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


class Replicas:
    """The models of all ranks, in one process."""

    def __init__(self, size: int) -> None:
        self.models = [network() for _ in range(size)]
        self.optimizers = [sgd(model) for model in self.models]

    def step(self, step: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            train_step(self.models[rank], self.optimizers[rank], rank, step)

    def parameters(self, place: int) -> list[Tensor]:
        return [list(model.parameters())[place].data for model in self.models]

    @property
    def places(self) -> range:
        return range(len(list(self.models[0].parameters())))

    def average(self, weights: Sequence[float]) -> None:
        for place in self.places:
            ours = self.parameters(place)
            mean = sum(one * weight for one, weight in zip(ours, weights, strict=True)) / sum(weights)
            for one in ours:
                one.copy_(mean)


def assert_replica(model: nn.Module, replica: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), replica.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@case(every=[1, 3])
def parameters_are_averaged(every: int) -> None:
    model, replicas = network(), Replicas(hvd.size())
    optimizer = hvd.LocalSGD(sgd(model), every)
    for step in range(7):
        train_step(model, optimizer, hvd.rank(), step)
        replicas.step(step, range(hvd.size()))
        if (step + 1) % every == 0:
            replicas.average([1.0] * hvd.size())
        assert optimizer.is_synchronized == ((step + 1) % every == 0)
        assert_replica(model, replicas.models[hvd.rank()])
    optimizer.synchronize()
    replicas.average([1.0] * hvd.size())
    assert_replica(model, replicas.models[0])
    assert_same_on_all_ranks(model)


@case()
def ranks_with_fewer_steps_count_less() -> None:
    """Rank r has 8 - 3r batches; the ranks average after 3 steps, and at the end of each one's data."""
    size, every = hvd.size(), 3
    model, replicas = network(), Replicas(size)
    optimizer = hvd.LocalSGD(sgd(model), every)
    steps = [max(8 - 3 * rank, 0) for rank in range(size)]
    for step in range(steps[hvd.rank()]):
        train_step(model, optimizer, hvd.rank(), step)
    optimizer.synchronize()
    for window in range(0, max(steps) + 1, every):
        taken = [min(max(count - window, 0), every) for count in steps]
        for step in range(window, window + every):
            replicas.step(step, [rank for rank in range(size) if step < steps[rank]])
        if sum(taken):
            replicas.average(taken)
    assert_replica(model, replicas.models[0])
    assert_same_on_all_ranks(model)


@case(how=[(1, 0, 0.0), (1, 0, 0.25), (1, 2, 0.25), (2, 0, 0.0), (2, 1, 0.0), (2, 1, 0.25)])
def an_outer_optimizer_steps_with_the_changes(how: tuple[int, int, float]) -> None:
    fragments, overlap, alpha = how
    size, every, steps = hvd.size(), 4, 10
    model, replicas = network(), Replicas(size)
    optimizer = hvd.DiLoCo(model, sgd(model), every=every, fragments=fragments, overlap=overlap, alpha=alpha)
    outer = Outer(replicas, [one.parameters for one in optimizer._synchronizer.fragments], model)
    pending: list[tuple[int, int, Any]] = []
    for step in range(1, steps + 1):
        train_step(model, optimizer, hvd.rank(), step)
        replicas.step(step, range(size))
        if pending and pending[0][0] == step:
            _, fragment, changes = pending.pop()
            outer.apply(fragment, changes, alpha)
        for fragment in range(fragments):
            if step % every == (fragment + 1) * every // fragments % every:
                pending = [(step + overlap, fragment, outer.changes(fragment))]
                if not overlap:
                    outer.apply(fragment, pending.pop()[2], alpha)
        assert_replica(model, replicas.models[hvd.rank()])
    optimizer.synchronize()  # ends the average that is under way first
    for _, fragment, changes in pending:
        outer.apply(fragment, changes, alpha)
    for fragment in range(fragments):
        if steps % every == (fragment + 1) * every // fragments % every:  # it has just been averaged
            outer.take_whole(fragment)
        else:
            outer.apply(fragment, outer.changes(fragment), 0.0)
    assert_replica(model, replicas.models[0])
    assert_same_on_all_ranks(model)


class Outer:
    """Nesterov's momentum with the paper's settings, written out."""

    def __init__(self, replicas: Replicas, fragments: Sequence[Sequence[Tensor]], model: nn.Module) -> None:
        self.replicas = replicas
        places = {id(one): place for place, one in enumerate(model.parameters())}
        self.places = [[places[id(one)] for one in fragment] for fragment in fragments]
        self.whole = [replicas.parameters(place)[0].clone() for place in replicas.places]
        self.momentum: dict[int, Tensor] = {}

    def changes(self, fragment: int) -> dict[int, Tensor]:
        size = len(self.replicas.models)
        return {
            place: sum(self.whole[place] - one for one in self.replicas.parameters(place)) / size
            for place in self.places[fragment]
        }

    def apply(self, fragment: int, changes: dict[int, Tensor], alpha: float) -> None:
        for place, gradient in changes.items():
            before = self.momentum.get(place)
            momentum = gradient if before is None else 0.9 * before + gradient
            self.momentum[place] = momentum
            self.whole[place] = self.whole[place] - 0.7 * (gradient + 0.9 * momentum)
            for one in self.replicas.parameters(place):
                one.copy_((1 - alpha) * self.whole[place] + alpha * one)

    def take_whole(self, fragment: int) -> None:
        for place in self.places[fragment]:
            for one in self.replicas.parameters(place):
                one.copy_(self.whole[place])


@case()
def an_outer_rate_of_one_averages_the_parameters() -> None:
    """The results agree to two units in the last place."""
    results = []
    for wrapped in (
        lambda model: hvd.LocalSGD(sgd(model), 2),
        lambda model: hvd.DiLoCo(model, sgd(model), torch.optim.SGD(model.parameters(), lr=1.0), every=2),
    ):
        model = network()
        optimizer = wrapped(model)
        for step in range(2):
            train_step(model, optimizer, hvd.rank(), step)
        results.append([one.detach().clone() for one in model.parameters()])
    for averaged, stepped in zip(*results, strict=True):
        unit = torch.finfo(torch.float64).eps * averaged.abs().max()
        assert (averaged - stepped).abs().max() <= 2 * unit


@case()
def training_continues_from_a_state_dict() -> None:
    def trained(optimizer: Any, model: nn.Module, steps: range) -> None:
        for step in steps:
            train_step(model, optimizer, hvd.rank(), step)
        optimizer.synchronize()

    model = network()
    optimizer = hvd.DiLoCo(model, sgd(model), every=3)
    trained(optimizer, model, range(3))
    saved, weights = optimizer.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
    saved["state"] = {key: {k: v.clone() for k, v in one.items()} for key, one in saved["state"].items()}
    saved["outer"]["global"] = [one.clone() for one in saved["outer"]["global"]]
    momenta = saved["outer"]["outer"]["state"]
    saved["outer"]["outer"]["state"] = {
        key: {"momentum_buffer": one["momentum_buffer"].clone()} for key, one in momenta.items()
    }
    trained(optimizer, model, range(3, 6))
    other = network(seed=9)
    other.load_state_dict(weights)
    again = hvd.DiLoCo(other, sgd(other), every=3)
    again.load_state_dict(saved)
    trained(again, other, range(3, 6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@case(fragments=[1, 2])
def weights_that_the_program_sets_are_no_change_of_the_steps(fragments: int) -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DiLoCo(model, inner, every=2, fragments=fragments)
    for step in range(6):
        if step % 2 == 0:
            optimizer.synchronize()
            best = {name: torch.full_like(value, float(step)) for name, value in model.state_dict().items()}
            model.load_state_dict(best)
        train_step(model, optimizer, hvd.rank(), step)
    for one in model.parameters():
        assert torch.equal(one, torch.full_like(one, 4.0))


@case()
def weights_that_only_one_rank_sets_are_refused() -> None:
    model = network()
    optimizer = hvd.DiLoCo(model, sgd(model), every=2)
    for step in range(2):
        train_step(model, optimizer, hvd.rank(), step)
    if hvd.rank() == 0:
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    train_step(model, optimizer, hvd.rank(), 2)
    if hvd.size() == 1:
        train_step(model, optimizer, 0, 3)
        return
    with pytest.raises(ValueError, match=rf"on 1 of {hvd.size()} ranks, (also|not) on this one"):
        train_step(model, optimizer, hvd.rank(), 3)


@case()
def an_incomplete_window_is_not_loaded_over() -> None:
    model = network()
    optimizer = hvd.LocalSGD(sgd(model), 2)
    train_step(model, optimizer, hvd.rank(), 0)
    with pytest.raises(ValueError, match="since the last synchronization"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.synchronize()


@case(is_model_given=[False, True])
def buffers_are_averaged_with_the_model(is_model_given: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.LocalSGD(sgd(model), 2, model=model if is_model_given else None)
    own = nn.BatchNorm1d(3).double()
    for step in range(2):
        inputs, _ = data(hvd.rank(), step)
        with torch.no_grad():
            own(model[0](inputs))
        train_step(model, optimizer, hvd.rank(), step)
    expected = hvd.allreduce(own.running_mean) if is_model_given else own.running_mean
    torch.testing.assert_close(model[1].running_mean, expected, **CLOSE)


@case()
def buffers_that_are_no_state_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 3)).double()
    model.register_buffer("mask", torch.tensor([hvd.rank(), -torch.inf]), persistent=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.LocalSGD(sgd(model), 1, model=model)
    train_step(model, optimizer, hvd.rank(), 0)
    assert model.mask.tolist() == [hvd.rank(), -torch.inf]


@case()
def unequal_starts_are_refused() -> None:
    model = network(seed=hvd.rank())
    optimizer = hvd.LocalSGD(sgd(model), 5)
    if hvd.size() == 1:
        train_step(model, optimizer, 0, 0)
        return
    with pytest.raises(ParametersDifferError, match="broadcast_parameters"):
        train_step(model, optimizer, hvd.rank(), 0)


@case()
def a_rank_that_skips_steps_does_not_stop_the_others() -> None:
    """As with a GradScaler that has found an overflow on one rank."""
    model = network()
    optimizer = hvd.LocalSGD(sgd(model), 2)
    for step in range(5):
        if step != hvd.rank():
            train_step(model, optimizer, hvd.rank(), step)
    optimizer.synchronize()
    assert_same_on_all_ranks(model)


@case()
def a_rank_may_join() -> None:
    """The others average without it."""
    model = network()
    optimizer = hvd.LocalSGD(sgd(model), 2)
    replicas = Replicas(hvd.size())
    last = hvd.size() - 1
    for step in range(4):
        train_step(model, optimizer, hvd.rank(), step)
        replicas.step(step, range(hvd.size()))
        if step % 2:
            replicas.average([1.0] * hvd.size())
    if hvd.rank() == last and hvd.size() > 1:
        hvd.join()
        return
    others = range(max(last, 1))
    for step in (4, 5):
        train_step(model, optimizer, hvd.rank(), step)
        replicas.step(step, others)
    optimizer.synchronize()
    replicas.average([float(rank in others) for rank in range(hvd.size())])
    assert_replica(model, replicas.models[0])
    if hvd.size() > 1:
        hvd.join()


@case(2)
def a_process_set_is_refused_in_an_elastic_job() -> None:
    pair, context, model = hvd.add_process_set([0]), current(), network()
    context.survivors = Survivors()
    try:
        with pytest.raises(ValueError, match="leave out process_set"):
            hvd.LocalSGD(sgd(model), 2, process_set=pair)
    finally:
        context.survivors = None


@case()
def wrong_arguments_are_refused() -> None:
    model = network()
    for arguments in ({"every": 0}, {"fragments": 3, "every": 2}, {"overlap": 5, "every": 5}, {"alpha": 1.5}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            hvd.DiLoCo(model, sgd(model), **arguments)
    with pytest.raises(ValueError, match="other parameters"):
        hvd.DiLoCo(model, sgd(model), sgd(network()))
    with pytest.raises(ValueError, match="only 6 parameters"):
        hvd.DiLoCo(model, sgd(model), fragments=7)
    optimizer = hvd.LocalSGD(sgd(model), 2)
    for wrap in (hvd.DistributedOptimizer, lambda one: hvd.LocalSGD(one, 2)):
        with pytest.raises(ValueError, match="distributed already"):
            wrap(optimizer)
    with pytest.raises(ValueError, match="add the parameters before"):
        optimizer.add_param_group({"params": [torch.zeros(1)]})
