"""Carries a training function through the generations of an elastic job: leave, link, receive, go on.

docs/design/elastic_protocol.md is the specification.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar

from sirtaki.bindings.bootstrap import lifecycle
from sirtaki.bindings.bootstrap.elastic.loaded_modules import SPARES, write_list
from sirtaki.bindings.bootstrap.elastic.messages import Enlist, World
from sirtaki.bindings.bootstrap.elastic.process import WorkerProcess, closed
from sirtaki.bindings.bootstrap.elastic.worker import ElasticWorker
from sirtaki.bindings.context import Context, current
from sirtaki.bindings.context import process as this_process
from sirtaki.bindings.errors import HorovodInternalError, HostsUpdatedInterrupt, MismatchError
from sirtaki.bindings.observing import observe
from sirtaki.bindings.observing.elastic_timeline import write_changes
from sirtaki.bindings.survivors import Membership, Survivors
from sirtaki.common.elastic.state import GenerationStart, State
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import ProcessSet, add_to_world, global_process_set

_Result = TypeVar("_Result")

_NEWCOMERS = (
    "ranks that have just joined do not call reset callbacks: exchange nothing in them, and begin the "
    "function with it instead"
)
# Failures of a world after which the arbiter may form another one: a rank, its host or its link was lost, or
# a rank has ended with an exception, which the arbiter judges by that rank's end.
_OF_OTHERS = ("peer_lost", "timeout", "protocol", "aborted")


class CommitCounter:
    """Counts the commits of this worker, for the arbiter; part of a state while the function runs."""

    def __init__(self, process: WorkerProcess, state: State) -> None:
        self._worker, self._survivors = process.worker, process.survivors
        self._state = state
        self._failed = 0  # operations that had failed at the last check
        self._has_counted = False  # a commit since the last check
        self._change: ChangeClock | None = None  # the generation's, until its first check
        self._folder = process.folder
        self._writes_modules = SPARES in os.environ  # after the first step, which may import some

    def begin(self, change: ChangeClock) -> None:
        """Begins a generation with 0 failed operations, as its context is new."""
        self._failed, self._has_counted = 0, False
        self._change = change

    def check_operations(self) -> None:
        """Raises the failure of the world if any operation of this rank has failed since the last check.

        The program may have caught that exception: its state is then no commit.
        """
        context = current()
        if context.failure is not None and observe.failed_operations(context) > self._failed:
            _raise_failure(context)

    def count_commit(self) -> None:
        self._worker.commit += 1
        self._survivors.commit(current().steps)
        self._has_counted = True
        if self._writes_modules:
            self._writes_modules = False
            write_list(self._folder)
        checkpoints, commit = self._state._checkpoints, self._worker.commit
        if checkpoints is not None and checkpoints.is_due(commit) and current().rank == 0:
            checkpoints.write(commit, self._state.checkpoint())

    def check(self, state: State) -> None:
        self.check_operations()
        if self._change is not None:
            self._change.end_first_step()
            self._change = None
        context = current()
        self._failed = observe.failed_operations(context)

        def before_leaving() -> None:
            if not self._has_counted:
                state.save()
                self.count_commit()
            state.prepare_change()

        self._worker.check(before_leaving)
        self._has_counted = False
        if context.failure is not None:
            _raise_failure(context)


def train(process: WorkerProcess, state: State, function: Callable[[], _Result]) -> _Result:
    """Runs the function, in as many generations as it takes to return once.

    `sys.exit()` in the function, or in a callback of the state, ends it: like a return with exit code 0, else
    like an exception.

    Raises:
        WorkerEnded: this worker is not needed any more, or the job has ended.
        Exception: that of the function, if no other rank has caused it.
    """
    worker, commits = process.worker, CommitCounter(process, state)
    process.survivors.begin()
    _choose_average(process, state)
    sets = FollowingSets(process.survivors)
    message = Enlist(0, "new", has_checkpoints=state._checkpoints is not None)
    process.leave()
    while True:
        with _reporting_exits(worker, state):
            world, change = _begin(process, state, sets, message)
        commits.begin(change)
        state._commits = commits
        try:
            with _reporting_exits(worker, state):
                result = function()
            _note_return(worker, state)
            return result
        except HostsUpdatedInterrupt:
            message = _report(world, worker, state, "changed")
        except Exception as error:
            with _reporting_catches(worker, state):
                message = _loss(process, world, state, error)
        finally:
            state._commits = None
        process.leave()


def _begin(
    process: WorkerProcess, state: State, sets: FollowingSets, message: Enlist
) -> tuple[World, ChangeClock]:
    """Takes this worker into the next generation that all of its members can begin, and returns that."""
    worker = process.worker
    change = ChangeClock(process.survivors)
    while True:
        if message.reason == "lost" and message.can_restore:
            state.restore()  # before others wait for this rank's links, for which they have seconds only
        world = worker.enlist(message)
        change.take_world(world)
        is_new = worker.commit < 0
        all_current = len(world.current) == len(world.slots)
        try:
            context = process.enter(world)
            sets.move_to(context, is_new=is_new, all_know=all_current)
            process.survivors.move_to(context)
            change.end_phase()
            if not is_new:
                with closed(context, _NEWCOMERS) if world.joined else nullcontext():
                    state.on_reset()
            is_current = world.rank in world.current
            if is_new and world.rank == 0:  # and so are all ranks
                _load_checkpoint(state)
            state.receive(GenerationStart(context, is_current, all_current))
            change.end_phase()
            worker.commit = world.commit
            worker.received()
        except Exception as error:
            message = _loss(process, world, state, error)
            process.leave()
            change.begin_again()
            continue
        change.record(context, world)
        return world, change


@contextmanager
def _reporting_exits(worker: ElasticWorker, state: State) -> Iterator[None]:
    """Reports it if the program calls `sys.exit()`, in its function or in a callback of its state."""
    try:
        yield
    except SystemExit as end:
        if end.code in (None, 0):
            _note_return(worker, state)
        else:  # sys.excepthook is not called; an orderly end of the world would fail the others
            lifecycle.abort(end)
        raise


@contextmanager
def _reporting_catches(worker: ElasticWorker, state: State) -> Iterator[None]:
    """Reports at the end of this process that the program has caught the exception: it has returned."""
    try:
        yield
    except Exception:
        atexit.register(_note_catch, worker, state)
        raise


def _note_catch(worker: ElasticWorker, state: State) -> None:
    if not hasattr(sys, "last_value"):  # which Python sets for an exception that nobody has caught
        with suppress(HorovodInternalError):
            _note_return(worker, state)


def _note_return(worker: ElasticWorker, state: State) -> None:
    if state._checkpoints is not None:
        state._checkpoints.wait()
    worker.returned()


def _choose_average(process: WorkerProcess, state: State) -> None:
    """Applies `State.average_over`. Raises ValueError if it comes too late."""
    survivors = process.survivors
    survivors.averages_over_initial = state._averages_over_initial
    if survivors.averages_over_initial and survivors.has_averaged_early:
        raise ValueError(
            "a program that averages gradients was traced before hvd.elastic.run, when the number of ranks "
            'at the start was unknown: with state.average_over("initial"), trace it in the training function'
        )


def _load_checkpoint(state: State) -> None:
    content = state._checkpoints.newest() if state._checkpoints is not None else None
    if content is not None:
        state.load_checkpoint(content)


def _loss(process: WorkerProcess, world: World, state: State, error: Exception) -> Enlist:
    """Returns the report of a world that has failed because of another rank; raises the error otherwise."""
    worker = process.worker
    report = _report(world, worker, state, "lost")
    context = this_process.context
    if context is None:  # it could not link
        if not isinstance(error, HorovodInternalError):
            raise error
        return replace(report, kind="link", text=str(error), unreachable=process.unreachable)
    failure = context.failure
    is_own = failure is not None and failure.kind == "aborted" and failure.culprit == context.rank
    if worker.is_over and (failure is None or is_own):
        return replace(report, kind="over", text=str(error))
    if failure is None and context.has_missed_peer and worker.counts_differ:
        raise MismatchError(worker.counts_differ) from error
    # Others may blame this rank for a lost link, or for a deadline: it lives, and the arbiter judges.
    if failure is None or failure.kind not in _OF_OTHERS or is_own:
        raise error
    return replace(report, culprit=failure.culprit, kind=failure.kind, text=failure.text)


def _report(world: World, worker: ElasticWorker, state: State, reason: str) -> Enlist:
    """Returns this worker's report that it has left a generation."""
    can_restore, has_checkpoints = worker.commit >= 0 and state.can_restore(), state._checkpoints is not None
    return Enlist(world.generation, reason, worker.commit, can_restore, has_checkpoints=has_checkpoints)


