"""A rank's observations: its statistics, from the core's counters, and its timeline."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import call, ffi, lib, text
from sirtaki.bindings.observing.step_counters import CompressionCounters


class Lateness(TypedDict):
    """How often a rank was the only late submitter of an operation, and how long the other ranks waited.

    Attributes:
        times: the number of such operations.
        mean_seconds, max_seconds: how long all others waited for that rank alone.

    Example:
        lateness: list[hvd.Lateness] = hvd.stats()["lateness"]
        latest = max(range(hvd.size()), key=lambda rank: lateness[rank]["times"])
        print(f"rank {latest} was late {lateness[latest]['times']} times")
    """

    times: int
    mean_seconds: float
    max_seconds: float


class Durations(TypedDict):
    """Durations, counted by range.

    Attributes:
        bounds: the upper bounds of all ranges but the last, in seconds, ascending.
        counts: the number of durations in each range, one more than there are bounds.
        total_seconds: the sum of all durations.
    """

    bounds: list[float]
    counts: list[int]
    total_seconds: float


class Activity(TypedDict):
    """The operations of a rank that have not ended.

    Attributes:
        operations: their number; if it is 0, the rank is busy with other work, and the rest is empty.
        name, kind: of the oldest one, such as "gradient.fc.weight" and "all-reduce".
        process_set: the number of the ranks' set that it belongs to; 0: all ranks.
        is_agreed: whether all ranks have submitted it; otherwise it waits for other ranks.
        seconds: since this rank has submitted it; 0 if as many as `--recorder-operations` came later.
    """

    operations: int
    name: str
    kind: str
    process_set: int
    is_agreed: bool
    seconds: float


class TensorsPerPlan(TypedDict):
    """The distribution of the number of tensors fused into a plan."""

    mean: float
    max: int


class OperationCount(TypedDict):
    """The ended operations of a kind, by the backend that moved them.

    Attributes:
        kind: such as "all-reduce".
        backend: "shared memory" within a host; "links" between ranks, by sockets; "hierarchical" for both;
            "nccl" or, through the memory of the host, "staged" for tensors on GPUs; "single rank" where
            nobody else takes part; "none" for operations that move nothing, and for those that failed.
        operations: their number, successful or not; every tensor of a fused plan counts.
        failed: number of those that ended with an error.
        bytes: of this rank's tensors in their plans.
        algorithm: of the last one: of an all-reduce "whole", "sliced" or "in place" in shared memory, or
            "direct", "ring", "recursive_doubling" or "quantised" over links; "" where there is only one.
    """

    kind: str
    backend: str
    operations: int
    failed: int
    bytes: int
    algorithm: str


class SentBytes(TypedDict):
    """The bytes that a rank has sent over links to the ranks of a host, before any encryption.

    Control messages are counted, too. Bytes within shared memory, and those that NCCL sends, are not.

    Attributes:
        peer_host: the name of that host.
        transport: "tcp", "tls", "unix" for the sockets within a host, or "ring" for the control messages that
            go through shared memory.
        bytes: their number.
    """

    peer_host: str
    transport: str
    bytes: int


class TensorTimes(TypedDict):
    """The operations of the same name among the last 1,024 of a rank.

    Attributes:
        name: of the tensor, shortened where it is long.
        operations: their number.
        exposed_seconds: time in which the program waited for gradients and any of them was in flight, added
            up over the operations; None where that is not measured (see `Steps.exposed_seconds`).
        wait_seconds: until all ranks had submitted them and agreed on them.
        transfer_seconds: from then on.
    """

    name: str
    operations: int
    exposed_seconds: float | None
    wait_seconds: float
    transfer_seconds: float


class WireBytes(TypedDict):
    """The bytes that a rank has sent in a wire format, as with `Compression.int8`.

    Attributes:
        unencoded: their size as elements of the tensors.
        encoded: their size as sent.
        saved: the difference.
    """

    unencoded: int
    encoded: int
    saved: int


class RankChange(TypedDict):
    """A change of the ranks of an elastic job, as this rank has seen it.

    Attributes:
        generation: the number of the membership that began.
        size: its number of ranks.
        rank: this rank there.
        commit: the commit with which it began.
        reason: the text that hvdrun has shown: who was lost, and why.
        lost: the ranks of this process's previous membership that do not belong to the new one.
        joined: the ranks of the new membership that did not belong to that one.
        detect_seconds: from the first news of the change to this rank's leaving its world. The first news of
            a loss is that hvdrun notices it, or a rank reports a broken link or an exceeded deadline; of a
            host that was given up for its silence, that it was last heard of. A planned change begins when
            hvdrun asks the ranks to leave. 0 for a rank that has left before, and for one that is new.
        agree_seconds: from this rank's leaving to the new membership. If further ranks were lost meanwhile,
            to the last one of several.
        rebuild_seconds: until this rank was linked to all others.
        state_seconds: until it had the state of the commit.
        first_step_seconds: until the training function's first `commit()` or `check_host_updates()`; None
            before that.
    """

    generation: int
    size: int
    rank: int
    commit: int
    reason: str
    lost: list[int]
    joined: list[int]
    detect_seconds: float
    agree_seconds: float
    rebuild_seconds: float
    state_seconds: float
    first_step_seconds: float | None


class Compressed(TypedDict):
    """The gradients that were compressed with a memory of what is left out: `Compression.powersgd` etc.

    Bytes are those that a rank has to send at least, without frames: of an all-reduce 2 (n - 1) / n times its
    data, of an all-gather n - 1 times its rows, over n ranks.

    Attributes:
        exchanges: the number of exchanges in which gradients were compressed.
        exact_bytes: what these gradients would have cost uncompressed.
        sent_bytes: what they have cost.
        relative_error: the norm of what the last exchange has left out, divided by that of what this rank
            had to send; 0 without error feedback.
    """

    exchanges: int
    exact_bytes: int
    sent_bytes: int
    relative_error: float


class Steps(TypedDict):
    """The training steps of a rank: updates by its distributed optimizers.

    A step lasts from the end of the one before it to its own end.

    Attributes:
        count: their number since init().
        number: the same; in an elastic job, with those that this process has committed in earlier
            generations, and without those that a change of the ranks has undone.
        times: how long they took, without the first, whose beginning is not known.
        last_seconds: how long the last one took.
        age_seconds: the time since it has ended.
        exposed_seconds: time in which the program waited for gradients and put them in place, or exchanged
            parameters in its step; also for those of a gradient tape, which counts no steps. None where it
            did not wait, as on GPUs, whose streams do, and in compiled programs.
        productive_seconds: the duration of all steps, in an elastic job of the committed ones. A step that
            took more than twice the median of the last 15, because of an evaluation, a checkpoint or a
            stall, counts as that median.
    """

    count: int
    number: int
    times: Durations
    last_seconds: float
    age_seconds: float
    exposed_seconds: float | None
    productive_seconds: float


class Statistics(TypedDict):
    """The counters of a rank since init().

    Attributes:
        rank, size: this rank, and the number of ranks.
        operations: number of operations that have ended, successfully or not; every tensor of a fused plan
            counts.
        failed: number of those that ended with an error.
        plans: number of collectives; a fused one counts once.
        tensors_per_plan: the extent of fusion.
        bytes: of this rank's tensors in those plans.
        by_backend: the operations that have ended, by their kind and the backend that has moved them.
        sent: the bytes that this rank has sent over links, by host and transport.
        cache_hits, cache_misses: operations that the response cache already held, and those that had to be
            sent in full.
        waiting_seconds: time in which any operation of this rank waited for other ranks to submit it, too. It
            includes the negotiation itself, and time in which the program did other work meanwhile.
        moving_seconds: time in which data moved.
        busbw: 10^9 bytes per second while data moved, counted so that worlds of any size compare: the bytes
            that a rank has to send at least, divided by `moving_seconds`. 0 if nothing has moved.
        wire_bytes: what this rank has sent in a wire format, and how much less that was than without one.
        wait: how long each ended operation had to wait until all ranks had submitted it and agreed on it.
            Left out are operations that failed before, and those that `--recorder-operations` others have
            overtaken.
        transfer: how long the same operations took from then on.
        stalls: the number of reports of stalls, such as "rank 1 has not submitted 'loss'", that named this
            rank.
        lateness: the lateness of each rank, by rank. Equal on all ranks; the coordinator sends it with its
            answers, at most twice a second.
        changes: the changes of the ranks since this process has joined; empty in a job that is not elastic.
        compression: the gradients that were compressed with error feedback.
        steps: the training steps.

    Example:
        stats: hvd.Statistics = hvd.stats()
        print(f"{stats['tensors_per_plan']['mean']:.1f} tensors per plan, {stats['steps']['count']} steps")
    """

    rank: int
    size: int
    operations: int
    failed: int
    plans: int
    tensors_per_plan: TensorsPerPlan
    bytes: int
    by_backend: list[OperationCount]
    sent: list[SentBytes]
    cache_hits: int
    cache_misses: int
    waiting_seconds: float
    moving_seconds: float
    busbw: float
    wire_bytes: WireBytes
    wait: Durations
    transfer: Durations
    stalls: int
    lateness: list[Lateness]
    changes: list[RankChange]
    compression: Compressed
    steps: Steps


def statistics(context: Context) -> Statistics:
    """Returns this rank's counters since the context was started. Other ranks need not call it."""
    by_rank = ffi.new("srt_lateness[]", context.size)
    counted = _counted(context, by_rank)
    plans = counted.plans
    return Statistics(
        rank=context.rank,
        size=context.size,
        operations=counted.operations,
        failed=counted.failed,
        plans=plans,
        tensors_per_plan=TensorsPerPlan(
            mean=counted.planned_tensors / plans if plans else 0.0, max=counted.largest_plan
        ),
        bytes=counted.bytes,
        by_backend=operation_counts(context),
        sent=sent_bytes(context),
        cache_hits=counted.cache_hits,
        cache_misses=counted.cache_misses,
        waiting_seconds=counted.waiting,
        moving_seconds=counted.moving,
        busbw=counted.bus_bytes / counted.moving / 1e9 if counted.moving else 0.0,
        wire_bytes=WireBytes(
            unencoded=counted.unencoded_bytes,
            encoded=counted.encoded_bytes,
            saved=counted.unencoded_bytes - counted.encoded_bytes,
        ),
        wait=_durations(counted.wait),
        transfer=_durations(counted.transfer),
        stalls=counted.stalls,
        lateness=[_lateness(late) for late in by_rank],
        changes=[change.copy() for change in context.survivors.changes] if context.survivors else [],
        compression=_compressed(context.compression),
        steps=_steps(context),
    )


