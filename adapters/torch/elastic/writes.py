"""Tracks the writes of optimizers, so that a commit is copied only if it might be needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakMethod

from sirtaki.bindings import observe
from sirtaki.bindings.default_context import find
from sirtaki.torch.elastic.optimizer_handler import OptimizerStateHandler


class Regularity(NamedTuple):
    """How regular the last commits have been.

    Attributes:
        in_a_row: the number of the last commits that were regular.
        needed: the number of them after which copies end.
    """

    in_a_row: int = 0
    needed: int = 2


class Writes:
    """The writes of a state's optimizers since its last commit.

    Until the first write, parameters and optimizer state are those of the commit, and no copy is needed. A
    copy is taken just before that write; but not in a loop that commits after every step. There, a loss shows
    in the exchange of gradients, before the write, or when the next commit has been made.

    A commit is regular if it follows one step of the only optimizer, without an operation between the ranks
    in between. Copies end after two such commits in a row: a program that commits every 100 batches, at batch
    0, 100, and so on, has a regular commit in each epoch. That number doubles with each commit that turns out
    not to be regular, and has no copy.

    Attributes:
        regularity: what the commits so far say about the next one.
    """

    def __init__(self, *, copies_always: bool) -> None:
        """Creates it. `copies_always`: take a copy at each commit, whatever the optimizers do."""
        self._copies_always = copies_always
        self._optimizers: Sequence[OptimizerStateHandler] = ()
        self._has_copy = False
        self.regularity = Regularity()
        self._steps = 0  # since the commit
        self._is_simple = False  # whether the last step has exchanged once, and only before it wrote
        self._operations = 0  # number that had ended before the last step wrote

    def commit(self, optimizers: Sequence[OptimizerStateHandler]) -> None:
        """Begins a new commit: these optimizers' handlers have just saved."""
        self._judge()
        self._optimizers = optimizers
        self._has_copy = False
        for optimizer in optimizers:
            self._watch(optimizer)
        self.note_restored()
        if self._copies_always:
            self._copy()
        elif self._ends_copies:
            for optimizer in optimizers:
                optimizer.drop_copy()

    def _judge(self) -> None:
        """Counts the commit that ends as regular, or not."""
        if self._steps == 0 and self.can_restore:
            return  # nothing has changed
        in_a_row, needed = self.regularity
        if self._steps == 1 and self._is_simple and self._operations == _operations():
            self.regularity = Regularity(in_a_row + 1, needed)
            return
        was_needed = self._ends_copies and not self._has_copy
        self.regularity = Regularity(0, 2 * needed if was_needed else needed)

    @property
    def _ends_copies(self) -> bool:
        return self.regularity.in_a_row >= self.regularity.needed

    def change(self, optimizers: Sequence[OptimizerStateHandler]) -> None:
        """Changes the optimizers. A new one becomes part of the commit as it is now: it has just saved."""
        added = [optimizer for optimizer in optimizers if optimizer not in self._optimizers]
        self._optimizers = optimizers
        for optimizer in added:
            self._watch(optimizer)
            optimizer.note_versions()
            if self._has_copy:
                optimizer.copy()

    @property
    def can_restore(self) -> bool:
        """Returns whether parameters and optimizer state are those of the commit, or there is a copy."""
        return self._has_copy or (
            self._steps == 0 and all(optimizer.is_untouched for optimizer in self._optimizers)
        )

    def restore(self) -> None:
        """Returns parameters and optimizer state to the commit. `note_restored` has to follow."""
        if self._has_copy:
            for optimizer in self._optimizers:
                optimizer.restore_copy()

    def note_received(self, regularity: Regularity | None) -> None:
        """Records that parameters and optimizer state are those of a commit that was received.

        They count as written, even where they were right already. A rank that did not have the commit takes
        over the regularity of the one that had it, whose program is the same: its first commits are copied
        only if that one copies its own.
        """
        self.regularity = regularity or self.regularity
        self.note_restored()

    def note_restored(self) -> None:
        """Records that parameters and optimizer state are those of the commit."""
        self._steps = 0
        for optimizer in self._optimizers:
            optimizer.note_versions()

    def _copy(self) -> None:
        for optimizer in self._optimizers:
            optimizer.copy()
        self._has_copy = True

    def _watch(self, optimizer: OptimizerStateHandler) -> None:
        reference = WeakMethod(self._before_write)  # the optimizer may outlive the state

        def before_write(has_closure: bool) -> None:
            if (method := reference()) is not None:
                method(has_closure)

        optimizer.watch(before_write)

    def _before_write(self, has_closure: bool) -> None:
        is_intact = self.can_restore
        if is_intact and not self._has_copy and (has_closure or not self._ends_copies):
            self._copy()
        self._steps += 1
        is_only = len(self._optimizers) == 1 and self._optimizers[0].exchanges_first
        self._is_simple = is_intact and is_only and not has_closure
        self._operations = _operations()


def _operations() -> int:
    """Returns the number of this rank's operations that have ended."""
    context = find()
    return 0 if context is None else observe.ended_operations(context)
