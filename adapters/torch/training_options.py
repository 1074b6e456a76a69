"""The arguments of `DistributedOptimizer` that change how a step exchanges its gradients."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sirtaki.bindings.context import Context
from sirtaki.common.groups import Groups
from sirtaki.common.ops import Adasum, Average, Sum
from sirtaki.common.process_sets import ProcessSet, global_process_set
from sirtaki.common.stateful_compression import StatefulCompression
from sirtaki.common.training.combinations import refuse_combinations
from sirtaki.torch.compression import NoneCompressor
from sirtaki.torch.exchange_options import ExchangeOptions
from sirtaki.torch.parameters import check_groups_of
from sirtaki.torch.sharded.kinds import GRADIENTS, check_shard
from sirtaki.torch.stale.arguments import check_staleness
from sirtaki.torch.wrapping import Optimizer


@dataclass(frozen=True)
class TrainingOptions:
    """The arguments, as the program has given them: see `DistributedOptimizer`."""

    op: int
    compression: Any
    gradient_predivide_factor: float
    groups: Groups
    passes: int
    sparse_as_dense: bool
    process_set: ProcessSet
    staleness: int
    deadline: float | None
    shard: str | None
    overlap_forward: bool
    gradients_in_shared_memory: bool

    def check_each(self, optimizer: Optimizer) -> None:
        """Raises ValueError for an argument that is wrong by itself, or for this optimizer."""
        check_passes(self.passes)
        check_staleness(self.staleness)
        check_shard(self.shard, optimizer)
        check_groups_of(optimizer, self.groups)

    def refuse_combinations(self, context: Context) -> None:
        """Raises ValueError for arguments that exclude each other, or that the job has no place for."""
        has_memory = isinstance(self.compression, StatefulCompression)
        choices: dict[str, str | bool] = {
            "shard": "shard=" * (self.shard is not None),
            "shard_gradients": self.shard == GRADIENTS,
            "staleness": "staleness" * bool(self.staleness),
            "deadline": "a deadline" * (self.deadline is not None),
            "overlap_forward": "overlap_forward" * bool(self.overlap_forward),
            "gradients_in_shared_memory": bool(self.gradients_in_shared_memory),
            "adasum": "op=Adasum" * (self.op == Adasum),
            "sum": self.op == Sum,
            "extreme": self.op not in (Average, Sum, Adasum),
            "memory": str(self.compression) if has_memory else False,
            "sixteen_bits": "compression" * (not has_memory and self.compression is not NoneCompressor),
            "predivide": "gradient_predivide_factor" * (self.gradient_predivide_factor != 1.0),
            "groups": "groups" * bool(self.groups),
            "passes": self.passes != 1,
            "sparse_as_dense": "sparse_as_dense" * bool(self.sparse_as_dense),
            "process_set": "process_set" * (self.process_set is not global_process_set),
            "elastic": context.survivors is not None,
        }
        refuse_combinations(choices)


def check_passes(passes: int) -> None:
    if passes <= 0:
        raise ValueError(f"backward_passes_per_step is {passes}, but a step needs one pass at least")


def in_shared_memory(
    exchange_options: ExchangeOptions, named: Iterable[tuple[str, Tensor]]
) -> ExchangeOptions:
    """Returns the options for gradients in shared memory.

    Raises:
        ValueError: gradients are not in the memory of the CPU.
    """
    for name, parameter in named:
        if not parameter.is_cpu:
            raise ValueError(
                f"gradients_in_shared_memory is for gradients on the CPU, and {name!r} is on "
                f"{parameter.device}: leave it out"
            )
    return replace(exchange_options, in_shared_memory=True)
