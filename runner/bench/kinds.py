"""Everything that `sirtaki bench` can measure: the report, the peers and the package of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from sirtaki.runner.bench.collective_report import CollectiveReport
from sirtaki.runner.bench.columns import Column, heads, line, peer_columns
from sirtaki.runner.bench.messages import EXCHANGE, OWN, SYNC, BenchWorld, LinkSpeeds, Plan, StepTimes
from sirtaki.runner.bench.operations import OPERATIONS
from sirtaki.runner.bench.peers import CPU, GLOO, PEERS
from sirtaki.runner.bench.report import Load, Report, comment
from sirtaki.runner.bench.samples import median_ratio
from sirtaki.runner.rendezvous.wire import printable

# ---- The cost of the exchange in a training step, beside a step without it -----------------------------

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

    def __init__(self, plan: Plan, world: BenchWorld, load: Load) -> None:
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


# ---- The speed and latency of each connection between ranks, as two matrices ---------------------------

_MAX_NAME = 40
_WIDTH = 10


class LinkReport(Report):
    """The result of `sirtaki bench link`."""

    def __init__(self, plan: Plan, world: BenchWorld, load: Load) -> None:
        super().__init__(plan, world, load)
        self.speeds: LinkSpeeds | None = None

    @property
    def wrong(self) -> Mapping[str, int]:
        return {OWN: self.speeds.wrong} if self.speeds and self.speeds.wrong else {}

    @property
    def is_complete(self) -> bool:
        return self.speeds is not None

    def take(self, message: object) -> Iterator[str]:
        assert isinstance(message, LinkSpeeds)
        self.speeds = message
        yield f"# GB/s in messages of {self.plan.last} bytes, from the rank of the line to that of the column"
        yield from _matrix(message, [[value / 1e9 for value in row] for row in message.rates], 3)
        yield "#"
        yield "# us for a message of 8 bytes: half of the median round trip"
        yield from _matrix(message, message.latencies, 2)
        yield "#"

    def foot_lines(self) -> Iterator[str]:
        yield from self.verdict_lines()
        if self.world.stream:
            yield comment(
                f"plain TCP from each host to the next: {self.world.stream / 1e9:.3f} GB/s over "
                f"{self.world.streams} connections on the slowest link"
            )

    def values(self) -> Mapping[str, Any]:
        assert self.speeds is not None
        return {
            "size": self.plan.last,
            "link_ranks": list(self.speeds.ranks),
            "link_hosts": list(self.speeds.hosts),
            "bytes_per_second": [list(row) for row in self.speeds.rates],
            "latency_us": [list(row) for row in self.speeds.latencies],
        }


def _matrix(speeds: LinkSpeeds, values: Sequence[Sequence[float]], digits: int) -> Iterator[str]:
    pairs = zip(speeds.ranks, speeds.hosts, strict=True)
    names = [f"{rank} ({printable(host, _MAX_NAME)})" for rank, host in pairs]
    left = max(map(len, names))
    yield "# " + " " * left + "".join(f"{rank:>{_WIDTH}}" for rank in speeds.ranks)
    for own, (name, row) in enumerate(zip(names, values, strict=True)):
        cells = ("-" if index == own else f"{value:.{digits}f}" for index, value in enumerate(row))
        yield f"  {name:<{left}}" + "".join(f"{cell:>{_WIDTH}}" for cell in cells)


class MeasurementKind(NamedTuple):
    """A measurement.

    Attributes:
        report: makes its report.
        peers: the libraries that offer it.
        settings: those of SETTINGS that it has.
        extra: the extra of sirtaki's package that its ranks need.
        tells_each_block: whether rank 0 sends a message for each block of calls, and not one for all rounds.
    """

    report: Callable[[Plan, BenchWorld, Load], Report]
    peers: Sequence[str]
    settings: Collection[str] = ()
    extra: str = "numpy"
    tells_each_block: bool = False


class KindOption(NamedTuple):
    """An option that not every measurement has, and its default."""

    flag: str
    default: Any


SETTINGS = {
    "first": KindOption("-b", 8),
    "last": KindOption("-e", 64 << 20),
    "factor": KindOption("-f", 4.0),
    "dtype": KindOption("-d", "float32"),
    "plot": KindOption("--plot", None),
    "device": KindOption("--device", CPU),
}
KINDS = {
    **{
        name: MeasurementKind(
            CollectiveReport,
            tuple(PEERS),
            SETTINGS if one.has_size else ("device",),
            tells_each_block=True,
        )
        for name, one in OPERATIONS.items()
    },
    "step": MeasurementKind(StepReport, (GLOO,), extra="torch"),
    "link": MeasurementKind(LinkReport, (), ("last",)),
}