def _raise_failure(context: Context) -> None:
    failure = context.failure
    if failure is not None:
        raise HorovodInternalError(failure.text)


# Process sets that were added before `hvd.elastic.run`: they follow their members from world to world.
#
# The members are those ranks of the first generation. A set is used with their ranks in the present world, in
# ascending order. When one of them is lost, the set has ended for good. A rank that joins takes over what
# rank 0 knows about each set; the core numbers the sets of a world in the order in which they were added.


_NAME = "elastic.process_sets"  # a reserved name, which separates this exchange from the user's operations


class Members(NamedTuple):
    """The members of a set: their ranks in a generation, and the numbers of their processes."""

    generation: int
    ranks: list[int]
    workers: list[int]


class _Fate(NamedTuple):
    """The course of a set so far; `members` are the members at its last use, None before its first use."""

    declared: list[int]
    members: Members | None
    why_unusable: str


class FollowingSets:
    """The process sets of a process that follow their members."""

    def __init__(self, survivors: Survivors) -> None:
        self._survivors = survivors
        self._sets: list[ProcessSet] = survivors.process_sets
        self._fates = [_Fate(list(process_set._ranks), None, "") for process_set in self._sets]

    def move_to(self, context: Context, *, is_new: bool, all_know: bool) -> None:
        """Makes the sets usable in another world. All of its ranks call it, before anything else.

        Args:
            context: the world. Its rank 0 is not new, unless all ranks are.
            is_new: whether this rank has not taken part in a whole generation.
            all_know: whether that is so on no rank, or this rank is the only one.

        Raises:
            MismatchError: ranks have added different sets before `hvd.elastic.run`, or chosen different
                averages of gradients.
            ValueError: a set has a rank that the first generation does not have.
            PeerLostError: a rank was lost.
        """
        membership = self._survivors.membership
        assert membership is not None
        mine = [
            _known(process_set, fate, is_new)
            for process_set, fate in zip(self._sets, self._fates, strict=True)
        ]
        tables = [mine]
        if not all_know:
            choice = self._survivors.averages_over_initial
            gathered = gather_objects(context, (choice, mine), _NAME, global_process_set)
            _check_averages([choice for choice, _ in gathered])
            tables = [table for _, table in gathered]
        _check_equal(tables)
        fates = [_fate_in(membership, fate) for fate in tables[0]]
        for process_set, fate in zip(self._sets, fates, strict=True):
            if fate.members is None or fate.why_unusable:
                process_set._end(fate.why_unusable)
            else:
                process_set._ranks = sorted(fate.members.ranks)
                add_to_world(context, process_set)
        self._fates = fates


