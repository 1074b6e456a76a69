"""Outcomes of a call on all ranks: made in each process of an engine, and read by the driver."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.context import process
from sirtaki.bindings.observing import user_code
from sirtaki.runner.function.call import show_sources
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.function.pickling import cannot_pickle, import_cloudpickle, load_call, load_result
from sirtaki.runner.function.report import RETURNED, exit_code, raise_reported, report_of


@dataclass(frozen=True)
class RankOutcome:
    """A rank's result or exception.

    Attributes:
        rank, host, pid: the process.
        report: the report about it; see `sirtaki.runner.function.report`.
        pickled: the result or the exception; b"" if it cannot be pickled.
        is_caused_elsewhere: whether it is an exception because another rank has failed.
        exit_code: of an exception that was to end the process.
    """

    rank: int
    host: str
    pid: int
    report: Mapping[str, Any]
    pickled: bytes
    is_caused_elsewhere: bool = False
    exit_code: int = 0

    @property
    def has_returned(self) -> bool:
        return self.report["kind"] == "returned"

    def load(self) -> Any:
        """Returns the result, or the exception as an object."""
        return import_cloudpickle().loads(self.pickled)


def call_on_rank(
    pickled_call: bytes,
    rank: int,
    first: tuple[Any, ...] = (),
    then: Callable[[Any], Any] = lambda result: result,
) -> RankOutcome:
    """Calls a function in this process; an exception of it ends the rank's world.

    `first` are arguments before those of the call; the outcome is what `then` returns for the result.
    """
    try:
        call = load_call(pickled_call, rank, "; every host needs the modules that the function comes from")
        show_sources(call)
        result = then(call.function(*first, *call.args, **call.kwargs))
        return _outcome(rank, RETURNED, _pickled(result, rank))
    except SystemExit as end:
        outcome = _failed(rank, end, "exited")
        return replace(outcome, exit_code=exit_code(end))
    except BaseException as error:
        return _failed(rank, error, "raised")


def end_world(error: BaseException) -> None:
    """Ends this rank's world because of an exception, which loses its internal frames."""
    context = process.context
    user_code.hide_internal_frames(error, context is not None and context.failure is not None)
    lifecycle.abort(error)


@contextlib.contextmanager
def with_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process's environment, and restores them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def results_of(outcomes: Sequence[RankOutcome], lost: str = "") -> list[Any]:
    """Returns the results, by rank, or raises the exception of the rank that failed first.

    Args:
        outcomes: one of each rank, unless a rank has failed.
        lost: the engine's report that a process was lost; "" if none was.

    Raises:
        The exception that the function has raised; see `raise_reported`.
        RunError: no rank is known to have failed by itself, and `lost` says why the job has ended.
    """
    failed = [outcome for outcome in outcomes if not outcome.has_returned]
    culprits = [outcome for outcome in failed if not outcome.is_caused_elsewhere]
    if lost and not culprits:
        victims = "".join(
            f"\nrank {outcome.rank} raised {outcome.report['type']}: {outcome.report['text']}"
            for outcome in failed
        )
        raise RunError(lost + victims)
    if failed:
        first = min(culprits or failed, key=lambda culprit: culprit.rank)
        raise_reported(first.rank, first.host, first.pid, first.report, first.load)
    ordered = sorted(outcomes, key=lambda outcome: outcome.rank)
    return [load_result(outcome.pickled, outcome.rank, outcome.host) for outcome in ordered]


def _pickled(result: object, rank: int) -> bytes:
    try:
        pickled: bytes = import_cloudpickle().dumps(result)
    except Exception as error:
        raise cannot_pickle(result, rank, error) from None
    return pickled


def _failed(rank: int, error: BaseException, kind: str) -> RankOutcome:
    report, is_caused_elsewhere = report_of(error, kind), lifecycle.is_failure_caused_elsewhere()
    pickled = b""
    with contextlib.suppress(Exception):  # the report has to do
        pickled = import_cloudpickle().dumps(error)
    lifecycle.abort(error)
    return _outcome(rank, report, pickled, is_caused_elsewhere)


def _outcome(
    rank: int, report: Mapping[str, Any], pickled: bytes, is_caused_elsewhere: bool = False
) -> RankOutcome:
    return RankOutcome(rank, socket.gethostname(), os.getpid(), report, pickled, is_caused_elsewhere)
