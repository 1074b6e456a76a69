"""Chooses the members of a generation, their ranks, and the commit that it starts from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sirtaki.bindings.bootstrap.elastic.messages import Change, Counted, LeaveAt, World
from sirtaki.runner.elastic.arbiter.model import Action, Send, Slot, Status, Worker, doubled


@dataclass(frozen=True)
class Formation:
    """A generation to be.

    Attributes:
        members: its workers, by rank.
        commit: the commit with which it begins.
        current: the ranks that can restore that commit by themselves; rank 0 is one of them.
    """

    members: Sequence[Worker]
    commit: int
    current: Sequence[int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Returns the numbers of the members, by rank."""
        return tuple(member.number for member in self.members)

    @property
    def summary(self) -> str:
        """Formats "3 ranks from commit 17 on"."""
        return f"{len(self.members)} rank{'s' * (len(self.members) > 1)} from commit {self.commit} on"

    def places(self, generation: int, initial: int, text: str) -> tuple[World, ...]:
        """Returns the message to each member, without what the opener of the rendezvous fills in."""
        first = World(
            generation=generation,
            rank=0,
            slots=[str(member.slot) for member in self.members],
            workers=list(self.numbers),
            initial=initial,
            job="",
            address="",
            commit=self.commit,
            current=list(self.current),
            joined=sum(member.first_generation in (0, generation) for member in self.members),
            text=text,
            elapsed=0,
        )
        return tuple(replace(first, rank=rank) for rank in range(len(self.members)))


class Unrestorable(Exception):  # a verdict on the job
    """No worker can restore the newest commit; the text says why."""


def choose_candidates(enlisted: Sequence[Worker]) -> list[Worker]:
    """Returns the workers that may belong to the next generation. One that drains may stay as the source."""
    staying = [worker for worker in enlisted if not worker.is_draining]
    newest = max((worker.commit for worker in enlisted), default=-1)
    owners = [worker for worker in enlisted if worker.commit == newest]
    holders = [owner for owner in owners if owner.can_restore] or owners
    if holders and all(holder.is_draining for holder in holders):
        staying.append(min(holders, key=lambda holder: holder.first_generation))
    return staying


def form(candidates: Sequence[Worker], limit: int) -> Formation:
    """Returns a generation of at most `limit` of the candidates; there must be a candidate.

    Rank 0 is the oldest of those that can restore the commit. The others follow by host and slot, so that the
    ranks of a host are contiguous; hosts that were used earlier come first. Candidates that have been members
    before are preferred to new ones.

    Raises Unrestorable: no candidate can restore the newest commit.
    """
    chosen = sorted(candidates, key=lambda candidate: (candidate.commit < 0, _age(candidate)))[:limit]
    commit = _commit(chosen)
    holders = [worker for worker in chosen if worker.can_restore and worker.commit == commit]
    first = min(holders or chosen, key=_age)
    oldest = {worker.slot.host: worker.number for worker in sorted(chosen, key=lambda worker: -worker.number)}
    members = sorted(
        chosen,
        key=lambda worker: (
            worker is not first,
            worker.slot.host != first.slot.host,
            oldest[worker.slot.host],
            worker.slot,
        ),
    )
    current = [rank for rank, member in enumerate(members) if member in holders] if holders else [0]
    return Formation(members, max(commit, 0), current)


def _commit(chosen: Sequence[Worker]) -> int:
    """Returns the highest commit that a worker can restore; -1 at the start of the job."""
    newest = max(worker.commit for worker in chosen)
    if newest < 0:
        return -1
    restorable = max((worker.commit for worker in chosen if worker.can_restore), default=-1)
    if restorable < newest:
        owner = next(worker for worker in chosen if worker.commit == newest)
        raise Unrestorable(
            f"no rank can return to commit {newest}, the last one of {owner.name}: all ranks that have it "
            "had begun to change their parameters, and had no copy. A state with copy='always' keeps one"
        )
    return restorable


def _age(worker: Worker) -> tuple[float, int]:
    return (worker.first_generation or float("inf"), worker.number)


# ---- The slots of an elastic job: which may be used, and the pauses of those that lose their workers ----


_FIRST_PAUSE = 1.0  # seconds: a replacement imports its modules on the cores on which the others recover


