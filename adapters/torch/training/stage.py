"""Stages of the exchange of gradients: each technique that does not simply all-reduce is a stage."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sirtaki.torch.training.exchange_options import ExchangeOptions
from sirtaki.torch.training.parameters import NamedParameter


class Gradients:
    """The gradients of an optimizer, by the index of their parameter, and how they are exchanged."""

    def __init__(self, options: ExchangeOptions, named: Sequence[NamedParameter]) -> None:
        self._options, self._scope, self._context = options, options.scope, options.scope.context
        self._set_number = options.scope.process_set.number(self._context)
        self._how, self._compression = options.how, options.compression
        self._names = [entry.name for entry in named]
        self._parameters = [entry.parameter for entry in named]


class Stage(Gradients):
    """The exchange of some gradients in each round, by the index of their parameter.

    `GradientExchange` offers each round's gradients to one stage after another, and all-reduces what is left.
    Which gradients a stage takes is equal on all ranks.
    """

    @property
    def is_open(self) -> bool:
        """Returns whether a round has begun and not ended."""
        raise NotImplementedError

    def start(self, indices: list[int], absent: bool) -> list[int]:
        """Takes gradients of this round, which are `absent` if this rank's pass has not touched them.

        Returns the indices of the gradients that it does not take.
        """
        raise NotImplementedError

    def start_rest(self) -> None:
        """Starts what needs all gradients of a round, which have been offered now."""

    def finish(self, reduced: Sequence[Tensor]) -> list[Tensor]:
        """Waits for the gradients of this round, and stores them.

        Args:
            reduced: the results of the stages before, and of the plain all-reduce.

        Returns:
            The results of this stage that are exact sums, for the stages behind it.

        Raises:
            HorovodInternalError: an exchange failed.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Ends the round, whether it has succeeded or not."""
        raise NotImplementedError

    def drop_earlier(self) -> None:
        """Forgets what earlier rounds have left to be added to gradients that are dropped."""

    def close(self) -> None:
        """Releases the parameters."""
