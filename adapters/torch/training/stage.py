"""Stages of the exchange of gradients, and its options.

Each technique that does not simply all-reduce gradients is a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.common.ops.requests import Deadline, Reduction
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compressor
from sirtaki.torch.training.compressed.state import CompressionState
from sirtaki.torch.training.parameters import NamedParameter
from sirtaki.torch.training.sharded.slices import Partition


@dataclass(frozen=True)
class StepDeadline(Deadline):
    """When a step is taken without ranks that are late, and what becomes of their gradients.

    Attributes:
        late: "accumulate" adds them to the rank's next contribution, "drop" discards them.
    """

    late: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.late not in ("accumulate", "drop"):
            raise ValueError(f"late is {self.late!r}, but it has to be 'accumulate' or 'drop'")


@dataclass(frozen=True)
class ExchangeOptions:
    """The options of an optimizer's gradient exchange: ranks, combination, and format.

    Attributes:
        scope, how: the ranks, and the combination.
        compression: the format of all gradients that are not compressed with a memory.
        sparse_as_dense: whether sparse gradients are exchanged as dense ones.
        memory: of a compression that has one; None otherwise.
        partition: the slices of gradients that are divided among the ranks; None otherwise.
        overlaps_forward: whether gradients may still be in flight in the next forward pass.
        in_shared_memory: whether gradients live where the exchange copies nothing: `GradientMemory`.
        deadline: of steps that do not wait for ranks that are late; None: steps wait for all ranks.
    """

    scope: CollectiveScope
    how: Reduction
    compression: type[Compressor]
    sparse_as_dense: bool = False
    memory: CompressionState | None = None
    partition: Partition | None = None
    overlaps_forward: bool = False
    in_shared_memory: bool = False
    deadline: StepDeadline | None = None

    def in_world(self, context: Context) -> ExchangeOptions:
        """Returns the options for another world of an elastic job."""
        return replace(self, scope=CollectiveScope.numbered(context, "gradient", self.scope.process_set))


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
