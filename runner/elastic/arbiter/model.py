"""The arbiter's model: the user's rules, slots, orders to the job, phases and workers."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sirtaki.bindings.bootstrap.elastic.messages import Enlist, Fence, Message, Standing, World

LOST, EXIT = "lost", "exit"  # the values of --elastic-survive
RANK, HOST = "rank", "host"  # the values of --elastic-failure-domain
_MOST_DOUBLINGS = 60  # 2 to this power is beyond any limit, and a float


@dataclass(frozen=True)
class Rules:
    """The user's rules.

    Attributes:
        start: the number of workers with which the job starts.
        minimum, maximum: bounds of the number of ranks.
        timeout: seconds to wait for enough workers.
        reset_limit: losses that end the job when one more happens; None for any number.
        cooldown: the shortest and the longest pause of a slot, in seconds, from its second loss on.
        survive: the ends of a worker that the job survives: LOST, or EXIT for any.
        domain: what is given up with a lost worker: RANK for itself, or HOST for all workers of its host.
        patience: seconds to wait for a member that lives, but does not leave its generation.
        are_arguments: whether the user gives the rules as arguments of a call, not as options of hvdrun.
    """

    start: int
    minimum: int
    maximum: int
    timeout: float = 600.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (1.0, 60.0)
    survive: str = LOST
    domain: str = RANK
    patience: float = 600.0
    are_arguments: bool = False

    def name_of(self, option: str) -> str:
        """Returns how the user calls an option, for a message: --reset-limit, or reset_limit in Python."""
        return option[2:].replace("-", "_") if self.are_arguments else option


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


def doubled(shortest: float, longest: float, times: int) -> float:
    """Returns the shortest pause in seconds, doubled `times` times, at most the longest pause."""
    return min(shortest * 2.0 ** min(times, _MOST_DOUBLINGS), longest)


# ---- Orders to the job, which carries them out -------------------------------------------------------


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


# ---- The state of the job -----------------------------------------------------------------------------


class Phase(enum.Enum):
    """The phase of the current generation."""

    FORMING = "forming"  # workers enlist for the next one
    LINKING = "linking"  # its members link, and receive the state
    RUNNING = "running"
    OVER = "over"  # the job has ended


class Status(enum.Enum):
    """A worker's part in the job."""

    STARTING = "starting"  # it has not enlisted yet
    ENLISTED = "enlisted"  # it waits for a generation
    MEMBER = "member"  # it belongs to the current generation
    RETURNED = "returned"  # its training function has returned
    ENDED = "ended"  # its process has ended, or was told to


@dataclass
class Worker:
    """A worker.

    Attributes:
        number: never used again.
        slot: its place, for life.
        started: when it was started (time.monotonic()).
        first_generation: the first one that it was a member of; 0 for none.
        rank: in the current generation, or the last one that it was a member of; -1 for none.
        report: its last enlistment.
        checks: its answer to the last question for it; -1 if it has not answered.
        has_received: whether it has the state of the current generation.
        is_draining: whether it leaves at the next change.
        was_asked: whether its process was asked to end (SIGTERM).
        has_slot: whether its slot may still be used.
        is_given_up: whether it was killed by the arbiter.
        is_running: whether its process still runs, perhaps after it was told to end.
    """

    number: int
    slot: Slot
    started: float
    status: Status = Status.STARTING
    first_generation: int = 0
    rank: int = -1
    report: Enlist | None = None
    checks: int = -1
    has_received: bool = False
    is_draining: bool = False
    was_asked: bool = False
    has_slot: bool = True
    is_given_up: bool = False
    is_running: bool = True

    @property
    def is_alive(self) -> bool:
        return self.status is not Status.ENDED

    def answer(self, question: Fence) -> Standing:
        """Returns whether nobody goes on in its place. That of a newcomer counts, too."""
        is_rank = self.is_alive and not self.is_given_up
        return Standing(question.generation, question.question, is_rank)

    @property
    def commit(self) -> int:
        """Returns the number of the last commit that it has reported; -1 for none."""
        return self.report.commit if self.report is not None else -1

    @property
    def can_restore(self) -> bool:
        return self.report is not None and self.report.can_restore and self.commit >= 0

    def give_up(self) -> list[Action]:
        """Returns the orders that give it up: its process is killed, once."""
        is_new, self.is_given_up = not self.is_given_up, True
        return [Kill(self.number)] if is_new else []

    @property
    def name(self) -> str:
        """Formats "rank 2", or "the process in slot localhost:2" for a worker that was never a rank."""
        return f"rank {self.rank}" if self.rank >= 0 else f"the process in slot {self.slot}"


