"""Messages between `sirtaki bench` and its ranks: a plan for them, and lines of JSON from rank 0.

The lines are a part of the ranks' standard output, so that they come from other hosts, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from sirtaki.runner.bench.peers import CPU
from sirtaki.runner.doctor.decoding import decode
from sirtaki.runner.doctor.decoding import line as line_of

MARK = "@sirtaki-bench "
OWN = "sirtaki"  # the name of sirtaki's own measurement, beside peers
COPY = "copy"  # and that of a plain copy of memory
SYNC, EXCHANGE = "sync", "exchange"  # a training step without exchange, and the exchange alone
_MAX_NOTE = 100


@dataclass(frozen=True)
class Plan:
    """The work of all ranks.

    Attributes:
        first, last, factor: the sizes in bytes.
        rounds: the number of blocks of each implementation.
        peers: names of the table PEERS.
        device: "cpu" or "cuda", where tensors are.
        left_out: peers that are not measured, each with the reason.
    """

    operation: str
    dtype: str
    first: int
    last: int
    factor: float
    rounds: int
    peers: Sequence[str]
    device: str = CPU
    left_out: Mapping[str, str] = field(default_factory=dict)

    def without(self, peers: Mapping[str, str]) -> Plan:
        """Returns the plan without these peers, for the reasons that are their values."""
        kept = [name for name in self.peers if name not in peers]
        return replace(self, peers=kept, left_out={**self.left_out, **peers})

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> Plan:
        return Plan(**json.loads(text))


@dataclass(frozen=True)
class BenchWorld:
    """The ranks of a run.

    Attributes:
        size: their number.
        hosts: the number of ranks by the name of their host.
        host_count: the number of hosts as the engine sees them.
        versions: the version of each implementation.
        stream: bytes per second from each host to the next, over plain TCP; 0 if it was not measured.
        streams: the number of connections that were used for it.
        left_out: peers that the ranks cannot measure, each with the reason.
    """

    size: int
    hosts: Mapping[str, int]
    host_count: int
    versions: Mapping[str, str]
    stream: float
    streams: int
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """The reason why the ranks cannot measure what the plan asks for."""

    reason: str


@dataclass(frozen=True)
class Timing:
    """Durations of calls in microseconds, each that of its slowest rank; `blocks` are medians by round."""

    median: float
    p99: float
    blocks: tuple[float, ...]


@dataclass(frozen=True)
class Measurement:
    """The result at a given size.

    Attributes:
        wrong, times: wrong elements on all ranks, and times, by implementation.
        backend: the part of sirtaki's core that has moved its bytes; "" if nothing had to move.
        algorithm: that of the backend; "" where it has only one.
    """

    size: int
    count: int
    wrong: Mapping[str, int]
    times: Mapping[str, Timing]
    backend: str = ""
    algorithm: str = ""


@dataclass(frozen=True)
class LinkSpeeds:
    """The speed of the connections between ranks: bytes per second, and latency in microseconds."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    rates: tuple[tuple[float, ...], ...]
    latencies: tuple[tuple[float, ...], ...]
    wrong: int


@dataclass(frozen=True)
class StepTimes:
    """Training steps of a model: milliseconds of each kind of step by round, on the slowest rank.

    `wrong` counts elements of parameters that differ from those of rank 0; `bytes` are those of gradients.
    """

    model: str
    tensors: int
    bytes: int
    wrong: int
    times: Mapping[str, tuple[float, ...]]


Message = BenchWorld | Refusal | Measurement | LinkSpeeds | StepTimes | str
_KINDS: Mapping[str, type] = {
    "world": BenchWorld,
    "refusal": Refusal,
    "measurement": Measurement,
    "link": LinkSpeeds,
    "step": StepTimes,
}


def encode(message: Message) -> str:
    """Returns a line without its end. A text is a note about what happens now."""
    if isinstance(message, str):
        return MARK + json.dumps({"note": message})
    kind = next(name for name, cls in _KINDS.items() if isinstance(message, cls))
    return MARK + json.dumps({kind: asdict(message)})


def read(line: str) -> Message | None:
    """Returns the message in a line of the ranks' output, or None. Raises ValueError if it is malformed."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    values = json.loads(text)
    if not isinstance(values, dict) or len(values) != 1:
        raise ValueError("a message is one object")
    ((kind, value),) = values.items()
    if kind == "note":
        return line_of(value, _MAX_NOTE)
    if kind not in _KINDS:
        raise ValueError(f"there is no message {kind!r}")
    message: Message = decode(_KINDS[kind], value)
    return message
