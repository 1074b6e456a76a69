"""A hint for programs that start several ranks but do not connect them.

It is given once, on rank 0: when optimizers that are not distributed take several steps in a row, and nothing
is exchanged between the ranks meanwhile, or no more than a loss, a metric, or the gradients of distributed
optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from sirtaki.bindings.context import Context, find
from sirtaki.bindings.observing import observe
from sirtaki.common.semantics import hint
from sirtaki.torch.ops.autograd import averaged_losses
from sirtaki.torch.training.parameters import parameters_of
from sirtaki.torch.training.wrapping import Wrapped

_STEPS = 3  # without any exchange, or with losses that were averaged before their backward pass
_LITTLE_STEPS = 100  # with little exchange; parameters that are averaged by hand may be so every few steps
_OWN_MODEL = ": each rank trains a model of its own"
_LITTLE = 1024  # bytes per step, at most; compressed gradients of most models need more


@dataclass
class _Record:
    """A record of a rank's plain optimizers.

    Attributes:
        operations, bytes, losses: numbers at the last step: operations that had ended, their bytes, and
            backward passes of averaged losses.
        steps: in a row without another operation.
        little_steps: in a row with fewer bytes than the optimizer's parameters have elements.
        loss_steps: those of them with an averaged loss.
        shared_steps: steps of each distributed optimizer since the last step.
        has_shared: whether a distributed optimizer has taken a step since `little_steps` began.
    """

    operations: int = -1
    bytes: int = 0
    losses: int = 0
    steps: int = 0
    little_steps: int = 0
    loss_steps: int = 0
    shared_steps: WeakKeyDictionary[Any, int] = field(default_factory=WeakKeyDictionary)
    has_shared: bool = False
    is_reported: bool = False

    def count_shared(self, optimizer: Any) -> None:
        """Counts a step of a distributed optimizer."""
        self.has_shared, self.loss_steps = True, 0
        self.shared_steps[optimizer] = self.shared_steps.get(optimizer, 0) + 1

    def count(self, context: Context, optimizer: Any) -> None:
        """Counts a step of an optimizer that is not distributed."""
        distributed = [
            other for reference in self.shared_steps.keyrefs() if (other := reference()) is not None
        ]
        shared = {id(parameter) for other in distributed for parameter in parameters_of(other)}
        if any(id(parameter) in shared for parameter in parameters_of(optimizer)):
            return
        shared_bytes = sum(
            self.shared_steps[other] * sum(parameter.nbytes for parameter in parameters_of(other))
            for other in distributed
        )
        operations, volume = observe.ended_operations(context)
        losses = averaged_losses.get(context, 0)
        self.steps = self.steps + 1 if operations == self.operations else 1
        if _has_more_elements(optimizer, volume - self.bytes - shared_bytes):
            self.little_steps += 1
            self.loss_steps += losses > self.losses
        else:
            self.little_steps, self.loss_steps, self.has_shared = 0, 0, False
        for other in distributed:
            self.shared_steps[other] = 0
        self.operations, self.bytes, self.losses = operations, volume, losses


_records: WeakKeyDictionary[Context, _Record] = WeakKeyDictionary()


def _has_more_elements(optimizer: Any, volume: int) -> bool:
    """Returns whether `volume` bytes are too few to be the optimizer's gradients, in any dtype."""
    if volume >= _LITTLE:
        return False
    for parameter in parameters_of(optimizer):
        volume -= parameter.numel() if parameter.grad is not None else 0
        if volume < 0:
            return True
    return False


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    context = find()
    if context is None or context.size == 1 or context.rank != 0:
        return
    record = _records.setdefault(context, _Record())
    if record.is_reported:
        return
    if isinstance(optimizer, Wrapped):
        record.count_shared(optimizer)
        return
    record.count(context, optimizer)
    what = _mistake(record, type(optimizer).__name__, context.size)
    if what:
        record.is_reported = True
        hint(
            f"{what}. Wrap {'this optimizer, too' if record.has_shared else 'the optimizer'}: "
            "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())"
        )


def _mistake(record: _Record, name: str, size: int) -> str | None:
    if record.steps == _STEPS:
        return f"{_STEPS} steps of {name} without any exchange between the {size} ranks{_OWN_MODEL}"
    if record.loss_steps == _STEPS:
        return (
            f"{_STEPS} steps of {name} in which the {size} ranks have exchanged only the loss or a metric, "
            f"not the gradients, and averaging the loss does not average the gradients{_OWN_MODEL}"
        )
    if record.little_steps == _LITTLE_STEPS and record.has_shared:
        return (
            f"{_LITTLE_STEPS} steps of {name} in which the {size} ranks have exchanged gradients of "
            "distributed optimizers only, not those of this one: its parameters drift apart, unless each "
            "rank is to have its own"
        )
    if record.little_steps == _LITTLE_STEPS:
        return (
            f"{_LITTLE_STEPS} steps of {name} in which the {size} ranks have exchanged at most a loss or "
            f"metrics, neither gradients nor parameters{_OWN_MODEL}"
        )
    return None


def register_hook() -> None:
    """Starts observing every step of any optimizer."""
    register_optimizer_step_post_hook(_count_step)


# ---- A hint for optimizers whose parameters are not the trained model's: their steps do nothing --------
# It is given once, on rank 0. A program makes the optimizer first, and replaces the model or its parameters
# afterwards; the steps of both then run without an error.


_IDLE_STEPS = 3  # in a row that did nothing
_SAMPLED = 64  # elements
_REMEDY = (
    "Was the model copied, or were its parameters replaced, after the optimizer was made? Make the optimizer "
    "with the parameters of the model that trains, and then call hvd.DistributedOptimizer"
)


class IdleSteps:
    """Counts an optimizer's first steps until a step has an effect; hints at steps without effect."""

    def __init__(self) -> None:
        self.is_over = False
        self._without_gradients = self._without_change = 0
        self._earlier: list[Any] | None = None  # after the step before

    def count(self, optimizer: Any) -> None:
        """Counts a step that has just ended, and hints at steps that did nothing."""
        if self.is_over:
            return
        parameters = parameters_of(optimizer)
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        earlier, self._earlier = self._earlier, _state_of(parameters)
        has_written = earlier is not None and earlier[1:] != self._earlier[1:]  # and dropped its gradients
        self._without_gradients = 0 if has_gradients or has_written else self._without_gradients + 1
        self._without_change = self._without_change + 1 if has_gradients and self._earlier == earlier else 0
        kind = type(optimizer).__name__
        if self._without_gradients == _IDLE_STEPS:
            what = (
                f"{_IDLE_STEPS} steps of {kind} in which none of its {len(parameters)} parameters had a "
                "gradient"
            )
        elif self._without_change == _IDLE_STEPS:
            what = f"{_IDLE_STEPS} steps of {kind} that changed none of its {len(parameters)} parameters"
        else:
            self.is_over = has_gradients and earlier not in (None, self._earlier)
            return
        self.is_over = True
        if optimizer._scope.context.rank == 0:
            hint(f"{what}: the ranks train nothing. {_REMEDY}")


def _state_of(parameters: list[Tensor]) -> list[Any]:
    """Returns what a step changes: how often parameters were written, and the values of the smallest.

    Fused updates are not counted as writes.
    """
    smallest = min(
        (parameter for parameter in parameters if parameter.grad is not None), key=Tensor.numel, default=None
    )
    values = [] if smallest is None else smallest.detach().flatten()[:_SAMPLED].tolist()
    return [values, *[parameter._version for parameter in parameters]]
