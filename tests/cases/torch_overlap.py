"""Optimizers with overlap_forward=True: the bits of those without it, whatever the program looks at."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    OPTIMIZERS,
    assert_alike,
    distributed,
    fill,
    leaving_early,
    network,
    own_loss,
    train,
    whole_loss,
)
from cases.torch_overlap_models import alike, assert_equal, both, in_flight, plain_step
from sirtaki.torch.training.exchange import Overlap


@case(name=list(OPTIMIZERS))
def it_has_the_same_bits(name: str) -> None:
    pairs = both(OPTIMIZERS[name])
    alike(pairs, plain_step)
    alone = network()
    train(alone, OPTIMIZERS[name](alone.parameters()), whole_loss, steps=6)
    assert_alike(pairs[0][0], alone)


@case()
def parameters_are_in_flight_until_they_are_used() -> None:
    (model, optimizer), (other, plain) = both()
    is_alone = hvd.size() == 1
    plain_step(other, plain, 0)
    own_loss(model, 0).backward()
    names = [name for name, _ in model.named_parameters()]
    assert in_flight(model) == ([] if is_alone else names)
    optimizer.step()
    assert in_flight(model) == ([] if is_alone else names)
    assert model[0].weight.shape == (5, 4)  # needs no elements
    assert len(in_flight(model)) == (0 if is_alone else 6)
    model[0](torch.zeros(1, 4, dtype=torch.float64))
    # In the first rounds, each parameter lands only when it is used.
    assert in_flight(model) == ([] if is_alone else names[2:])
    assert torch.equal(model[4].bias.norm(), other[4].bias.norm())
    assert_equal(model, other)
    assert in_flight(model) == []


@case()
def what_a_program_looks_at_is_up_to_date() -> None:
    reads: list[Callable[[nn.Module], Any]] = [
        lambda model: {name: value.clone() for name, value in model.state_dict().items()},
        lambda model: dict(copy.deepcopy(model).named_parameters()),
        lambda model: dict(pickle.loads(pickle.dumps(model)).named_parameters()),
        lambda model: {name: one.data.clone() for name, one in model.named_parameters()},
        lambda model: {name: one.detach().numpy().copy() for name, one in model.named_parameters()},
        lambda model: {"all": nn.utils.parameters_to_vector(model.parameters()).detach()},
        lambda model: {"all": torch.stack(torch._foreach_norm(list(model.parameters()))).detach()},
        lambda model: {"sum": sum(one.detach().sum() for one in model.parameters())},
        lambda model: {"out": model(torch.ones(2, 4, dtype=torch.float64)).detach()},
        lambda model: {"grad": torch.cat([one.grad.flatten() for one in model.parameters()])},
    ]
    for read in reads:
        pairs = both()
        for step in range(4):
            found = []
            for model, optimizer in pairs:
                plain_step(model, optimizer, step)
                found.append(read(model))
            assert found[0].keys() == found[1].keys()
            for name in found[0]:
                assert torch.equal(torch.as_tensor(found[0][name]), torch.as_tensor(found[1][name])), name


@case()
def schedulers_and_groups() -> None:
    pairs = []
    for overlap in (True, False):
        model = network()
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": list(model[2:].parameters())}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        before = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        optimizer = distributed(model, optimizer, overlap_forward=overlap)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        pairs.append((model, optimizer, before, after))
    for number in range(6):
        for model, optimizer, before, after in pairs:
            plain_step(model, optimizer, number)
            before.step()
            after.step()
            optimizer.param_groups[1]["weight_decay"] = 0.1 * number
    assert_equal(pairs[0][0], pairs[1][0])


@case()
def clipping_and_scaling() -> None:
    def clipped(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        own_loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    alike(both(), clipped)
    scalers: dict[int, torch.amp.GradScaler] = {}

    def scaled(model: nn.Module, optimizer: Any, step: int) -> None:
        scaler = scalers.setdefault(id(model), torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2))
        optimizer.zero_grad()
        loss = own_loss(model, step)
        scaler.scale(loss * torch.inf if step == 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()

    alike(both(), scaled)


@case()
def ways_to_drop_gradients() -> None:
    def to_zero(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        own_loss(model, step).backward()
        optimizer.step()

    def by_the_model(model: nn.Module, optimizer: Any, step: int) -> None:
        model.zero_grad()
        own_loss(model, step).backward()
        optimizer.step()

    def never(model: nn.Module, optimizer: Any, step: int) -> None:
        own_loss(model, step).backward()
        optimizer.step()

    def without_a_step(model: nn.Module, optimizer: Any, step: int) -> None:
        own_loss(model, step + 100).backward()
        plain_step(model, optimizer, step)

    def after_the_step(model: nn.Module, optimizer: Any, step: int) -> None:
        own_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)

    for step in (to_zero, by_the_model, never, without_a_step, after_the_step):
        alike(both(), step)


@case()
def several_passes_and_steps() -> None:
    def accumulated(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        for number in range(2):
            own_loss(model, 10 * step + number).backward()
        optimizer.step()

    def kept_back(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        with optimizer.no_sync():
            own_loss(model, 10 * step).backward()
        own_loss(model, step).backward()
        optimizer.step()

    def twice(model: nn.Module, optimizer: Any, step: int) -> None:
        plain_step(model, optimizer, step)
        optimizer.step()

    def by_a_closure(model: nn.Module, optimizer: Any, step: int) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = own_loss(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)

    def synchronized(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        own_loss(model, step).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    def without_synchronizing(model: nn.Module, optimizer: Any, step: int) -> None:
        optimizer.zero_grad()
        own_loss(model, step).backward()
        with optimizer.skip_synchronize():
            optimizer.step()

    alike(both(backward_passes_per_step=2), accumulated)
    for step in (accumulated, kept_back, twice, by_a_closure, synchronized, without_synchronizing):
        alike(both(), step)


class Unordered(nn.Module):
    """Uses its layers in another order than that of their registration, and not all in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.rare = nn.Linear(6, 3), nn.Linear(4, 6), nn.Linear(6, 6)
        self.step = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.step += 1
        hidden = self.first(inputs).tanh()
        # Each rank leaves out another layer's turn; in each fourth step nobody uses it.
        if self.step % 4 and (self.step + hvd.rank()) % 2:
            hidden = hidden + self.rare(hidden)
        return self.last(hidden)


