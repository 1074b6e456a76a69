"""The orders of the arbiter to the job that carries them out, and the places where workers run."""

from __future__ import annotations

from dataclasses import dataclass

from sirtaki.runner.rendezvous.elastic.messages import Message, World


@dataclass(frozen=True, order=True)
class Slot:
    """A place for a worker: a host, and an index on that host, which is the worker's local rank."""

    host: str
    index: int

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"

    @classmethod
    def of(cls, text: str) -> Slot:
        """Returns the slot that `str` has written."""
        host, _, index = text.rpartition(":")
        return cls(host, int(index))


class Action:
    """An order."""


@dataclass(frozen=True)
class Start(Action):
    """Starts a worker, with a number that no other worker has had, in a free slot."""

    worker: int
    slot: Slot


@dataclass(frozen=True)
class Kill(Action):
    """Kills a worker; its end is awaited before the next generation begins."""

    worker: int


@dataclass(frozen=True)
class Send(Action):
    """Sends a message to a worker."""

    worker: int
    message: Message


@dataclass(frozen=True)
class Open(Action):
    """Opens the rendezvous of a generation, and sends its members their places.

    The places lack the name and the address of the rendezvous, which the opener fills in. The name has to
    contain the digest of the members, so that nobody else is accepted. They also lack the time that has
    passed since `first_news`, the moment since when the generation before was to end; None if there was none.
    """

    generation: int
    members: tuple[int, ...]  # worker numbers, by rank
    places: tuple[World, ...]
    first_news: float | None = None  # time.monotonic()

    @property
    def slots(self) -> list[Slot]:
        """Returns the slots of the members, by rank."""
        return [Slot.of(text) for text in self.places[0].slots]


@dataclass(frozen=True)
class Close(Action):
    """Closes the rendezvous of the generation that has ended."""


@dataclass(frozen=True)
class Say(Action):
    """Shows a line to the user."""

    text: str


@dataclass(frozen=True)
class Finish(Action):
    """Ends the job, and all workers that still run, with this exit code.

    `culprit` is the worker whose standard error explains it; None if there is none.
    """

    code: int
    text: str = ""
    culprit: int | None = None
