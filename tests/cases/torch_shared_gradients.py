"""Gradients with places of their own: the same training to the bit, and views as in DDP.

On the CPU the places are in memory that the ranks of a host share. On a GPU only small gradients have any.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.torch_models import (
    assert_alike,
    assert_same_on_all_ranks,
    distributed,
    leaving_early,
    network,
    own_loss,
    sgd,
    train,
    whole_loss,
)
from sirtaki.bindings.context import current
from sirtaki.bindings.request import CPU
from sirtaki.torch import device

WIDE = 100  # some gradients are worth an offer, and are moved as soon as they are there


def sharing(model: nn.Module, **options: Any) -> Any:
    return distributed(model, gradients_in_shared_memory=True, **options)


def side_by_side(**options: Any) -> list[tuple[nn.Module, Any]]:
    """Returns two equal models with optimizers: one with gradients in shared memory, and a usual one."""
    model, usual = network(width=WIDE), network(width=WIDE)
    return [(model, sharing(model, **options)), (usual, distributed(usual, **options))]


def has_place(parameter: Tensor) -> bool:
    return device.ordinal(parameter) == CPU or parameter.nbytes < 1 << 16


def addresses(model: nn.Module) -> list[int]:
    return [_gradient(parameter).data_ptr() for parameter in model.parameters() if has_place(parameter)]


def assert_same_bits(model: nn.Module, other: nn.Module) -> None:
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)


@case(early=[False, True])
def it_trains_to_the_same_bits(early: bool) -> None:
    (model, optimizer), (usual, other) = side_by_side()
    if early:
        leaving_early(optimizer)
    train(model, optimizer, own_loss)
    train(usual, other, own_loss)
    assert_same_bits(model, usual)
    alone = network(width=WIDE)
    assert_alike(model, train(alone, sgd(alone), whole_loss))
    assert_same_on_all_ranks(model)


@case(set_to_none=[False, True])
def gradients_keep_their_places(set_to_none: bool) -> None:
    model = network(width=WIDE)
    optimizer = sharing(model)
    places = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        own_loss(model, step).backward()
        places.append(addresses(model))
        optimizer.step()
    if hvd.size() > 1 and current().setting("transport") != "socket":
        assert places[0] == places[1] == places[2]


@case()
def passes_add_up_in_place() -> None:
    (model, _), (usual, _) = both = side_by_side()
    for one, its in both:
        for step in range(3):
            its.zero_grad()
            with its.no_sync():
                own_loss(one, 2 * step).backward()
            own_loss(one, 2 * step + 1).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.1)
            its.step()
    assert_same_bits(model, usual)


@case()
def sums_of_gradients_that_the_model_has_dropped() -> None:
    """A new gradient in an old place has not grown from the last step's, which only averages may."""
    (model, _), (usual, _) = both = side_by_side(op=hvd.Sum)
    for one, its in both:
        for step in range(3):
            one.zero_grad()
            own_loss(one, step).backward()
            its.step()
    assert_same_bits(model, usual)
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="already been combined"):
            own_loss(model, 3).backward()  # without dropping them before


@case()
def a_gradient_that_was_replaced() -> None:
    """The program may set `.grad`: the step uses what it has set, and the next pass finds its place again."""
    (model, _), (usual, _) = both = side_by_side()
    for one, its in both:
        for step in range(3):
            its.zero_grad()
            own_loss(one, step).backward()
            for parameter in one.parameters():
                parameter.grad = 2 * parameter.grad
            its.step()
    assert_same_bits(model, usual)


@case()
def gradients_without_a_pass() -> None:
    model = network(width=WIDE)
    optimizer = sharing(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, hvd.rank())
    optimizer.synchronize()
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.full_like(parameter, (hvd.size() - 1) / 2))


