"""The speed that the machine itself allows for an operation: that of a plain copy, or of the network."""

from __future__ import annotations

from sirtaki.runner.bench.messages import COPY, OWN, Measurement, World
from sirtaki.runner.bench.operations import Operation
from sirtaki.runner.bench.peers import CPU
from sirtaki.runner.bench.samples import median_ratio

SMALLEST = 64 << 10  # bytes; smaller tensors are bound by the latency of messages, not by a bandwidth
_MEGABYTE = 1e6
_FOR_HOST = (
    "plain TCP from each host to the next, {rate:,.0f} MB/s over {streams} connections on the slowest link, "
    "measured before the operations; the bytes are those that have to leave a host at least"
)
_FOR_MEMORY = (
    "a plain copy of {share:.0%} of the size by all ranks at the same time, in the same rounds: the bytes "
    "that a rank has to read and write at least"
)


class Limit:
    """The least time of an operation at a size, and its description. It is not known for GPUs."""

    def __init__(self, operation: Operation, world: World, device: str = CPU) -> None:
        self._operation, self._world, self._device = operation, world, device

    @property
    def text(self) -> str:
        """Describes the limit; "" if there is none."""
        if not self._operation.has_size or self._device != CPU:
            return ""
        if self._world.host_count == 1:
            return _FOR_MEMORY.format(share=self._operation.copied(self._world.size))
        if not self._world.stream:
            return ""
        rate = self._world.stream / _MEGABYTE
        return _FOR_HOST.format(rate=rate, streams=self._world.streams)

    def microseconds(self, measured: Measurement) -> float | None:
        """Returns the least time for that size; None if it is too small, or if no limit was measured."""
        if measured.size < SMALLEST or not self.text:
            return None
        if self._world.host_count == 1:
            return measured.times[COPY].median
        return self._sent(measured.size) / self._world.stream * 1e6

    def share(self, measured: Measurement) -> float | None:
        """Returns the least time as a share of the time of sirtaki's operation."""
        least = self.microseconds(measured)
        if least is None:
            return None
        own = measured.times[OWN]
        if COPY in measured.times:
            return median_ratio(measured.times[COPY].blocks, own.blocks)
        return least / own.median

    def _sent(self, size: int) -> float:
        """Returns the bytes that have to leave each host."""
        hosts = self._world.host_count
        sent = size * self._operation.bus_factor(hosts)
        is_personal = self._operation.parts_in and self._operation.parts_out
        return sent * self._world.size / hosts if is_personal else sent
