"""Everything that `sirtaki bench` can measure: the report, the peers and the package of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sirtaki.runner.bench.collective_report import CollectiveReport
from sirtaki.runner.bench.link_report import LinkReport
from sirtaki.runner.bench.messages import Plan, World
from sirtaki.runner.bench.operations import OPERATIONS
from sirtaki.runner.bench.peers import GLOO, PEERS
from sirtaki.runner.bench.report import Load, Report
from sirtaki.runner.bench.step_report import StepReport


class Kind(NamedTuple):
    """A measurement: its report, the peers that offer it, whether it has sizes to draw, and the extra of
    sirtaki's package that its ranks need.
    """

    report: Callable[[Plan, World, Load], Report]
    peers: Sequence[str]
    has_sizes: bool
    extra: str = "numpy"


KINDS = {
    **{name: Kind(CollectiveReport, tuple(PEERS), one.has_size) for name, one in OPERATIONS.items()},
    "step": Kind(StepReport, (GLOO,), False, "torch"),
    "link": Kind(LinkReport, (), False),
}
