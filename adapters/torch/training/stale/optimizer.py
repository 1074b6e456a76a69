"""An optimizer that continues while the gradients of its last steps are still being reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from sirtaki.common.training.consistency import checksum_of_text, combined
from sirtaki.torch.consistency import check_parameters, plain_options_of
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.tensors import reducible_view
from sirtaki.torch.training.parameters import all_named, kept_gradients
from sirtaki.torch.training.stage import ExchangeOptions
from sirtaki.torch.training.stale.arguments import refuse_model
from sirtaki.torch.training.stale.rounds import GlobalBatchClock, StaleExchange, Update
from sirtaki.torch.training.wrapping import Optimizer, Wrapped, wrap


class StaleOptimizer(Wrapped):
    """The abilities of such an optimizer besides its own class.

    `step()` hands over the gradients of this rank, and makes a step of the own class for each update that has
    been exchanged meanwhile: none, one, or several.
    """

    _technique = "DistributedOptimizer(…, staleness=…)"
    _exchange_options: ExchangeOptions
    _named: dict[str, Tensor]
    _clock: GlobalBatchClock
    _updates: int  # applied on this rank
    _checksum: int  # of the hyper-parameters of all updates
    _exchange: StaleExchange | None
    _finalizer: Any

    @property
    def _scope(self) -> CollectiveScope:
        return self._exchange_options.scope

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """False, also with fused=True: a GradScaler has to unscale gradients before they are handed over.

        It would pass its scale to the optimizer instead, for gradients of this rank only.
        """
        return False

    def clock(self) -> int:
        """Returns the number of updates in the parameters of this rank.

        Ranks with the same number have the same parameters.
        """
        return self._updates

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Gives the gradients of this rank to the next update, and applies the updates that are there.

        Waits only while this rank's gradients of more than `staleness` steps are in no update.

        Raises:
            ValueError: a gradient is sparse.
            UnsupportedError: the program has put a parameter into the groups itself.
            DeadlineError: a rank has computed nothing for `--stall-deadline` seconds.
            ParametersDifferError: ranks have applied an update with different hyper-parameters.
            HorovodInternalError: any other failure between ranks.
        """
        self._refuse_other_parameters()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._scope.has_no_peers:
            super().step()
            self._updates += 1
            return loss
        own = [parameter.grad for parameter in self._named.values()]
        self._refuse_sparse(own)
        exchange = self._started()
        exchange.hand_over(own)
        self._apply_all(exchange.next_update)
        return loss

    def synchronize(self) -> None:
        """Makes the parameters equal on all ranks, with the gradients of all steps.

        All ranks must call it, at the end of their data: a rank that has fewer steps takes part in the
        updates of the others until they call it, too. Training may continue afterwards.
        """
        if self._scope.has_no_peers:
            return
        exchange = self._started()
        self._apply_all(exchange.last_updates)
        self._finalizer.detach()
        self._exchange = None

    def skip_synchronize(self) -> NoReturn:
        """Raises ValueError: gradients are exchanged after step(), not before."""
        raise ValueError(
            "with staleness, gradients are exchanged beside later steps, so there is nothing to skip: clip "
            "this rank's gradients before step(), without synchronize()"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Works like the optimizer's own. All ranks must load the same state, or broadcast it afterwards.

        Raises:
            ValueError: steps have been taken since the last `synchronize()`.
        """
        if self._exchange is not None:
            raise ValueError(
                "load_state_dict needs parameters that are equal on all ranks: call optimizer.synchronize() "
                "first"
            )
        super().load_state_dict(state_dict)

    def _unwrap(self) -> None:
        if self._exchange is not None:
            self._finalizer()
        super()._unwrap()

    def _started(self) -> StaleExchange:
        """Returns the exchange; starts it in the first step, and in the first step after `synchronize()`."""
        scope = self._scope
        scope.check_world()
        if self._exchange is None:
            if scope.context.setting("check_parameters") != "0":
                check_parameters(self._named.items(), scope.process_set)
            self._clock = GlobalBatchClock(self._clock.staleness, self._updates)
            self._checksum = 0
            self._exchange = StaleExchange(scope, list(self._named.values()), self._clock)
            self._finalizer = weakref.finalize(self, self._exchange.end)
            self._finalizer.atexit = False
        return self._exchange

    def _apply_all(self, next_update: Callable[[], Update | None]) -> None:
        with kept_gradients(self._named.values()):
            while (update := next_update()) is not None:
                self._apply(update)

    def _apply(self, update: Update) -> None:
        assert self._exchange is not None
        for parameter, gradient in zip(self._named.values(), update.gradients, strict=True):
            parameter.grad = gradient
        options = checksum_of_text(repr(plain_options_of(self)))
        super().step()
        self._updates += 1
        self._checksum = combined([self._checksum, options]) >> 1  # fits into a signed number
        self._exchange.applied(update, self._checksum)

    def _refuse_sparse(self, gradients: list[Tensor | None]) -> None:
        for name, gradient in zip(self._named, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ValueError(
                    f"the gradient of parameter {name!r} is sparse, but staleness needs dense gradients: "
                    "make the layer with sparse=False"
                )


def with_staleness(
    optimizer: Optimizer, exchange_options: ExchangeOptions, names: dict[Tensor, str], staleness: int
) -> Any:
    """Makes the optimizer's steps common to all ranks, with gradients that are up to `staleness` updates old.

    Raises:
        ValueError: an optimizer or a parameter that cannot train this way.
    """
    found = dict(all_named(optimizer, names))
    for name, parameter in found.items():
        reducible_view(parameter, name)
    refuse_model(optimizer, found.items())
    wrapped = wrap(optimizer, StaleOptimizer)
    wrapped._exchange_options, wrapped._named = exchange_options, found
    wrapped._clock, wrapped._updates, wrapped._exchange = GlobalBatchClock(staleness), 0, None
    return wrapped
