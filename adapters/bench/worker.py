"""A rank of `sirtaki bench`: `python -m sirtaki.bench.worker PLAN`, started by hvdrun or mpirun.

All implementations take turns in blocks of calls, so that other load on the machine affects them alike.
"""

from __future__ import annotations

import gc
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

import sirtaki.numpy as hvd
from sirtaki.bench.implementations import Bound, Call, Implementation, implement
from sirtaki.bench.patterns import Array, Patterns
from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces, local_addresses
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.common import basics
from sirtaki.common.basics import stats
from sirtaki.runner.bench.messages import (
    COPY,
    OWN,
    BenchWorld,
    LinkSpeeds,
    Measurement,
    Message,
    Plan,
    Refusal,
    Timing,
    encode,
)
from sirtaki.runner.bench.operations import ITEMSIZES, OPERATIONS, counts
from sirtaki.runner.bench.peers import CPU, NCCL
from sirtaki.runner.bench.samples import block_calls, quantile, timed
from sirtaki.runner.doctor.facts import Speed
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure

_BYTES_PER_BLOCK = 32 << 20
_LEAST_CALLS, _MOST_CALLS = 4, 64
_WARM_UP_CALLS = 2


def main() -> None:
    plan = Plan.decode(sys.argv[1])
    basics.init()
    if basics.size() == 1:
        sys.exit("sirtaki bench: one rank exchanges nothing: give -np 2 or more")
    first = first_ranks()
    _RUNS.get(plan.operation, _run_collective)(plan, first)
    basics.shutdown()


def _run_collective(plan: Plan, first: Sequence[int]) -> None:
    if reason := missing_gpu(plan):
        _tell(Refusal(reason))
        return
    device, left_out = own_device(plan), unusable_peers(plan)
    plan = plan.without(left_out)
    has_limit = len(first) == 1 and OPERATIONS[plan.operation].has_size and plan.device == CPU
    names = [OWN, *([COPY] if has_limit else []), *plan.peers]
    implementations = {name: implement(name, device) for name in names}
    _describe(
        {name: implementation.version for name, implementation in implementations.items()}, first, left_out
    )
    run = Run(plan, implementations)
    for count in run.counts:
        run.measure(count)


def _run_link(plan: Plan, first: Sequence[int]) -> None:
    _describe({OWN: VERSION}, first, {})
    _tell(measure_links(plan, first, _tell))


def _run_step(plan: Plan, first: Sequence[int]) -> None:
    from sirtaki.bench.steps import measure_models, versions  # needs torch

    _describe(versions(plan), first, {})
    for message in measure_models(plan):
        _tell(message)


def _describe(versions: Mapping[str, str], first: Sequence[int], left_out: Mapping[str, str]) -> None:
    """Sends a description of the job. All ranks have to call it, before they measure."""
    hosts = Counter(hvd.allgather_object(socket.gethostname()))
    stream, streams = slowest_stream(first)
    _tell(BenchWorld(basics.size(), dict(hosts), len(first), versions, stream, streams, left_out))
    gc.disable()


def _tell(message: Message) -> None:
    """Sends a message from rank 0."""
    if basics.rank() == 0:
        print(encode(message), flush=True)


class Run:
    """The measurement of an operation by size. All ranks have to make the same calls."""

    def __init__(self, plan: Plan, implementations: Mapping[str, Implementation]) -> None:
        self._plan, self._implementations = plan, implementations
        self._operation = OPERATIONS[plan.operation]
        self._patterns = Patterns(self._operation, plan.dtype, basics.size())
        self.counts = counts(self._operation, plan.dtype, basics.size(), plan.first, plan.last, plan.factor)

    def measure(self, count: int) -> None:
        """Checks and measures all implementations on parts of `count` elements, and sends the result."""
        size = count * self._operation.parts(basics.size()) * ITEMSIZES[self._plan.dtype]
        bound = {
            name: self._bind(implementation, count) for name, implementation in self._implementations.items()
        }
        before = self._count_wrong(bound, count)
        for item in bound.values():
            item.fill(0)  # zeros stay zeros, however often they are summed in place
        backend, algorithm = _way_of(bound[OWN].call)
        times = self._time({name: item.call for name, item in bound.items()}, size)
        after = self._count_wrong(bound, count)
        wrong = {name: before[name] + after[name] for name in before}
        _tell(Measurement(size, count, wrong, times, backend, algorithm))

    def _bind(self, implementation: Implementation, count: int) -> Bound:
        array = np.empty(self._operation.input_count(count, basics.size()), self._plan.dtype)
        output = np.empty(self._operation.output_count(count, basics.size()), self._plan.dtype)
        return implementation.bind(self._operation, array, output)

    def _count_wrong(self, bound: Mapping[str, Bound], count: int) -> dict[str, int]:
        """Calls each implementation on the ranks' patterns; returns its wrong elements on all ranks."""
        if not self._operation.has_size:
            return {}
        own = {}
        for name, item in bound.items():
            if name == COPY:
                continue
            item.fill(self._patterns.input(count, basics.rank()))
            item.call()
            own[name] = self._patterns.count_wrong(item.result(), count, basics.rank())
        totals = hvd.allreduce(np.array(list(own.values())), op=hvd.Sum, name="bench wrong")
        return dict(zip(own, totals.tolist(), strict=True))

    def _time(self, calls: Mapping[str, Call], size: int) -> dict[str, Timing]:
        """Measures blocks of each implementation in turns."""
        number = block_calls(size, _BYTES_PER_BLOCK, _LEAST_CALLS, _MOST_CALLS)
        blocks: dict[str, list[list[float]]] = {name: [] for name in calls}
        for turn in range(self._plan.rounds):
            for name, call in calls.items():
                _tell(f"{self._plan.operation} of {size} bytes, round {turn + 1}, {name}")
                hvd.barrier()
                timed(call, _WARM_UP_CALLS)
                blocks[name].append(timed(call, number))
        return {name: _summary(of_all_ranks) for name, of_all_ranks in blocks.items()}


