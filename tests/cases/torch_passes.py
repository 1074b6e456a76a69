"""Backward passes of every shape between two steps: several, held back, shared, none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    assert_trains_as_one_process,
    batch,
    distributed,
    fill,
    leaving_early,
    loss_of,
    network,
    own_loss,
    sgd,
    train,
    whole_loss,
)

OPS = {"Average": hvd.Average, "Sum": hvd.Sum}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "none": {},
    "state": {"shard": "state"},
    "gradients": {"shard": "gradients"},
    "overlap": {"overlap_forward": True},
    "memory": {"gradients_in_shared_memory": True},
}


def large() -> nn.Module:
    """Returns a network with gradients that leave during a backward pass."""
    return network(width=400)  # a weight of 1.28 MB between two small ones


def run_passes(model: nn.Module, step: int, count: int) -> None:
    """Runs the passes of a step, each over this rank's part of another batch."""
    for part in range(count):
        own_loss(model, count * step + part).backward()


def summed_loss(model: nn.Module, step: int, count: int = 3) -> Tensor:
    """Returns the sum of the losses of a step's passes over the whole batches, as in one process."""
    return sum(
        (whole_loss(model, count * step + part) for part in range(count)),
        torch.zeros((), dtype=torch.float64),
    )


def reference(step_count: int = 3, factor: float = 1.0) -> nn.Module:
    model = network()
    return train(model, sgd(model), lambda model, step: summed_loss(model, step) * factor, step_count)


@case(count=[2, 3])
def clipping_before_a_step_that_completes_passes(count: int) -> None:
    """Data may end before the last pass of a step; where it has come, synchronize() is harmless."""
    model, plain = network(), network()
    optimizer, single = distributed(model, backward_passes_per_step=3), sgd(plain)
    for step in range(3):
        run_passes(model, step, count)
        optimizer.synchronize()
        summed_loss(plain, step, count).backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.05) for one in (model, plain)]
        torch.testing.assert_close(*norms)
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_alike(model, plain)


@case(op=OPS)
def passes_that_add_up(op: str) -> None:
    model = network()
    optimizer = distributed(model, backward_passes_per_step=3, op=OPS[op])
    for step in range(3):
        optimizer.zero_grad()
        run_passes(model, step, 3)
        optimizer.step()
    assert_alike(model, reference(factor=hvd.size() if op == "Sum" else 1.0))


@case()
def the_number_of_passes_can_change() -> None:
    model = network()
    optimizer = distributed(model)
    optimizer.set_backward_passes_per_step(3)
    for step in range(3):
        optimizer.zero_grad()
        run_passes(model, step, 3)
        optimizer.step()
    assert_alike(model, reference())
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        optimizer.set_backward_passes_per_step(0)


@case()
def a_step_before_the_last_pass_exchanges_what_there_is() -> None:
    assert_trains_as_one_process(train, backward_passes_per_step=4)


@case(op=OPS)
def passes_that_are_held_back(op: str) -> None:
    model = network()
    optimizer = distributed(model, op=OPS[op])
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            own_loss(model, 3 * step).backward()
            own_loss(model, 3 * step + 1).backward()
        own_loss(model, 3 * step + 2).backward()
        optimizer.step()
    assert_alike(model, reference(factor=hvd.size() if op == "Sum" else 1.0))


@case()
def held_back_gradients_are_this_rank_s() -> None:
    model, alone = network(), network()
    optimizer = distributed(model)
    with optimizer.no_sync():
        own_loss(model, 0).backward()
    own_loss(alone, 0).backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    optimizer.step()
    plain = network()
    assert_alike(model, train(plain, sgd(plain), whole_loss, steps=1))


@case()
def passes_that_are_averaged_one_by_one() -> None:
    """Without further arguments, each pass is exchanged, and their averages add up."""
    model = network()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        run_passes(model, step, 3)
        optimizer.step()
    assert_alike(model, reference())


