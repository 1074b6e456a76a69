"""Programs that write gradients, or the parameters of an optimizer, by hand."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    OPTIMIZERS,
    assert_alike,
    assert_same_on_all_ranks,
    batch,
    distributed,
    loss_of,
    network,
    own_loss,
    sgd,
    whole_loss,
)
from sirtaki.common.exceptions import UnsupportedError

LAST_STEP = 4


def rows_of_rank_1(step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = (whole.chunk(hvd.size())[1] for whole in batch(step))
    return inputs, targets


def heir(old: Tensor, scale: float = 2.0) -> nn.Parameter:
    return nn.Parameter(scale * old.detach())


def replace_weight(model: Any, optimizer: Any) -> None:
    """Puts another parameter into the place of the first, with its state, as programs that prune do."""
    old = model[0].weight
    model[0].weight = optimizer.param_groups[0]["params"][0] = heir(old)
    if old in optimizer.state:
        optimizer.state[model[0].weight] = optimizer.state.pop(old)


def train_and_replace(model: Any, optimizer: Any, loss: Any, when: str) -> nn.Module:
    for step in range(LAST_STEP):
        optimizer.zero_grad()
        if step == 2 and when == "before the pass":
            replace_weight(model, optimizer)
        loss(model, step).backward()
        if step == 2 and when == "before the step":
            gradient = model[0].weight.grad
            replace_weight(model, optimizer)
            model[0].weight.grad = gradient.mul_(0.5)
        optimizer.step()
    return model


@case(when=["before the pass", "before the step"])
def a_parameter_that_takes_the_place_of_another(when: str) -> None:
    """Its gradient is exchanged in the same step, if it is not that of the other."""
    for name, op in (("SGD", hvd.Average), ("Adam", hvd.Average), ("SGD", hvd.Sum)):
        model, plain = network(), network()
        factor = hvd.size() if op == hvd.Sum else 1
        optimizer = distributed(model, OPTIMIZERS[name](model.parameters()), op=op)
        train_and_replace(model, optimizer, own_loss, when)
        train_and_replace(
            plain,
            OPTIMIZERS[name](plain.parameters()),
            lambda plain, step, factor=factor: factor * whole_loss(plain, step),
            when,
        )
        assert_alike(model, plain)
        assert_same_on_all_ranks(model)


@case(options=["sums", "in groups", "held back", "synchronized", "in shared memory", "in flight"])
def replaced_parameters_with_other_options(options: str) -> None:
    """The other gradients have been combined in the pass, and are not combined again."""
    arguments: dict[str, dict[str, Any]] = {
        "sums": {"op": hvd.Sum},
        "held back": {"backward_passes_per_step": 3},
        "in shared memory": {"gradients_in_shared_memory": True},
        "in flight": {"overlap_forward": True},
    }
    model, plain = network(), network()
    chosen = arguments.get(options, {})
    if options == "in groups":
        chosen = {"groups": [[model[0].weight, model[0].bias], [model[2].weight, model[4].bias]]}
    optimizer, reference = distributed(model, **chosen), sgd(plain)
    factor = hvd.size() if options == "sums" else 1
    for step in range(LAST_STEP):
        for one, each, loss in ((model, optimizer, own_loss), (plain, reference, whole_loss)):
            each.zero_grad()
            if step == 2:
                replace_weight(one, each)
            ((factor if one is plain else 1) * loss(one, step)).backward()
            if one is model and options == "synchronized":
                optimizer.synchronize()
                with optimizer.skip_synchronize():
                    optimizer.step()
            else:
                each.step()
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case(least=2, options=["plain", "held back", "in flight"])
def a_replacement_without_a_pass_on_one_rank(options: str) -> None:
    """It owes the others the round of their pass, before all exchange the new parameter."""
    passes = 2 if options == "held back" else 1
    model, plain = network(), network()
    optimizer = distributed(model, backward_passes_per_step=passes, overlap_forward=options == "in flight")
    reference = sgd(plain)
    for step in range(LAST_STEP):
        for one, each in ((model, optimizer), (plain, reference)):
            each.zero_grad()
            if step == 2:
                replace_weight(one, each)
            for number in range(passes):
                if one is model and not (step == 2 and hvd.rank() == 1 and number == passes - 1):
                    own_loss(one, step + number).backward()
                elif one is plain:
                    whole = whole_loss(one, step + number)
                    if step == 2 and number == passes - 1:
                        whole = whole - loss_of(one, rows_of_rank_1(step + number)) / hvd.size()
                    whole.backward()
            each.step()
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case(way=["clipped", "clipped in flight", "scaled"])
def replaced_parameters_whose_gradients_are_looked_at(way: str) -> None:
    """`synchronize()` makes them those of all ranks, before the step."""
    model, plain = network(), network()
    optimizer, reference = distributed(model, overlap_forward=way == "clipped in flight"), sgd(plain)
    scalers = {
        one: torch.amp.GradScaler("cpu", init_scale=8.0, enabled=way == "scaled")
        for one in (optimizer, reference)
    }
    for step in range(LAST_STEP):
        for one, each, loss in ((model, optimizer, own_loss), (plain, reference, whole_loss)):
            each.zero_grad()
            if step == 2:
                replace_weight(one, each)
            scaler = scalers[each]
            scaler.scale(loss(one, step)).backward()
            if way == "scaled" and step == 2 and (one is plain or hvd.rank() == hvd.size() - 1):
                one[0].weight.grad[0, 0] = torch.inf
            if one is model:
                optimizer.synchronize()
            scaler.unscale_(each)
            nn.utils.clip_grad_norm_(one.parameters(), 0.05)
            scaler.step(each)
            scaler.update()
    assert scalers[optimizer].get_scale() == (4.0 if way == "scaled" else 1.0)
    assert_alike(model, plain)
    assert_same_on_all_ranks(model)


@case()
def rows_that_count_unequally() -> None:
    """A pass has multiplied the gradients of the other parameters, and not that of the new one."""
    model, plain = network(), network()
    optimizer, reference = distributed(model), sgd(plain)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(7, 4, generator=generator, dtype=torch.float64)

    def update(inputs: Tensor, model: Any, optimizer: Any, replaces: bool) -> None:
        optimizer.zero_grad()
        if replaces:
            replace_weight(model, optimizer)
        model(inputs).square().mean().backward()
        optimizer.step()

    step = hvd.consistent(lambda inputs, replaces: update(inputs, model, optimizer, replaces), batch="inputs")
    for number in range(LAST_STEP):
        step(inputs, replaces=number == 2)
        update(inputs, plain, reference, replaces=number == 2)
    assert_alike(model, plain)


@case(least=2)
def a_new_parameter_that_one_rank_uses() -> None:
    model, plain = network(), network()
    optimizer, reference = distributed(model, op=hvd.Sum), sgd(plain)
    for one, each in ((model, optimizer), (plain, reference)):
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))
        each.param_groups[0]["params"].append(extra)
        for step in range(3):
            each.zero_grad()
            is_used = one is plain or hvd.rank() == 1
            loss = own_loss(one, step) if one is model else hvd.size() * whole_loss(one, step)
            (loss + (extra.square().sum() if is_used else 0.0)).backward()
            each.step()
        one.register_parameter("extra", extra)
    assert_alike(model, plain)


@case()
def a_parameter_of_another_shape_is_named() -> None:
    """Pruning leaves a layer with fewer rows; the name stays, and nothing keeps the old parameter."""
    model = network()
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own_loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    gone = weakref.ref(model[4].weight)
    parameters = optimizer.param_groups[0]["params"]
    model[4].weight = parameters[4] = nn.Parameter(model[4].weight.detach()[:2])
    model[4].bias = parameters[5] = nn.Parameter(model[4].bias.detach()[:2])
    for _ in range(3):
        model(torch.ones(2, 4, dtype=torch.float64) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_on_all_ranks(model)
    names = [one.name for one in optimizer._reducer._named]
    assert hvd.size() == 1 or names[4].endswith("4.weight")
    gc.collect()
    assert gone() is None


@case(least=2)
def slices_of_other_parameters_are_refused() -> None:
    model = network()
    optimizer = distributed(model, shard="state")
    own_loss(model, 0).backward()
    optimizer.step()
    model[0].weight = optimizer.param_groups[0]["params"][0] = heir(model[0].weight)
    own_loss(model, 1).backward()
    with pytest.raises(UnsupportedError, match="add_param_group"):
        optimizer.step()


@case()
def slices_that_a_failed_step_has_left() -> None:
    """They are not taken for parameters of the program."""
    model = network()
    optimizer = distributed(model, shard="state")
    own_loss(model, 0).backward()

    def fail(*_: Any) -> None:
        raise ArithmeticError

    hook = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    hook.remove()
    optimizer.synchronize()
    optimizer.step()
    assert_same_on_all_ranks(model)


@case(passes=[1, 3])
def a_parameter_that_moves_to_another_optimizer(passes: int) -> None:
    """The optimizer that had it exchanges it, until that is gone."""
    model, plain = network(), network()
    for one in (model, plain):
        both = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (one[:2], one[2:])]
        if one is model:
            both = [hvd.DistributedOptimizer(each, backward_passes_per_step=passes) for each in both]
        for step in range(2 * LAST_STEP):
            if step == 2:
                weight = both[0].param_groups[0]["params"].pop(0)
                both[1].param_groups[0]["params"].append(weight)
            if step == LAST_STEP:
                del both[0]
            for each in both:
                each.zero_grad()
            (own_loss if one is model else whole_loss)(one, step).backward()
            for each in reversed(both):
                each.step()
    assert_alike(model, plain)


def optimizer_with(technique: str, model: nn.Module) -> Any:
    if technique == "LocalSGD":
        return hvd.LocalSGD(sgd(model), every=2)
    return distributed(model, **{technique: 1})


@case(technique=["staleness", "LocalSGD"])
def fewer_parameters_are_allowed(technique: str) -> None:
    model = network()
    optimizer = optimizer_with(technique, model)
    own_loss(model, 0).backward()
    optimizer.step()
    del optimizer.param_groups[0]["params"][1]
    optimizer.step()
    hvd.barrier()  # with staleness, a slower rank's step still needs this rank


@case(technique=["staleness", "deadline", "LocalSGD"])
def other_parameters_are_refused(technique: str) -> None:
    model = network()
    optimizer = optimizer_with(technique, model)
    model[0].weight = optimizer.param_groups[0]["params"][0] = heir(model[0].weight)
    own_loss(model, 1).backward()
    with pytest.raises(UnsupportedError, match=rf"index 0, shape \(5, 4\).*{technique}"):
        optimizer.step()


@case(way=["Average", "Sum", "Sum before a closure", "Sum in a closure"])
def gradients_that_are_written_into_the_same_memory(way: str) -> None:
    """They are exchanged in each step, also if `zero_grad()` is never called."""
    op, _, place = way.partition(" ")
    factor = hvd.size() if op == "Sum" else 1
    model, plain = network(), network()
    optimizer, reference = distributed(model, op=getattr(hvd, op)), sgd(plain)

    def write(found: nn.Module, loss: Any, scale: int, step: int) -> None:
        made = torch.autograd.grad(scale * loss(found, step), list(found.parameters()))
        with torch.no_grad():
            for one, gradient in zip(found.parameters(), made, strict=True):
                one.grad.copy_(gradient)

    for one in (*model.parameters(), *plain.parameters()):
        one.grad = torch.zeros_like(one)
    for step in range(3):
        write(plain, whole_loss, factor, step)
        reference.step()
        if place == "in a closure":
            optimizer.step(lambda step=step: write(model, own_loss, 1, step))
            continue
        write(model, own_loss, 1, step)
        optimizer.step(*([lambda: None] if place else []))
    assert_alike(model, plain)


@case(overlap=[False, True])
def a_step_that_repeats_the_last_one(overlap: bool) -> None:
    """Gradients that were clipped for a step are those of all ranks, and are not summed again."""
    model, plain = network(), network()
    optimizer, reference = distributed(model, op=hvd.Sum, overlap_forward=overlap), sgd(plain)
    for one, each, loss in ((model, optimizer, own_loss), (plain, reference, whole_loss)):
        ((hvd.size() if one is plain else 1) * loss(one, 0)).backward()
        if not overlap:
            nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        each.step()
        each.step()
        for parameter in one.parameters():
            parameter.grad = None
        each.step()
        assert all(parameter.grad is None for parameter in one.parameters())
    assert_alike(model, plain)


class Marked(Tensor):
    """A tensor of a class of the program."""


@case()
def gradients_of_a_class_of_the_program() -> None:
    """They are not taken for written ones after a step."""
    model = network()
    optimizer = distributed(model, op=hvd.Sum)
    for one in model.parameters():
        one.grad = torch.ones_like(one).as_subclass(Marked)
    for _ in range(3):
        optimizer.step()
        assert all(torch.equal(one.grad, torch.full_like(one, hvd.size())) for one in model.parameters())
