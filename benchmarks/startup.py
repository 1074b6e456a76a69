"""Measures costs before and beside training: imports, launching, memory, and the detection of a dead rank.

Usage: python benchmarks/startup.py [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common.harness import Benchmark, Results
from common.jobs import Job, environment, free_ports, hvdrun, make_key, mpirun
from common.measure import alternate, difference, median
from common.options import MIB, rounds
from common.report import Table, Target, at_most
from torch import nn

import sirtaki.torch as hvd

RANKS = 2
MOST_SECONDS = 120
LOST_RANKS = 5  # measurements, at most
LAYERS, WIDTH = 6, 2048  # of the model whose memory is measured
STEPS = 5
# A script's first calls, after which most of what it needs is imported.
FIRST_USE = "sirtaki.torch as hvd; hvd.init(); hvd.DistributedOptimizer; hvd.broadcast_parameters"
FRAMEWORKS = ["torch", "tensorflow", "keras", "jax", "numpy"]
IMPORT = """
import json, sys, time
before = time.perf_counter()
import {first}
middle = time.perf_counter()
import {second}
after = time.perf_counter()
print(json.dumps([middle - before, after - middle, [name for name in {frameworks} if name in sys.modules]]))
"""


def resident(field: str) -> int:
    """Reads a line of /proc/self/status, in bytes: VmHWM is the peak, RssShmem the current shared part."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    batch = torch.randn(16, WIDTH)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def measure_growth() -> dict[str, int]:
    """Returns, in bytes: the gradients, the growth of the peak, and the shared segment's part of it."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer)
    optimizer.zero_grad()
    before, shared_before = resident("VmHWM"), resident("RssShmem")
    hvd.init()
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    train(model, distributed)
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    shared = resident("RssShmem") - shared_before
    return {"gradients": gradients, "growth": resident("VmHWM") - before, "shared": shared}


class MemoryRank:
    """Trains first alone, then with sirtaki, and reports the growth of its memory's peak."""

    def __init__(self, _: Path) -> None:
        torch.set_num_threads(1)
        self._result = measure_growth()
        self.number = hvd.rank()

    def result(self) -> dict[str, int]:
        return self._result


def measure(options: Namespace) -> Results:
    """Runs everything. Seconds and bytes."""
    rounds = options.rounds
    return {
        "imports": measure_imports(rounds),
        "launches": measure_launches(rounds),
        "memory": measure_memory(),
        "lost_rank": [measure_lost_rank() for _ in range(min(rounds, LOST_RANKS))],
    }


def measure_imports(rounds: int) -> dict[str, Any]:
    bare = [run_import("sys", "sirtaki") for _ in range(rounds)]
    over_torch = [run_import("torch", "sirtaki.torch") for _ in range(rounds)]
    used = [run_import("torch", FIRST_USE) for _ in range(rounds)]
    return {
        "has_bytecode": not sys.dont_write_bytecode,
        "sirtaki": median([seconds for _, seconds, _ in bare]),
        "frameworks": sorted({name for *_, found in bare for name in found}),
        "torch": median([seconds for seconds, _, _ in over_torch]),
        "sirtaki.torch": median([seconds for _, seconds, _ in over_torch]),
        "first use": median([seconds for _, seconds, _ in used]),
    }


def run_import(first: str, second: str) -> tuple[float, float, list[str]]:
    """Measures two imports, in this order in a new Python, and lists the frameworks that they loaded."""
    text = IMPORT.format(first=first, second=second, frameworks=FRAMEWORKS)
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, check=True, timeout=MOST_SECONDS, text=True
    )
    return tuple(json.loads(done.stdout))


def measure_launches(rounds: int) -> dict[str, Any]:
    """Measures a script that only initialises, from start to exit, alone and under each launcher, in turn."""
    script = [sys.executable, "-m", "workers.init_only"]
    commands = {
        "alone, torch": [*script, "sirtaki.torch"],
        "hvdrun, torch": [*hvdrun(RANKS), *script, "sirtaki.torch"],
        "alone, numpy": [*script, "sirtaki.numpy"],
        "hvdrun, numpy": [*hvdrun(RANKS), *script, "sirtaki.numpy"],
        "torchrun, gloo": [*torchrun(RANKS), "-m", "workers.init_only", "gloo"],
    }
    launcher = mpirun(RANKS)
    if launcher is not None:
        commands["mpirun, torch"] = [*launcher, *script, "mpi"]
    times = alternate({name: partial(run_launch, command) for name, command in commands.items()}, rounds)
    over = {
        kind: difference(times[f"hvdrun, {kind}"], times[f"alone, {kind}"]) for kind in ("torch", "numpy")
    }
    return {"seconds": {name: median(of_it) for name, of_it in times.items()}, "over_alone": over}


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]