@case(least=2)
def a_second_pass_cannot_add_to_a_sum() -> None:
    model = network()
    optimizer = distributed(model, op=hvd.Sum)
    own_loss(model, 0).backward()
    with pytest.raises(ValueError, match=r"backward_passes_per_step.*no_sync") as caught:
        own_loss(model, 1).backward()
    assert "gradient.4." in str(caught.value) or "4.bias" in str(caught.value)
    optimizer.zero_grad()
    own_loss(model, 2).backward()
    optimizer.step()
    assert_same_on_all_ranks(model)
    nn.Module.zero_grad(model)
    own_loss(model, 3).backward()


@case(dropped_by=["optimizer", "model"])
def a_rank_without_a_pass_takes_part_by_stepping(dropped_by: str) -> None:
    model, plain = network(), network()
    optimizer, reference_optimizer = distributed(model, op=hvd.Sum), sgd(plain)
    for step in range(3):
        (optimizer if dropped_by == "optimizer" else model).zero_grad()
        if hvd.rank() == 0:
            own_loss(model, step).backward()
        optimizer.step()
        reference_optimizer.zero_grad()
        own_of_rank_0(plain, step).backward()
        reference_optimizer.step()
    assert_alike(model, plain)


class Twice(torch.optim.Optimizer):
    """An optimizer that calls its closure twice per step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
            with torch.no_grad():
                for parameter in self.param_groups[0]["params"]:
                    parameter -= 0.1 * parameter.grad


@case()
def a_closure_without_a_pass_takes_part() -> None:
    model, plain = network(), network()
    optimizer = distributed(model, Twice(model.parameters()), op=hvd.Sum)

    def closure() -> None:
        model.zero_grad()
        if hvd.rank() == 0:
            own_loss(model, 0).backward()

    def plain_closure() -> None:
        plain.zero_grad()
        own_of_rank_0(plain, 0).backward()

    for _ in range(2):
        optimizer.step(closure)
        Twice(plain.parameters()).step(plain_closure)
    assert_alike(model, plain)


def own_of_rank_0(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return loss_of(model, (inputs.chunk(hvd.size())[0], targets.chunk(hvd.size())[0]))


@case()
def gradients_that_are_set_by_hand() -> None:
    model = fill(nn.Linear(3, 2).double())
    optimizer = distributed(model)
    model.weight.grad = torch.full((2, 3), float(hvd.rank()), dtype=torch.float64)
    model.bias.grad = torch.tensor([float(hvd.rank())], dtype=torch.float64).expand(2)
    optimizer.synchronize()
    mean = (hvd.size() - 1) / 2
    assert model.weight.grad.tolist() == [[mean] * 3] * 2
    optimizer.zero_grad()
    optimizer.step()
    assert model.weight.grad is None


@case()
def a_second_order_gradient() -> None:
    def steps(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            value = loss(model, step)
            gradients = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
            (value + sum(gradient.sum() for gradient in gradients)).backward()
            optimizer.step()

    assert_trains_as_one_process(steps)


@case(freezes=[False, True])
def two_optimizers_in_turn(freezes: bool) -> None:
    """Covers adversarial training: each step's pass goes through both networks."""

    def steps(maker: nn.Module, judge: nn.Module, optimizers: list[Any], loss: Any) -> None:
        for step in range(3):
            judge.requires_grad_(not freezes)
            optimizers[0].zero_grad()
            (-loss(lambda x: judge(maker(x)), step)).backward()
            optimizers[0].step()
            judge.requires_grad_(True)
            optimizers[1].zero_grad()
            loss(lambda x: judge(maker(x).detach()), step).backward()
            optimizers[1].step()

    def networks() -> tuple[nn.Module, nn.Module]:
        return fill(nn.Linear(4, 4).double(), 1), network(2)

    ours, plain = networks(), networks()
    steps(*ours, [distributed(model) for model in ours], own_loss)
    steps(*plain, [sgd(model) for model in plain], whole_loss)
    for one, other in zip(ours, plain, strict=True):
        assert_alike(one, other)