@case(least=2)
def a_parameter_that_only_some_ranks_use() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDE, WIDE).double() for _ in range(2)]
    model = nn.ModuleList(layers)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = sharing(model, op=hvd.Sum)
    inputs = torch.ones(1, WIDE, dtype=torch.float64)
    for _ in range(2):
        optimizer.zero_grad()
        (layers[0](inputs).sum() + (layers[1](inputs).sum() if hvd.rank() == 0 else 0)).backward()
        assert layers[0].weight.grad is not None
        assert layers[1].weight.grad is not None
        assert torch.equal(layers[0].weight.grad, torch.full_like(layers[0].weight, hvd.size()))
        assert torch.equal(layers[1].weight.grad, torch.ones_like(layers[1].weight))


@case()
def sparse_gradients_and_other_layouts() -> None:
    """Gradients that have no place are exchanged as usual."""
    table = nn.Embedding(50, WIDE, sparse=True).double()
    image = nn.Parameter(torch.zeros(4, 3, 8, 8, dtype=torch.float64).to(memory_format=torch.channels_last))
    with torch.no_grad():
        table.weight.zero_()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight, image], lr=1.0), gradients_in_shared_memory=True
    )
    for _ in range(2):
        optimizer.zero_grad()
        (table(torch.tensor([hvd.rank()])).sum() + (image * (hvd.rank() + 1)).sum()).backward()
        optimizer.step()
    assert torch.equal(table.weight[0], torch.full((WIDE,), -2.0 / hvd.size(), dtype=torch.float64))
    assert torch.equal(image.detach(), torch.full_like(image, -2 * (hvd.size() + 1) / 2))


@case()
def gradients_that_autograd_differentiates() -> None:
    model = network(width=WIDE)
    optimizer = sharing(model)
    parameters = list(model.parameters())
    loss = own_loss(model, 0)
    loss.backward(create_graph=True)
    penalty = torch.stack([(one.grad**2).sum() for one in parameters if one.grad is not None]).sum()
    optimizer.zero_grad()
    penalty.backward()
    optimizer.step()
    assert_same_on_all_ranks(model)


@case()
def saving_one_gradient_saves_no_other() -> None:
    """On a GPU the small gradients of a dtype are saved together, and no large gradient with them."""
    model = network(width=WIDE)
    optimizer = sharing(model)
    own_loss(model, 0).backward()
    stored = io.BytesIO()
    torch.save(model[4].bias.grad, stored)
    on_cpu = device.ordinal(model[4].bias) == CPU
    assert stored.tell() < (4_000 if on_cpu else 12_000)
    optimizer.step()


@case()
def parameters_that_are_added() -> None:
    model = network(width=WIDE)
    optimizer = sharing(model)
    extra = nn.Parameter(torch.zeros(WIDE, WIDE, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    (own_loss(model, 0) + (extra * hvd.rank()).sum()).backward()
    assert torch.equal(_gradient(extra), torch.full_like(extra, (hvd.size() - 1) / 2))


@case()
def tensors_of_the_program() -> None:
    mine = hvd.empty((WIDE, WIDE), torch.float32)
    assert torch.equal(mine, torch.zeros(WIDE, WIDE))
    assert hvd.empty(3).dtype == torch.get_default_dtype()
    assert hvd.empty((2, 0)).shape == (2, 0)
    mine += hvd.rank()
    hvd.allreduce_(mine, op=hvd.Sum)
    assert torch.equal(mine, torch.full((WIDE, WIDE), float(sum(range(hvd.size())))))


@case()
def what_it_does_not_go_with() -> None:
    model = network()
    wrong: list[dict[str, Any]] = [
        {"op": hvd.Adasum},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.int8()},
        {"gradient_predivide_factor": 2.0},
        {"shard": "state"},
        {"staleness": 1},
        {"deadline": 1.0},
        {"overlap_forward": True},
    ]
    for options in wrong:
        with pytest.raises(ValueError, match="gradients_in_shared_memory"):
            sharing(model, **options)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