def run_launch(command: Sequence[str]) -> float:
    start = time.perf_counter()
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=MOST_SECONDS
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout.decode(errors='replace')}")
    return seconds


def measure_memory() -> dict[str, int]:
    """Returns the growth of a rank's peak memory when it trains with sirtaki, for the rank that grows most.

    glibc adapts its threshold for memory that is returned to the system at once. The resulting holes in the
    heap change from run to run, even without sirtaki, and hide the measured growth; the threshold is
    therefore fixed.
    """
    settings = {"MALLOC_MMAP_THRESHOLD_": str(MIB)}
    with Job(hvdrun(RANKS), RANKS, MemoryRank, settings=settings) as job:
        return max(job.ask("result"), key=lambda rank: rank["growth"] - rank["shared"])


def measure_lost_rank() -> float:
    """Returns the seconds from the kill -9 of rank 1 until rank 0, in the middle of an all-reduce, raises."""
    with tempfile.TemporaryDirectory(prefix="sirtaki-benchmark-") as folder:
        key = make_key(Path(folder))
        address = f"127.0.0.1:{free_ports(1)[0]}"
        results = [Path(folder, f"rank{rank}.json") for rank in range(RANKS)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "workers.lost_rank", str(rank), str(RANKS), address, results[rank]],
                env={**environment(), "SIRTAKI_KEY_FILE": str(key)},
                start_new_session=True,
            )
            for rank in range(RANKS)
        ]
        try:
            for process in ranks:
                process.wait(MOST_SECONDS)
        finally:
            # The DataLoader's workers end, too: they detect the loss themselves only after seconds.
            for process in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        raised, killed = (json.loads(result.read_text()) for result in results)
    return raised["raised"] - killed["killed"]


def tables(results: Results) -> list[Table]:
    imports, launches, lost = results["imports"], results["launches"], results["lost_rank"]
    imported = {"sirtaki": "sirtaki", "torch": "torch", "sirtaki.torch": "sirtaki.torch, after import torch"}
    imported["first use"] = "sirtaki.torch, after import torch, with init() and DistributedOptimizer"
    rows = [[f"import {text}", f"{imports[name] * 1e3:.0f} ms"] for name, text in imported.items()]
    rows += [[], *([name, f"{seconds:.2f} s"] for name, seconds in launches["seconds"].items())]
    for kind, over in launches["over_alone"].items():
        bounds = f"({over.low:.2f} to {over.high:.2f})"
        rows.append([f"hvdrun over alone, {kind}", f"{over.median:.2f} s {bounds}"])
    rows += [[], *([f"memory: {name}", f"{size / MIB:.1f} MiB"] for name, size in results["memory"].items())]
    worst = f"(worst {max(lost) * 1e3:.0f})"
    rows += [[], ["kill -9 of a rank until the other raises", f"{median(lost) * 1e3:.0f} ms {worst}"]]
    if not imports["has_bytecode"]:
        rows += [[], ["PYTHONDONTWRITEBYTECODE is set: imports may compile every module", ""]]
    return [Table(f"Start, {RANKS} ranks", ["what", "median"], rows)]


def judge(results: Results) -> list[Target]:
    imports, memory = results["imports"], results["memory"]
    brought = imports["frameworks"]
    over_alone = results["launches"]["over_alone"]["torch"].median
    growth = (memory["growth"] - memory["shared"]) / MIB
    return [
        at_most("import sirtaki", 50, imports["sirtaki"] * 1e3, "ms"),
        Target("import sirtaki brings no framework", "none", ", ".join(brought) or "none", not brought),
        at_most("import sirtaki.torch over import torch", 50, imports["sirtaki.torch"] * 1e3, "ms"),
        at_most("hvdrun of an init-only script, over alone", 0.7, over_alone, "s"),
        at_most("a rank's peak memory beside the segment", 16, growth, "MiB"),
    ]


BENCHMARK = Benchmark(__doc__, [rounds(7, "measurements of each")], measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