class Workers:
    """All workers so far, by their numbers."""

    def __init__(self) -> None:
        self._all: dict[int, Worker] = {}

    def add(self, slot: Slot, now: float) -> Worker:
        """Returns a new worker."""
        worker = Worker(len(self._all), slot, now)
        self._all[worker.number] = worker
        return worker

    def __getitem__(self, number: int) -> Worker:
        return self._all[number]

    def __contains__(self, number: int) -> bool:
        return number in self._all

    def living(self, *statuses: Status) -> list[Worker]:
        """Returns the workers that have not ended, in the order of their numbers: all, or with a status."""
        return [
            worker
            for worker in self._iterate()
            if worker.is_alive and (not statuses or worker.status in statuses)
        ]

    def all(self) -> list[Worker]:
        return list(self._iterate())

    def give_up_host(self, host: str) -> list[Action]:
        """Returns the orders that give up all workers of a host which have not returned."""
        living = self.living(Status.STARTING, Status.ENLISTED, Status.MEMBER)
        return [order for worker in living if worker.slot.host == host for order in worker.give_up()]

    def may_have_state(self, has_trained: bool) -> bool:
        """Returns whether a worker may have the state of the training, which only members have had."""
        return any(
            worker.status is Status.MEMBER or worker.commit >= 0 or not has_trained
            for worker in self.living(Status.ENLISTED, Status.MEMBER)
        )

    def used_slots(self) -> set[Slot]:
        """Returns the slots in which a process runs, including processes that were told to end."""
        return {worker.slot for worker in self._iterate() if worker.is_running}

    def _iterate(self) -> Iterator[Worker]:
        return iter(self._all.values())


# ---- The account of an elastic job: how long its ranks were training, and the lines that say so at the end


class Account:
    """The time in which the ranks were training: between the start of a generation and its end."""

    def __init__(self) -> None:
        self._training = 0.0
        self._was_training = False
        self._last = 0.0

    def note(self, is_training: bool, now: float) -> None:
        """Records whether the ranks train from now on."""
        if self._was_training:
            self._training += now - self._last
        self._was_training, self._last = is_training, now

    def summary(self, generations: int, losses: int, workers: Sequence[Worker], seconds: float) -> str:
        """Returns a line about a job that has taken so many seconds."""
        share = 100.0 * self._training / seconds if seconds > 0 else 0.0
        joined = sum(worker.first_generation > 1 for worker in workers)
        count = "1 generation" if generations == 1 else f"{generations} generations"
        times = f"they were training in {share:.1f} % of {seconds:.1f} s"
        return f"{count} of ranks, {count_losses(losses)}, {joined} joined; {times}"


def describe_separate_runs(runs: int, has_initialised: bool, runs_python: bool) -> str:
    """Returns a notice after a successful job that had no generation; "" if it ran a single process."""
    if runs <= 1:
        return ""
    missing = "hvd.init() or " * (not has_initialised) + "the function of hvd.elastic.run"
    text = f"no rank called {missing}: these were {runs} separate runs, which exchanged nothing"
    advice = "train in a function that @hvd.elastic.run decorates"
    advice = advice if has_initialised else f"call hvd.init() at the start of the script, and {advice}"
    return text + f". To train one model on all of them, {advice}" * runs_python


def count_losses(losses: int) -> str:
    """Formats "1 rank was lost" or "3 ranks were lost"."""
    return "1 rank was lost" if losses == 1 else f"{losses} ranks were lost"
