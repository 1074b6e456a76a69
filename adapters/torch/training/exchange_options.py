"""The options of the exchange of an optimizer's gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sirtaki.bindings.context import Context
from sirtaki.common.ops.reduction import Reduction
from sirtaki.torch.ops.autograd import CollectiveScope
from sirtaki.torch.ops.compression import Compressor
from sirtaki.torch.training.compressed.state import CompressionState
from sirtaki.torch.training.sharded.slices import Partition


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
        in_shared_memory: whether gradients live in memory that the ranks of a host share.
    """

    scope: CollectiveScope
    how: Reduction
    compression: type[Compressor]
    sparse_as_dense: bool = False
    memory: CompressionState | None = None
    partition: Partition | None = None
    overlaps_forward: bool = False
    in_shared_memory: bool = False

    def in_world(self, context: Context) -> ExchangeOptions:
        """Returns the options for another world of an elastic job."""
        return replace(self, scope=CollectiveScope.numbered(context, "gradient", self.scope.process_set))