def unordered() -> nn.Module:
    return fill(Unordered().double())


@case()
def parameters_that_not_all_ranks_use() -> None:
    pairs = both(build=unordered)
    alike(pairs, plain_step, steps=9)
    flight = pairs[0][1]._reducer.flight
    if flight is not None:
        named = [name for name, _ in pairs[0][0].named_parameters()]
        used = [named[number] for number in flight._gradients._uses]
        assert used[:2] == ["first.weight", "first.bias"], used


@case(leaves_early=[False, True])
def large_parameters_leave_in_parts(leaves_early: bool) -> None:
    def build() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(4, 800), nn.Linear(800, 800), nn.Linear(800, 3)).double())

    pairs = both(OPTIMIZERS["SGD"], build)
    if leaves_early:
        for _, optimizer in pairs:
            leaving_early(optimizer)
    alike(pairs, plain_step, steps=4)
    flight = pairs[0][1]._reducer.flight
    if flight is not None:  # 5.12 MB, of which a part has up to 1 MiB
        assert [len(parts) for parts in flight._gradients._parts] == [1, 1, 5, 1, 1, 1]


@case(is_idle=[True, False])
def a_gradient_leaves_before_the_next_one_is_made(is_idle: bool) -> None:
    def build() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3000), nn.Linear(3000, 3)).double())

    pairs = both(OPTIMIZERS["SGD"], build)
    for _, optimizer in pairs:
        leaving_early(optimizer)
    reducer = pairs[0][1]._reducer
    ticks = count()

    def clocks() -> tuple[float, float]:
        now = float(next(ticks))
        return now, 0.0 if is_idle else now

    reducer._overlap = Overlap(has_spare_core=True, is_urgent=True, clocks=clocks)
    alike(pairs, plain_step, steps=2)
    flight = reducer.flight
    if flight is not None:  # the weights of the last two layers have 72 kB each, the rest less than 64 KiB
        calls: list[list[int]] = []
        start = flight._gradients.start

        def record(numbers: list[int], absent: bool) -> None:
            if numbers:
                calls.append(list(numbers))
            start(numbers, absent)

        flight._gradients.start = record  # type: ignore[method-assign]
        plain_step(*pairs[0], 2)
        places = [next(place for place, call in enumerate(calls) if weight in call) for weight in (4, 2, 0)]
        assert places == ([0, 1, 2] if is_idle else [0, 0, 0]), calls


@case()
def other_ways_to_combine() -> None:
    def once(model: nn.Module, optimizer: Any, step: int) -> None:
        plain_step(model, optimizer, step)

    options: list[dict[str, Any]] = [
        {"op": hvd.Sum},
        {"op": hvd.Max},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"process_set": hvd.global_process_set},
    ]
    for chosen in options:
        alike(both(OPTIMIZERS["SGD"], **chosen), once, steps=4)
    model = network()
    optimizer = distributed(model, overlap_forward=True, op=hvd.Sum)
    own_loss(model, 0).backward()
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="already been combined"):
            own_loss(model, 1).backward()
    optimizer.zero_grad()
