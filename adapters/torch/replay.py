"""`hvdrun --replay N`: every N steps all ranks compute a batch of rank 0 twice, and compare the bits.

A processor or a memory that errs now and then shows in no loss, and in no comparison of parameters: all ranks
apply the same wrong gradient. Replaying a part of the training finds such a machine, as described in "The
Llama 3 Herd of Models" (2024), section 3.3.4, and asked for in pytorch/torchtitan#4333.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ResultsDifferError
from sirtaki.common.ops.objects import broadcast_object, gather_objects
from sirtaki.common.semantics import hint
from sirtaki.common.training.consistency import combined
from sirtaki.torch.consistency import check_parameters, checksum_of
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.nested import mapped, tensors_in

_RANDOM = (
    "--replay compares nothing any more: each rank computes other bits from the same batch each time, so the "
    "model has an operation whose result is not repeatable. torch.use_deterministic_algorithms(True) names it"
)
_UNSTABLE = (
    "{culprits} computed a batch twice, with different bits, and the other ranks did not: its machine errs. "
    "The steps since the last comparison may be wrong"
)
_OTHER = (
    "{culprits} computed other bits from the same batch and parameters than {count} of {all} ranks: its "
    "machine errs, or differs in processor, libraries or number of threads. The steps since the last "
    "comparison may be wrong"
)


class _Call(NamedTuple):
    """A call of the model, with tensors in the memory of the CPU."""

    inputs: Any  # (args, kwargs)
    buffers: list[Tensor]
    random: list[Tensor]  # states of the random generators: the CPU's and, on a GPU, the device's
    autocast: torch.dtype | None


class _Report(NamedTuple):
    """Checksums of a rank's parameters, and of the results of both replays."""

    parameters: int
    first: int
    second: int


class Replay:
    """The replays of an optimizer's model: the outermost module that is called with its parameters."""

    def __init__(self, parameters: Iterable[Tensor], scope: CollectiveScope, interval: int) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._scope, self._interval = scope, interval
        self._step = 0
        self._root = scope.ranks[0]
        self._call: _Call | None = None
        self._is_replaying = False
        self._module: Any = lambda: None  # a weak reference
        search = weakref.WeakMethod(self._find)
        self._handle = register_module_forward_pre_hook(
            lambda module, _: None if (find := search()) is None else find(module)
        )

    def close(self) -> None:
        """Removes the hook."""
        self._handle.remove()

    def finish_step(self) -> None:
        """Counts a step. All ranks call it."""
        self._step += 1

    def compare(self) -> None:
        """Replays and compares, if it is due in this step. All ranks call it before the optimizer updates.

        Raises:
            ResultsDifferError: a rank computes other results than it did before, or than other ranks do.
            ParametersDifferError: the ranks have other parameters.
        """
        if not self._is_due:
            return
        call, self._call = self._call, None
        name, context = f"{self._scope.name}.replay", self._scope.context
        call = broadcast_object(call, self._root, name, self._scope.process_set)
        module = self._module()
        if call is None:
            return
        report = None if module is None else self._report(module, call)
        reports = gather_objects(context, report, name, self._scope.process_set)
        pairs = zip(self._scope.ranks, reports, strict=True)
        known = {rank: report for rank, report in pairs if report is not None}
        if len(known) == len(reports) and len({each.parameters for each in known.values()}) > 1:
            check_parameters(module, self._scope.process_set)
        self._judge(known)

    @property
    def _is_due(self) -> bool:
        return self._interval > 0 and (self._step + 1) % self._interval == 0

    def _find(self, module: nn.Module) -> None:
        if self._parameters.isdisjoint(map(id, module.parameters())):
            return
        self._handle.remove()
        self._module = weakref.ref(module)
        self._handle = module.register_forward_pre_hook(self._capture, prepend=True, with_kwargs=True)

    def _capture(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        is_first = self._is_due and self._call is None and not self._is_replaying
        if not is_first or not torch.is_grad_enabled() or self._scope.context.rank != self._root:
            return
        kind = _device_of(module).type
        random = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if kind == "cuda" else [])
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._call = _Call(
            _moved((args, kwargs), torch.device("cpu")),
            [_copy(buffer, torch.device("cpu")) for buffer in module.buffers()],
            random,
            dtype,
        )

    def _report(self, module: nn.Module, call: _Call) -> _Report:
        """Computes the call twice; leaves the module and the random generators as they were."""
        device = _device_of(module)
        buffers = [_copy(buffer, buffer.device) for buffer in module.buffers()]
        self._is_replaying = True
        try:
            with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
                first, second = (_results(module, call, device) for _ in range(2))
        finally:
            self._is_replaying = False
            _set_buffers(module, buffers)
        return _Report(combined(map(checksum_of, module.parameters())), first, second)

    def _judge(self, reports: dict[int, _Report]) -> None:
        unstable = [rank for rank, report in reports.items() if report.first != report.second]
        if unstable and len(unstable) == len(reports):
            self._interval = 0
            if self._scope.context.rank == self._root:
                hint(_RANDOM)
            return
        if unstable:
            raise ResultsDifferError(_UNSTABLE.format(culprits=self._labels(unstable)))
        ((common, count), *others) = Counter(report.first for report in reports.values()).most_common()
        if others:
            culprits = [rank for rank, report in reports.items() if report.first != common]
            text = _OTHER.format(culprits=self._labels(culprits), count=count, all=len(reports))
            raise ResultsDifferError(text)

    def _labels(self, ranks: list[int]) -> str:
        return ", ".join(map(self._scope.context.topology.label, ranks))


def replay_of(parameters: Iterable[Tensor], scope: CollectiveScope) -> Replay | None:
    """Returns the replays of an optimizer with these parameters; None if the job has none."""
    interval = int(scope.context.setting("replay"))
    is_member = scope.context.rank in scope.ranks
    return Replay(parameters, scope, interval) if interval and is_member else None


def refuse_replay(context: Context) -> None:
    """Raises ValueError if the job replays; for jobs and optimizers with steps that cannot be repeated."""
    if int(context.setting("replay")):
        raise ValueError(
            "--replay does not go with overlap_forward, deadline, staleness and op=hvd.Adasum, where ranks "
            "may have other parameters than the batch was computed with, nor with --auto. Leave out --replay"
        )


def _results(module: nn.Module, call: _Call, device: torch.device) -> int:
    """Returns a checksum of a call's outputs, and of their derivatives by the parameters."""
    args, kwargs = _moved(call.inputs, device)
    _set_buffers(module, call.buffers)
    torch.set_rng_state(call.random[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(call.random[1], device)
    with torch.enable_grad(), torch.autocast(device.type, call.autocast, enabled=call.autocast is not None):
        outputs = [tensor for tensor in tensors_in(module(*args, **kwargs)) if tensor.requires_grad]
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ones = [torch.ones_like(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, parameters, ones, allow_unused=True) if outputs else ()
    tensors = [*outputs, *(gradient for gradient in gradients if gradient is not None)]
    return combined(checksum_of(tensor.to_dense() if tensor.is_sparse else tensor) for tensor in tensors)


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def _moved(value: Any, device: torch.device) -> Any:
    return mapped(value, lambda _, leaf: _copy(leaf, device) if isinstance(leaf, Tensor) else leaf)


@torch.no_grad()
def _set_buffers(module: nn.Module, buffers: list[Tensor]) -> None:
    for buffer, value in zip(module.buffers(), buffers, strict=True):
        buffer.copy_(value)
