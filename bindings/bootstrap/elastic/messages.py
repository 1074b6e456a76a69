"""The messages between a worker and hvdrun's arbiter, on the worker's connection to the rendezvous.

docs/design/elastic_protocol.md says when each is sent. Each names the generation that it is about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, get_type_hints

from sirtaki.bindings.bootstrap.connection.wire import TEXT_LIMIT, Frame, MessageKind, printable


class Message:
    """A message; each kind is a class. Fields are numbers, texts, truth values, or lists of these."""

    def __init_subclass__(cls, kind: MessageKind) -> None:
        _CLASSES[kind], _KINDS[cls] = cls, kind


_CLASSES: dict[MessageKind, type[Message]] = {}
_KINDS: dict[type[Message], MessageKind] = {}


@dataclass(frozen=True)
class Enlist(Message, kind=MessageKind.ENLIST):
    """A worker is ready for the next generation.

    Attributes:
        generation: the one that it has left; 0 if it is new.
        reason: "new"; "changed": it has left at the agreed commit; "lost": its world has failed.
        commit: the number of its last commit; -1 if it is new.
        can_restore: whether it can return to that commit by itself.
        culprit: the rank that its context blames, in the generation that it has left; -1 for none.
        kind: the kind of the failure, a name of the core's table of statuses.
        text: the failure.
        has_checkpoints: whether new workers could start from a checkpoint if all are lost.
        unreachable: ranks on other hosts that it had to connect to and could not reach, one for each host.
    """

    generation: int
    reason: str
    commit: int = -1
    can_restore: bool = False
    culprit: int = -1
    kind: str = ""
    text: str = ""
    has_checkpoints: bool = False
    unreachable: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Received(Message, kind=MessageKind.RECEIVED):
    """A worker has linked, and has the state of the generation's commit."""

    generation: int


@dataclass(frozen=True)
class Counted(Message, kind=MessageKind.COUNTED):
    """Answers `Change`: the number of checks that the worker has started.

    The worker waits in its next check.
    """

    generation: int
    question: int
    checks: int


@dataclass(frozen=True)
class Returned(Message, kind=MessageKind.RETURNED):
    """The training function has returned on a worker."""

    generation: int


@dataclass(frozen=True)
class Drain(Message, kind=MessageKind.DRAIN):
    """A worker was asked to end (SIGTERM): it takes part until the next change."""

    generation: int


@dataclass(frozen=True)
class Fence(Message, kind=MessageKind.FENCE):
    """A worker asks whether it still is a rank of the job. `question` numbers its questions."""

    generation: int
    question: int


@dataclass(frozen=True)
class World(Message, kind=MessageKind.WORLD):
    """A worker is a member of a generation.

    Attributes:
        generation: its number.
        rank: of the receiver.
        slots: the slot of each member, by rank, as "host:index".
        workers: the number of each member, by rank.
        initial: the number of ranks of the first generation.
        job, address: the generation's rendezvous; the job's id has the digest of the members in it.
        commit: the commit with which the generation begins.
        current: the ranks that can restore that commit by themselves. Rank 0 is one of them.
        joined: the number of ranks that are new.
        text: what has changed, for people.
        elapsed: microseconds from the first news that has ended the generation before to this message; 0 if
            there was no such news.
    """

    generation: int
    rank: int
    slots: list[str]
    workers: list[int]
    initial: int
    job: str
    address: str
    commit: int
    current: list[int]
    joined: int
    text: str
    elapsed: int


@dataclass(frozen=True)
class Change(Message, kind=MessageKind.CHANGE):
    """The members are about to change: they are to say how many checks they have counted.

    `question` numbers the changes of a generation that the arbiter has asked for.
    """

    generation: int
    question: int


@dataclass(frozen=True)
class LeaveAt(Message, kind=MessageKind.LEAVE_AT):
    """All members leave at this check; 0: none leaves, the change is off."""

    generation: int
    check: int


@dataclass(frozen=True)
class Over(Message, kind=MessageKind.OVER):
    """A generation has ended: its members enlist again."""

    generation: int
    text: str


@dataclass(frozen=True)
class Standing(Message, kind=MessageKind.STANDING):
    """Answers `Fence`: whether the worker is still a rank, or has returned as a rank."""

    generation: int
    question: int
    is_rank: bool


@dataclass(frozen=True)
class End(Message, kind=MessageKind.END):
    """A worker ends, with this exit code."""

    code: int
    text: str


def pack(message: Message) -> Frame:
    """Returns a message as it is sent; long texts are cut."""
    values: dict[str, Any] = dict(vars(message))  # no copies of lists, as asdict() makes of each member
    if "text" in values:
        values["text"] = values["text"][:TEXT_LIMIT]
    return Frame.of(_KINDS[type(message)], values)


def unpack(frame: Frame) -> Message:
    """Parses a message from an authenticated peer. Raises RendezvousError if it is malformed."""
    if (cls := _CLASSES.get(frame.kind)) is None:
        raise frame.unexpected()
    values = frame.fields(**get_type_hints(cls))
    return cls(*(printable(value, TEXT_LIMIT) if isinstance(value, str) else value for value in values))