class Slots:
    """The slots that may be used, in the order of preference.

    A slot pauses after a loss: `cooldown` is the shortest and the longest pause in seconds, from its second
    loss on; it doubles with each one. On the hosts in `spares`, a process waits that can replace a lost one
    at once.
    """

    def __init__(
        self, slots: Sequence[Slot], cooldown: tuple[float, float], spares: Container[str] = ()
    ) -> None:
        self._slots = list(slots)
        self._cooldown = cooldown
        self._spares = spares
        self._losses: dict[Slot, int] = {}
        self._until: dict[Slot, float] = {}
        self._hosts_until: dict[str, float] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._slots

    def hosts(self) -> set[str]:
        return {slot.host for slot in self._slots}

    def replace(self, slots: Sequence[Slot]) -> None:
        self._slots = list(slots)

    def remove(self, slot: Slot) -> None:
        """Removes a slot; nothing happens if it is not there."""
        self._slots = [item for item in self._slots if item != slot]

    def note_loss(self, slot: Slot, now: float) -> None:
        losses = self._losses[slot] = self._losses.get(slot, 0) + 1
        pause = doubled(*self._cooldown, times=losses - 2)
        if losses == 1:
            pause = 0.0 if slot.host in self._spares else min(_FIRST_PAUSE, self._cooldown[1])
        self._until[slot] = now + pause

    def pause_host(self, host: str, until: float) -> None:
        """Pauses all slots of a host (time.monotonic())."""
        self._hosts_until[host] = until

    def resume_hosts(self) -> None:
        """Ends the pauses of hosts."""
        self._hosts_until.clear()

    def startable(self, used: Collection[Slot], now: float) -> Iterator[Slot]:
        """Yields the free slots that do not pause."""
        return (slot for slot in self._free(used) if self._paused_until(slot) <= now)

    def due(self, used: Collection[Slot]) -> float | None:
        """Returns when the next pause of a free slot ends (time.monotonic())."""
        return min(filter(None, map(self._paused_until, self._free(used))), default=None)

    def _paused_until(self, slot: Slot) -> float:
        """Returns when a slot's pause ends, or has ended; 0 if it had none."""
        return max(self._until.get(slot, 0.0), self._hosts_until.get(slot.host, 0.0))

    def _free(self, used: Collection[Slot]) -> list[Slot]:
        return [slot for slot in self._slots if slot not in used]


# ---- A planned change: finds the check at which all members leave their generation ---------------------
# Each member answers with the number of checks that it has begun, and waits in its next one. The check
# after the highest number is therefore one that no member has passed, and that all can reach.


_SETTLE_SECONDS = 0.5  # after the first new worker: others that were started with it join in the same change
_ANSWER_SECONDS = (
    30.0  # a member whose program holds Python's lock for longer delays the change, and nothing else
)


class PlannedChange:
    """The planned change of a generation."""

    def __init__(self) -> None:
        self.is_asked = False
        self.asked_at = math.inf  # when the members were last asked (time.monotonic())
        self.due: float | None = None  # when to ask, or to ask again (time.monotonic())
        self._question = 0
        self._is_agreed = False
        self._members: Sequence[Worker] = ()

    def advance(
        self,
        generation: int,
        members: Sequence[Worker],
        joiners: Sequence[Worker],
        now: float,
        awaits_more: bool = True,
    ) -> list[Action]:
        """Asks the members if a worker can join, or wants to leave. Returns the orders.

        `awaits_more`: other workers are starting, which may join in the same change.

        If not all have answered for a while, those that wait in a check go on, and all are asked again.
        """
        if self._is_agreed:
            return []
        if self.is_asked:
            if self.due is None or now < self.due:
                return []
            self.is_asked, self.due = False, now + _ANSWER_SECONDS
            return [Send(member.number, LeaveAt(generation, 0)) for member in members]
        present = [member for member in members if member.status is Status.MEMBER]
        stays = bool(joiners) or any(not worker.is_draining for worker in present)
        leaves = stays and any(worker.is_draining for worker in present)
        if not joiners and not leaves:
            self.due = None
            return []
        if self.due is None:
            self.due = now + _SETTLE_SECONDS
        is_complete = leaves or not awaits_more
        if self.due > now and not (is_complete and self._question == 0):
            return []
        self.is_asked, self.due, self._members = True, now + _ANSWER_SECONDS, members
        self.asked_at = now
        self._question += 1
        for worker in members:
            worker.checks = -1
        return [Send(member.number, Change(generation, self._question)) for member in members]

    def note_count(self, worker: Worker, answer: Counted) -> list[Action]:
        """Records a member's answer; returns the orders once all members have answered."""
        if not self.is_asked or answer.question != self._question:
            return []
        worker.checks = answer.checks
        if any(member.checks < 0 for member in self._members):
            return []
        self._is_agreed, self.due = True, None
        leave_at = LeaveAt(answer.generation, 1 + max(member.checks for member in self._members))
        return [Send(member.number, leave_at) for member in self._members]


