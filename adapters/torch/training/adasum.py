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

from sirtaki.bindings.context import Context
from sirtaki.common.ops.compression import compressed
from sirtaki.common.ops.requests import ALLREDUCE
from sirtaki.common.training.round_checks import RoundChecks
from sirtaki.torch import device
from sirtaki.torch.consistency import note_gradients, round_checks
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import reducible_view
from sirtaki.torch.training.parameters import NamedParameter, all_named
from sirtaki.torch.training.stage import ExchangeOptions
from sirtaki.torch.training.wrapping import Optimizer, SeparateOptimizer, wrap


class AdasumOptimizer(SeparateOptimizer):
    """The abilities of such an optimizer besides its own class."""

    is_synchronized = True  # after each step
    _exchange_options: ExchangeOptions
    _names: dict[Tensor, str]
    _previous_values: list[Tensor]
    _checks: RoundChecks

    @property
    def _scope(self) -> CollectiveScope:
        return self._exchange_options.scope

    def _begin(self, exchange_options: ExchangeOptions) -> None:
        self._exchange_options, self._previous_values = exchange_options, []
        found = [NamedParameter(name, parameter) for name, parameter in all_named(self, self._names)]
        self._checks = round_checks(exchange_options.scope, found, self, has_same_state=False)

    def move_to(self, context: Context) -> None:
        """Continues in another world. `hvd.elastic.run` calls it."""
        self._begin(self._exchange_options.in_world(context))

    def _before_own_step(self, args: Any, kwargs: Any) -> None:
        self._check_use()
        self._scope.check_world()
        if self._scope.has_no_peers:
            return
        if self._checks.wants_gradients:
            gradients = [parameter.grad for parameter in self._parameters()]
            note_gradients(self._checks, range(len(gradients)), gradients)
        self._checks.start()
        self._previous_values = [parameter.detach().clone() for parameter in self._parameters()]

    @torch.no_grad()
    def _after_own_step(self, args: Any, kwargs: Any) -> None:
        scope = self._scope
        if scope.has_no_peers:
            return

        def combine(changes: Sequence[Tensor]) -> list[Tensor]:
            with device.exposed(scope.context, changes):
                return scope.derived("change").run_group(ALLREDUCE, changes, self._exchange_options.how)

        pairs = list(zip(self._parameters(), self._previous_values, strict=True))
        own = [parameter - previous for parameter, previous in pairs]
        changes = compressed(self._exchange_options.compression, own, combine)
        for (parameter, previous), change in zip(pairs, changes, strict=True):
            parameter.copy_(previous + change)
        self._previous_values = []
        self._checks.finish()
        self._checks.report()

    def synchronize(self) -> None:
        """Does nothing: the exchange is in step()."""

    def skip_synchronize(self) -> None:
        """Raises ValueError: every step is an exchange."""
        raise ValueError("with op=Adasum the ranks meet in step(), so there is nothing to skip")

    def _parameters(self) -> list[Tensor]:
        return [parameter for _, parameter in all_named(self, {})]


def with_adasum(optimizer: Optimizer, exchange_options: ExchangeOptions, names: dict[Tensor, str]) -> Any:
    """Makes the optimizer's steps common to all ranks; `names` are for messages.

    Raises:
        ValueError: a parameter cannot be exchanged.
    """
    for name, parameter in all_named(optimizer, names):
        reducible_view(parameter, name)
    wrapped = wrap(optimizer, AdasumOptimizer)
    wrapped._names = names
    wrapped._begin(exchange_options)
    wrapped._register(exchange_options.scope.context)
    return wrapped
