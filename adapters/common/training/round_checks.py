"""Comparisons during the exchange of an optimizer's gradients, so that ranks cannot diverge unnoticed.

In the second exchange, the parameters, the optimizer's state and the loss scaling are compared (not in the
first: some programs broadcast them after one step); in each exchange, learning rates and a loss scaling that
have changed; in the first two, the gradients that each rank has computed, which should not be equal; and in
each exchange, the epoch of the data if a rank has begun another one (`epochs.py`). A difference is analysed,
and raised, when the optimizer is about to step: all ranks do that in the same order, while exchanges of
several optimizers may end in any order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from sirtaki.bindings.context import Context
from sirtaki.bindings.errors import ParametersDifferError
from sirtaki.common.ops.objects import gather_objects
from sirtaki.common.ops.process_sets import global_process_set, joins_of
from sirtaki.common.semantics import are_horovods, hint
from sirtaki.common.training.consistency import (
    Comparison,
    Options,
    Outcome,
    RankDifference,
    Scope,
    Tensors,
    checksum_of_tensors,
    checksum_of_text,
    combined,
    find_difference,
)

_ADVICE = (
    "together they read some samples twice and others not at all. Each iteration over an hvd.DataLoader "
    "begins its next epoch, also one that is left after the first batch: iterate on all ranks or on none, or "
    "call loader.set_epoch(epoch) before each epoch; call loader.load_state_dict(state) on all ranks, with "
    "the same state; data that one rank reads alone need torch's DataLoader"
)


_DATA_ADVICE = (
    "sirtaki divides one data set that is the same on all ranks. Give random_split, or what else chooses or "
    "shuffles samples, the same seed on all ranks: "
    "random_split(data, lengths, generator=torch.Generator().manual_seed(0)). A rank that has loaded no more "
    "than its own part needs torch's DataLoader"
)


class Epoch(NamedTuple):
    """An epoch of shuffled data; equal epochs have the same order.

    Attributes:
        number: the epoch's number, from 0.
        seed: determines the order, together with the number.
        samples: the number of samples of all ranks.
        data: a checksum of what is cheap to know of the samples, such as the indices of a subset; 0: nothing.
        start: the number of samples, of all ranks, that were read in the epoch before the program started.
    """

    number: int
    seed: int
    samples: int
    data: int = 0
    start: int = 0

    def __str__(self) -> str:
        begin = f", from sample {self.start}" if self.start else ""
        return f"epoch {self.number} of {self.samples} samples (seed {self.seed}{begin})"


class _Report(NamedTuple):
    """The last batch that a rank has read: its epoch, and its index there; None: they are unknown."""

    rank: int
    epoch: Epoch | None
    batch: int


def note_batch(context: Context, epoch: Epoch, index: int) -> None:
    """Records that this thread has read the batch of an epoch with this index, from 0."""
    thread = threading.get_ident()
    _, _, count = context.epochs.get(thread, (None, 0, 0))
    context.epochs[thread] = (epoch, index, count + 1)


class EpochCheck:
    """The epochs of the batches that ranks read before the rounds of an optimizer.

    A rank may read other data than it trains on, to show a sample or to evaluate. An epoch is therefore
    known only in a round before which this thread has read a batch, and ranks are taken to train on
    different epochs only if two rounds in succession find the same ones.

    Ranks may also skip batches of their own, and be at the end of an epoch while others begin the next, or
    take turns of their own between data sets. Only epochs of equally many samples are compared, and only
    where the ranks are at the same batch of them: a rank that is an epoch ahead always is.

    Attributes:
        checksum: that of this rank's epoch in this round; None if it is unknown.
        has_difference: whether ranks train on different epochs, which has not been reported yet.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._thread = threading.get_ident()  # a thread that reads data ahead is in any epoch
        self._count = 0  # of the batches that the thread had read at the last round
        self._epoch: Epoch | None = None  # the last that was known, the index of its batch, and its checksum
        self._index = 0
        self._epoch_checksum = 0
        self._suspected: tuple[int, int] | None = None  # different epochs of the last round with known ones
        self._found = _Report(scope.context.rank, None, 0)  # of the round that has found a difference
        self._is_over = False
        self.checksum: int | None = None
        self.has_difference = False

    def begin_round(self) -> bool:
        """Returns whether the ranks have to compare their epochs in this round."""
        epoch, self._index, count = self._scope.context.epochs.get(self._thread, (None, 0, 0))
        if count == self._count or self._is_over:
            self.checksum = None
            return False
        self._count = count
        is_new = epoch != self._epoch or self._suspected is not None
        if epoch != self._epoch:
            self._epoch, self._epoch_checksum = epoch, checksum_of_text(repr(epoch))
        self.checksum = self._epoch_checksum
        return is_new

    def finish(self, least: int, most: int) -> None:
        """Takes the extremes of the checksums of all ranks that know theirs; all ranks get the same."""
        if least > most:  # no rank knows its epoch
            return
        suspected, self._suspected = self._suspected, None
        if least == most:
            return
        if suspected == (least, most):
            self.has_difference = True
            epoch = None if self.checksum is None else self._epoch
            self._found = _Report(self._scope.context.rank, epoch, self._index)
        else:
            self._suspected = least, most

    def stop(self) -> None:
        """Ends the comparisons, on all ranks: a difference has been reported, and the program continues."""
        self._is_over, self._suspected = True, None

    def difference(self) -> str:
        """Describes the difference that has been found; an empty text if it is none. All ranks call it."""
        self.has_difference = False
        return _difference(self._scope, self._found)