def _compressed(counted: CompressionCounters) -> Compressed:
    return Compressed(
        exchanges=counted.exchanges,
        exact_bytes=round(counted.exact_bytes),
        sent_bytes=round(counted.sent_bytes),
        relative_error=counted.relative_error,
    )


def _steps(context: Context) -> Steps:
    counted, survivors = context.steps.read(), context.survivors
    is_elastic = survivors is not None and survivors.membership is not None
    number, productive = counted.number, counted.productive
    if survivors is not None and is_elastic:
        number = survivors.committed_steps + number - context.steps.committed
        productive = survivors.committed_seconds
    return Steps(
        count=counted.number,
        number=number,
        times=_durations(counted),
        last_seconds=counted.last,
        age_seconds=counted.age,
        exposed_seconds=context.steps.exposed.seconds,
        productive_seconds=productive,
    )


def operation_counts(context: Context) -> list[OperationCount]:
    """Returns the counts that are not 0 since the context was started. Other ranks need not call it."""
    rows = _rows("srt_operation_count", lib.srt_count_operations, context)
    return [_fields_of(OperationCount, row) for row in rows]


def sent_bytes(context: Context) -> list[SentBytes]:
    """Returns the counts that are not 0 since the context was started. Other ranks need not call it."""
    rows = _rows("srt_sent_bytes", lib.srt_count_sent_bytes, context)
    return [_fields_of(SentBytes, row) for row in rows]


