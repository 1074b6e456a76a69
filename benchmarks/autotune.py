"""Measures what autotune makes of bad settings, beside the defaults, on two ranks of one thread each.

    python benchmarks/autotune.py [--model large_linear] [--starts "--spin 0"] [--rounds 5] [--json FILE]

For each start there is a job that stays at its settings, and one that begins with them under autotune and is
measured once it has ended. Blocks of steps of these jobs and of one at the defaults take turns.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import models
from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import alternate, median, medians, timed
from common.options import Option, choice, number, rounds
from common.report import Columns, Row, Table, Target, at_most, make_table
from common.torch_ranks import TorchRank

import sirtaki.torch as hvd
from sirtaki.bindings.context import current
from sirtaki.common.autotune import tuner_of

RANKS = 2
MODELS = ("large_linear", "transformer", "small_linear")
STARTS = {
    "the defaults": {},
    "--chunk-bytes 4K": {"SIRTAKI_CHUNK_BYTES": "4K"},
    "--chunk-bytes 64M": {"SIRTAKI_CHUNK_BYTES": "64M"},
    "--spin 0": {"SIRTAKI_SPIN": "0"},
    "--fusion-threshold 0": {"SIRTAKI_FUSION_THRESHOLD": "0"},
    "--report-bytes 1 --hand-over early": {"SIRTAKI_REPORT_BYTES": "1", "SIRTAKI_HAND_OVER": "early"},
}
MOST = 1.1  # times as long as at the defaults, or at the start
WARM_UP = 3  # steps of a block that are not measured
STEPS_AT_A_TIME = 50


def torch_step(model: str) -> Callable[[], object]:
    """Makes the model; returns a function that takes a step of it."""
    torch.manual_seed(hvd.rank())  # each rank has a batch of its own
    steps = getattr(models, model)()
    made = steps.make_model()
    hvd.broadcast_parameters(made.state_dict(), root_rank=0)
    plain = torch.optim.SGD(made.parameters(), lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, made.named_parameters())
    return lambda: steps.train(made, optimizer)


class TunedRank(TorchRank):
    """Training steps while autotune changes settings, and afterwards."""

    def __init__(self, folder: Path, model: str) -> None:
        super().__init__(folder)
        self.step = torch_step(model)

    def tune(self) -> dict[str, Any]:
        """Takes steps until autotune has ended; returns how many, and the changes that were kept."""
        tuner, steps, is_over = None, 0, False
        while not is_over:
            timed(self.step, STEPS_AT_A_TIME)
            steps += STEPS_AT_A_TIME
            tuner = tuner_of(current())
            is_over = hvd.broadcast_object(tuner is None or tuner.is_over)
        changes = tuner.findings.changes if tuner is not None and tuner.findings is not None else []
        return {"steps": steps, "kept": " ".join(map(str, changes))}

    def block(self, steps: int) -> list[float]:
        """Returns the duration of each step, in microseconds."""
        timed(self.step, WARM_UP)
        return timed(self.step, steps)


COLUMNS: Columns = {
    "start": "{start}",
    "kept": lambda row: row["kept"] or "nothing",
    "steps of autotune": "{steps:,}",
    "ms at the start": "{stays:.2f}",
    "ms at the end": "{tuned:.2f}",
    "ms at the defaults": "{defaults:.2f}",
}


def measure(options: Namespace) -> Results:
    """Measures all starts."""
    return {"rows": [measure_start(options, start) for start in options.starts]}


def measure_start(options: Namespace, start: str) -> Row:
    """Returns the medians of a step on rank 0, in milliseconds, and what autotune has kept after how many."""
    bad = {**KEEP_MEMORY, **STARTS[start]}
    settings = {"stays": bad, "tuned": {**bad, "SIRTAKI_AUTOTUNE": "1"}, "defaults": KEEP_MEMORY}
    with ExitStack() as opened:
        jobs = {
            name: opened.enter_context(Job(hvdrun(RANKS), RANKS, TunedRank, options.model, settings=one))
            for name, one in settings.items()
        }
        found = jobs["tuned"].ask("tune")[0]
        blocks = {name: partial(measure_block, job, options.steps) for name, job in jobs.items()}
        times = {name: median(medians(of_job)) for name, of_job in alternate(blocks, options.rounds).items()}
    return {"model": options.model, "start": start, **times, **found}


def measure_block(job: Job, steps: int) -> list[float]:
    return [microseconds / 1e3 for microseconds in job.ask("block", steps=steps)[0]]


def tables(results: Results) -> list[Table]:
    title = f"Training step of {results['rows'][0]['model']}, {RANKS} ranks"
    return [make_table(title, COLUMNS, results["rows"], text_columns=2)]


def judge(results: Results) -> list[Target]:
    return [
        at_most(
            f"step after autotune, times the better of start and defaults, from {row['start']}",
            MOST,
            row["tuned"] / min(row["stays"], row["defaults"]),
            "×",
        )
        for row in results["rows"]
    ]


BENCHMARK = Benchmark(
    __doc__,
    [
        Option("--model", choices=MODELS, default=MODELS[0], help=f"whose steps are taken ({MODELS[0]})"),
        choice("--starts", list(STARTS), "the settings to begin with"),
        number("--steps", 10, "steps of a block"),
        rounds(5, "blocks of each job"),
    ],
    measure,
    tables,
    judge,
)

if __name__ == "__main__":
    BENCHMARK.main()
