"""Training steps on hosts of their own: the ways of a worker take turns, in blocks of steps."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from common.harness import Results
from common.jobs import KEEP_MEMORY, Job
from common.measure import alternate, median
from common.options import Option, number, rounds
from common.over_hosts import HOST_OPTIONS, hosts_of, ranks_on
from common.report import show_rows

PORT = 29_800

Answers = list[dict[str, Any]]  # of all ranks for one block, as `StepRank.steps` returns them


@dataclass(frozen=True)
class Blocks:
    """The blocks of one way.

    Attributes:
        milliseconds: the median of a step, on the slower rank.
        answers: those of all ranks, by block.
    """

    milliseconds: float
    answers: list[Answers]


MakeRows = Callable[[str, dict[str, Blocks]], Sequence[Any]]  # of a model, and its blocks by way


def step_options(blocks: int, steps: int) -> list[Option]:
    """Returns the options that `measure_steps` reads."""
    return [rounds(blocks, "blocks of each"), *HOST_OPTIONS, number("--steps", steps, "steps of a block")]


def measure_steps(
    options: Namespace, worker: str, make_rows: MakeRows, settings: Mapping[str, str] | None = None
) -> Results:
    """Creates the hosts, with a rank each, and measures all models of a worker in all ways.

    `settings` are added to the ranks' environment.
    """
    surroundings = {**KEEP_MEMORY, **(settings or {})}
    with hosts_of(options) as (hosts, key):
        launcher = ranks_on(hosts, 1, key, PORT)
        with Job(launcher, options.hosts, worker, settings=surroundings) as job:
            versions, choices = job.ask("versions")[0], job.ask("choices")[0]
            rows = [
                row
                for model in choices["models"]
                if model in getattr(options, "models", choices["models"])
                for row in make_rows(model, _measure_model(job, model, choices["ways"], options))
            ]
    return {"hosts": options.hosts, "rate": options.rate, "versions": versions, "rows": rows}


def _measure_model(job: Job, model: str, ways: list[str], options: Namespace) -> dict[str, Blocks]:
    blocks = {way: partial(_block, job, model, way, options.steps) for way in ways}
    found = alternate(blocks, options.rounds)
    return {way: Blocks(_median_step(answers), answers) for way, answers in found.items()}


def _block(job: Job, model: str, way: str, steps: int) -> Answers:
    job.ask("prepare", model=model, way=way)
    return job.ask("steps", calls=steps)


def _median_step(answers: list[Answers]) -> float:
    slowest = [
        max(step) for ranks in answers for step in zip(*(rank["times"] for rank in ranks), strict=True)
    ]
    return median(slowest) / 1e3


def show_steps(results: Results, columns: Sequence[tuple[str, Callable[[Any], str]]]) -> None:
    """Prints the table of `measure_steps`."""
    title = f"Training step, {results['hosts']} hosts × 1 rank, links of {results['rate']}"
    show_rows(title, columns, results["rows"], text_columns=2, group=lambda row: row.model)
