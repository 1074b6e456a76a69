"""torch's side of the consistency checks: presents models and optimizers to `sirtaki.common`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from sirtaki.bindings.context import current
from sirtaki.bindings.errors import UnsupportedError
from sirtaki.bindings.request import MAX, MIN
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.common.ops.requests import ALLREDUCE, Reduction
from sirtaki.common.training import consistency
from sirtaki.common.training.consistency import Options, Scope, Spread
from sirtaki.common.training.round_checks import RoundChecks
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import plain_name, view
from sirtaki.torch.state import named_tensors
from sirtaki.torch.training.loss_scale import LossScale
from sirtaki.torch.training.parameters import NamedParameter

_BROADCAST_PARAMETERS = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)"
_BROADCAST_BOTH = f"{_BROADCAST_PARAMETERS} and hvd.broadcast_optimizer_state(optimizer, root_rank=0)"
_DATA_ADVICE = ", for example with DataLoader(data, sampler=hvd.DistributedSampler(data))"
_AFTER_JOIN = (
    "call hvd.join(model=model, optimizer=optimizer), which gives all ranks the state of the last one"
)
_SPEED_OPTIONS = {"foreach", "fused", "capturable"}  # options that affect the speed of a step, not its result
_PLAIN = (str, bool, type(None))


def check_parameters(
    params: nn.Module | torch.optim.Optimizer | Mapping[str, Tensor] | Iterable[tuple[str, Tensor] | Tensor],
    process_set: ProcessSet = global_process_set,
) -> None:
    """Makes sure that all ranks of the set have the same parameters. All of them must call it.

    It reads all parameters and sends 8 bytes; more only if they differ. Differences that are only rounding
    count as differences.

    Args:
        params: a model; an optimizer, whose state and hyper-parameters are compared, too; or anything that
            `broadcast_parameters` takes. A `state_dict()` includes buffers, such as the running mean of a
            BatchNorm layer, which differ between ranks.
        process_set: the ranks that take part.

    Raises:
        ParametersDifferError: they differ. All ranks raise it, with the same text: which tensors differ, on
            which ranks, and by how much.
        PeerLostError: a rank died.

    Example:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.check_parameters(model)
        hvd.check_parameters(optimizer)  # parameters, state and hyper-parameters
    """
    scope = CollectiveScope(current(), "check_parameters", process_set)
    if scope.has_no_peers:
        return
    if isinstance(params, torch.optim.Optimizer):
        parameters = [
            (f"{group}.{place}", parameter)
            for group, settings in enumerate(params.param_groups)
            for place, parameter in enumerate(settings["params"])
        ]
        optimizer = TorchOptimizer(scope, parameters, params)
        consistency.check(_scope(scope, _BROADCAST_BOTH), optimizer, optimizer.options())
        return
    named = params.named_parameters() if isinstance(params, nn.Module) else params
    tensors = TorchTensors(scope, named_tensors("check_parameters", named))
    consistency.check(_scope(scope, _BROADCAST_PARAMETERS), tensors)


def round_checks(
    scope: CollectiveScope,
    named: Sequence[NamedParameter],
    optimizer: torch.optim.Optimizer,
    *,
    has_same_state: bool = True,
    checks_data: bool = True,
    is_repeated: bool = True,
    first_check: int = 2,
    loss_scale: LossScale | None = None,
    marks: int = 0,
) -> RoundChecks:
    """Comparisons beside each exchange of this optimizer's gradients, its state included.

    With `checks_data`, also of the gradients that each rank has computed, which should not be equal.
    Unless `is_repeated`, only in the first round, which then is the only one that waits for all ranks.
    With `loss_scale`, also of the scaler, where it is known.
    Parameters are compared for the first time in the round `first_check`, counted from 1.
    The operation carries `marks`: see `RoundChecks`.
    """
    here = scope.derived("check of parameters")
    prefix = f"{scope.name}."
    parameters = [(entry.name.removeprefix(prefix), entry.parameter) for entry in named]
    kind = RoundChecks if checks_data else _ChecksOfParameters
    if not is_repeated:
        kind = _ChecksOfFirstRound
    compared = TorchOptimizer(here, parameters, optimizer, has_same_state)
    return kind(_scope(here, _BROADCAST_BOTH), compared, first_check, loss_scale, marks)


class _ChecksOfParameters(RoundChecks):
    """Round checks without the comparison of gradients."""

    @property
    def wants_gradients(self) -> bool:
        return False


class _ChecksOfFirstRound(_ChecksOfParameters):
    """Round checks that end with the first round."""

    def start(self) -> None:
        if self._round == 0 and self._interval != 0:
            super().start()


def note_gradients(checks: RoundChecks, indices: Iterable[int], gradients: Iterable[Tensor | None]) -> None:
    """Records this rank's nonzero gradients, by checksum."""
    for index, gradient in zip(indices, gradients, strict=True):
        if gradient is None:
            continue
        parts = [gradient]
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.detach().coalesce()
            parts = [gradient.indices(), gradient.values()]
        if parts[-1].any():
            checks.note_gradient(index, consistency.combined(map(checksum_of, parts)))


