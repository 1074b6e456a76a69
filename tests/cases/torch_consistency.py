"""Detection of ranks that diverge: parameters, hyper-parameters, and batches that are equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case
from cases.differing import differ
from cases.torch_models import distributed, generator, network, own_loss, sgd, train, whole_loss
from sirtaki.common.exceptions import ParametersDifferError


def step(model: nn.Module, optimizer: Any, number: int, loss: Callable[..., Tensor] = own_loss) -> None:
    optimizer.zero_grad()
    loss(model, number).backward()
    optimizer.step()


def train_with_rounding() -> nn.Module:
    """Trains for two steps, between which a parameter comes to differ by rounding; returns the model."""
    model = network()
    optimizer = distributed(model)
    step(model, optimizer, 0)
    with torch.no_grad():
        model[0].weight.mul_(1 + hvd.rank() * 2**-52)
    step(model, optimizer, 1)
    return model


def train_and_join(steps: int) -> tuple[nn.Module, Any]:
    """Trains for `steps` and as many more as the rank's number, without changing parameters, and joins."""
    model = network()
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.0))
    train(model, optimizer, own_loss, steps + hvd.rank())
    hvd.join()
    return model, optimizer


@case(least=2)
def a_forgotten_broadcast_is_named_at_the_second_step() -> None:
    model = network(seed=int(hvd.rank() == 1))
    optimizer = distributed(model)
    step(model, optimizer, 0)
    differ(
        lambda: step(model, optimizer, 1),
        r"'0\.weight' on rank 1 \(pid \d+ on \S+\) is not as on rank 0 ",
        r"by up to \d",
        "and 9 more",
        r"hvd\.broadcast_parameters\(model\.state_dict\(\), root_rank=0\)",
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, own_loss, steps=3)
    hvd.check_parameters(model)


@case(least=2)
def frozen_parameters_count_too() -> None:
    model = network()
    with torch.no_grad():
        model[0].weight.requires_grad_(False).add_(float(hvd.rank() == 1))
    optimizer = distributed(model)
    step(model, optimizer, 0)
    differ(lambda: step(model, optimizer, 1), r"'0\.weight' on rank 1")


@case(least=2)
def parameters_that_were_broadcast_after_the_first_step() -> None:
    model = network(seed=hvd.rank())
    optimizer = distributed(model)
    step(model, optimizer, 0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, own_loss, steps=3)


@case(least=2)
def optimizer_state_that_differs() -> None:
    """Only one rank has loaded a checkpoint's momenta, or the broadcast left them out."""
    model = network()
    optimizer = distributed(model)
    step(model, optimizer, 0)
    state = optimizer.state[model[0].weight]
    state["momentum_buffer"].add_(float(hvd.rank() == 1))
    differ(
        lambda: step(model, optimizer, 1),
        r"'0\.weight \(momentum_buffer\)' on rank 1",
        r"hvd\.broadcast_optimizer_state\(optimizer, root_rank=0\)",
    )


@case(least=2)
def state_that_one_rank_has() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    if hvd.rank() == 1:
        train(model, optimizer, whole_loss, steps=1)
    differ(lambda: hvd.check_parameters(optimizer), r"0\.0 \(exp_avg\)' is on rank 1", "not on rank 0")


@case(least=2)
def a_process_set_checks_its_own_ranks() -> None:
    odd = hvd.add_process_set(range(1, hvd.size()))
    model = network(seed=max(hvd.rank(), 1))  # ranks outside the set may have any parameters
    optimizer = distributed(model, process_set=odd)
    if hvd.size() == 2:
        train(model, optimizer, own_loss, steps=3)
    elif hvd.rank():
        step(model, optimizer, 0)
        with pytest.raises(ParametersDifferError, match=r"rank 2 .* is not as on rank 1"):
            step(model, optimizer, 1)


@case(least=2)
def adasum_checks_as_well() -> None:
    model = network(seed=hvd.rank())
    optimizer = distributed(model, op=hvd.Adasum)
    step(model, optimizer, 0)
    differ(lambda: step(model, optimizer, 1), r"'0\.weight' on rank 1", "broadcast_parameters")


@case(least=2)
def sparse_embeddings_that_differ() -> None:
    model = nn.Embedding(5, 3, sparse=True, _weight=torch.full((5, 3), float(hvd.rank() == 1)))
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = torch.tensor([1, 2])
    model(rows).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(rows).sum().backward()
    differ(optimizer.step, "'weight' on rank 1", "by up to 1")


@case(least=2)
def half_precision_is_compared_in_place() -> None:
    model = nn.Linear(3, 3).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5 if hvd.rank() == 1 else 0.25)
    differ(lambda: hvd.check_parameters(model), "'weight' on rank 1", r"by up to 0\.25")


@case(least=2)
def rounding_is_no_mistake_of_the_program() -> None:
    model = train_with_rounding()
    differ(lambda: hvd.check_parameters(model), "'0.weight'")