def _difference(scope: Scope, own: _Report) -> str:
    """Names two ranks in different epochs; returns an empty text if there are none. All ranks call it."""
    reports: list[_Report] = gather_objects(scope.context, own, f"{scope.name}.epochs", scope.process_set)
    # By the samples of the epoch, and the index of the batch.
    firsts: dict[tuple[int, int], tuple[int, Epoch]] = {}
    for rank, epoch, batch in reports:
        if epoch is None:
            continue
        first_rank, first = firsts.setdefault((epoch.samples, batch), (rank, epoch))
        item, other = scope.label(first_rank), scope.label(rank)
        if epoch.data != first.data:
            return (
                f"ranks have different data sets of {epoch.samples} samples: {item} and {other} have other "
                "samples, or other labels, under the same numbers, so together they read some samples twice "
                f"and others, such as those kept for validation, although they should not. {_DATA_ADVICE}"
            )
        if epoch != first:
            return (
                f"ranks train on different epochs of their data: {item} on {first}, and {other} on {epoch}, "
                f"so {_ADVICE}"
            )
    return ""


# ---- The checks of a round -----------------------------------------------------------------------------

# Indices of the numbers that are compared.
_PARAMETERS, _OPTIONS, _GRADIENTS, _ROUND, _EPOCH, _SCALING, _POSITION = range(7)
_UNKNOWN = [None] * 7  # differs from nothing
_FIRST_CHECK = 2  # the round whose comparison includes the parameters
_ROUNDS_WITH_GRADIENTS = 2

_SAME_DATA = (
    "in two steps, all {count} ranks have computed the same gradients, as if from the same batches: together "
    "they learn what one of them would. Give each rank its own part of the data{example}"
)
_AFTER_JOIN = "ranks that had called hvd.join() have missed the steps that the others still took; {remedy}"


class Optimizer(Tensors, Protocol):
    """An optimizer as an adapter presents it: the tensors are its parameters, and its state."""

    def rates(self) -> Sequence[float]:
        """Returns the learning rate of each parameter group. Has to be cheap: called in each step."""
        ...

    def options(self) -> Options:
        """Returns all hyper-parameters of each parameter group."""
        ...


class LossScaling(Protocol):
    """The scaling of losses as an adapter presents it.

    Attributes:
        remedy: how the program makes it equal on all ranks, for messages.
    """

    remedy: str

    def checksum(self, *, is_due: bool) -> int | None:
        """Returns a checksum of the state; None if this rank knows none. Has to be cheap unless `is_due`."""
        ...

    def forget(self) -> None:
        """Makes the next checksum that of the state at that time."""
        ...

    def state(self) -> Mapping[str, Any] | None:
        """Returns the state, as plain values by name; None if this rank knows none."""
        ...


