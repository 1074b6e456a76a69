"""Checks of the arguments of `DistributedOptimizer` that belong to no technique alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.common.ops import Adasum
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.torch.compression import NoneCompressor
from sirtaki.torch.sparse_gradients import ExchangeOptions


def check_follows_changes(op: int, process_set: ProcessSet, context: Context) -> None:
    """Raises ValueError for an optimizer that could not continue when the ranks of an elastic job change."""
    if context.survivors is None:
        return
    if op == Adasum:
        raise ValueError(
            "op=Adasum is not available in an elastic job: the ranks exchange after they have changed their "
            "parameters, so a lost rank would leave no common state; use op=Average"
        )
    if process_set is not global_process_set:
        raise ValueError(
            "in an elastic job all ranks have to train one model, because a rank that joins gets the state "
            "of another: leave out process_set"
        )


def check_techniques(**are_used: bool) -> None:
    """Raises ValueError for two options of which each decides itself whose gradients a step has."""
    used = [name for name, is_used in are_used.items() if is_used]
    if len(used) > 1:
        raise ValueError(f"{used[0]} and {used[1]} cannot be combined: give the optimizer one of them")


def check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")


def in_shared_memory(
    exchange_options: ExchangeOptions, op: int, named: Iterable[tuple[str, Tensor]]
) -> ExchangeOptions:
    """Returns the options for gradients in shared memory.

    Raises:
        ValueError: gradients are not exchanged as they are, or are not in the memory of the CPU.
    """
    uses = {
        "op=Adasum": op == Adasum,
        "compression": exchange_options.compression is not NoneCompressor
        or exchange_options.memory is not None,
        "gradient_predivide_factor": exchange_options.how.prescale != 1.0,
    }
    used = [name for name, is_used in uses.items() if is_used]
    if used:
        raise ValueError(
            f"{used[0]} does not exchange the gradients themselves, so it has no use for "
            "gradients_in_shared_memory: leave out one of them"
        )
    for name, parameter in named:
        if not parameter.is_cpu:
            raise ValueError(
                f"gradients_in_shared_memory is for gradients on the CPU, and {name!r} is on "
                f"{parameter.device}: leave it out"
            )
    return replace(exchange_options, in_shared_memory=True)
