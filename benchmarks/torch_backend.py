"""Measures sirtaki as a backend of torch.distributed beside gloo, on two ranks of one thread each.

    python benchmarks/torch_backend.py [--rounds 40] [--json FILE]

One pair of processes runs a step of each kind in turn: `sync` (a barrier only, nothing is exchanged), DDP
over gloo and over sirtaki, and FSDP2, which divides the parameters of each layer, over both. The weights
that both backends lead to are compared.
"""

from __future__ import annotations

from argparse import Namespace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from common.harness import Benchmark, Results
from common.measure import median, ratio
from common.models import Step, deviation
from common.options import rounds
from common.report import Row, Table, Target, at_least, make_table
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_step import MODELS_OPTION, TrainRank, Variant, measure_models, models_table, with_barrier, with_ddp

LEAST_DDP = 1.5  # times gloo's added time over sirtaki's
LEAST_FSDP = 1.0  # times gloo's step over sirtaki's


def with_shards(step: Step, group: Any) -> Variant:
    """Divides the parameters of each layer among the ranks of a group: FSDP2."""
    variant, mesh = Variant(step), DeviceMesh.from_group(group, "cpu")
    layers = getattr(variant.model, "layers", None) or variant.model.children()
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(variant.model, mesh=mesh)
    return variant.finish()


class BackendRank(TrainRank):
    """Training steps over groups of torch.distributed; the default group is over gloo."""

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
            deviation([self.copies[f"{kind}, {backend}"].model for backend in ("gloo", "sirtaki")])
            for kind in ("DDP", "FSDP2")
        )


def added_by_ddp(model: Row) -> float:
    """Returns what DDP adds to a step over gloo, divided by what it adds over sirtaki."""
    gloo, sirtaki = (model["costs"][f"DDP, {backend}"].median for backend in ("gloo", "sirtaki"))
    return gloo / max(sirtaki, 1e-9)


def ratio_of(model: Row, kind: str) -> str:
    return f"{ratio(model['times'][f'{kind}, gloo'], model['times'][f'{kind}, sirtaki']):.2f}"


COLUMNS = {
    "model": "{model}",
    "DDP's step - sync": lambda model: f"{added_by_ddp(model):.2f}",
    "DDP's step": lambda model: ratio_of(model, "DDP"),
    "FSDP2's step": lambda model: ratio_of(model, "FSDP2"),
}


def measure(options: Namespace) -> Results:
    """Runs everything. Times in milliseconds."""
    return measure_models(BackendRank, options.models, options.rounds)


def tables(results: Results) -> list[Table]:
    models = results["models"]
    return [models_table(models), make_table("gloo / sirtaki (95 %)", COLUMNS, models)]


def judge(results: Results) -> list[Target]:
    targets = []
    for model in results["models"]:
        name, times = model["model"].partition(",")[0], model["times"]
        step = median(times["FSDP2, gloo"]) / median(times["FSDP2, sirtaki"])
        targets.append(at_least(f"DDP's step - sync, gloo / sirtaki, {name}", LEAST_DDP, added_by_ddp(model)))
        targets.append(at_least(f"FSDP2's step, gloo / sirtaki, {name}", LEAST_FSDP, step))
    return targets


BENCHMARK = Benchmark(__doc__, [rounds(40, "steps of each kind"), MODELS_OPTION], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