def _way_of(call: Call) -> tuple[str, str]:
    """Returns the backend that moves the bytes of a call, and its algorithm; "" for what there is not.

    All ranks have to call it.
    """
    before = {(row["kind"], row["backend"]): row["bytes"] for row in stats()["by_backend"]}
    call()
    grown = [
        (row["backend"], row["algorithm"])
        for row in stats()["by_backend"]
        if row["bytes"] > before.get((row["kind"], row["backend"]), 0)
    ]
    return grown[0] if grown else ("", "")


def _summary(blocks: list[list[float]]) -> Timing:
    """Returns the durations on the slowest rank. All ranks have to call it."""
    slowest = hvd.allreduce(np.array(blocks), op=hvd.Max, name="bench times")
    every = slowest.reshape(-1).tolist()
    return Timing(median(every), quantile(every, 0.99), tuple(map(median, slowest.tolist())))


_RUNS: dict[str, Callable[[Plan, Sequence[int]], None]] = {"link": _run_link, "step": _run_step}


# ---- The speed of plain TCP from each host of a job to the next one, by all hosts at the same time -----


def first_ranks() -> list[int]:
    """Returns the first rank of each host. All ranks have to call it."""
    return [rank for rank, number in enumerate(hvd.allgather_object(basics.local_rank())) if number == 0]


def slowest_stream(first: Sequence[int]) -> tuple[float, int]:
    """Returns bytes per second on the slowest link, over so many connections; (0, 0) if it is unknown.

    All ranks have to call it with the first ranks of the hosts, which measure. On a single host there is
    nothing to measure.
    """
    if len(first) == 1:
        return 0.0, 0
    token = hvd.broadcast_object(secrets.token_bytes(TOKEN_BYTES), root_rank=0)
    is_first = basics.rank() in first
    listeners = hvd.allgather_object((_addresses(), Listener(token).port) if is_first else None)
    speed = None
    if is_first:
        following = first[(first.index(basics.rank()) + 1) % len(first)]
        addresses, port = listeners[following]
        speed = _measure(addresses, port, token)
    speeds = [found for found in hvd.allgather_object(speed) if found is not None]
    rates = [max(speed.one_stream, speed.several_streams) for speed in speeds]
    if len(rates) < len(first) or not min(rates):
        return 0.0, 0
    slowest = min(speeds, key=lambda speed: max(speed.one_stream, speed.several_streams))
    return min(rates), slowest.streams if slowest.several_streams > slowest.one_stream else 1


def _addresses() -> list[str]:
    try:
        return list(local_addresses(chosen_interfaces()))
    except RendezvousError:
        return []


def _measure(addresses: list[str], port: int, token: bytes) -> Speed | None:
    """Measures the connection at the first address that is open; returns None if there is none."""
    for address in addresses:
        try:
            return measure(address, port, token)
        except OSError:
            continue
    return None


# ---- The device of each rank's tensors, and the peers that the ranks' devices do not allow -------------


def missing_gpu(plan: Plan) -> str:
    """Returns why a rank has no GPU although the plan wants GPUs, else "". All ranks have to call it."""
    reasons = [] if plan.device == CPU else hvd.allgather_object(_why_no_gpu())
    return next((reason for reason in reasons if reason), "")