@case()
def two_optimizers_that_end_a_pass_in_another_order_on_each_rank() -> None:
    models = [network(1), network(2)]
    optimizers = [distributed(model) for model in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = models if hvd.rank() % 2 == 0 else models[::-1]
        losses = [own_loss(model, step) for model in order]
        (losses[0] + losses[1]).backward()
        for optimizer in optimizers:
            optimizer.step()
    for model, seed in zip(models, (1, 2), strict=True):
        plain = network(seed)
        assert_alike(model, train(plain, sgd(plain), whole_loss, steps=4))


@case()
def parameters_that_are_frozen_for_a_while() -> None:
    def steps(model: nn.Sequential, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        assert not model[0].weight.requires_grad
        for step in range(4):
            model[0].requires_grad_(step >= 2)
            optimizer.zero_grad()
            loss(model, step).backward()
            optimizer.step()

    def frozen() -> Any:
        model: Any = network()
        model[0].requires_grad_(False)
        return model

    assert_trains_as_one_process(steps, frozen)


def expect_two_passes_a_step(begin: Callable[[nn.Module], None]) -> None:
    """Checks that two passes per step add up, with `begin` called on the model at the start of each step."""
    model, plain = network(), network()
    optimizer = distributed(model, backward_passes_per_step=2, op=hvd.Sum)
    for step in range(3):
        begin(model)
        optimizer.zero_grad()
        run_passes(model, step, 2)
        optimizer.step()
        optimizer.zero_grad()
    train(plain, sgd(plain), lambda model, step: summed_loss(model, step, 2) * hvd.size(), steps=3)
    assert_alike(model, plain)


@case()
def passes_whose_gradients_were_dropped_do_not_count() -> None:
    """After zero_grad() a step needs all its passes again; an extra pass would be rejected with op=Sum."""
    expect_two_passes_a_step(lambda model: own_loss(model, 77).backward())


def uneven(step: int, part: int) -> list[tuple[Tensor, Tensor]]:
    """Returns the batch of each rank in a pass: other numbers of rows, on some ranks none."""
    counts = [(step + part + 2 * rank) % 4 for rank in range(hvd.size())]
    return list(zip(*(whole.split(counts) for whole in batch(10 * step + part, sum(counts))), strict=True))


@case(shard=(None, "state"))
def samples_that_count_alike(shard: str | None) -> None:
    """Ranks with other numbers of samples divide sums by the number of all, as the guide says."""
    passes = 3
    model, plain = network(), network()
    optimizer = distributed(model, op=hvd.Sum, backward_passes_per_step=passes, shard=shard)
    single = sgd(plain)
    for step in range(4):
        parts = [uneven(step, part) for part in range(passes)]
        own = [batches[hvd.rank()] for batches in parts]
        total = hvd.allreduce(torch.tensor(sum(len(targets) for _, targets in own)), op=hvd.Sum)
        for inputs, targets in own:
            (nn.functional.mse_loss(model(inputs), targets, reduction="sum") / total).backward()
        rows = [torch.cat(column) for column in zip(*(pair for part in parts for pair in part), strict=True)]
        errors = nn.functional.mse_loss(plain(rows[0]), rows[1], reduction="none")
        errors.sum(1).mean().backward()
        for each in (optimizer, single):
            each.step()
            each.zero_grad()
    assert_alike(model, plain)


@case(technique=TECHNIQUES)
def the_last_pass_of_a_step_leaves_early(technique: str) -> None:
    """Its gradients leave while it runs, and those of the passes before only once it has added to them."""

    def held_back(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        for step in range(3):
            optimizer.zero_grad()
            if loss is own_loss:
                with optimizer.no_sync():
                    loss(model, 2 * step).backward()
            else:
                loss(model, 2 * step).backward()
            loss(model, 2 * step + 1).backward()
            optimizer.step()
        if loss is own_loss:
            optimizer.synchronize()

    def run(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        if loss is own_loss and hvd.size() > 1:
            leaving_early(optimizer)
        train(model, optimizer, loss, steps=2)  # gradients leave early once a whole pass has been seen
        held_back(model, optimizer, loss)

    assert_trains_as_one_process(run, large, **TECHNIQUES[technique])


@case(technique=TECHNIQUES)
def hooks_of_the_program_change_gradients_that_leave_early(technique: str) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5

    def double(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(2.0)

    def run(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        if loss is own_loss and hvd.size() > 1:
            leaving_early(optimizer)
        for hook in (double, halve, halve):
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(hook)
        train(model, optimizer, loss)
        if loss is own_loss:
            optimizer.synchronize()

    assert_trains_as_one_process(run, large, **TECHNIQUES[technique])
