"""The results of a job in the process that has called `sirtaki.run`, or the exception that it raises."""

from __future__ import annotations

from typing import Any, NoReturn

from sirtaki.runner.function.errors import RunError
from sirtaki.runner.function.pickling import import_cloudpickle
from sirtaki.runner.function.report import raise_reported
from sirtaki.runner.function.service import Outcome, Summary, read_outcome, read_summary

_NO_SUMMARY = (
    "the launcher of the ranks ended before it could report their results: it was killed, or crashed"
)


def results_in(file: int) -> list[Any]:
    """Returns the results in a file that the launcher has written, by rank.

    Raises the exception of the rank that caused the job to fail, or RunError.
    """
    summary = read_summary(file)
    if summary is None:
        raise RunError(_NO_SUMMARY)
    if summary.error:
        raise RunError(summary.error)
    if summary.failure is not None:
        _raise_failure(file, summary)
    _check_complete(summary)
    returned = [rank for rank, outcome in summary.outcomes.items() if _has_returned(outcome)]
    if not returned:
        raise RunError("no rank has returned a result")
    ordered = sorted(returned, key=lambda worker: (summary.last_ranks.get(worker, worker), worker))
    return [_load_result(file, rank, summary.outcomes[key]) for rank, key in enumerate(ordered)]


def _has_returned(outcome: Outcome) -> bool:
    return outcome.is_complete and outcome.report["kind"] == "returned"


def _check_complete(summary: Summary) -> None:
    for rank in range(summary.size):
        outcome = summary.outcomes.get(rank)
        if outcome is None or not _has_returned(outcome):
            raise RunError(f"rank {rank} ended with exit code 0 before the function had returned a result")


def _load_result(file: int, rank: int, outcome: Outcome) -> Any:
    try:
        return import_cloudpickle().loads(read_outcome(file, outcome))
    except Exception as error:
        text = f"the result of rank {rank} on {outcome.host} cannot be loaded here"
        raise RunError(f"{text}: {type(error).__name__}: {error}") from error


def _raise_failure(file: int, summary: Summary) -> NoReturn:
    culprit, failure = summary.culprit, RunError(summary.failure or "the job was interrupted")
    outcome = None if culprit is None else summary.outcomes.get(culprit)
    if culprit is None or outcome is None or not outcome.is_complete:
        raise failure
    rank, report = summary.last_ranks.get(culprit, culprit), outcome.report
    if report["kind"] == "returned":  # it failed after its function had returned
        raise failure

    def load() -> object:
        return import_cloudpickle().loads(read_outcome(file, outcome))

    raise_reported(rank, outcome.host, outcome.pid, report, load)
