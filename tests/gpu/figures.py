"""Step 7: figures of one rank, which show the costs of the GPU path besides the data's way between GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from card import IS_DRY_RUN, Card, milliseconds_since, own_card, report
from torch import nn

import sirtaki.torch as hvd

KERNEL_SECONDS = 0.1
SMALL_TENSORS, SMALL_ELEMENTS = 400, 1024  # of 4 KiB each
CALLS, WARM_UP = (1, 1) if IS_DRY_RUN else (20, 3)
WIDTH, LAYERS = 16 if IS_DRY_RUN else 1024, 16  # of the model that is trained


def measure_first_operation(card: Card) -> None:
    tensor = torch.ones(1, device=card.device)
    start = time.perf_counter()
    hvd.allreduce_(tensor, op=hvd.Sum, name="first")
    card.synchronize()
    report(first_operation_ms=milliseconds_since(start))


def measure_blocked_host(card: Card) -> None:
    """Measures how long `synchronize` blocks the host while a kernel runs before the operation."""
    tensor = torch.ones(1 << 20, device=card.device)
    card.work_for(0.001)  # finds out how fast the GPU counts
    card.synchronize()
    card.work_for(KERNEL_SECONDS)
    handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name="behind a kernel")
    start = time.perf_counter()
    hvd.synchronize(handle)
    report(host_blocked_behind_100_ms_kernel_ms=milliseconds_since(start))
    card.synchronize()


def measure_small_tensors(card: Card) -> None:
    """Measures a group of small tensors, which are copied into one buffer and back, beside one tensor."""
    small = [torch.ones(SMALL_ELEMENTS, device=card.device) for _ in range(SMALL_TENSORS)]
    whole = torch.ones(SMALL_TENSORS * SMALL_ELEMENTS, device=card.device)
    grouped = duration(card, lambda: hvd.grouped_allreduce_(small, op=hvd.Sum, name="small"))
    single = duration(card, lambda: hvd.allreduce_(whole, op=hvd.Sum, name="whole"))
    report(allreduce_of_400_tensors_of_4_KiB_ms=grouped, allreduce_of_one_tensor_of_1600_KiB_ms=single)


def duration(card: Card, call: Callable[[], Any]) -> float:
    """Returns the median of the milliseconds until the GPU has finished a call."""
    times = []
    for _ in range(WARM_UP + CALLS):
        card.synchronize()
        start = time.perf_counter()
        call()
        card.synchronize()
        times.append(milliseconds_since(start))
    return round(median(times[WARM_UP:]), 3)


def measure_memory(card: Card) -> None:
    """Measures the most memory of training steps, 16.8 M parameters, with and without sirtaki."""
    figures = {}
    for name in ("without", "with"):
        card.start_counting_memory()
        train(card, is_distributed=name == "with")
        figures[f"most_memory_{name}_sirtaki_MiB"] = card.most_memory()
    report(**figures)


def train(card: Card, is_distributed: bool) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=card.device) for _ in range(LAYERS)))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    if is_distributed:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    inputs = torch.randn(512, WIDTH, device=card.device)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    card.synchronize()


def main() -> None:
    hvd.init()
    with own_card(hvd.local_rank()) as card:
        for measure in (measure_first_operation, measure_blocked_host, measure_small_tensors, measure_memory):
            measure(card)
    hvd.shutdown()


if __name__ == "__main__":
    main()
