"""Properties of a distributed optimizer: it keeps its class, its state, its groups and its calls."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_trains_as_one_process,
    batch,
    distributed,
    loss_of,
    network,
    own_loss,
    sgd,
    train,
    whole_loss,
)


@case()
def it_is_still_of_its_class() -> None:
    model = network()
    plain = sgd(model)
    optimizer = distributed(model, plain)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert optimizer is plain
    assert optimizer.param_groups[0]["lr"] == 0.05
    has_hooks = bool(model[0].weight._post_accumulate_grad_hooks)
    assert has_hooks == (hvd.size() > 1)  # a world of one rank costs nothing


@case()
def its_state_loads_with_and_without_sirtaki() -> None:
    model, plain = network(), network()
    optimizer, alone = distributed(model), sgd(plain)
    train(model, optimizer, own_loss, steps=2)
    train(plain, alone, whole_loss, steps=2)
    stored = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)

    second, third = network(5), network(6)
    second.load_state_dict(loaded["model"])
    third.load_state_dict(loaded["model"])
    without, with_it = sgd(second), distributed(third)
    without.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    with_it.load_state_dict(copy.deepcopy(loaded["optimizer"]))
    train(second, without, whole_loss)
    train(third, with_it, own_loss)
    train(plain, alone, whole_loss)
    assert_alike(second, plain)
    assert_alike(third, plain)


@case()
def copies_are_plain_optimizers() -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, own_loss, steps=1)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is torch.optim.SGD
        assert len(twin.state) == len(optimizer.state)
    twin_model = copy.deepcopy(model)
    own_loss(twin_model, 0).backward()  # its parameters have no hooks
    pickle.dumps(model)
    model.share_memory()


@case()
def calls_of_horovod_s_recipe_for_clipping() -> None:
    model, plain = network(), network()
    optimizer, alone = distributed(model), sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        own_loss(model, step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
        alone.zero_grad()
        whole_loss(plain, step).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        alone.step()
    assert_alike(model, plain)


@case(to_none=[True, False])
def gradients_are_dropped_at_any_time(to_none: bool) -> None:
    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor]) -> None:
        for step in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            loss(model, 10 + step).backward()
            optimizer.zero_grad(to_none)
            loss(model, step).backward()
            optimizer.step()
            model.zero_grad(to_none)

    assert_trains_as_one_process(steps)


@case(skips=[False, True])
def several_groups_and_a_late_one(skips: bool) -> None:
    def groups(model: nn.Sequential) -> torch.optim.Optimizer:
        first, second = model[0].parameters(), model[2].parameters()
        return torch.optim.SGD([{"params": first, "lr": 0.2}, {"params": second}], lr=0.1)

    model, plain = network(), network()
    optimizer, alone = distributed(model, groups(model)), groups(plain)
    train(model, optimizer, own_loss, steps=2)
    train(plain, alone, whole_loss, steps=2)
    with optimizer.skip_synchronize() if skips else nullcontext():
        optimizer.add_param_group({"params": model[4].parameters(), "lr": 0.05})
    alone.add_param_group({"params": plain[4].parameters(), "lr": 0.05})
    optimizer.zero_grad()
    alone.zero_grad()
    train(model, optimizer, own_loss, steps=3)
    train(plain, alone, whole_loss, steps=3)
    optimizer.zero_grad()
    for own, one in zip(model.parameters(), plain.parameters(), strict=True):  # step() exchanges these
        own.grad, one.grad = torch.full_like(own, hvd.rank()), torch.full_like(one, (hvd.size() - 1) / 2)
    optimizer.step()
    alone.step()
    assert_alike(model, plain)


@case(way=["Average", "Sum", "a pass is missing", "a parameter is replaced", "in flight"])
def a_group_between_a_pass_and_its_step(way: str) -> None:
    """Gradients that have been combined are not combined again, and the others are."""
    model, plain = network(), network()
    op = hvd.Sum if way == "Sum" else hvd.Average
    optimizer = distributed(model, sgd(model[:4]), op=op, overlap_forward=way == "in flight")
    alone = sgd(plain[:4])
    for step in range(4):
        for one, each in ((model, optimizer), (plain, alone)):
            each.zero_grad()
            if step == 1 and way == "a parameter is replaced":
                one[0].weight = each.param_groups[0]["params"][0] = nn.Parameter(2 * one[0].weight.detach())
            passes = 2 if step == 1 and way == "a pass is missing" else 1
            loss = whole_loss(one, step)
            if one is model:
                loss = own_loss(one, step) if passes == 1 or hvd.rank() == 0 else None
            elif passes == 2:
                loss = loss_of(one, [whole.chunk(hvd.size())[0] for whole in batch(step)]) / hvd.size()
            elif op == hvd.Sum:
                loss = loss * hvd.size()
            if loss is not None:
                loss.backward()
            if step == 1:
                each.add_param_group({"params": one[4].parameters(), "lr": 0.05})
            each.step()
    assert_alike(model, plain)


@case()
def a_discarded_optimizer_lets_go_of_the_model() -> None:
    model, plain = network(), network()
    gc.disable()  # no reference cycle may keep it alive
    try:
        for _ in range(3):
            optimizer = distributed(model)
            train(model, optimizer, own_loss, steps=1)
            del optimizer
        assert not model[0].weight._post_accumulate_grad_hooks
    finally:
        gc.enable()
    for _ in range(3):
        train(plain, sgd(plain), whole_loss, steps=1)
    assert_alike(model, plain)


@case()
def the_user_s_own_hooks_of_a_step_run_once() -> None:
    model = network()
    calls: list[str] = []
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer = distributed(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, own_loss, steps=2)
    assert calls == ["before", "after"] * 2


@case(least=2)
def autograd_knows_that_gradients_were_written() -> None:
    model = nn.Linear(3, 1)
    distributed_one = distributed(model)
    model(torch.ones(1, 3)).sum().backward()
    gradient = model.weight.grad
    assert gradient is not None
    factor = torch.ones(1, 3, requires_grad=True)
    product = (gradient * factor).sum()  # saves the gradient
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    del distributed_one


@case()
def scalars_and_empty_parameters() -> None:
    model = nn.ParameterList([torch.tensor(1.0), torch.zeros(0, 3), torch.ones(2)])
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for _ in range(2):
        optimizer.zero_grad()
        (sum(one.sum() for one in model) * (hvd.rank() + 1)).backward()
        mean = (hvd.size() + 1) / 2
        assert [one.grad.tolist() for one in model] == [mean, [], [mean] * 2]
        optimizer.step()


@case()
def whole_numbers_among_the_parameters() -> None:
    """Quantized models have them; they never have gradients."""
    table = nn.Parameter(torch.arange(4), requires_grad=False)
    weight = nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table, weight], lr=1.0))
    (table * weight).sum().backward()
    optimizer.step()
    assert weight.tolist() == [1.0, 0.0, -1.0, -2.0]


@case()
def parameters_of_several_dtypes() -> None:
    model = nn.ParameterList(
        [torch.ones(3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    )
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=1.0))
    sum(one.sum().double() * (hvd.rank() + 1) for one in model).backward()
    mean = (hvd.size() + 1) / 2
    assert all(one.grad.tolist() == [mean] * 3 for one in model)
    optimizer.step()
    optimizer.zero_grad()
    model.double()  # gradients of another dtype from now on
    sum(one.sum() * (hvd.rank() + 1) for one in model).backward()
    assert all(one.grad.dtype == torch.float64 and one.grad.tolist() == [mean] * 3 for one in model)


@case(op=["Average", "Sum"])
def gradients_that_are_conjugates_or_negatives_of_their_memory(op: str) -> None:
    """Autograd leaves them so, uncopied; on ranks that have not used the parameter, there is no such view."""
    factor = hvd.size() if op == "Sum" else 1

    def train(optimizer: torch.optim.Optimizer, ranks: list[int], parameters: nn.ParameterList) -> None:
        wave, imaginary = parameters
        zero, turn = torch.zeros((), dtype=torch.float64), torch.tensor(1 + 3j, dtype=torch.complex128)
        for step in range(4):
            optimizer.zero_grad()
            loss = wave.abs().sum() * len(ranks)
            for rank in ranks:
                if rank == step % 2:
                    loss = loss + (wave.conj() * turn).real.sum()
                    loss = loss + (torch.complex(zero, imaginary).conj() * turn * (rank + 1)).real
            (loss if len(ranks) == 1 else loss * factor / len(ranks)).backward()
            optimizer.step()

    def make() -> nn.ParameterList:
        values = torch.tensor([1 + 2j, 3 - 1j, 0.5j], dtype=torch.complex128)
        return nn.ParameterList([values, torch.tensor(2.0, dtype=torch.float64)])

    ours, plain = make(), make()
    train(distributed(ours, torch.optim.SGD(ours, lr=0.1), op=getattr(hvd, op)), [hvd.rank()], ours)
    train(torch.optim.SGD(plain, lr=0.1), list(range(hvd.size())), plain)
    assert_alike(ours, plain)


@case()
def lbfgs_with_closures() -> None:
    def steps(model: nn.Module, optimizer: Any, loss: Callable[..., Tensor]) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(model, 0)
            value.backward()
            return value

        for _ in range(2):
            optimizer.step(closure)

    assert_trains_as_one_process(
        steps, optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    )
