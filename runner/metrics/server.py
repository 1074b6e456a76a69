"""The process that serves a host's metrics.

Usage: python -m sirtaki.runner.metrics.server FOLDER

Standard input is the listening socket. The ranks of this host write to the folder.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import socket
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import psutil
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from sirtaki.bindings._version import VERSION
from sirtaki.runner.observe.bounded_server import CLIENT_SECONDS, BoundedServer, hosts_of
from sirtaki.runner.observe.endpoints import is_loopback
from sirtaki.runner.observe.states import RankState, read_states

MAX_CLIENTS = 8  # at once


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing: standard error is that of hvdrun."""


def _guarded(application: Any, hosts: Collection[str]) -> Any:
    """Returns the application with answers instead of tracebacks for requests that it cannot read.

    Requests with a Host header that is not in `hosts`, if there are any, are refused: a web page's name may
    have been made to stand for this address (DNS rebinding).
    """

    def answer(environment: Any, start_response: Any) -> Any:
        if hosts and environment.get("HTTP_HOST", "").lower() not in hosts:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"this is not the address of the metrics\n"]
        try:
            return application(environment, start_response)
        except Exception:
            start_response("400 Bad Request", [("Content-Type", "text/plain")])
            return [b"this request cannot be read\n"]

    return answer


class MetricsServer(BoundedServer, WSGIServer):
    """Answers each request with the metrics of that moment."""

    def __init__(self, listener: socket.socket, folder: Path) -> None:
        super().__init__(listener, _Handler, MAX_CLIENTS)
        self.setup_environ()
        registry = CollectorRegistry()
        registry.register(RankSamples(folder))
        number, port = listener.getsockname()[:2]
        hosts = hosts_of(number, number, port) if is_loopback(number) else frozenset()
        self.set_app(_guarded(make_wsgi_app(registry), hosts))


def main() -> None:
    MetricsServer(socket.socket(fileno=0), Path(sys.argv[1])).serve_forever()


# ---- The metrics of a host, made at each scrape from the files of its ranks (`observe.states`) ---------

# Counters by their keys in the files of ranks: the names, without _total, and their help.
COUNTERS = {
    "plans": ("sirtaki_plans", "Collectives; a fused one counts once."),
    "cache_hits": ("sirtaki_cache_hits", "Operations that the response cache held already."),
    "cache_misses": ("sirtaki_cache_misses", "Operations that had to be sent in full."),
    "late_times": ("sirtaki_last_arrivals", "Operations that the rank was the last to submit."),
    "ranks_lost": ("sirtaki_ranks_lost", "Ranks that an elastic job has lost, as this rank has seen it."),
    "waiting_seconds": (
        "sirtaki_waiting_seconds",
        "Time in which any operation waited for other ranks to submit it, too.",
    ),
    "moving_seconds": ("sirtaki_moving_seconds", "Time in which data moved."),
    "stalls": ("sirtaki_stalls", "Reports of stalls that named this rank."),
}
# Histograms by their keys: how long each operation took, before and after all ranks had submitted it.
HISTOGRAMS = {
    "wait": ("sirtaki_operation_wait_seconds", "How long an operation waited for other ranks."),
    "transfer": ("sirtaki_operation_transfer_seconds", "How long it took once all ranks had submitted it."),
}
# Counters of training steps, likewise by their keys there. Ranks without steps have at most the last one.
STEP_COUNTERS = {
    "count": ("sirtaki_steps", "Training steps: updates by distributed optimizers."),
    "productive_seconds": (
        "sirtaki_productive_seconds",
        "Duration of the steps, without what made some of them long; in an elastic job of committed ones.",
    ),
    "exposed_seconds": (
        "sirtaki_exposed_communication_seconds",
        "Time in which the program waited for the exchange of a step.",
    ),
}
RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_RANK = ["rank"]


