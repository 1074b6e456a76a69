"""The private symbols of torch that this package uses, found when it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from sirtaki.common.private_api import Framework

_TORCH = Framework("torch", torch.__version__, "2.4, 2.13 and 2.15")

if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
    from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
else:
    # Sees the operations below autograd.
    DispatchMode = _TORCH.symbol("torch.utils._python_dispatch.TorchDispatchMode")
    BatchNormBase = _TORCH.symbol("torch.nn.modules.batchnorm._BatchNorm")

# Calls a function when the current backward pass ends.
queue_callback: Callable[[Callable[[], None]], None] = _TORCH.symbol(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
# Returns the number of the current backward pass; -1 outside of one.
current_pass: Callable[[], int] = _TORCH.symbol("torch._C._current_graph_task_id")
# Returns the node that the current backward pass evaluates; None at its end.
current_node: Callable[[], Any] = _TORCH.symbol("torch._C._current_autograd_node")
# Returns the CUDA stream in which this thread queues work for a GPU; only builds with CUDA have it.
current_raw_stream: Callable[[int], int] = (_TORCH.symbol if torch.version.cuda else _TORCH.optional)(
    "torch._C._cuda_getCurrentRawStream"
)
# Sets `torch.autograd.profiler._is_profiler_enabled`, whether a profiler records; None: there is none.
set_profiler_flag: Callable[[bool], None] | None = _TORCH.optional(
    "torch.autograd.profiler._set_is_profiler_enabled"
)
# Copies tensors to as many others, in one call.
copy_all: Callable[[list[Any], list[Any]], None] = _TORCH.symbol("torch._foreach_copy_")
# Nested structures of any kind that torch or a library has registered, such as the outputs of models.
tree_flatten_with_path: Callable[[Any], Any] = _TORCH.symbol("torch.utils._pytree.tree_flatten_with_path")
tree_unflatten: Callable[[Any, Any], Any] = _TORCH.symbol("torch.utils._pytree.tree_unflatten")
keystr: Callable[[Any], str] = _TORCH.symbol("torch.utils._pytree.keystr")

# Makes tensors of all classes behave like plain ones inside, in this thread.
without_subclasses: Callable[[], AbstractContextManager[None]] = _TORCH.symbol(
    "torch._C.DisableTorchFunctionSubclass"
)
# Makes no function of torch call a mode or a class of tensors inside, in this thread.
without_functions: Callable[[], AbstractContextManager[None]] = _TORCH.symbol("torch._C.DisableTorchFunction")
# Suspends modes that watch or change all operations of this thread.
without_modes: Callable[[], AbstractContextManager[None]] = _TORCH.symbol(
    "torch.utils._python_dispatch._disable_current_modes"
)
# Suspends the transformations of torch.func.
without_transforms: Callable[[], AbstractContextManager[None]] = _TORCH.symbol(
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
)
# Divides gradients in place, and notes whether one is not finite: the only function that GradScaler calls.
check_and_unscale: Callable[..., Any] = _TORCH.symbol("torch._amp_foreach_non_finite_check_and_unscale_")
# Divides the gradients of an optimizer, or only looks for an overflow: GradScaler calls it once a step.
unscale_gradients: Callable[..., Any] = _TORCH.symbol("torch.amp.GradScaler._unscale_grads_")


def has_compiled() -> bool:
    """Returns whether torch.compile has compiled anything in this process."""
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return False
    counters = _TORCH.attribute(utilities, "counters")  # with fullgraph=True, it counts graphs only
    return bool(counters["frames"]["total"] or counters["stats"]["unique_graphs"])


def loaded_state(scaler: torch.amp.GradScaler) -> tuple[float, ...]:
    """Returns what a scaler was made with, or has last loaded. It does not wait for a GPU."""
    if not scaler.is_enabled():
        return ()
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return scaler._init_scale, scaler._init_growth_tracker, *factors


def forget_stages(scaler: torch.amp.GradScaler) -> None:
    """Makes a scaler regard no optimizer's gradients as unscaled or used, as at the start of a step."""
    scaler._per_optimizer_states.clear()
