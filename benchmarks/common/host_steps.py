"""Training steps on hosts of their own: the ways of a rank take turns, in blocks of steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from common.harness import Results
from common.jobs import KEEP_MEMORY, Job
from common.measure import alternate, median
from common.options import Option, number, rounds
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import Columns, Row, Table, make_table
from common.torch_ranks import StepRank

PORT = 29_800

Answers = list[dict[str, Any]]  # of all ranks for one block, as `StepRank.steps` returns them


def step_options(blocks: int, steps: int) -> list[Option]:
    """Returns the options that `measure_steps` reads."""
    return [rounds(blocks, "blocks of each"), *HOST_OPTIONS, number("--steps", steps, "steps of a block")]


def measure_steps(
    options: Namespace,
    rank: type[StepRank],
    baseline: str,
    facts: Callable[[list[Answers]], Row],
    settings: Mapping[str, str] | None = None,
) -> Results:
    """Creates the hosts, with a rank each, and measures all models in all ways.

    A row holds the median of a step on the slower rank, in milliseconds, the gain: the time of the way
    `baseline` as a multiple of its time, and the facts of its blocks. `settings` are added to the ranks'
    environment.
    """
    surroundings = {**KEEP_MEMORY, **(settings or {})}
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, 1, key, PORT)
        with Job(launcher, options.hosts, rank, settings=surroundings) as job:
            versions, rows = job.ask("versions")[0], []
            for model in getattr(options, "models", rank.models):
                blocks = {way: partial(_block, job, model, way, options.steps) for way in rank.ways}
                found = alternate(blocks, options.rounds)
                times = {way: _median_step(answers) for way, answers in found.items()}
                for way, answers in found.items():
                    row = {"model": model, "way": way, "milliseconds": times[way]}
                    rows.append({**row, "gain": times[baseline] / times[way], **facts(answers)})
    return {"hosts": options.hosts, "rate": options.rate, "versions": versions, "rows": rows}


def _block(job: Job, model: str, way: str, steps: int) -> Answers:
    job.ask("prepare", model=model, way=way)
    return job.ask("steps", calls=steps)


def _median_step(answers: list[Answers]) -> float:
    slowest = [
        max(step) for ranks in answers for step in zip(*(rank["times"] for rank in ranks), strict=True)
    ]
    return median(slowest) / 1e3


def step_table(results: Results, columns: Columns) -> Table:
    """Returns the table of `measure_steps`."""
    title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
    return make_table(title, columns, results["rows"], group="model", text_columns=2)