class RankSamples(Collector):
    """Yields the metrics of the ranks that have files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = socket.gethostname()

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("sirtaki_build_info", "The version of sirtaki.", labels=["version"])
        build.add_metric([VERSION], 1)
        yield build
        ranks = read_states(self._folder)
        yield from self._job_metrics(ranks)
        yield from _operations(ranks)
        yield _sent_bytes(ranks)
        for key, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_RANK)
            for rank in ranks:
                counter.add_metric([rank.label], rank.values[key])
            yield counter
        for key, (name, text) in HISTOGRAMS.items():
            yield _durations(name, text, [(rank.label, rank.values[key]) for rank in ranks])
        yield from _steps(ranks)
        yield _lateness(ranks)
        yield _recoveries(ranks)
        yield from _process_metrics([rank for rank in ranks if rank.process is not None])

    def _job_metrics(self, ranks: Sequence[RankState]) -> Iterator[Metric]:
        up = GaugeMetricFamily("sirtaki_up", "Whether the rank is in its world.", labels=["rank", "host"])
        for rank in ranks:
            up.add_metric([rank.label, self._host], rank.is_up)
        yield up
        if newest := max(ranks, key=lambda rank: rank.values["generation"], default=None):
            yield GaugeMetricFamily(
                "sirtaki_world_size", "The number of ranks of the job.", value=newest.values["size"]
            )
            yield GaugeMetricFamily(
                "sirtaki_generation",
                "The number of the membership of an elastic job; 1 in other jobs.",
                value=newest.values["generation"],
            )


def _operations(ranks: Sequence[RankState]) -> Iterator[Metric]:
    """Yields the operations and their bytes by kind and backend; what is 0 there is left out."""
    text = "Operations that have ended; every tensor of a fused plan counts."
    labels = ["rank", "kind", "backend"]
    counter = CounterMetricFamily("sirtaki_operations", text, labels=[*labels, "status"])
    size = CounterMetricFamily(
        "sirtaki_operation_bytes", "Size of the rank's tensors in plans that have ended.", labels=labels
    )
    for rank in ranks:
        for row in rank.values["by_backend"]:
            values = [rank.label, row["kind"], row["backend"]]
            numbers = {"ok": row["operations"] - row["failed"], "failed": row["failed"]}
            for status, number in numbers.items():
                if number:
                    counter.add_metric([*values, status], number)
            if row["bytes"]:
                size.add_metric(values, row["bytes"])
    yield from (counter, size)


def _sent_bytes(ranks: Sequence[RankState]) -> Metric:
    text = "Bytes that the rank has sent over links to the ranks of a host."
    counter = CounterMetricFamily("sirtaki_link_sent_bytes", text, labels=["rank", "peer_host", "transport"])
    for rank in ranks:
        for row in rank.values["sent"]:
            counter.add_metric([rank.label, row["peer_host"], row["transport"]], row["bytes"])
    return counter


def _durations(name: str, text: str, ranks: Sequence[tuple[str, dict[str, Any]]]) -> Metric:
    """Returns a histogram of durations, in seconds, as `hvd.stats()` counts them."""
    histogram = HistogramMetricFamily(name, text, labels=_RANK)
    for label, durations in ranks:
        bounds = [*map(str, durations["bounds"]), "+Inf"]
        counts = itertools.accumulate(durations["counts"])
        histogram.add_metric([label], list(zip(bounds, counts, strict=True)), durations["total_seconds"])
    return histogram


def _steps(ranks: Sequence[RankState]) -> Iterator[Metric]:
    stepped = [rank for rank in ranks if rank.values["steps"]["count"]]
    for key, (name, text) in STEP_COUNTERS.items():
        counter = CounterMetricFamily(name, text, labels=_RANK)
        for rank in ranks if key == "exposed_seconds" else stepped:
            if (value := rank.values["steps"][key]) is not None:
                counter.add_metric([rank.label], value)
        yield counter
    times = [(rank.label, rank.values["steps"]["times"]) for rank in stepped]
    yield _durations("sirtaki_step_seconds", "How long a training step took, but for the first.", times)


def _lateness(ranks: Sequence[RankState]) -> Metric:
    text = "How long all others waited for this rank alone, where it was the last to submit an operation."
    summary = SummaryMetricFamily("sirtaki_lateness_seconds", text, labels=_RANK)
    for rank in ranks:
        summary.add_metric([rank.label], rank.values["late_times"], rank.values["late_seconds"])
    return summary


def _recoveries(ranks: Sequence[RankState]) -> Metric:
    text = "How long the phases of an elastic job's changes took."
    histogram = HistogramMetricFamily("sirtaki_recovery_seconds", text, labels=["rank", "phase"])
    for rank in ranks:
        for phase, times in rank.values["recoveries"].items():
            ordered = sorted(times)
            counts = [(str(bound), bisect.bisect_right(ordered, bound)) for bound in RECOVERY_BUCKETS]
            histogram.add_metric([rank.label, phase], [*counts, ("+Inf", len(ordered))], sum(ordered))
    return histogram


def _process_metrics(ranks: Sequence[RankState]) -> Iterator[Metric]:
    """Yields Prometheus' usual metrics of a process, for the process of each rank."""
    cpu = CounterMetricFamily("process_cpu_seconds", "CPU time of the rank's process.", labels=_RANK)
    resident = GaugeMetricFamily("process_resident_memory_bytes", "Resident memory.", labels=_RANK)
    virtual = GaugeMetricFamily("process_virtual_memory_bytes", "Virtual memory.", labels=_RANK)
    start = GaugeMetricFamily("process_start_time_seconds", "Start, in Unix time.", labels=_RANK)
    files = GaugeMetricFamily("process_open_fds", "Open descriptors.", labels=_RANK)
    for rank in ranks:
        process = rank.process
        assert process is not None
        with contextlib.suppress(psutil.Error), process.oneshot():
            times, memory, descriptors = process.cpu_times(), process.memory_info(), process.num_fds()
            cpu.add_metric([rank.label], times.user + times.system)
            resident.add_metric([rank.label], memory.rss)
            virtual.add_metric([rank.label], memory.vms)
            start.add_metric([rank.label], process.create_time())
            files.add_metric([rank.label], descriptors)
    yield from (cpu, resident, virtual, start, files)


if __name__ == "__main__":
    main()
