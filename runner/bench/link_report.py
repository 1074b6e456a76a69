"""The speed and latency of each connection between ranks, as two matrices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sirtaki.runner.bench.messages import OWN, LinkSpeeds, Plan, World
from sirtaki.runner.bench.report import Load, Report, comment
from sirtaki.runner.rendezvous.wire import printable

_MAX_NAME = 40
_WIDTH = 10


class LinkReport(Report):
    """The result of `sirtaki bench link`."""

    def __init__(self, plan: Plan, world: World, load: Load) -> None:
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