def slowest_tensors(context: Context, most: int) -> list[TensorTimes]:
    """Returns the tensors with the longest exposed time, or the longest wait where that is not measured.

    Other ranks need not call it.
    """
    waits = context.steps.exposed.recent
    moments = [round(moment * 1e9) for wait in waits for moment in wait]
    rows = ffi.new("srt_tensor_times[]", most)
    count = lib.srt_slowest_tensors(context.pointer, moments, len(waits), rows, most)
    return [
        TensorTimes(
            name=text(row.name),
            operations=row.operations,
            exposed_seconds=row.exposed if waits else None,
            wait_seconds=row.wait,
            transfer_seconds=row.transfer,
        )
        for row in rows[0:count]
    ]


def _rows(ctype: str, count: Any, context: Context) -> Any:
    """Returns the rows that exist now; further rows may appear at any time.

    The array owns its rows, so it must live as long as they are read.
    """
    room = count(context.pointer, ffi.NULL, 0)
    rows = ffi.new(f"{ctype}[]", room)
    count(context.pointer, rows, room)
    return rows


def ended_operations(context: Context) -> tuple[int, int]:
    """Returns how many operations have ended since the context was started, and the bytes of their plans.

    Cheaper than `statistics`.
    """
    counted = _counted(context, ffi.NULL)
    return int(counted.operations), int(counted.bytes)


