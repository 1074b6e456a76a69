"""A rank of `sirtaki bench`: `python -m sirtaki.bench.worker PLAN`, started by hvdrun or mpirun.

All implementations take turns in blocks of calls, so that other load on the machine affects them alike.
"""

from __future__ import annotations

import gc
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

import sirtaki.numpy as hvd
from sirtaki.bench.devices import missing_gpu, own_device, unusable_peers
from sirtaki.bench.implementations import Bound, Call, Implementation, implement
from sirtaki.bench.links import measure_links
from sirtaki.bench.patterns import Patterns
from sirtaki.bench.streams import first_ranks, slowest_stream
from sirtaki.bindings._version import VERSION
from sirtaki.common import basics
from sirtaki.common.observing import stats
from sirtaki.runner.bench.messages import (
    COPY,
    OWN,
    Measurement,
    Message,
    Plan,
    Refusal,
    Timing,
    World,
    encode,
)
from sirtaki.runner.bench.operations import OPERATIONS
from sirtaki.runner.bench.peers import CPU
from sirtaki.runner.bench.samples import block_calls, quantile, timed
from sirtaki.runner.bench.sizes import ITEMSIZES, counts

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
    _describe({name: one.version for name, one in implementations.items()}, first, left_out)
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
    _tell(World(basics.size(), dict(hosts), len(first), versions, stream, streams, left_out))
    gc.disable()


def _tell(message: Message) -> None:
    """Sends a message from rank 0."""
    if basics.rank() == 0:
        print(encode(message), flush=True)


class Run:
    """The measurement of one operation by size. All ranks have to make the same calls."""

    def __init__(self, plan: Plan, implementations: Mapping[str, Implementation]) -> None:
        self._plan, self._implementations = plan, implementations
        self._operation = OPERATIONS[plan.operation]
        self._patterns = Patterns(self._operation, plan.dtype, basics.size())
        self.counts = counts(self._operation, plan.dtype, basics.size(), plan.first, plan.last, plan.factor)

    def measure(self, count: int) -> None:
        """Checks and measures all implementations on parts of `count` elements, and sends the result."""
        size = count * self._operation.parts(basics.size()) * ITEMSIZES[self._plan.dtype]
        bound = {name: self._bind(one, count) for name, one in self._implementations.items()}
        before = self._count_wrong(bound, count)
        for one in bound.values():
            one.fill(0)  # zeros stay zeros, however often they are summed in place
        backend, algorithm = _way_of(bound[OWN].call)
        times = self._time({name: one.call for name, one in bound.items()}, size)
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
        for name, one in bound.items():
            if name == COPY:
                continue
            one.fill(self._patterns.input(count, basics.rank()))
            one.call()
            own[name] = self._patterns.count_wrong(one.result(), count, basics.rank())
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

if __name__ == "__main__":
    main()