def own_device(plan: Plan) -> str:
    """Returns the device of this rank's tensors, such as "cuda:0", and makes it torch's own."""
    if plan.device == CPU:
        return CPU
    import torch

    device = basics.local_rank() % torch.cuda.device_count()
    torch.cuda.set_device(device)
    return f"{plan.device}:{device}"


def unusable_peers(plan: Plan) -> dict[str, str]:
    """Returns the peers that cannot work on the ranks' devices, and why. All ranks have to call it."""
    if NCCL not in plan.peers:
        return {}
    reasons = [reason for reason in hvd.allgather_object(_why_no_nccl()) if reason]
    return {NCCL: reasons[0]} if reasons else {}


def _why_no_gpu() -> str:
    """Returns the reason why this rank has no GPU; "" if it has a GPU."""
    import torch

    if torch.cuda.is_available():
        return ""
    is_built = torch.backends.cuda.is_built()
    why = "finds no CUDA device" if is_built else "was built without CUDA"
    return f"torch {torch.__version__} on {socket.gethostname()} {why}: leave out --device cuda"


def _why_no_nccl() -> str:
    """Returns the reason why NCCL does not work on this rank; "" if it may."""
    import torch
    import torch.distributed as dist

    host, gpus, ranks = socket.gethostname(), torch.cuda.device_count(), basics.local_size()
    if not (dist.is_available() and dist.is_nccl_available()):
        return f"torch {torch.__version__} on {host} was built without NCCL"
    if gpus < ranks:
        return f"{host} has {ranks} ranks and {gpus} GPUs, and NCCL takes one rank for each GPU"
    return ""


# ---- The connections between ranks ---------------------------------------------------------------------
# A message each way for the latency, large messages in a single direction for the bandwidth.


_SMALL = 8  # bytes
_CALLS, _LINK_WARM_UP_CALLS = 200, 20
_MOST_RANKS = 64


def measure_links(plan: Plan, first: Sequence[int], note: Callable[[str], None]) -> LinkSpeeds:
    """Measures each connection in turn: between the hosts' `first` ranks, or all ranks of a single host.

    All ranks have to call it.
    """
    ranks = (first if len(first) > 1 else range(basics.size()))[:_MOST_RANKS]
    hosts = hvd.allgather_object(socket.gethostname())
    rates = [[0.0] * len(ranks) for _ in ranks]
    latencies = [[0.0] * len(ranks) for _ in ranks]
    wrong = 0
    for row, source in enumerate(ranks):
        for column, target in enumerate(ranks):
            if source == target:
                continue
            note(f"rank {source} to rank {target}")
            hvd.barrier()
            found = _measure_links(source, target, plan)
            rate, latency, mistakes = hvd.allreduce(np.array(found), op=hvd.Sum, name="bench link").tolist()
            rates[row][column], latencies[row][column] = rate, latency
            wrong += int(mistakes)
    names = tuple(hosts[rank] for rank in ranks)
    return LinkSpeeds(tuple(ranks), names, _frozen(rates), _frozen(latencies), wrong)


def _frozen(matrix: list[list[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, matrix))


def _measure_links(source: int, target: int, plan: Plan) -> tuple[float, float, float]:
    """Returns bytes per second and microseconds at the source, wrong bytes at the target, and 0 elsewhere."""
    rank = basics.rank()
    if rank not in (source, target):
        return 0.0, 0.0, 0.0
    other = target if rank == source else source
    small, large = np.zeros(_SMALL, np.uint8), np.zeros(plan.last, np.uint8)
    answer = np.zeros(1, np.uint8)
    if rank == source:
        large[:] = _pattern(plan.last)
    trip = _both_ways(rank == source, small, np.zeros_like(small), other)
    timed(trip, _LINK_WARM_UP_CALLS)
    round_trips = timed(trip, _CALLS)
    way = _both_ways(rank == source, large, answer, other)
    timed(way, 1)
    times = timed(way, plan.rounds)
    if rank == target:
        return 0.0, 0.0, float(np.count_nonzero(large != _pattern(plan.last)))
    return plan.last / median(times) * 1e6, median(round_trips) / 2, 0.0


def _both_ways(is_source: bool, message: Array, answer: Array, other: int) -> Callable[[], None]:
    """Returns a call in which a message travels from the source to the target, and then an answer back."""

    def call() -> None:
        if is_source:
            hvd.send(message, other, name="bench message")
            hvd.recv(answer, other, name="bench answer")
        else:
            hvd.recv(message, other, name="bench message")
            hvd.send(answer, other, name="bench answer")

    return call


def _pattern(size: int) -> Array:
    return np.resize(np.arange(251, dtype=np.uint8), size)


if __name__ == "__main__":
    main()
