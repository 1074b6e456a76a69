"""A rank of benchmarks/torch_backend.py: training steps over groups of torch.distributed, in turns.

Usage: python -m workers.torch_backend SOCKET NATIVE_FOLDER
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from common.models import Step, deviation
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from workers.train_step import Rank, Variant, main, with_barrier, with_ddp


def with_shards(step: Step, group: Any) -> Variant:
    """Divides the parameters of each layer among the ranks of a group: FSDP2."""
    variant, mesh = Variant(step), DeviceMesh.from_group(group, "cpu")
    layers = getattr(variant.model, "layers", None) or variant.model.children()
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(variant.model, mesh=mesh)
    return variant.finish()


class BackendRank(Rank):
    """The orders that a rank executes. Its default group is one over gloo."""

    @cached_property
    def _group(self) -> Any:
        return dist.new_group(backend="sirtaki")

    def variants(self, step: Step) -> dict[str, Variant]:
        gloo = dist.group.WORLD
        return {
            "sync": with_barrier(step, self.bound),
            "DDP, gloo": with_ddp(step, gloo),
            "DDP, sirtaki": with_ddp(step, self._group),
            "FSDP2, gloo": with_shards(step, gloo),
            "FSDP2, sirtaki": with_shards(step, self._group),
        }

    def deviation(self) -> float:
        """Returns how far copies that are exchanged alike have diverged."""
        return max(
            deviation([self.model(f"{kind}, {backend}") for backend in ("gloo", "sirtaki")])
            for kind in ("DDP", "FSDP2")
        )

    def model(self, name: str) -> nn.Module:
        """Returns a copy of the model by its exchange."""
        return self._variants[name].model

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}


if __name__ == "__main__":
    main(BackendRank)
