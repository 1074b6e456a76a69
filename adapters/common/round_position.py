"""The place of a rank's rounds in its program, which differs where ranks make unequal numbers of passes."""

from __future__ import annotations

from sirtaki.common.consistency import Scope

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
    """

    def __init__(self) -> None:
        self._steps = self._rounds = 0
        self._usual = 1  # rounds of the last step

    def begin_round(self) -> bool:
        """Returns whether this step has more rounds than the last: other ranks may be in the next step."""
        self._rounds += 1
        return self._rounds > self._usual

    def end_step(self) -> None:
        """Records that the optimizer has used the gradients."""
        self._usual = max(self._rounds, 1)
        self._steps, self._rounds = self._steps + 1, 0

    def restart(self) -> None:
        """Counts anew, after a join: ranks have taken different numbers of steps."""
        self._steps = self._rounds = 0
        self._usual = 1

    @property
    def number(self) -> int:
        """Returns one number for the position, to compare it over the ranks."""
        return self._steps * _ROUNDS + self._rounds

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
