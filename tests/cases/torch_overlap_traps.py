"""Optimizers with overlap_forward=True in programs that use parameters in other ways, or at odd moments."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    OPTIMIZERS,
    assert_same_on_all_ranks,
    batch,
    distributed,
    fill,
    network,
    own_loss,
)
from cases.torch_overlap_models import alike, assert_equal, both, in_flight, plain_step
from sirtaki.common.exceptions import HorovodInternalError
from sirtaki.torch.training.overlapped.flight import DeferredUpdate

compiling = threading.Lock()  # ranks may be threads, and TorchScript is for one at a time


def inputs(rows: int = 2) -> Tensor:
    return torch.ones(rows, 4, dtype=torch.float64)


@case()
def a_second_pass_over_an_earlier_graph() -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        losses = [own_loss(model, 10 * number + which) for which in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()

    def large() -> nn.Module:
        return fill(nn.Linear(4, 100_000, bias=False).double())

    model = large()
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.0), overlap_forward=True)
    for number in range(3):
        optimizer.zero_grad()
        losses = [factor * model(batch(number)[0]).sum() for factor in (1.0, 3.0)]
        for loss in losses:
            loss.backward()
        expected = 4 * batch(number)[0].sum(0).expand(100_000, 4)
        torch.testing.assert_close(model.weight.grad, expected)
        optimizer.step()
    alike(both(OPTIMIZERS["SGD"]), step)


@case(least=2)
def a_graph_of_the_last_step_is_refused() -> None:
    ((model, optimizer), _) = both()
    plain_step(model, optimizer, 0)
    loss = own_loss(model, 1)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    optimizer.zero_grad()
    optimizer.synchronize()


@case(least=2)
def ranks_whose_calls_differ() -> None:
    """Calls of one rank alone, or those that it leaves out, change no parameters, and no exchange."""
    for overlap in (True, False):
        model = network()
        optimizer = distributed(model, overlap_forward=overlap)
        plain_step(model, optimizer, 0)
        if hvd.rank() == 0:
            optimizer.state_dict()
        optimizer.synchronize()
        plain_step(model, optimizer, 1)
        if hvd.rank() == 1:
            optimizer.zero_grad()
            optimizer.step()  # takes part in the others' exchange
        else:
            plain_step(model, optimizer, 2)
        if hvd.rank() == 0:
            for parameter in model.parameters():
                parameter.grad.norm()
        optimizer.synchronize()
        plain_step(model, optimizer, 3)
        assert_same_on_all_ranks(model)
        if overlap:
            kept = model
    assert_equal(kept, model)


@case(least=2)
def ranks_that_join() -> None:
    models = []
    for overlap in (True, False):
        model = network()
        optimizer = distributed(model, overlap_forward=overlap)
        for _ in range(3):
            for step in range(4 if hvd.rank() == 0 else 1):
                plain_step(model, optimizer, step)
            hvd.join(model=model, optimizer=optimizer)
        for step in range(5):
            plain_step(model, optimizer, step)
        assert_same_on_all_ranks(model)
        models.append(model)
    assert_equal(*models)


@case()
def compiled_and_transformed_modules() -> None:
    ((model, optimizer), (other, plain)) = both()
    with compiling:
        scripted = torch.jit.script(model)
    for step in range(3):
        for one, each in ((model, optimizer), (other, plain)):
            plain_step(one, each, step)
        assert torch.equal(scripted(inputs()), other(inputs()))
    captured = torch.func.grad(lambda x, net: net(x).square().sum())
    for step in range(3):
        for one, each in ((model, optimizer), (other, plain)):
            plain_step(one, each, step)
        assert torch.equal(captured(inputs(), model), captured(inputs(), other))
    plain_step(model, optimizer, 3)
    given = dict(model.named_parameters())
    found = torch.func.grad(lambda own: torch.func.functional_call(model, own, (inputs(),)).sum())(given)
    is_visible = all(torch.isnan(one).all() for one in found.values() if one.dim() == 2)
    assert is_visible or hvd.size() == 1  # never the gradients of old parameters


@case()
def modes_of_the_program() -> None:
    def evaluated(model: nn.Module, optimizer: Any, number: int) -> None:
        plain_step(model, optimizer, number)
        with torch.inference_mode():
            model(inputs())

    def cast(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = own_loss(lambda given: model(given.float()).double(), number)
        loss.backward()
        optimizer.step()
        if hvd.rank() == 0:
            [one.norm() for one in model.parameters()]

    def adafactor(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([one for one in parameters if one.dim() == 2], lr=0.1)

    for name in ("Adam", "SGD"):
        alike(both(OPTIMIZERS[name]), evaluated)
    pairs = []
    for overlap in (True, False):
        model = network().float()
        pairs.append(
            (model, hvd.DistributedOptimizer(adafactor(model.parameters()), overlap_forward=overlap))
        )
    for number in range(5):
        for model, optimizer in pairs:
            cast(model, optimizer, number)
    for (_, one), (_, two) in zip(*(model.named_parameters() for model, _ in pairs), strict=True):
        assert one.dim() != 2 or torch.equal(one.detach(), two.detach())


@case()
def hooks_of_the_program() -> None:
    pairs = []
    for overlap in (True, False):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def clamp(plain: Any, *_: Any) -> None:
            with torch.no_grad():
                for group in plain.param_groups:
                    for one in group["params"]:
                        one.clamp_(-0.2, 0.2)

        def clip(plain: Any, *_: Any) -> None:
            given = [one for group in plain.param_groups for one in group["params"]]
            nn.utils.clip_grad_norm_(given, 0.01)

        optimizer.register_step_post_hook(clamp)
        optimizer = distributed(model, optimizer, overlap_forward=overlap)
        optimizer.register_step_pre_hook(clip)
        pairs.append((model, optimizer))
    alike(pairs, plain_step)


@case()
def state_that_the_program_changes() -> None:
    def cleared(model: nn.Module, optimizer: Any, number: int) -> None:
        plain_step(model, optimizer, number)
        if number == 2:
            optimizer.state.clear()
        for one in model.parameters() if number == 3 else ():
            optimizer.state[one]["exp_avg"].zero_()

    def taken_out(model: nn.Module, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        own_loss(model, number).backward()
        if number == 2:
            optimizer.param_groups[0]["params"] = list(model[2].parameters())
        optimizer.step()

    alike(both(), cleared)
    alike(both(), taken_out)


@case()
def steps_that_raise() -> None:
    ((model, optimizer), (other, plain)) = both()
    for one, each in ((model, optimizer), (other, plain)):
        plain_step(one, each, 0)
        own_loss(one, 1).backward()

        def fail(*_: Any) -> None:
            raise KeyError("of the program")

        hook = each.register_step_post_hook(fail)
        with pytest.raises(KeyError):
            each.step()
        hook.remove()
        each.zero_grad()
        assert len(each.param_groups[0]["params"]) == 6
        plain_step(one, each, 2)
    assert_equal(model, other)


@case(least=2)
def an_update_that_fails() -> None:
    ((model, optimizer), _) = both()
    plain_step(model, optimizer, 0)
    update: DeferredUpdate = optimizer._reducer.flight._update
    update.apply = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        model(inputs())
    assert not in_flight(model)
    with pytest.raises(HorovodInternalError, match="an earlier step has failed"):
        plain_step(model, optimizer, 1)


def interrupt(_: Any) -> None:
    raise KeyboardInterrupt


@case()
def optimizers_that_follow_each_other() -> None:
    model, other = network(), network()
    plain = distributed(other, torch.optim.SGD(other.parameters(), lr=0.1))
    plain_step(other, plain, 0)
    earlier = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), overlap_forward=True)
    plain_step(model, earlier, 0)
    if hvd.size() == 1:
        return
    later = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1), overlap_forward=True)
    with pytest.raises(ValueError, match="two DistributedOptimizers exchange the gradient"):
        plain_step(model, later, 1)
    assert_equal(model, other)


@case()
def a_conversion_of_the_model() -> None:
    def step(model: nn.Module, optimizer: Any, number: int) -> None:
        if number == 3:  # the order of use is known
            model.double()
        dtype = next(model.parameters()).dtype
        optimizer.zero_grad()
        own_loss(lambda rows: model(rows.to(dtype)).double(), number).backward()
        optimizer.step()

    alike(both(OPTIMIZERS["SGD"], lambda: network().float()), step, steps=8)


@case()
def parameters_that_are_taken_out_keep_their_gradients() -> None:
    """Only the gradients of its own parameters are an optimizer's to drop."""

    def step(model: Any, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        group = optimizer.param_groups[0]
        group["params"] = [*model.parameters()][: 2 if 2 <= number < 4 else None]
        own_loss(model, number).backward()
        optimizer.step()

    alike(both(OPTIMIZERS["SGD"]), step)
