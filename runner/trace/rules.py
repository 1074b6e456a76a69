"""The rules that judge a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from sirtaki.bindings.observing.program_timeline import COLLECTION, NO_CORE, QUOTA
from sirtaki.runner.doctor.findings import NOTE, PROBLEM, WARNING, Evidence, Rule
from sirtaki.runner.trace.analysis import SLOW_DECISION, Measures
from sirtaki.runner.trace.clocks import HostClock
from sirtaki.runner.trace.doings import Doing, as_text
from sirtaki.runner.trace.formats import percent, ranks_text, time
from sirtaki.runner.trace.trace import Disagreement, Trace, failures

_LATE_SHARE = 0.05  # of all steps' time, that the others wait for a rank
_TRANSFER_SHARE, _DECISION_SHARE = 0.2, 0.1  # of all steps' time, exposed
_MAX_STEPS = 5  # that a line names
_MOST = 0.5  # of the time in which the others waited
_PAUSES = {
    COLLECTION: "call gc.freeze() once all is set up, or gc.disable(), and gc.collect() in the same step of "
    "all ranks",
    NO_CORE: "start no more ranks than cores, with fewer threads each, and stop what else runs there",
    QUOTA: "give its container a larger quota, or the rank fewer threads",
}
_ANY_REASON = {
    True: "look at its share of the data and at what else its cores do",
    False: "look for garbage collection, loading of data, checkpoints and logging",
}


class TracePicture(NamedTuple):
    """A trace with its clocks and measures: what rules judge."""

    trace: Trace
    clocks: Sequence[HostClock]
    measures: Measures


def _mismatches(picture: TracePicture) -> Iterator[Evidence]:
    for failure in failures(picture.trace):
        if failure.is_mismatch:
            yield Evidence("", _submitted(failure), {"name": failure.name})


def _submitted(disagreement: Disagreement) -> str:
    """Returns what each rank has submitted, and its line of the program, as far as files have it."""
    same = len(disagreement.submitted) > 1 and len(set(disagreement.submitted.values())) == 1
    more = "; the same kind and size, so the dtype, shape or operation differs" if same else ""
    values = (
        disagreement.error.removeprefix(f"ranks disagree about '{disagreement.name}': ")
        or disagreement.submitted_text + more
    )
    return f"{values}; {places}" if (places := disagreement.places_text) else values


def _ended_worlds(picture: TracePicture) -> Iterator[Evidence]:
    for rows in picture.trace.generations():
        ranks_of = defaultdict(list)
        for row in rows:
            if row.ending is not None and row.ending.is_failure and row.rank is not None:
                ranks_of[row.ending.reason].append(row.rank)
        for reason, ranks in ranks_of.items():
            yield Evidence("", f"by the failure reports of {ranks_text(ranks)}", {"reason": reason})


def _failed(picture: TracePicture) -> Iterator[Evidence]:
    failed = [failure for failure in failures(picture.trace) if not failure.is_mismatch]
    for status in sorted({status for disagreement in failed for status in disagreement.statuses}):
        names = list(
            dict.fromkeys(disagreement.name for disagreement in failed if status in disagreement.statuses)
        )
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield Evidence("", f"{names[0]!r}{more}", {"status": status})


def _late_ranks(is_often: bool, picture: TracePicture) -> Iterator[Evidence]:
    """Yields the ranks that are late in at least half of the steps, or, unless `is_often`, in fewer."""
    wall, steps = picture.measures.wall, len(picture.measures.steps)
    for rank in sorted(picture.measures.ranks, key=lambda rank: -rank.caused):
        worst = rank.worst_steps()
        if not worst or not wall or rank.caused < _LATE_SHARE * wall or (2 * len(worst) >= steps) != is_often:
            continue
        at_first = 2 * sum(step.at_first for step in worst) >= len(worst)
        waited = f"they waited {time(rank.caused)}, {percent(rank.caused / wall)} of the time"
        named = f": {', '.join(str(step.number) for step in worst)}" if len(worst) <= _MAX_STEPS else ""
        text = f"{waited}; mostly in {len(worst)} of {steps} {'step' if steps == 1 else 'steps'}"
        found = rank.doings()
        meanwhile = f"; meanwhile: {as_text(found)}" if found else ""
        values = {
            "rank": rank.row.rank,
            "part": "before its first exchange" if at_first else "between exchanges",
            "advice": _advice(found, is_often),
        }
        yield Evidence("", text + ("" if is_often else named) + meanwhile, values)


def _advice(found: Sequence[Doing], is_often: bool) -> str:
    """Returns the remedy for a pause that took most of the time, else for the line that it was at, else for
    the longest pause, else for any reason.
    """
    if not found:
        return _ANY_REASON[is_often]
    has_most = found[0].is_pause and found[0].share >= _MOST
    reason = found[0] if has_most else found[-1]
    return _PAUSES.get(reason.what, f"see what the line {reason.what} waits for or computes")


def _slow_transfers(picture: TracePicture) -> Iterator[Evidence]:
    wall, steps = picture.measures.wall, picture.measures.steps
    exposed = sum(step.transfer for step in steps)
    if wall and exposed >= _TRANSFER_SHARE * wall:
        yield Evidence("", f"{time(exposed)} of {time(wall)}, {percent(exposed / wall)}")


def _slow_decisions(picture: TracePicture) -> Iterator[Evidence]:
    wall, steps = picture.measures.wall, picture.measures.steps
    exposed = sum(step.decision for step in steps)
    if wall and exposed >= _DECISION_SHARE * wall:
        ranks = [step.rank for step in steps if step.cause == SLOW_DECISION]
        last = max(set(ranks), key=ranks.count, default=None)
        most = f"; most often rank {last} was informed last" if last is not None else ""
        yield Evidence("", f"{time(exposed)} of {time(wall)}, {percent(exposed / wall)}{most}")


def _lacking(picture: TracePicture) -> Iterator[Evidence]:
    for text in picture.trace.lacks:
        yield Evidence("", text)


def _incomplete(picture: TracePicture) -> Iterator[Evidence]:
    count = picture.measures.incomplete
    if count:
        yield Evidence("", f"{count} of {count + picture.measures.exchanges}")


def _unknown_clocks(picture: TracePicture) -> Iterator[Evidence]:
    for clock in picture.clocks:
        if clock.error is None:
            yield Evidence("", ", ".join(clock.hosts))


def _no_steps(picture: TracePicture) -> Iterator[Evidence]:
    if len(picture.measures.steps) < 2 and picture.measures.exchanges:
        yield Evidence("", "")


TRACE_RULES: tuple[Rule[TracePicture], ...] = (
    Rule(
        "world-failed",
        PROBLEM,
        "the world failed: {reason}",
        "the lines above tell what each rank was doing, and `hvdrun` which one failed first",
        _ended_worlds,
    ),
    Rule(
        "mismatch",
        PROBLEM,
        "the ranks disagree about '{name}'",
        "make the same call with the same shape, dtype and operation on all ranks",
        _mismatches,
    ),
    Rule(
        "operations-failed",
        PROBLEM,
        "operations ended with {status}",
        "see the error of the job; `hvdrun --dump-directory DIR` keeps what each rank was doing",
        _failed,
    ),
    Rule(
        "late-rank",
        WARNING,
        "the others wait for rank {rank} in most steps",
        "it is slow {part} of a step: {advice}",
        partial(_late_ranks, True),
    ),
    Rule(
        "pausing-rank",
        WARNING,
        "the others wait for rank {rank} in some steps",
        "it pauses {part} of these steps: {advice}",
        partial(_late_ranks, False),
    ),
    Rule(
        "slow-transfer",
        WARNING,
        "the ranks wait for data to move",
        "exchange less (docs/reference/compression.md) or less often (docs/reference/local_sgd.md), and "
        "measure the network with `sirtaki doctor -H HOSTS`",
        _slow_transfers,
    ),
    Rule(
        "slow-decision",
        WARNING,
        "the ranks wait to learn that all agree",
        "start no more ranks than cores (`sirtaki doctor -np N` counts them), and fuse small tensors",
        _slow_decisions,
    ),
    Rule(
        "files-lack",
        WARNING,
        "the files are not complete",
        "the measures are those of what there is; name all files of the job",
        _lacking,
    ),
    Rule(
        "exchanges-lack",
        NOTE,
        "exchanges are left out, because the files do not have the parts of all ranks",
        "nothing, if a rank ended earlier, joined, or began its timeline later",
        _incomplete,
    ),
    Rule(
        "clock-unknown",
        WARNING,
        "the times of some hosts are moved by their wall clocks, and may be wrong by any amount",
        "synchronise the clocks (chrony, systemd-timesyncd); ranks that exchange nothing give no bounds",
        _unknown_clocks,
    ),
    Rule(
        "no-steps",
        NOTE,
        "there are no steps, because no tensor is exchanged twice under one name",
        "give the tensors of a step names that recur",
        _no_steps,
    ),
)