class RoundChecks:
    """The comparisons of an optimizer. A round is a single exchange of all its gradients, by all its ranks.

    In each round call: `note_gradient` while `wants_gradients`, `start`, then `finish` once the gradients
    have arrived, and `report` before the optimizer steps.

    The operation that compares also carries marks: small numbers of the adapter, of which all ranks learn the
    maximum. So a step sends one operation beside its gradients.

    Attributes:
        position: the place of rounds in the program, if the adapter counts passes: it is compared when a step
            has more of them than the last one.
    """

    def __init__(
        self,
        scope: Scope,
        optimizer: Optimizer,
        first_check: int = _FIRST_CHECK,
        scaling: LossScaling | None = None,
        marks: int = 0,
    ) -> None:
        """Creates the checks.

        Args:
            scope: the ranks, and the words of messages.
            optimizer: its parameters, state and hyper-parameters.
            first_check: the first round that compares parameters, counted from 1.
            scaling: of losses.
            marks: number of marks.
        """
        self._scope, self._optimizer, self._first_check = scope, optimizer, first_check
        self._scaling = scaling
        self._scaling_checksum: int | None = None  # that of the last round
        self._interval = int(scope.context.setting("check_parameters"))  # 0: never; -1: once
        self._comparison = Comparison(scope.context, scope.call(), len(_UNKNOWN), marks)
        self._has_marks = marks > 0
        self._round = 0
        self._rates: Sequence[float] | None = None  # those of the last round, and their checksum
        self._rates_checksum = 0
        self._epochs = EpochCheck(scope)
        self._joins = joins_of(scope.context, scope.process_set.number(scope.context))
        self._seen_joins = self._joins.count
        self._is_after_join = False
        self._gradients: dict[int, int] = {}  # checksums of this round's gradients, by parameter
        self._equal_gradient_rounds = 0  # number of rounds in which all ranks had the same
        self._has_difference = False
        self.position: RoundPosition | None = None
        self._position_number: int | None = None  # that of the round in progress
        self._unequal_passes = ""  # the error about them
        self._has_reported_rounding = False

    @property
    def wants_gradients(self) -> bool:
        """Returns whether this rank's gradients of the coming round must be passed to `note_gradient`.

        Ranks of a process set may legitimately get the same batch.
        """
        return (
            self._round < _ROUNDS_WITH_GRADIENTS
            and self._interval != 0
            and self._scope.process_set is global_process_set
        )

    @property
    def is_open(self) -> bool:
        return self._comparison.is_open

    def mark(self, index: int, value: int) -> None:
        """Sets a mark of this rank, which the next round carries."""
        self._comparison.marks[index] = value

    def note_gradient(self, index: int, checksum: int) -> None:
        """Stores the checksum of a gradient that is not zero, before it is exchanged."""
        self._gradients[index] = checksum

    def start(self) -> None:
        """Queues this round's comparison, unless it has been queued already."""
        if self._comparison.is_open:
            return
        if self._interval == 0:
            if self._has_marks:
                self._comparison.start(_UNKNOWN, is_new=False)
            return
        has_gradients = self.wants_gradients
        self._round += 1
        is_due = self._is_due()
        has_more_passes = self.position is not None and self.position.begin_round()
        rates = self._optimizer.rates()
        has_other_epoch = self._epochs.begin_round()
        scaling = self._scaling.checksum(is_due=is_due) if self._scaling is not None else None
        is_new = is_due or has_gradients or has_more_passes or rates != self._rates
        is_new = is_new or has_other_epoch or scaling != self._scaling_checksum
        if rates != self._rates:
            self._rates, self._rates_checksum = rates, checksum_of_text(repr(rates))
        self._scaling_checksum = scaling
        number = self._round if is_new else 0
        numbers = [0, self._rates_checksum, 0, number, self._epochs.checksum, scaling, None]
        if is_due:
            numbers[_PARAMETERS] = checksum_of_tensors(self._optimizer)
            numbers[_OPTIONS] = checksum_of_text(repr(self._optimizer.options()))
        if has_gradients and self._gradients:
            numbers[_GRADIENTS] = combined(word for pair in sorted(self._gradients.items()) for word in pair)
        self._gradients.clear()
        self._position_number = None if self.position is None else self.position.number
        self._comparison.start(numbers, is_new=is_new, position=self._position_number)

    def _is_due(self) -> bool:
        """Returns whether the parameters are compared in this round."""
        if self._joins.count != self._seen_joins:
            self._seen_joins, self._is_after_join = self._joins.count, True
            if self.position is not None:
                self.position.restart()
            return True
        since = self._round - self._first_check
        return since == 0 or (since > 0 and self._interval > 0 and since % self._interval == 0)

    def finish(self) -> Sequence[int]:
        """Waits for this round's comparison. `report` reports the outcome.

        Returns:
            The largest mark of all ranks by index; empty if no rank had any, or other news.
        """
        outcome = self._comparison.finish() if self._comparison.is_open else None
        if outcome is None:
            return ()
        if self._interval != 0:
            self._note(outcome)
        return outcome.marks

    def _note(self, outcome: Outcome) -> None:
        own = self._position_number
        if self.position is not None and own is not None and not outcome.equal[_POSITION]:
            extremes = outcome.smallest[_POSITION], outcome.largest[_POSITION]
            self._unequal_passes = self.position.difference(self._scope, own, *extremes)
        self._round = max(self._round, outcome.largest[_ROUND])  # a rank that had joined has missed some
        if not (outcome.equal[_PARAMETERS] and outcome.equal[_OPTIONS] and outcome.equal[_SCALING]):
            self._has_difference = True
        elif outcome.equal[_GRADIENTS] and outcome.largest[_GRADIENTS] and outcome.is_shared:
            self._equal_gradient_rounds += 1
        self._epochs.finish(outcome.smallest[_EPOCH], outcome.largest[_EPOCH])

    def discard(self) -> None:
        """Drops the comparison of a round that has failed."""
        self._comparison.discard()
        self._gradients.clear()

    def report(self) -> None:
        """Raises or warns if a comparison has found a problem. All ranks have to call it.

        Raises:
            ParametersDifferError: parameters or hyper-parameters differ; on all ranks, with the same text. Or
                they would, because ranks make different numbers of passes. A warning with Horovod's rules.
            ValueError: ranks train on different epochs of their data; likewise.
        """
        if self._unequal_passes:
            text, self._unequal_passes = self._unequal_passes, ""
            if not are_horovods():
                raise ParametersDifferError(text)
            hint(text)
            self.position = None  # once is enough: the ranks do not come together again
        after_join, self._is_after_join = self._is_after_join, False
        if self._has_difference:
            self._has_difference = False
            scaling = self._scaling.state() if self._scaling is not None else None
            finding = find_difference(self._scope, self._optimizer, self._optimizer.options(), scaling)
            if self._scaling is not None:  # ranks that have read equal states at different times agree again
                self._scaling.forget()
            if finding is not None:
                self._report_finding(replace(finding, advice=self._advice(finding, after_join)))
        if self._equal_gradient_rounds == _ROUNDS_WITH_GRADIENTS:
            self._equal_gradient_rounds = 0
            self._warn(_SAME_DATA.format(count=self._scope.context.size, example=self._scope.data_advice))
        if self._epochs.has_difference:
            self._report_epochs()

    def _report_epochs(self) -> None:
        text = self._epochs.difference()
        if text and not are_horovods():
            raise ValueError(text)
        if text:
            self._warn(text)
            self._epochs.stop()

    def _advice(self, finding: RankDifference, after_join: bool) -> str:
        if finding.is_scaling and self._scaling is not None:
            return self._scaling.remedy
        missed = self._scope.after_join or f"after it, call {self._scope.remedy}"
        return _AFTER_JOIN.format(remedy=missed) if after_join else finding.advice

    def _report_finding(self, finding: RankDifference) -> None:
        if not finding.is_rounding:
            if not are_horovods():
                raise ParametersDifferError(str(finding))
            self._warn(str(finding))
            return
        if not self._has_reported_rounding:
            self._has_reported_rounding = True
            self._warn(f"{finding.text}, no more than rounding: the ranks' machines compute differently")

    def _warn(self, text: str) -> None:
        """Warns on the first rank of the set only: all ranks would print the same text."""
        if self._scope.context.rank == self._scope.process_set.members(self._scope.context)[0]:
            hint(text)


