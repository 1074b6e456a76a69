"""The cost of the exchange in a training step, beside a step without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from sirtaki.runner.bench.columns import Column, heads, line, peer_columns
from sirtaki.runner.bench.messages import EXCHANGE, OWN, SYNC, Plan, StepTimes, World
from sirtaki.runner.bench.peers import PEERS
from sirtaki.runner.bench.report import Load, Report, comment
from sirtaki.runner.bench.samples import median_ratio

_COLUMNS = (
    Column(14, "model"),
    Column(9, "tensors"),
    Column(9, "size", "(MB)"),
    Column(10, "sync", "(ms)"),
    Column(10, "step", "(ms)"),
    Column(10, "exposed", "(ms)"),
    Column(10, "exchange", "(ms)"),
    Column(9, "overlap", "(%)"),
    Column(8, "#wrong"),
)

_EXPLANATIONS = (
    "sync: a step without exchange, whose ranks meet in a barrier; step: one with sirtaki",
    "exposed: the median of step - sync in the same round",
    "exchange: that of all gradients alone; overlap: the part of it that does not lengthen the step",
    "#wrong: elements of the trained parameters that differ from rank 0's by more than rounding",
)


@dataclass(frozen=True)
class StepRow:
    """The figures of a model; times in milliseconds.

    Attributes:
        sync_ms, step_ms: a step without exchange whose ranks meet in a barrier, and one with sirtaki.
        exposed_ms: their difference: the time that the exchange adds.
        exchange_ms: the exchange of all gradients alone.
        overlap: the share of that time which does not lengthen the step.
        peers: a step's time with each peer, as a multiple of sirtaki's.
    """

    model: str
    tensors: int
    bytes: int
    sync_ms: float
    step_ms: float
    exposed_ms: float
    exchange_ms: float
    overlap: float
    wrong: int
    peers: Mapping[str, float]


class StepReport(Report):
    """The result of `sirtaki bench step`."""

    def __init__(self, plan: Plan, world: World, load: Load) -> None:
        super().__init__(plan, world, load)
        self.rows: list[StepRow] = []
        self._columns = [*_COLUMNS, *peer_columns(plan.peers)]

    @property
    def wrong(self) -> Mapping[str, int]:
        total = sum(row.wrong for row in self.rows)
        return {OWN: total} if total else {}

    def columns(self) -> Iterator[str]:
        return heads(self._columns)

    @property
    def is_complete(self) -> bool:
        return bool(self.rows)

    def take(self, message: object) -> Iterator[str]:
        assert isinstance(message, StepTimes)
        row = make_row(message, self.plan)
        self.rows.append(row)
        cells = [row.model, str(row.tensors), f"{row.bytes / 1e6:.1f}", f"{row.sync_ms:.2f}"]
        cells += [f"{row.step_ms:.2f}", f"{row.exposed_ms:.2f}", f"{row.exchange_ms:.2f}"]
        cells += [f"{100 * row.overlap:.0f}", str(row.wrong)]
        yield line([*cells, *(f"{ratio:.2f}" for ratio in row.peers.values())], self._columns)

    def foot_lines(self) -> Iterator[str]:
        yield from self.verdict_lines()
        yield from map(comment, _EXPLANATIONS)
        for name in self.plan.peers:
            yield comment(f"{name}: a step with DDP over {PEERS[name].title}, as a multiple of sirtaki's")

    def values(self) -> Mapping[str, Any]:
        return {"rows": [asdict(row) for row in self.rows]}


def make_row(measured: StepTimes, plan: Plan) -> StepRow:
    """Derives the figures of a model from its times by round."""
    times = measured.times
    own, sync, exchange = times[OWN], times[SYNC], median(times[EXCHANGE])
    exposed = median(step - alone for step, alone in zip(own, sync, strict=True))
    return StepRow(
        model=measured.model,
        tensors=measured.tensors,
        bytes=measured.bytes,
        sync_ms=median(sync),
        step_ms=median(own),
        exposed_ms=exposed,
        exchange_ms=exchange,
        overlap=min(max(1 - exposed / exchange, 0.0), 1.0),
        wrong=measured.wrong,
        peers={name: median_ratio(times[name], own) for name in plan.peers},
    )
