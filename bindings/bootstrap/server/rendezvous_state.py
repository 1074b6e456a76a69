"""All-gathers among ranks that arrive in any order: tracks payloads, waiting ranks, and ranks that are gone.

This module only decides; `rendezvous_server` communicates. An all-gather is identified by its key:
(generation, round), where the generation counts the init() calls of each process.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sirtaki.bindings.bootstrap.job import RendezvousError, name_ranks

RoundKey = tuple[int, int]


@dataclass(frozen=True)
class Answer:
    """The result of an all-gather for its waiting ranks.

    All payloads; or an error, and the missing ranks that caused it.
    """

    key: RoundKey
    waiting: tuple[int, ...]
    payloads: tuple[bytes, ...] = ()
    error: str = ""
    timed_out: bool = False
    missing: tuple[int, ...] = ()


@dataclass
class _Round:
    deadline: float
    payloads: dict[int, bytes] = field(default_factory=dict)


class RendezvousState:
    """The all-gathers of `size` ranks; each has to complete within `timeout` seconds of its first rank."""

    def __init__(self, size: int, timeout: float) -> None:
        self._size = size
        self._timeout = timeout
        self._open: dict[RoundKey, _Round] = {}
        self._departed: dict[int, tuple[float, str]] = {}  # rank: absent up to this generation, and why
        self._failed: dict[int, str] = {}  # generation: the reason of its failure

    def contribute(self, key: RoundKey, rank: int, payload: bytes, now: float) -> list[Answer]:
        """Records a rank's payload; returns answers if its all-gather completes, or can no longer complete.

        Raises RendezvousError if the rank has already contributed, or has not waited for the answer to its
        last contribution.
        """
        generation = key[0]
        if generation in self._failed:
            return [Answer(key, (rank,), error=f"the other ranks gave up before: {self._failed[generation]}")]
        others = [round_ for other, round_ in self._open.items() if other[0] == generation and other != key]
        if any(rank in round_.payloads for round_ in others):
            raise RendezvousError(f"rank {rank} has not waited for the others")
        current = self._open.setdefault(key, _Round(now + self._timeout))
        if rank in current.payloads:
            raise RendezvousError(
                f"two processes claim to be rank {rank}: give each process a rank of its own"
            )
        current.payloads[rank] = payload
        if len(current.payloads) == self._size:
            del self._open[key]
            ranks = tuple(range(self._size))
            return [Answer(key, ranks, tuple(current.payloads[r] for r in ranks))]
        return self._fail_incomplete()

    def note_departure(self, rank: int, up_to_generation: float, reason: str) -> list[Answer]:
        """Records that a rank no longer takes part, and answers the ranks that wait for it."""
        if up_to_generation > self._departed.get(rank, (-1.0, ""))[0]:
            self._departed[rank] = (up_to_generation, reason)
        return self._fail_incomplete()

    def has_failed(self, generation: int) -> bool:
        """Returns whether a generation has ended without all ranks."""
        return generation in self._failed

    def mark_failed(self, generation: int, error: str) -> bool:
        """Ends a generation: its all-gathers have failed. Returns False if it had failed before."""
        if generation in self._failed:
            return False
        self._failed[generation] = error
        self._open = {key: current for key, current in self._open.items() if key[0] != generation}
        return True

    def expire(self, now: float) -> list[Answer]:
        """Answers the ranks that have waited too long."""
        late = [key for key, current in self._open.items() if current.deadline <= now]
        return [self._expire(key) for key in late]

    def next_deadline(self) -> float | None:
        return min((current.deadline for current in self._open.values()), default=None)

    def _expire(self, key: RoundKey) -> Answer:
        error = f"{self._describe_arrivals(key)} ({self._timeout:g} s after the first)"
        return self._fail(key, error, self._missing(key), timed_out=True)

    def _fail_incomplete(self) -> list[Answer]:
        answers = []
        for key in list(self._open):
            departed = tuple(
                rank for rank in self._missing(key) if self._departed.get(rank, (-1.0, ""))[0] >= key[0]
            )
            if departed:
                error = (
                    f"{self._describe_arrivals(key)}, but rank {departed[0]} {self._departed[departed[0]][1]}"
                )
                answers.append(self._fail(key, error, departed))
        return answers

    def _fail(self, key: RoundKey, error: str, missing: tuple[int, ...], timed_out: bool = False) -> Answer:
        waiting = tuple(self._open.pop(key).payloads)
        self._failed[key[0]] = error
        return Answer(key, waiting, error=error, timed_out=timed_out, missing=missing)

    def _missing(self, key: RoundKey) -> tuple[int, ...]:
        return tuple(rank for rank in range(self._size) if rank not in self._open[key].payloads)

    def _describe_arrivals(self, key: RoundKey) -> str:
        missing = self._missing(key)
        arrived = self._size - len(missing)
        return f"{arrived} of {self._size} ranks are here; waiting for {name_ranks(missing)}"