# ---- The place of a rank's rounds in its program -------------------------------------------------------

# It differs where ranks make unequal numbers of passes.


_ROUNDS = 1 << 20  # more than a step has
_UNEQUAL = (
    "ranks exchange gradients of different backward passes: {rank} is in pass {passes} of step {step}, and "
    "another rank in pass {others_passes} of step {others_step} (counted since the optimizer was made, or "
    "since the last hvd.join()). Call backward() as often on all ranks before each optimizer.step(), or keep "
    "passes on the rank with optimizer.no_sync()"
)


class RoundPosition:
    """The step that a round belongs to, and its place among the rounds of the step.

    Rounds whose gradients the program drops count, too: all ranks have been in them, and not all drop them.

    Attributes:
        steps: number of steps.
    """

    def __init__(self) -> None:
        self.steps = self._rounds = 0
        self._usual = 1  # rounds of the last step

    def begin_round(self) -> bool:
        """Returns whether this step has more rounds than the last: other ranks may be in the next step."""
        self._rounds += 1
        return self._rounds > self._usual

    def end_step(self) -> None:
        """Records that the optimizer has used the gradients."""
        self._usual = max(self._rounds, 1)
        self.steps, self._rounds = self.steps + 1, 0

    def restart(self) -> None:
        """Counts anew, after a join: ranks have taken different numbers of steps."""
        self.steps = self._rounds = 0
        self._usual = 1

    @property
    def number(self) -> int:
        """Returns the position as a single number, to compare it over the ranks."""
        return self.steps * _ROUNDS + self._rounds

    def difference(self, scope: Scope, own: int, least: int, most: int) -> str:
        """Describes the position of a round and that of another rank, given the extremes of all numbers.

        `own` is this rank's number when the round began: it may have stepped since.
        """
        other = least if own == most else most
        return _UNEQUAL.format(
            rank=scope.label(scope.context.rank),
            step=own // _ROUNDS + 1,
            passes=own % _ROUNDS,
            others_step=other // _ROUNDS + 1,
            others_passes=other % _ROUNDS,
        )
