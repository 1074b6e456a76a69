"""The gradient of a parameter of which this rank has only its slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import MAX
from sirtaki.common.ops.requests import ALLREDUCE_IN_PLACE, Reduction
from sirtaki.torch._private import check_and_unscale
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.metadata import NEEDS_NO_ELEMENTS


class ShardedGradient(Tensor):
    """A tensor in the place of a whole gradient, without memory for its elements.

    Everything that reads elements raises an error, because they exist on other ranks. As the `grad` of a
    parameter it can be replaced, and removed, as usual; the slice then goes with it.

    Attributes:
        own: this rank's elements.
        scope: the ranks that have the others.
        properties: the dtype, the device, the shape and the strides of the parameter.
    """

    own: Tensor
    scope: CollectiveScope
    properties: tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]

    @staticmethod
    def make(parameter: Tensor, scope: CollectiveScope) -> ShardedGradient:
        """Returns a stand-in for the gradient of a parameter. Its `own` is to be set."""
        tensor = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
        made = tensor.expand(parameter.shape).as_subclass(ShardedGradient)
        made.scope, made.properties = scope, _properties(parameter)
        return made

    def fits(self, parameter: Tensor) -> bool:
        """Returns whether it may be the gradient of this parameter."""
        return self.properties == _properties(parameter)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient(own={self.own!r})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in NEEDS_NO_ELEMENTS or func is Tensor.untyped_storage:  # of one element
            return super().__torch_function__(func, types, args, kwargs or {})
        if func in (Tensor.zero_, torch._foreach_zero_):
            for argument in args[:1] if func is Tensor.zero_ else args[0]:
                own_elements(argument).zero_()
            return args[0]
        if func is check_and_unscale:
            return _unscale(*args)
        name = str(getattr(func, "__name__", func))
        if name in ("__get__", "__set__"):  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        raise UnsupportedError(
            f"{name} needs the elements of a gradient, but with "
            f'shard="gradients" each rank has only its slice of them: {_remedy(name)}'
        )


def _properties(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size, tuple[int, ...]]:
    return parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def own_elements(gradient: Tensor) -> Tensor:
    """Returns the elements of a gradient that this rank has."""
    return gradient.own if isinstance(gradient, ShardedGradient) else gradient


def _remedy(function: str) -> str:
    if "norm" in function or "clamp" in function:
        return (
            "call hvd.clip_grad_norm_(optimizer, max_norm) or hvd.clip_grad_value_(optimizer, clip_value) "
            'instead of torch\'s functions, or use shard="state", which leaves gradients whole'
        )
    return (
        "call optimizer.zero_grad() first, as before a conversion of the model, or use "
        'shard="state", which leaves gradients whole'
    )


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Divides gradients by the loss scale; reports on all ranks whether any rank's gradients are not finite.

    torch.amp.GradScaler calls it, on all ranks for the same gradients.
    """
    own = [tensor for tensor in map(own_elements, gradients) if tensor.numel()]
    if own:
        check_and_unscale(own, found_inf, inv_scale)
    scope = next(gradient.scope for gradient in gradients if isinstance(gradient, ShardedGradient))
    scope.derived("not finite").run(ALLREDUCE_IN_PLACE, found_inf, Reduction(MAX))
