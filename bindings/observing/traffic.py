"""A rank's operations by kind and backend, the bytes that it has sent, and its slowest tensors."""

from __future__ import annotations

from typing import Any, TypedDict

from sirtaki.bindings.context import Context
from sirtaki.bindings.library import ffi, lib, text


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


def operation_counts(context: Context) -> list[OperationCount]:
    """Returns the counts that are not 0 since the context was started. Other ranks need not call it."""
    return [
        OperationCount(
            kind=text(row.kind),
            backend=text(row.backend),
            operations=row.operations,
            failed=row.failed,
            bytes=row.bytes,
            algorithm=text(row.algorithm),
        )
        for row in _rows("srt_operation_count", lib.srt_count_operations, context)
    ]


def sent_bytes(context: Context) -> list[SentBytes]:
    """Returns the counts that are not 0 since the context was started. Other ranks need not call it."""
    return [
        SentBytes(peer_host=text(row.peer_host), transport=text(row.transport), bytes=row.bytes)
        for row in _rows("srt_sent_bytes", lib.srt_count_sent_bytes, context)
    ]


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
