"""Mistakes of torch users: each has its exception, whose text names the remedy, and does no harm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import sirtaki.torch as hvd
from cases import case
from cases.refusals import refusal_check
from cases.torch_models import assert_alike, distributed, network, own_loss, sgd, train, whole_loss
from sirtaki.bindings.errors import MismatchError, UnsupportedError


def still_works() -> None:
    assert hvd.allreduce(torch.ones(()), op=hvd.Sum) == hvd.size()


refused = refusal_check(still_works)


def every_operation(tensor: Any, *words: str, kind: type[Exception] = ValueError) -> None:
    for operation in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        refused(lambda operation=operation: operation(tensor, name="loss"), *words, "loss", kind=kind)
    for operation in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        refused(lambda operation=operation: operation(tensor, 0, name="loss"), *words, "loss", kind=kind)
    for operation in (hvd.allgather, hvd.allgather_async):
        refused(lambda operation=operation: operation(tensor, name="loss"), *words, "loss", kind=kind)


@case()
def sparse_tensors() -> None:
    for layout in (torch.sparse_coo, torch.sparse_csr):
        sparse = torch.eye(3).to_sparse(layout=layout)
        every_operation(sparse, "sparse", "to_dense()", kind=UnsupportedError)


@case()
def tensors_without_data() -> None:
    every_operation(torch.ones(3, device="meta"), "meta", "no data", kind=UnsupportedError)
    lazy = nn.LazyLinear(3).weight
    refused(lambda: hvd.broadcast_(lazy, 0), "lazy", "batch", kind=UnsupportedError)


class OnRocm(torch.Tensor):
    """A tensor as torch for ROCm has it on a GPU of AMD: this build, too, has no CUDA."""

    is_cuda, is_cpu = True, False


@case()
def tensors_on_gpus_that_are_not_nvidias() -> None:
    every_operation(
        torch.ones(3).as_subclass(OnRocm), "only tensors on GPUs of NVIDIA", kind=UnsupportedError
    )


@case()
def dtypes_that_cannot_be_exchanged() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    every_operation(quantized, "quint8", "float32", kind=UnsupportedError)


@case()
def dtypes_that_cannot_be_reduced() -> None:
    names = [name for name in ("bool", "float8_e8m0fnu") if hasattr(torch, name)]  # the latter since 2.7
    for dtype in (getattr(torch, name) for name in names):
        mine = torch.ones(3).to(dtype)
        refused(
            lambda mine=mine: hvd.allreduce(mine), str(dtype).removeprefix("torch."), kind=UnsupportedError
        )
    refused(lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64), op=hvd.Max), "complex64")


@case()
def things_that_are_no_tensors() -> None:
    every_operation([1.0], "list", "torch.Tensor", kind=TypeError)
    every_operation(3.0, "float", kind=TypeError)


@case()
def arguments_that_do_not_fit() -> None:
    one = torch.ones(3)
    refused(lambda: hvd.allreduce(one, average=True, op=hvd.Sum), "average")
    refused(lambda: hvd.allreduce(one, op=6), "Sum")
    refused(lambda: hvd.allreduce(one, prescale_factor=float("nan")), "scale")
    refused(lambda: hvd.broadcast(one, hvd.size()), "root")
    refused(lambda: hvd.allgather(torch.tensor(1.0)), "dimension")
    refused(lambda: hvd.allreduce_(torch.ones(1).expand(4)), "clone()")
    refused(lambda: hvd.allreduce(one.view((1,) * 16 + (3,))), "16 dimensions")


@case(least=2)
def ranks_that_disagree() -> None:
    mine = torch.ones(3 + hvd.rank() % 2, requires_grad=True)
    with pytest.raises(MismatchError, match=r"weights.*\[3\].*\[4\]"):
        hvd.allreduce(mine, name="weights")
    still_works()


@case(least=2)
def models_that_differ_between_ranks() -> None:
    """backward() raises the error, which names the gradient, and the next pass works."""
    model = nn.ParameterDict({"even": torch.ones(2 + hvd.rank() % 2), "same": torch.ones(3)})
    optimizer = distributed(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(MismatchError, match=r"gradient\.even.*\[2\].*\[3\]"):
        (model["even"].sum() + model["same"].sum()).backward()
    still_works()
    optimizer.zero_grad()
    still_works()


@case()
def optimizers_that_are_none() -> None:
    model = network()
    refused(lambda: hvd.DistributedOptimizer(model), "torch.optim.Optimizer", "Sequential")
    optimizer = distributed(model)
    refused(lambda: hvd.DistributedOptimizer(optimizer), "once")


@case()
def names_that_do_not_fit() -> None:
    model = network()
    named = list(model.named_parameters())
    refused(lambda: hvd.DistributedOptimizer(sgd(model), [named[0], *named]), "more than once", "0.weight")
    refused(lambda: hvd.DistributedOptimizer(sgd(model), named[1:]), "1 of the optimizer's parameters")
    refused(lambda: hvd.DistributedOptimizer(sgd(model), model.parameters()), "named_parameters()")
    train(model, hvd.DistributedOptimizer(sgd(model)), own_loss, steps=2)


@case()
def options_that_do_not_fit() -> None:
    model = network()
    refused(lambda: distributed(model, backward_passes_per_step=0), "backward_passes_per_step")
    refused(lambda: distributed(model, op=6), "op")
    refused(lambda: distributed(model, op=hvd.Sum, gradient_predivide_factor=2.0), "op=Average")
    for factor in (0.0, -1.0, math.inf, math.nan):
        refused(lambda: distributed(model, gradient_predivide_factor=factor), "positive")  # noqa: B023
    assert type(sgd(model)) is torch.optim.SGD


@case()
def groups_that_do_not_fit() -> None:
    model, weight = network(), torch.ones(2)
    first = model[0].weight
    refused(lambda: distributed(model, groups=-1), "groups is -1")
    refused(lambda: distributed(model, num_groups=-2), "groups is -2")
    refused(lambda: distributed(model, groups=[[first], [first]]), "group 1", "twice")
    refused(lambda: distributed(model, groups=[[weight]]), "group 0", "not one of the optimizer's")
    refused(lambda: distributed(model, groups=[first]), "list of lists")


@case(least=2)
def parameters_that_cannot_be_exchanged() -> None:
    model = nn.Linear(2, 2, device="meta")
    refused(lambda: distributed(model), "weight", "meta", "load")
    model = nn.LazyLinear(3)
    refused(lambda: distributed(model), "weight", "lazy")


@case(least=2)
def parameters_of_two_optimizers_in_one_pass() -> None:
    model = network()
    first, second = distributed(model), distributed(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"two DistributedOptimizers exchange .* '0.weight'"):
            own_loss(model, 0).backward()
    del second
    plain = network()
    assert_alike(train(model, first, own_loss, steps=2), train(plain, sgd(plain), whole_loss, steps=2))


@case(least=2)
def gradients_that_share_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = distributed(model)
    model[0].bias.grad = model[1].bias.grad = torch.zeros(2)
    words = "the gradients of the parameters", "'0.bias'", "'1.bias'", "same memory", "gradient.clone()"
    refused(lambda: model(torch.ones(1, 2)).sum().backward(), *words)
    del optimizer


@case(least=2)
def parameters_that_share_memory() -> None:
    """They would be updated one after the other, and used in between."""
    techniques: list[dict[str, Any]] = [{"overlap_forward": True}, {"shard": "state"}, {"shard": "gradients"}]
    for options in techniques:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight.data = model[0].weight.data
        words = "'0.weight' and '1.weight'", "same memory", next(iter(options)), "without .data"
        refused(lambda model=model, options=options: distributed(model, **options), *words)


@case()
def parameters_to_broadcast_that_are_none() -> None:
    model = network()
    for wrong in (model, {"epoch": 3}, [("a", 1)], torch.ones(3), 7):
        refused(lambda wrong=wrong: hvd.broadcast_parameters(wrong, 0), "state_dict()")
    refused(lambda: hvd.broadcast_parameters(model.state_dict(), hvd.size()), "root")
    refused(lambda: hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0), "LBFGS")


@case(least=2)
def optimizers_that_differ_between_ranks() -> None:
    parameters = [torch.ones(2, requires_grad=True) for _ in range(3)]
    count = 3 if hvd.rank() == 0 else 2
    optimizer = torch.optim.SGD(parameters[:count], lr=0.1)
    if hvd.rank() == 0:
        hvd.broadcast_optimizer_state(optimizer, 0)
    else:
        refused_text(lambda: hvd.broadcast_optimizer_state(optimizer, 0), "[3]", "[2]")
    still_works()


def refused_text(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(ValueError, match="parameter groups") as caught:
        call()
    assert all(word in str(caught.value) for word in words)


@case()
def techniques_that_each_decide_whose_gradients_a_step_has() -> None:
    own: dict[str, Any] = {"shard": "state", "staleness": 1, "deadline": 0.1}
    for one, other in itertools.combinations(own, 2):
        options = {name: own[name] for name in (one, other)}
        refused(lambda options=options: distributed(network(), **options), one, other, "one of them")