def tensors_of_others(context: Context) -> int:
    """Returns how many tensors of plans this rank did not submit, because it had joined.

    It is too small by the operations of this rank that were refused, and too large by those in flight.
    """
    counted = _counted(context, ffi.NULL)
    return int(counted.planned_tensors - counted.operations)


def failed_operations(context: Context) -> int:
    """Returns the number of failed or rejected operations since the context was started.

    A failed operation has ended with an error; rejected operations could not be queued, and those of a batch
    count once.
    """
    return int(_counted(context, ffi.NULL).failed) + context.refused_batches


def _counted(context: Context, by_rank: Any) -> Any:
    counted = ffi.new("srt_statistics *", {"struct_size": ffi.sizeof("srt_statistics")})
    lib.srt_stats(context.pointer, counted, by_rank)
    return counted


def activity(context: Context) -> Activity:
    """Returns the operations of this rank that have not ended. Other ranks need not call it."""
    found = ffi.new("srt_activity *", {"struct_size": ffi.sizeof("srt_activity")})
    lib.srt_get_activity(context.pointer, found)
    pending: Activity = _fields_of(Activity, found)
    pending["is_agreed"] = bool(found.is_agreed)
    return pending


def _fields_of(kind: Any, struct: Any) -> Any:
    """Returns a TypedDict with the fields that a struct of the core has under the same names."""
    values = {name: getattr(struct, name) for name in kind.__annotations__}
    for name, value in values.items():
        if isinstance(value, ffi.CData):
            values[name] = text(value) if value else ""
    return kind(**values)


def _durations(histogram: Any) -> Durations:
    return Durations(
        bounds=list(histogram.bounds), counts=list(histogram.counts), total_seconds=histogram.total
    )


def _lateness(late: Any) -> Lateness:
    mean = late.total / late.times if late.times else 0.0
    return Lateness(times=late.times, mean_seconds=mean, max_seconds=late.longest)


def start_timeline(context: Context, path: str, mark_decisions: bool) -> None:
    """Starts this rank's timeline, in `path` on rank 0, in `path`.rank<N> on any other rank.

    In an elastic job it goes on in the following worlds: see sirtaki.bindings.observing.elastic_timeline.
    Raises OSError.
    """
    survivors = context.survivors
    if survivors is not None and (context.is_provisional or survivors.membership is not None):
        from sirtaki.bindings.observing.elastic_timeline import ElasticTimeline  # other jobs need none of it

        timeline = survivors.timeline
        if timeline is None or (timeline.path, timeline.mark_decisions) != (path, mark_decisions):
            stop_timeline(context)
            timeline = survivors.timeline = ElasticTimeline(path, mark_decisions)
        timeline.enter(context)
        return
    file = path if context.rank == 0 else f"{path}.rank{context.rank}"
    context.timeline.start(context, file, mark_decisions)