# ---- Hosts that do not reach each other, although hvdrun reaches them ----------------------------------
# A firewall or a broken route may separate two hosts of a job. The ranks there cannot link to each other,
# as often as they try; a part of the ranks can go on.


_FAILURES = 2  # generations that fail to link because of two hosts, before these count as separated
_SHORTEST_PAUSE, _LONGEST_PAUSE = 60.0, 3600.0  # seconds: each further attempt costs the others one to link

_Pair = frozenset[str]


class Reachability:
    """Counts failures to connect by pair of hosts."""

    def __init__(self) -> None:
        self._failures: dict[_Pair, int] = {}  # generations, since the two hosts were linked
        self._last: dict[_Pair, int] = {}  # the generation that has counted last
        self._times: Counter[str] = Counter()  # how often a host was left out

    def note_failure(self, generation: int, worker: Worker, members: Sequence[Worker]) -> None:
        """Records a member's failure report: its generation is lost, or it could not connect to its peers.

        If it could not link, it has found out which hosts it does not reach. If all had been linked, the
        verdict on the lost rank is common: it proves a lost link of one of those that report it.
        """
        report = worker.report
        assert report is not None
        lost = (
            [report.culprit]
            if report.kind == "peer_lost" and all(member.has_received for member in members)
            else []
        )
        for other in (members[rank] for rank in report.unreachable or lost if 0 <= rank < len(members)):
            pair = frozenset((worker.slot.host, other.slot.host))
            if len(pair) == 2 and self._last.get(pair) != generation:
                self._last[pair] = generation
                self._failures[pair] = self._failures.get(pair, 0) + 1

    def note_links(self, members: Iterable[Worker]) -> None:
        """Records that these workers have connected to each other."""
        hosts = {member.slot.host for member in members}
        for pair in [failure for failure in self._failures if failure <= hosts]:
            del self._failures[pair]

    def separated(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Returns the hosts to leave out so that the rest connect, each with a host that it does not reach.

        The host that does not reach the most ranks goes first. If the network is cut in two, the larger part
        is left; if both are equal, that of the oldest worker. Ranks that can restore their commit count
        before the others that have one, and these before newcomers: a host that has the state of the training
        goes only if another one that stays has it.
        """
        ranks = Counter(worker.slot.host for worker in workers)
        holders = Counter(worker.slot.host for worker in workers if worker.can_restore)
        trained = Counter(worker.slot.host for worker in workers if worker.commit >= 0)
        first = min(workers, key=lambda worker: worker.number).slot.host if workers else ""
        cut = {pair for pair, count in self._failures.items() if count >= _FAILURES and pair <= ranks.keys()}
        gone: dict[str, str] = {}
        while cut:
            unreached = {host: _others(host, cut) for pair in cut for host in pair}
            missed = {
                host: [sum(counts[host_name] for host_name in others) for counts in (holders, trained, ranks)]
                for host, others in unreached.items()
            }
            worst = max(unreached, key=lambda host: (missed[host], first in unreached[host], host))
            gone[worst] = min(unreached[worst])
            cut = {pair for pair in cut if worst not in pair}
        return gone

    def leave_out(self, host: str) -> float:
        """Records that a host is left out; returns for how many seconds.

        Afterwards a single failure is enough.
        """
        for pair in [failure for failure in self._failures if host in failure]:
            self._failures[pair] = _FAILURES - 1
        self._times[host] += 1
        return doubled(_SHORTEST_PAUSE, _LONGEST_PAUSE, self._times[host] - 1)


def _others(host: str, pairs: Iterable[_Pair]) -> set[str]:
    """Returns the hosts that a host does not reach."""
    return {other for pair in pairs if host in pair for other in pair if other != host}