@case(least=2)
def learning_rates_that_part_in_any_step() -> None:
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, own_loss, steps=4)
    optimizer.param_groups[0]["lr"] *= 1 + hvd.rank()
    differ(lambda: step(model, optimizer, 4), "lr is 0.1 on rank 1", "0.05 on rank 0", r"hvd\.allreduce")


@case(least=2)
def hyper_parameters_that_differ_from_the_start() -> None:
    model = network()
    momentum = 0.8 if hvd.rank() == 1 else 0.9
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    step(model, optimizer, 0)
    differ(lambda: step(model, optimizer, 1), "momentum is 0.8 on rank 1", "0.9 on rank 0")


@case(least=2)
def one_rank_that_reacts_to_its_own_loss() -> None:
    """ReduceLROnPlateau receives the rank's own loss."""
    model = network()
    optimizer = distributed(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    train(model, optimizer, own_loss, steps=3)
    for loss in (1.0, 2.0 - 1.5 * hvd.rank()):
        scheduler.step(loss)
    differ(lambda: step(model, optimizer, 3), "lr is", "average")


@case(least=2)
def uneven_data_and_a_join() -> None:
    """A rank that runs out of data misses the others' last steps, and the next step reports it."""
    model = network()
    optimizer = distributed(model)
    train(model, optimizer, own_loss, steps=3 + hvd.rank())
    hvd.join()
    differ(lambda: step(model, optimizer, 9), r"hvd\.join\(\) have missed", r"hvd\.join\(model=model")


@case(least=2)
def even_data_and_a_join() -> None:
    model = network()
    optimizer = distributed(model)
    for _ in range(2):
        train(model, optimizer, own_loss, steps=3)
        hvd.join()
    train(model, optimizer, own_loss, steps=3)


@case(least=2)
def a_join_in_the_first_steps() -> None:
    """Ranks then count their exchanges differently; only real differences are reported."""
    train(*train_and_join(1), own_loss, steps=4)


@case(least=2)
def checks_at_any_time() -> None:
    model = network()
    optimizer = sgd(model)
    hvd.check_parameters(model)
    hvd.check_parameters(optimizer)
    hvd.check_parameters(model.state_dict())
    hvd.check_parameters(list(model.parameters()))
    optimizer.param_groups[0]["lr"] = 0.1 + hvd.rank()
    differ(lambda: hvd.check_parameters(optimizer), "lr is")
    with torch.no_grad():
        model[4].bias[0] = hvd.rank()
    differ(lambda: hvd.check_parameters(model), r"'4\.bias' on rank 1", "by up to")
    differ(lambda: hvd.check_parameters({"a": torch.ones(2 + hvd.rank() % 2)}), "'a' is float32 of shape")
    differ(lambda: hvd.check_parameters({f"of {hvd.rank()}": torch.ones(1)}), "different parameters")
    names = ["a", "b"] if hvd.rank() else ["b", "a"]
    differ(lambda: hvd.check_parameters([(name, torch.ones(1)) for name in names]), "different orders")
    with pytest.raises(ValueError, match=r"check_parameters takes"):
        hvd.check_parameters(7)


@case(least=2)
def memory_in_any_order() -> None:
    """The comparison covers values, not their memory order."""
    weight = torch.randn(4, 3, 5, 5, generator=generator(1))
    if hvd.rank():
        weight = weight.to(memory_format=torch.channels_last)
    hvd.check_parameters([weight, weight.transpose(0, 1), weight[:0], weight[0, 0, 0, 0]])


@case(least=2)
def a_parameter_that_one_rank_has_frozen() -> None:
    """The parameter would count as zero there, and the others' gradient would be too small."""
    model = network()
    model[2].weight.requires_grad_(hvd.rank() != 1)
    optimizer = distributed(model)
    step(model, optimizer, 0)
    differ(
        lambda: step(model, optimizer, 1), r"'2\.weight' is float64 of shape \[5, 5\] \(frozen\) on rank 1"
    )


@case(least=2)
def parameters_in_another_order() -> None:
    """Without names, gradients are matched by position."""
    model = network()
    layers = [model[0], model[2], model[4]]
    twin = nn.Linear(5, 5).double()
    with torch.no_grad():
        for one, value in zip(twin.parameters(), (2.0, 3.0), strict=True):
            one.fill_(value)
    squares = [layers[1], twin] if hvd.rank() == 1 else [twin, layers[1]]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([one for layer in squares for one in layer.parameters()], lr=0.1)
    )
    step(model, optimizer, 0)
    differ(lambda: step(model, optimizer, 1), "'parameter 0 of group 0' on rank 1")


@case(least=2)
def the_plain_optimizer_that_was_kept() -> None:
    """The result of `hvd.DistributedOptimizer(optimizer)` is dropped: it is the same object."""
    model = network()
    optimizer = sgd(model)
    distributed(model, optimizer)
    train(model, optimizer, own_loss, steps=3)
    hvd.check_parameters(model)
