"""Parses the events of a timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sirtaki.runner.post_mortem import place_of
from sirtaki.runner.rendezvous.wire import printable
from sirtaki.runner.trace.operations import Operation
from sirtaki.runner.trace.trace import Ending, Failed, StatedClock

_MAX_STATUS, _MAX_NUMBER = 100, 1 << 62
_MOVING = ("PACK", "TRANSFER", "UNPACK")  # the slices of an operation's transfer


@dataclass
class OpenOperation:
    """An operation whose slices follow it in the file."""

    operation: Operation
    status: str
    error: str  # with a mismatch
    place: str  # of the program, with a mismatch
    has_slices: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether its slices are known: the core writes one for any duration."""
        return self.has_slices or self.operation.submitted == self.operation.ended

    def failed(self) -> Failed:
        """Returns it as an operation that ended with an error."""
        one = self.operation
        properties = (one.name, one.kind, one.bytes, self.status, one.track, one.submitted, one.ended)
        return Failed(*properties, self.error, self.place)

    def add_slice(self, event: dict[str, Any]) -> None:
        begin, name = nanoseconds(event["ts"]), event["name"]
        end = begin + nanoseconds(event["dur"])
        if event["tid"] != self.operation.track:
            return
        if not begin <= end < _MAX_NUMBER:
            raise OverflowError
        self.has_slices = True
        if name == "NEGOTIATE":
            self.operation = self.operation._replace(decided=end)
        elif name in _MOVING and not self.operation.started:
            self.operation = self.operation._replace(started=begin)


def opened(event: dict[str, Any], name: int, kind: int) -> OpenOperation:
    """Returns the operation of an event. Raises what a malformed event raises."""
    args, begin = event["args"], nanoseconds(event["ts"])
    operation = Operation(
        plan=int(args["plan"]),
        name=name,
        kind=kind,
        process_set=int(args["process_set"]),
        fused=int(args["fused"]),
        bytes=int(args["bytes"]),
        track=int(event["tid"]),
        submitted=begin,
        decided=begin,
        started=0,
        ended=begin + nanoseconds(event["dur"]),
    )
    if not all(0 <= number < _MAX_NUMBER for number in operation):
        raise OverflowError
    error, place = printable(str(args.get("error", ""))), printable(place_of(args.get("stack", [])))
    return OpenOperation(operation, printable(str(args["status"]), _MAX_STATUS), error, place)


def read_ending(args: dict[str, Any]) -> Ending:
    texts = {name: printable(str(args[name])) for name in ("status", "reason", "doing")}
    return Ending(culprit=int(args["culprit"]), **texts)


def read_clock(args: dict[str, Any]) -> StatedClock:
    wall, error = args.get("wall_minus_monotonic_ns"), args.get("error_ns")
    return StatedClock(
        None if wall is None else int(wall),
        "offset_ns" in args,
        int(args.get("offset_ns", 0)),
        None if error is None else int(error),
    )


def nanoseconds(microseconds: str | int) -> int:
    """Converts a time without rounding: of 2**33 µs, a float has not all the nanoseconds."""
    whole, _, part = str(microseconds).partition(".")
    return int(whole) * 1000 + int(part.ljust(3, "0")[:3] or 0)
