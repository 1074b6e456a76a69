"""The metrics of a host, made at each scrape from the files of its ranks (`bindings.metrics_file`)."""

from __future__ import annotations

import bisect
import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from sirtaki.bindings._version import VERSION

# Counters by their keys in the files of ranks: the names, without _total, and their help.
COUNTERS = {
    "bytes": ("sirtaki_operation_bytes", "Size of the rank's tensors in its plans."),
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
}
RECOVERY_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_RANK = ["rank"]


class _Rank(NamedTuple):
    """The last state of a rank: the contents of its file, and its process if that still runs."""

    values: dict[str, Any]
    process: psutil.Process | None

    @property
    def label(self) -> str:
        return str(self.values["rank"])

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.values["is_member"]


class RankSamples(Collector):
    """Yields the metrics of the ranks whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._host = socket.gethostname()

    def collect(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("sirtaki_build_info", "The version of sirtaki.", labels=["version"])
        build.add_metric([VERSION], 1)
        yield build
        ranks = read_ranks(self._folder)
        yield from self._job_metrics(ranks)
        yield _operations(ranks)
        for key, (name, text) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_RANK)
            for rank in ranks:
                counter.add_metric([rank.label], rank.values[key])
            yield counter
        yield _lateness(ranks)
        yield _recoveries(ranks)
        yield from _process_metrics([rank for rank in ranks if rank.process is not None])

    def _job_metrics(self, ranks: Sequence[_Rank]) -> Iterator[Metric]:
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


def read_ranks(folder: Path) -> list[_Rank]:
    """Returns the ranks of this host, ascending.

    Processes of an elastic job have had the same rank one after another: the one that is up counts, or else
    the last.
    """
    found: dict[int, _Rank] = {}
    for file in sorted(folder.glob("*.json"), key=_age_order):
        with contextlib.suppress(OSError, ValueError):
            values = json.loads(file.read_text())
            rank = _Rank(values, _running(values["pid"]))
            before = found.get(values["rank"])
            if before is None or rank.is_up or not before.is_up:
                found[values["rank"]] = rank
    return [found[number] for number in sorted(found)]


def _age_order(file: Path) -> float:
    """Returns when a file was written last; 0 for one that has gone."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _running(pid: int) -> psutil.Process | None:
    """Returns a process unless it has ended: hvdrun keeps a zombie of each rank until the job ends."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return process
    return None


def _operations(ranks: Sequence[_Rank]) -> Metric:
    text = "Operations that have ended; every tensor of a fused plan counts."
    counter = CounterMetricFamily("sirtaki_operations", text, labels=["rank", "status"])
    for rank in ranks:
        failed = rank.values["failed"]
        counter.add_metric([rank.label, "ok"], rank.values["operations"] - failed)
        counter.add_metric([rank.label, "failed"], failed)
    return counter


def _lateness(ranks: Sequence[_Rank]) -> Metric:
    text = "How long all others waited for this rank alone, where it was the last to submit an operation."
    summary = SummaryMetricFamily("sirtaki_lateness_seconds", text, labels=_RANK)
    for rank in ranks:
        summary.add_metric([rank.label], rank.values["late_times"], rank.values["late_seconds"])
    return summary


def _recoveries(ranks: Sequence[_Rank]) -> Metric:
    text = "How long the phases of an elastic job's changes took."
    histogram = HistogramMetricFamily("sirtaki_recovery_seconds", text, labels=["rank", "phase"])
    for rank in ranks:
        for phase, times in rank.values["recoveries"].items():
            ordered = sorted(times)
            counts = [(str(bound), bisect.bisect_right(ordered, bound)) for bound in RECOVERY_BUCKETS]
            histogram.add_metric([rank.label, phase], [*counts, ("+Inf", len(ordered))], sum(ordered))
    return histogram


def _process_metrics(ranks: Sequence[_Rank]) -> Iterator[Metric]:
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
