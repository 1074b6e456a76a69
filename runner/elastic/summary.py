"""The account of an elastic job: how long its ranks were training, and the lines that say so at the end."""

from __future__ import annotations

from collections.abc import Sequence

from sirtaki.runner.elastic.arbiter.model import Worker


class Account:
    """The time in which the ranks were training: between the start of a generation and its end."""

    def __init__(self) -> None:
        self._training = 0.0
        self._was_training = False
        self._last = 0.0

    def note(self, is_training: bool, now: float) -> None:
        """Records whether the ranks train from now on."""
        if self._was_training:
            self._training += now - self._last
        self._was_training, self._last = is_training, now

    def summary(self, generations: int, losses: int, workers: Sequence[Worker], seconds: float) -> str:
        """Returns a line about a job that has taken so many seconds."""
        share = 100.0 * self._training / seconds if seconds > 0 else 0.0
        joined = sum(worker.first_generation > 1 for worker in workers)
        count = "1 generation" if generations == 1 else f"{generations} generations"
        times = f"they were training in {share:.1f} % of {seconds:.1f} s"
        return f"{count} of ranks, {count_losses(losses)}, {joined} joined; {times}"


def describe_separate_runs(runs: int, has_initialised: bool, runs_python: bool) -> str:
    """Returns a notice after a successful job that had no generation; "" if it ran a single process."""
    if runs <= 1:
        return ""
    missing = "hvd.init() or " * (not has_initialised) + "the function of hvd.elastic.run"
    text = f"no rank called {missing}: these were {runs} separate runs, which exchanged nothing"
    advice = "train in a function that @hvd.elastic.run decorates"
    advice = advice if has_initialised else f"call hvd.init() at the start of the script, and {advice}"
    return text + f". To train one model on all of them, {advice}" * runs_python


def count_losses(losses: int) -> str:
    """Formats "1 rank was lost" or "3 ranks were lost"."""
    return "1 rank was lost" if losses == 1 else f"{losses} ranks were lost"