def stop_timeline(context: Context) -> None:
    """Completes the timeline file; does nothing if none is being written."""
    if context.survivors is not None and context.survivors.timeline is not None:
        context.survivors.timeline.leave()
    context.timeline.stop(context)


def start_timeline_of_environment(context: Context, environment: Mapping[str, str] = os.environ) -> None:
    """Starts the timeline that SIRTAKI_TIMELINE (or HOROVOD_TIMELINE) requests.

    "DYNAMIC", Horovod's value for "not before start_timeline", requests nothing: that call always works here.
    A worker of an elastic job starts it before its first world, and not in each.
    """
    if "SIRTAKI_WORKER" in environment and not context.is_provisional:
        return

    def look_up(name: str) -> str:
        return environment.get(f"SIRTAKI_{name}") or environment.get(f"HOROVOD_{name}") or ""

    path = look_up("TIMELINE")
    if path and path != "DYNAMIC":
        start_timeline(context, path, look_up("TIMELINE_MARK_CYCLES") not in ("", "0"))


# ---- Lets the core inspect the program's stack while other ranks wait for this rank --------------------
# A thread answers the core's queries with the main thread's stack; it sleeps in the kernel until one arrives.
# For a program that holds the interpreter's lock, faulthandler writes the stacks to an unnamed file when it
# receives a signal that nothing else uses. `core/observe/records/program_stack.h` defines when each of the
# two may be used.


_OWN_FOLDER = os.fsencode(Path(__file__).parents[2])
_QUERY_BYTES = 4
_MAX_FRAMES = 100


@dataclass(frozen=True)
class _Source:
    """The sources of stacks in this process."""

    signal_number: int
    file: int
    query_fd: int  # the descriptor of the core's end
    main_thread: int


def register_stack_source(context: Context) -> None:
    """Lets the context inspect this process's stack, if possible. Must precede `context.start()`."""
    source = _source()
    if source is None:
        return
    folder = ffi.new("char[]", _OWN_FOLDER)
    described = ffi.new("srt_stack_source *")
    described.interpreter_fd, described.file_fd = source.query_fd, source.file
    described.signal_number, described.thread = source.signal_number, source.main_thread
    described.own_folder = folder
    call(lib.srt_watch_stack, context.pointer, described)


@cache
def _source() -> _Source | None:
    """Returns the source, created once per process; None where there can be none."""
    number, main = _unused_signal(), threading.main_thread().ident
    if not number or main is None:
        return None
    try:
        file = _anonymous_file()
        faulthandler.register(number, file=file, all_threads=True, chain=False)
        core_end, thread_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(
            target=_answer_queries, args=(thread_end, main), name="sirtaki stack", daemon=True
        ).start()
    except (OSError, RuntimeError, ValueError):
        return None
    return _Source(number, file, core_end.detach(), main)


def _answer_queries(thread_end: socket.socket, thread: int) -> None:
    while query := thread_end.recv(_QUERY_BYTES):
        frame = sys._current_frames().get(thread)
        try:
            thread_end.send(query + _format_stack(thread, frame).encode(errors="replace"))
        except OSError:
            return


def _format_stack(thread: int, frame: FrameType | None) -> str:
    """Formats a thread's stack as faulthandler does, innermost frame first."""
    lines = [f"Thread 0x{thread:016x} (most recent call first):"]
    while frame is not None and len(lines) <= _MAX_FRAMES:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno or 0} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines) + "\n"


def _unused_signal() -> int:
    """Returns the highest real-time signal without a handler, as least likely to be in use; 0 if none."""
    for number in range(signal.SIGRTMAX - 1, signal.SIGRTMIN, -1):
        if signal.getsignal(number) == signal.SIG_DFL:
            return number
    return 0


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sirtaki-stack")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
