"""An optimizer for op=Adasum: the ranks combine the changes that a step makes, instead of the gradients.

Each rank's own optimizer takes its step with the rank's own gradients. Its changes to the parameters are
combined by Adasum and applied on all ranks: S. Maleki et al., Scaling Distributed Training with Adaptive
Summation, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sirtaki.common.compression import compressed
from sirtaki.common.handles import run
from sirtaki.common.requests import ALLREDUCE
from sirtaki.common.round_checks import RoundChecks
from sirtaki.torch import device
from sirtaki.torch.autograd import COLLECTIVES, CollectiveScope
from sirtaki.torch.consistency import note_gradients, round_checks
from sirtaki.torch.parameters import exchanged
from sirtaki.torch.sparse_gradients import ExchangeOptions
from sirtaki.torch.tensors import reducible_view
from sirtaki.torch.wrapping import Optimizer, Wrapped, wrap


class AdasumOptimizer(Wrapped):
    """The abilities of such an optimizer besides its own class."""

    _exchange_options: ExchangeOptions
    _previous_values: list[Tensor]
    _checks: RoundChecks

    @property
    def _scope(self) -> CollectiveScope:
        return self._exchange_options.scope

    def synchronize(self) -> None:
        """Does nothing: the exchange is in step()."""

    def skip_synchronize(self) -> None:
        """Raises ValueError: every step is an exchange."""
        raise ValueError("with op=Adasum the ranks meet in step(), so there is nothing to skip")

    def _parameters(self) -> list[Tensor]:
        return [one.parameter.detach() for one in exchanged(self, {}, None, "")]


def with_adasum(optimizer: Optimizer, exchange_options: ExchangeOptions, names: dict[Tensor, str]) -> Any:
    """Makes the optimizer's steps common to all ranks; `names` are for messages.

    Raises:
        ValueError: a parameter cannot be exchanged.
    """
    found = exchanged(optimizer, names, None, "")
    for name, parameter, _ in found:
        reducible_view(parameter, name)
    hooks = () if exchange_options.scope.has_no_peers else (_before_step, _after_step)
    wrapped = wrap(optimizer, AdasumOptimizer, *hooks)
    wrapped._exchange_options, wrapped._previous_values = exchange_options, []
    wrapped._checks = round_checks(exchange_options.scope, found, optimizer, has_same_state=False)
    return wrapped


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._scope.check_world()
    parameters, checks = optimizer._parameters(), optimizer._checks
    if checks.wants_gradients:
        gradients = [one.parameter.grad for one in exchanged(optimizer, {}, None, "")]
        note_gradients(checks, range(len(gradients)), gradients)
    checks.start()
    optimizer._previous_values = [parameter.clone() for parameter in parameters]


@torch.no_grad()
def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    exchange_options, previous_values = optimizer._exchange_options, optimizer._previous_values
    parameters = optimizer._parameters()
    scope = exchange_options.scope
    options = scope.derived("change").options(exchange_options.how)

    def combine(changes: Sequence[Tensor]) -> list[Tensor]:
        with device.exposed(scope.context, changes):
            return run(scope.context, COLLECTIVES.group(scope.context, ALLREDUCE, changes, options))

    own = [one - previous for one, previous in zip(parameters, previous_values, strict=True)]
    changes = compressed(exchange_options.compression, own, combine)
    for parameter, previous, change in zip(parameters, previous_values, changes, strict=True):
        parameter.copy_(previous + change)
    optimizer._previous_values = []
    optimizer._checks.finish()
    optimizer._checks.report()