def _known(process_set: ProcessSet, fate: _Fate, is_new: bool) -> _Fate:
    """Returns what this rank knows about a set; before its first whole generation, only its ranks."""
    if is_new or fate.members is None:
        return _Fate(fate.declared, None, "")
    return fate._replace(why_unusable=process_set._why_unusable)


def _check_averages(choices: Sequence[bool]) -> None:
    """Raises MismatchError, on all ranks, if any rank divides averages of gradients unlike rank 0."""
    names = ["initial" if choice else "live" for choice in choices]
    for rank, name in enumerate(names):
        if name != names[0]:
            raise MismatchError(
                f"rank {rank} averages gradients over the {name} ranks, and rank 0 over the {names[0]} ones: "
                "all ranks have to call state.average_over() alike, before hvd.elastic.run"
            )


def _check_equal(tables: Sequence[Sequence[_Fate]]) -> None:
    """Raises MismatchError, on all ranks, if any rank has added other sets than rank 0."""
    added = [[fate.declared for fate in table] for table in tables]
    for rank, sets in enumerate(added):
        if sets != added[0]:
            raise MismatchError(
                f"rank {rank} has added process sets of the ranks {sets} before hvd.elastic.run, but rank 0 "
                f"{added[0]}: all ranks have to add the same sets in the same order"
            )