def checksum_of(tensor: Tensor) -> int:
    """Returns the checksum of a tensor; copies it only if it is on a GPU or not row-major."""
    return consistency.checksum(view(tensor.detach().cpu().contiguous()))


def plain_options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Returns the hyper-parameters of each parameter group that are numbers, text, or tuples of these."""
    return [
        {
            option: _plain(value)
            for option, value in group.items()
            if option not in ("params", "param_names", *_SPEED_OPTIONS) and _is_plain(value)
        }
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, Real)) or (isinstance(value, Tensor) and value.numel() == 1)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return value if isinstance(value, _PLAIN) else float(value)


def _scope(scope: CollectiveScope, remedy: str) -> Scope:
    assert scope.name is not None
    return Scope(scope.context, scope.process_set, scope.name, remedy, _DATA_ADVICE, _AFTER_JOIN)


def _frozen(tensor: Tensor) -> str:
    return " (frozen)" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""


class TorchTensors:
    """Named tensors in the form that `sirtaki.common.training.consistency` compares."""

    def __init__(self, scope: CollectiveScope, named: Sequence[tuple[str, Tensor]]) -> None:
        self._scope, self._named = scope, named

    def named(self) -> Sequence[tuple[str, Tensor]]:
        return self._named

    def names(self) -> Sequence[str]:
        return [name for name, _ in self.named()]

    def kinds(self) -> Sequence[str]:
        return [
            f"{plain_name(tensor.dtype)} of shape {list(tensor.shape)}{_frozen(tensor)}"
            for _, tensor in self.named()
        ]

    def checksums(self) -> Sequence[int]:
        return [checksum_of(tensor) for _, tensor in self.named()]

    @torch.no_grad()
    def spread(self, index: int) -> Spread:
        tensor = self.named()[index][1].detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        epsilon = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        try:
            minimum, maximum = (self._extreme(tensor, op).double() for op in (MIN, MAX))
        except UnsupportedError:  # such elements have no order
            return Spread(float("inf"), 0.0, 0.0)
        scale = torch.maximum(minimum.abs(), maximum.abs()).max()
        return Spread(float((maximum - minimum).max()), float(scale), epsilon)

    def _extreme(self, tensor: Tensor, op: int) -> Tensor:
        return self._scope.derived("extreme").run(ALLREDUCE, tensor, Reduction(op))


class TorchOptimizer(TorchTensors):
    """An optimizer's parameters, state and hyper-parameters. It does not keep the optimizer alive."""

    def __init__(
        self,
        scope: CollectiveScope,
        parameters: Sequence[tuple[str, Tensor]],
        optimizer: torch.optim.Optimizer,
        has_same_state: bool = True,
    ) -> None:
        super().__init__(scope, parameters)
        self._optimizer = weakref.ref(optimizer)
        self._has_same_state = has_same_state

    def named(self) -> Sequence[tuple[str, Tensor]]:
        """Returns the parameters, followed by the tensors of their state."""
        optimizer = self._optimizer()
        if optimizer is None or not self._has_same_state:
            return self._named
        return [
            *self._named,
            *(
                (f"{name} ({key})", value)
                for name, parameter in self._named
                for key, value in sorted(optimizer.state.get(parameter, {}).items())
                if isinstance(value, Tensor) and value.layout is torch.strided
            ),
        ]

    def rates(self) -> Sequence[float]:
        """Returns the learning rates, with 0.0 for a rate on a GPU, for which the host would have to wait.

        Rates on a GPU are compared only with all other options.
        """
        optimizer = self._optimizer()
        rates = [group.get("lr", 0.0) for group in optimizer.param_groups] if optimizer else []
        return [0.0 if isinstance(rate, Tensor) and rate.is_cuda else float(rate) for rate in rates]

    def options(self) -> Options:
        optimizer = self._optimizer()
        return plain_options_of(optimizer) if optimizer else []
