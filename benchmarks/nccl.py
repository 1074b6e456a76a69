"""Compares operations on GPUs with plain NCCL, with one rank per GPU.

    python benchmarks/nccl.py [-np 2] [--sizes 1K 64K 1M 64M] [--rounds 11] [--json FILE]

The peer is torch.distributed's "nccl", in the same processes. They take turns in blocks of calls, and each
call is timed until the GPU is done with it. A ratio is the median of those of adjacent blocks. By default
each GPU has a rank. With one GPU, both use a communicator of one rank, which shows their own costs.
`--try-on-cpu` tries the benchmark where there is no GPU, beside gloo: its figures say nothing of GPUs.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch.distributed as dist
from common.gpus import RANKS, TRY_ON_CPU, finish, job_on_gpus, own_device
from common.harness import Benchmark, Results
from common.options import KIB, MIB, choice, rounds, sizes
from common.peer_jobs import Rank, latency_tables, make_rows
from common.report import Row, Table

import sirtaki.torch as hvd
from sirtaki.bench.torch_implementations import TorchDistributed, TorchSirtaki

SIZES = [KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
OPERATIONS = ["allreduce", "broadcast", "allgather", "reducescatter", "alltoall"]
BASELINE = {"nccl": "sirtaki", "gloo": "sirtaki"}
CALLS = 20  # per block
WARM_UP = 5


class GpuRank(Rank):
    """One GPU, or the CPU: each operation through sirtaki and through the peer."""

    def __init__(self, _: Path, kind: str) -> None:
        hvd.init()
        self._device, backend = own_device(kind, hvd.local_rank())
        device = str(self._device)
        peers = {"sirtaki": TorchSirtaki(device), backend: TorchDistributed(backend, device)}
        super().__init__(peers, hvd.rank(), hvd.size())

    def block(self, who: str, calls: int) -> list[float]:
        """Returns the duration of each call until the GPU has finished it, in microseconds."""
        call = self._bound[who].call
        self._timed(call, WARM_UP)
        return self._timed(call, calls)

    def _timed(self, call: Callable[[], object], calls: int) -> list[float]:
        times = []
        for _ in range(calls):
            finish(self._device)
            dist.barrier()
            finish(self._device)
            start = time.perf_counter()
            call()
            finish(self._device)
            times.append((time.perf_counter() - start) * 1e6)
        return times


def measure(options: Namespace) -> Results:
    rows: list[Row] = []
    with job_on_gpus(options, GpuRank) as job:
        versions, ranks = job.ask("versions")[0], job.size
        for name in options.only:
            for size in options.sizes:
                whole = max(size // 4 // ranks, 1) * ranks * 4  # each rank's part has whole elements
                implementations = job.ask("prepare", collective=name, size=whole)[0]
                blocks = job.blocks(implementations, options.rounds, CALLS)
                rows += make_rows(name, whole, ranks, blocks, BASELINE)
    return {"versions": versions, "ranks": ranks, "rows": rows}


def tables(results: Results) -> Iterator[Table]:
    yield from latency_tables(results["rows"], results["ranks"])


OPTIONS = [
    RANKS,
    sizes(SIZES),
    rounds(11, "blocks of each"),
    choice("--only", OPERATIONS, "these operations"),
    TRY_ON_CPU,
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables)

if __name__ == "__main__":
    BENCHMARK.main()
