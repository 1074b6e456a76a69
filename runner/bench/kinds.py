"""Everything that `sirtaki bench` can measure: the report, the peers and the package of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from sirtaki.runner.bench.collective_report import CollectiveReport
from sirtaki.runner.bench.link_report import LinkReport
from sirtaki.runner.bench.messages import Plan, World
from sirtaki.runner.bench.operations import OPERATIONS
from sirtaki.runner.bench.peers import CPU, GLOO, PEERS
from sirtaki.runner.bench.report import Load, Report
from sirtaki.runner.bench.step_report import StepReport


class Kind(NamedTuple):
    """A measurement.

    Attributes:
        report: makes its report.
        peers: the libraries that offer it.
        settings: those of SETTINGS that it has.
        extra: the extra of sirtaki's package that its ranks need.
        tells_each_block: whether rank 0 sends a message for each block of calls, and not one for all rounds.
    """

    report: Callable[[Plan, World, Load], Report]
    peers: Sequence[str]
    settings: Collection[str] = ()
    extra: str = "numpy"
    tells_each_block: bool = False


class Setting(NamedTuple):
    """An option that not every measurement has, and its default."""

    flag: str
    default: Any


SETTINGS = {
    "first": Setting("-b", 8),
    "last": Setting("-e", 64 << 20),
    "factor": Setting("-f", 4.0),
    "dtype": Setting("-d", "float32"),
    "plot": Setting("--plot", None),
    "device": Setting("--device", CPU),
}
KINDS = {
    **{
        name: Kind(
            CollectiveReport,
            tuple(PEERS),
            SETTINGS if one.has_size else ("device",),
            tells_each_block=True,
        )
        for name, one in OPERATIONS.items()
    },
    "step": Kind(StepReport, (GLOO,), extra="torch"),
    "link": Kind(LinkReport, (), ("last",)),
}