def _fate_in(membership: Membership, fate: _Fate) -> _Fate:
    """Returns the course of a set with a generation's members."""
    generation, workers = membership.generation, membership.workers
    if fate.why_unusable:
        return fate
    if fate.members is None:
        if fate.declared[-1] >= len(workers):
            raise ValueError(
                f"the process set of ranks {fate.declared} was added before hvd.elastic.run, but the ranks "
                f"are 0 to {len(workers) - 1}"
            )
        ranks = fate.declared
        return fate._replace(members=Members(generation, ranks, [workers[rank] for rank in ranks]))
    before = fate.members
    places = zip(before.ranks, before.workers, strict=True)
    if gone := [rank for rank, worker in places if worker not in workers]:
        return fate._replace(why_unusable=_unusable(before.generation, gone))
    ranks = [workers.index(worker) for worker in before.workers]
    return fate._replace(members=Members(generation, ranks, before.workers))


def _unusable(generation: int, ranks: Sequence[int]) -> str:
    """Returns the text about members that are gone."""
    if len(ranks) == 1:
        who = f"rank {ranks[0]} of generation {generation} was lost or has left"
    else:
        who = f"ranks {', '.join(map(str, ranks))} of generation {generation} were lost or have left"
    return f"{who}. Make a new set of ranks that live, inside the training function"


# ---- Records of the changes of the ranks ---------------------------------------------------------------
# In `hvd.stats()`, in the timeline, and beside the failure reports.


_PHASES = ("AGREE", "REBUILD", "STATE")


class ChangeClock:
    """Measures a change of the ranks as this rank goes through it, and records it at its end."""

    def __init__(self, survivors: Survivors) -> None:
        """Begins: this rank leaves its world."""
        self._survivors = survivors
        self._before = survivors.membership
        self._moments = [time.monotonic_ns()]
        self._detect: int | None = None  # nanoseconds
        self._record: observe.RankChange | None = None
        self._context: Context | None = None

    def begin_again(self) -> None:
        """Restarts the phases, because the ranks have changed in the middle; the first phase continues."""
        del self._moments[1:]

    def end_phase(self) -> None:
        """Records the end of a phase: agree, rebuild, state."""
        self._moments.append(time.monotonic_ns())

    def take_world(self, world: World) -> None:
        """Ends the first phase, "agree", with the arbiter's answer.

        The arbiter counts from the first news of the change. If the ranks change in the middle, the first
        world says when that was.
        """
        self.end_phase()
        if self._detect is None:
            first_news = self._moments[-1] - 1000 * world.elapsed
            self._detect = max(self._moments[0] - first_news, 0) if self._before else 0

    def record(self, context: Context, world: World) -> None:
        """Records the change, after its phases have ended."""
        before, workers, detect = self._before, world.workers, self._detect or 0
        agree, rebuild, state = (
            (end - begin) / 1e9 for begin, end in zip(self._moments, self._moments[1:], strict=False)
        )
        gone = [rank for rank, worker in enumerate(before.workers) if worker not in workers] if before else []
        joined = [rank for rank, worker in enumerate(workers) if before and worker not in before.workers]
        self._record = observe.RankChange(
            generation=world.generation,
            size=len(workers),
            rank=world.rank,
            commit=world.commit,
            reason=world.text,
            lost=gone,
            joined=joined,
            detect_seconds=detect / 1e9,
            agree_seconds=agree,
            rebuild_seconds=rebuild,
            state_seconds=state,
            first_step_seconds=None,
        )
        self._context = context
        self._survivors.changes.append(self._record)
        write_changes(context, self._survivors.changes)
        if (timeline := self._survivors.timeline) is not None:
            timeline.add_change(self._record, _PHASES, self._moments, self._moments[0] - detect)

    def end_first_step(self) -> None:
        """Adds the time until the first check of the new generation."""
        if self._record is not None and self._context is not None:
            self.end_phase()
            begin, end = self._moments[-2:]
            self._record["first_step_seconds"] = (end - begin) / 1e9
            write_changes(self._context, self._survivors.changes)
            if (timeline := self._survivors.timeline) is not None:
                timeline.add_slice("FIRST STEP", begin, end)
