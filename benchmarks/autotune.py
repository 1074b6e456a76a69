"""Measures what autotune makes of bad settings, beside the defaults, on two ranks of one thread each.

    python benchmarks/autotune.py [--model large_linear] [--starts "--spin 0"] [--rounds 5] [--json FILE]

For each start there is a job that stays at its settings, and one that begins with them under autotune and is
measured once it has ended. Blocks of steps of these jobs and of one at the defaults take turns.
"""

from __future__ import annotations

from argparse import Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from common.harness import Benchmark, Results
from common.jobs import KEEP_MEMORY, Job, hvdrun
from common.measure import alternate, median, medians
from common.options import Option, choice, number, rounds
from common.report import Target, at_most, show_rows

RANKS = 2
WORKER = "workers.autotune"
MODELS = ("large_linear", "transformer", "small_linear", "compiled_small")  # the last one: with JAX
STARTS = {
    "the defaults": {},
    "--chunk-bytes 4K": {"SIRTAKI_CHUNK_BYTES": "4K"},
    "--chunk-bytes 64M": {"SIRTAKI_CHUNK_BYTES": "64M"},
    "--spin 0": {"SIRTAKI_SPIN": "0"},
    "--fusion-threshold 0": {"SIRTAKI_FUSION_THRESHOLD": "0"},
    "--report-bytes 1 --hand-over early": {"SIRTAKI_REPORT_BYTES": "1", "SIRTAKI_HAND_OVER": "early"},
}
MOST = 1.1  # times as long as at the defaults, or at the start


@dataclass
class Row:
    """The result of one start. Times are medians of a step on rank 0, in milliseconds."""

    model: str
    start: str
    stays: float
    tuned: float
    defaults: float
    steps: int  # until autotune has ended
    kept: str

    @property
    def beside_the_better(self) -> float:
        return self.tuned / min(self.stays, self.defaults)


COLUMNS = [
    ("start", lambda row: row.start),
    ("kept", lambda row: row.kept or "nothing"),
    ("steps of autotune", lambda row: f"{row.steps:,}"),
    ("ms at the start", lambda row: f"{row.stays:.2f}"),
    ("ms at the end", lambda row: f"{row.tuned:.2f}"),
    ("ms at the defaults", lambda row: f"{row.defaults:.2f}"),
]


def measure(options: Namespace) -> Results:
    """Measures all starts."""
    return {"rows": [measure_start(options, start) for start in options.starts]}


def measure_start(options: Namespace, start: str) -> Row:
    bad = {**KEEP_MEMORY, **STARTS[start]}
    settings = {"stays": bad, "tuned": {**bad, "SIRTAKI_AUTOTUNE": "1"}, "defaults": KEEP_MEMORY}
    with ExitStack() as opened:
        jobs = {
            name: opened.enter_context(Job(hvdrun(RANKS), RANKS, WORKER, options.model, settings=one))
            for name, one in settings.items()
        }
        found = jobs["tuned"].ask("tune")[0]
        blocks = {name: partial(measure_block, job, options.steps) for name, job in jobs.items()}
        times = {name: median(medians(of_job)) for name, of_job in alternate(blocks, options.rounds).items()}
    return Row(options.model, start, **times, **found)


def measure_block(job: Job, steps: int) -> list[float]:
    return [microseconds / 1e3 for microseconds in job.ask("block", steps=steps)[0]]


def show(results: Results) -> None:
    model = results["rows"][0].model
    show_rows(f"Training step of {model}, {RANKS} ranks", COLUMNS, results["rows"], text_columns=2)


def judge(results: Results) -> list[Target]:
    what = "step after autotune, times the better of start and defaults, from {}"
    return [at_most(what.format(row.start), MOST, row.beside_the_better, "×") for row in results["rows"]]


BENCHMARK = Benchmark(
    __doc__,
    [
        Option("--model", choices=MODELS, default=MODELS[0], help=f"whose steps are taken ({MODELS[0]})"),
        choice("--starts", list(STARTS), "the settings to begin with"),
        number("--steps", 10, "steps of a block"),
        rounds(5, "blocks of each job"),
    ],
    measure,
    show,
    judge,
)

if __name__ == "__main__":
    BENCHMARK.main()
