"""A hint for programs that start several ranks but do not connect them.

It is given once, on rank 0: when optimizers that are not distributed take several steps in a row, and nothing
is exchanged between the ranks meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import register_optimizer_step_post_hook

from sirtaki.bindings import observe
from sirtaki.bindings.context import Context
from sirtaki.bindings.default_context import find
from sirtaki.common.hints import hint
from sirtaki.torch.wrapping import Wrapped

_STEPS = 3


@dataclass
class _Record:
    """A record of a rank's plain optimizers."""

    operations: int = -1  # number that had ended at the last step
    steps: int = 0  # in a row without another operation
    is_reported: bool = False


_records: WeakKeyDictionary[Context, _Record] = WeakKeyDictionary()


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    context = find()
    if context is None or context.size == 1 or context.rank != 0 or isinstance(optimizer, Wrapped):
        return
    record = _records.setdefault(context, _Record())
    if record.is_reported:
        return
    operations = observe.statistics(context)["operations"]
    record.steps = record.steps + 1 if operations == record.operations else 1
    record.operations = operations
    if record.steps == _STEPS:
        record.is_reported = True
        hint(
            f"{_STEPS} steps of {type(optimizer).__name__} without any exchange between the {context.size} "
            "ranks: each rank trains a model of its own. Wrap the optimizer: "
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
        )


def register_hook() -> None:
    """Starts observing every step of any optimizer."""
    register_optimizer_step_post_hook(_count_step)
