"""Whether gradients are submitted during a backward pass, or at its end: the setting `hand_over`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from sirtaki.bindings import config
from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context
from sirtaki.bindings.library import usable_cores
from sirtaki.torch import device
from sirtaki.torch.training.parameters import NamedParameter
from sirtaki.torch.training.stage import ExchangeOptions

# A pass that sleeps for at least half of the time leaves its core free for an exchange.
_IDLE_SHARE = 0.5
_EARLY_BYTES = 1 << 20  # submitted at once during a pass; submitting less costs more than the overlap saves
# The same with overlap_forward, if the pass leaves its core free: the next one needs the last ones first.
_EARLY_URGENT_BYTES = 64 << 10
_NANOSECONDS = 1e-9
_AUTO, _EARLY = "auto", "early"  # choices of the setting hand_over; the other one is "late"


class Overlap:
    """The decision, from pass to pass, whether gradients are submitted early.

    The exchange needs a core while it runs. If the ranks of a host have cores to spare, or a GPU computes, it
    overlaps with the backward pass. Otherwise the two take turns on one core, and switching between them
    costs more than the overlap saves, unless the pass itself waits for something other than the processor.
    """

    def __init__(
        self,
        *,
        has_spare_core: bool,
        is_urgent: bool = False,
        clocks: Callable[[], tuple[float, float]] | None = None,
        wish: Callable[[], str] = lambda: _AUTO,
    ) -> None:
        """Creates it.

        Args:
            has_spare_core: whether there is a core that no backward pass needs.
            is_urgent: whether the next forward pass begins while gradients are exchanged.
            clocks: returns seconds: elapsed, and those in which this thread was runnable.
            wish: returns the setting hand_over: "early", "late", or "auto", which leaves the decision here.
        """
        self._wish = wish
        self._has_spare_core, self._is_urgent = has_spare_core, is_urgent
        self._clocks = clocks or _clocks
        self._begun: tuple[float, float] | None = None
        self._is_worth_it, self._is_idle = has_spare_core, False

    @property
    def is_worth_it(self) -> bool:
        """Returns whether the next pass should submit gradients early, judging by the last pass."""
        wish = self._wish()
        return self._is_worth_it if wish == _AUTO else wish == _EARLY

    @property
    def early_bytes(self) -> int:
        """Returns how many bytes of gradients the next pass submits at once, if it submits them early."""
        return least_early_bytes(self._is_urgent and self._is_idle)

    def begin(self) -> None:
        """Records that a pass has made its first gradient, in this thread."""
        if self._begun is None and (self._is_urgent or not self._has_spare_core):
            self._begun = self._clocks()

    def end(self) -> None:
        """Records that the pass has ended, in the same thread."""
        if self._begun is not None:
            (begun, runnable_before), self._begun = self._begun, None
            now, runnable = self._clocks()
            self._is_idle = runnable - runnable_before < (1 - _IDLE_SHARE) * (now - begun)
            self._is_worth_it = self._has_spare_core or self._is_idle

    def drop(self) -> None:
        """Records that the pass has raised."""
        self._begun = None


def least_early_bytes(overlaps_forward: bool) -> int:
    """Returns how many bytes of gradients are submitted at once during a pass, at least."""
    return _EARLY_URGENT_BYTES if overlaps_forward else _EARLY_BYTES


def overlap_of(exchange_options: ExchangeOptions, named: Sequence[NamedParameter]) -> Overlap:
    """Returns the decision for the parameters of an optimizer, in the world of its ranks."""
    context = exchange_options.scope.context
    is_on_gpu = any(device.ordinal(parameter) != core.CPU for _, parameter, _ in named)
    has_spare_core = is_on_gpu or context.topology.local_size < usable_cores()
    is_urgent = exchange_options.overlaps_forward
    return Overlap(has_spare_core=has_spare_core, is_urgent=is_urgent, wish=_wish_in(context))


def _wish_in(context: Context) -> Callable[[], str]:
    """Returns a function that returns the setting hand_over, which changes during the job with autotune."""
    if context.setting("autotune") == "1":
        return lambda: config.in_use(context, "hand_over")
    fixed = context.setting("hand_over")
    return lambda: fixed


def _clocks() -> tuple[float, float]:
    """Returns the elapsed seconds, and the seconds in which this thread ran or waited for a core."""
    return time.monotonic(), time.thread_time() + _run_queue_seconds()


def _run_queue_seconds() -> float:
    """Returns how long this thread was ready to run but did not run; 0 where Linux does not count it."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as statistics:
            return int(statistics.read().split()[1]) * _NANOSECONDS
    except (OSError, ValueError, IndexError):
        return 0.0
