"""Every optimizer of torch with sirtaki's options: each pair of options is tested with each optimizer.

Gradients are small whole numbers that every format holds exactly, and divisible by the number of ranks. So
for all options, parameters must equal those of one process that uses the ranks' batches together.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

import sirtaki.torch as hvd
from cases import case

STEPS = 3
SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": (), "sometimes": (2, 3), "never": (2, 2)}

KINDS = [
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda those, **how: torch.optim.SGD(those, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    **{kind: getattr(torch.optim, kind) for kind in KINDS if hasattr(torch.optim, kind)},
}
ONLY_MATRICES = {"Muon"}

AXES: dict[str, tuple[Any, ...]] = {
    "implementation": ("plain", "foreach", "fused"),
    "passes": ("one", "counted", "held back", "one by one"),
    "op": ("Average", "Sum"),
    "groups": (0, 2, "lists"),
    "predivide": (1.0, 4.0),
    "compression": ("none", "fp16", "bf16"),
    "clips": (False, True),
    "scales": (False, True),
    "drops": (True, False),
}


def is_allowed(kind: str, options: Mapping[str, Any]) -> bool:
    implementation = options["implementation"]
    if (
        implementation != "plain"
        and implementation not in inspect.signature(getattr(torch.optim, kind)).parameters
    ):
        return False
    return options["op"] == "Average" or (options["predivide"] == 1.0 and options["passes"] != "one by one")


def pairwise(kind: str) -> Iterator[dict[str, Any]]:
    """Yields few combinations of options such that each allowed pair of two of them occurs."""
    everything = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    allowed = [options for options in everything if is_allowed(kind, options)]
    pairs = [set(combinations(options.items(), 2)) for options in allowed]
    missing = set().union(*pairs)
    while missing:
        best = max(range(0, len(allowed), 7), key=lambda place: len(pairs[place] & missing))
        if not pairs[best] & missing:
            best = next(place for place, found in enumerate(pairs) if found & missing)
        missing -= pairs[best]
        yield allowed[best]


def parameters(kind: str) -> nn.ParameterDict:
    numbers = {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) for name, shape in SHAPES.items()
    }
    chosen = {
        name: values for name, values in numbers.items() if values.dim() == 2 or kind not in ONLY_MATRICES
    }
    return nn.ParameterDict({name: values.double() / 8 for name, values in chosen.items()})


def loss(model: nn.ParameterDict, step: int, rank: int) -> Tensor:
    """Returns a rank's loss of a pass. It uses one parameter in every other pass, and one parameter never."""
    total = torch.zeros((), dtype=torch.float64)
    for name, parameter in model.items():
        if name == "never" or (name == "sometimes" and (rank + step) % 2):
            continue
        numbers = torch.arange(parameter.numel()).view(parameter.shape)
        total = total + (parameter * (12 * ((numbers + step + 2 * rank) % 7 - 3))).sum()
    return total


def train(
    model: nn.ParameterDict, optimizer: Any, options: Mapping[str, Any], losses: Callable[[int], Tensor]
) -> None:
    """Runs the same loop for the ranks and for the single reference process."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=options["scales"])
    passes = 1 if options["passes"] == "one" else 2
    for step in range(STEPS):
        for part in range(passes):
            holds = options["passes"] == "held back" and part == 0 and hasattr(optimizer, "no_sync")
            with optimizer.no_sync() if holds else contextlib.nullcontext():
                scaler.scale(losses(step * passes + part)).backward()
        if options["clips"]:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=options["drops"])


def compare(kind: str, options: Mapping[str, Any]) -> None:
    implementation = options["implementation"]
    how = {} if implementation == "plain" else {implementation: True}
    ours, plain = parameters(kind), parameters(kind)
    alone = OPTIMIZERS[kind](plain.parameters(), **how)
    lists = [[ours["matrix"], ours["sometimes"]]]
    optimizer = hvd.DistributedOptimizer(
        OPTIMIZERS[kind](ours.parameters(), **how),
        ours.named_parameters(),
        compression=getattr(hvd.Compression, options["compression"]),
        backward_passes_per_step=2 if options["passes"] == "counted" else 1,
        op=getattr(hvd, options["op"]),
        gradient_predivide_factor=options["predivide"],
        groups=lists if options["groups"] == "lists" else options["groups"],
    )
    divisor = hvd.size() if options["op"] == "Average" else 1
    train(ours, optimizer, options, lambda step: loss(ours, step, hvd.rank()))
    train(
        plain,
        alone,
        options,
        lambda step: sum(loss(plain, step, rank) for rank in range(hvd.size())) / divisor,
    )
    for name, one in ours.items():
        torch.testing.assert_close(one, plain[name], rtol=1e-12, atol=1e-12, msg=f"{kind}, {options}: {name}")


@case(kind=OPTIMIZERS)
def with_every_pair_of_options(kind: str) -> None:
    for options in pairwise(kind):
        compare(kind, options)
