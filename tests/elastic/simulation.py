"""An elastic job under virtual time: the arbiter, simulated workers, random faults, and what has to hold."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic.simulated_worker import At, SimulatedWorker

from sirtaki.bindings.bootstrap.elastic.messages import End, Message
from sirtaki.runner.elastic.arbiter.arbiter import Arbiter
from sirtaki.runner.elastic.arbiter.model import (
    EXIT,
    LOST,
    Action,
    Close,
    Finish,
    Kill,
    Open,
    Rules,
    Send,
    Slot,
    Start,
    Status,
)

EXCHANGE_SECONDS = 60.0  # an exchange's limit, after which a rank that is late is blamed
_MOST_EVENTS = 100_000
_FAULTS = ("kill", "kill", "kill", "kill two", "drain", "slots", "exit 1", "exit 0", "stuck", "cut", "heal")


@dataclass
class Group:
    """The members of a generation, and their links."""

    members: Sequence[int]
    gone: dict[int, str] = field(default_factory=dict)  # members with the failures that the others see
    exchanges: dict[int, set[int]] = field(default_factory=dict)  # arrived, by the step before
    left_at: set[tuple[int, int, int]] = field(default_factory=set)  # checks, commit and step


class Simulation:
    """A random job. `run` plays it to its end, and raises AssertionError if anything is wrong."""

    def __init__(self, seed: int) -> None:
        self.random = chance = random.Random(seed)
        self.now = 1000.0
        self.steps, self.commit_interval = chance.randint(1, 20), chance.choice([1, 1, 2, 3])
        self.keeps_copies = chance.random() < 0.7
        minimum = chance.randint(1, 3)
        start = chance.randint(minimum, 4)
        self.rules = Rules(
            start=start,
            minimum=minimum,
            maximum=chance.randint(start, 5),
            reset_limit=chance.choice([None, None, None, 0, 2]),
            survive=chance.choice([LOST, LOST, EXIT]),
        )
        hosts = chance.choice([["a"], ["a"], ["a", "b"], ["a", "b", "c"]])
        self.all_slots = [
            Slot(chance.choice(hosts), index) for index in range(self.rules.maximum + chance.randint(0, 1))
        ]
        self.cuts: set[frozenset[str]] = set()  # pairs of hosts that do not reach each other
        self.slots = self.all_slots[: chance.randint(start, len(self.all_slots))]
        self.faults_left = chance.choice([0, 1, 2, 4, 10, 20])
        self.fault_rate = chance.choice([0.01, 0.05, 0.2, 0.5])
        self.kinds = chance.sample(_FAULTS, chance.randint(1, len(_FAULTS)))
        self.link_failures = chance.choice([0.0, 0.0, 0.2])
        self.is_slow = chance.random() < 0.2
        self.injected: set[str] = set()
        self.arbiter = Arbiter(self.rules, self.slots)
        self.workers: list[SimulatedWorker] = []
        self.told_to_end: set[int] = set()
        self.has_left_out = False  # a host that another one did not reach
        self.groups: dict[int, Group] = {}
        self.commits: list[int] = []  # with which the generations have begun
        self.open: int | None = None
        self.opened_at = self.now
        self.has_trained = False
        self.failures: list[SimulatedWorker] = []  # exits that the job does not survive
        self.result: Finish | None = None
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._arrivals: dict[tuple[int, str], float] = {}  # of the last message, by worker and direction

    # ---- Time ------------------------------------------------------------------------------------------

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self.at(self.now + seconds, act)

    def at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._count), act))

    def pause(self, longest: float) -> float:
        """Returns a random time, more often a short one."""
        return longest * self.random.random() ** 3

    def compute_seconds(self) -> float:
        return self.pause(30.0 if self.is_slow else 1.0)

    def run(self) -> Finish:
        self.carry_out(self.arbiter.tick(self.now))
        for _ in range(_MOST_EVENTS):
            if self.result is not None:
                self.check_result(self.result)
                return self.result
            due = self.arbiter.due
            assert due is not None or self._events, "the job hangs"
            if due is not None and (not self._events or due <= self._events[0][0]):
                self.now = max(self.now, due)
                self.carry_out(self.arbiter.tick(self.now))
                assert self.arbiter.due is None or self.arbiter.due > self.now, "the arbiter is busy"
            else:
                self.now, _, act = heapq.heappop(self._events)
                act()
        raise AssertionError("the job does not end")

    # ---- Messages and orders ---------------------------------------------------------------------------

    def deliver(self, worker: int, direction: str, act: Callable[[], None]) -> None:
        """Delivers after a random time; one worker's messages stay in order."""
        key = (worker, direction)
        time = max(self._arrivals.get(key, 0.0), self.now + self.pause(0.2))
        self._arrivals[key] = time
        self.at(time, act)

    def send_to_arbiter(self, worker: SimulatedWorker, message: Message) -> None:
        def arrive() -> None:
            self.carry_out(self.arbiter.received(worker.number, message, self.now))
            self.maybe_inject()

        self.deliver(worker.number, "up", arrive)

    def send_to_worker(self, worker: SimulatedWorker, message: Message) -> None:
        self.deliver(worker.number, "down", lambda: worker.take(message) if worker.is_running else None)

    def note_end(self, worker: SimulatedWorker, was: At, code: int, killed_by: int, kind: str) -> None:
        """Tells the peers of a process that has ended, and the arbiter after its last message."""
        if was is not At.RETURNED:
            self.note_gone(worker, kind)

        def arrive() -> None:
            worker.is_over = True
            status = self.arbiter.workers[worker.number]
            is_newcomer = self.arbiter.generation > 0 and not status.first_generation
            is_judged = worker.number not in self.told_to_end and not status.is_given_up
            is_fatal = code and self.rules.survive == LOST and not is_newcomer
            was_done = (code or killed_by) and status.status is Status.RETURNED
            if is_judged and (is_fatal or was_done):
                self.failures.append(worker)
            self.carry_out(self.arbiter.ended(worker.number, code, killed_by, "ended", self.now))
            self.maybe_inject()

        self.deliver(worker.number, "up", arrive)

    def carry_out(self, orders: Sequence[Action]) -> None:
        for order in orders:
            assert self.result is None or isinstance(order, Send), f"{order} after the end"
            if isinstance(order, Start):
                used = [one for one in self.workers if one.slot == order.slot and not one.is_over]
                assert not used, f"{order.slot} is in use"
                assert order.slot in self.slots
                assert order.worker == len(self.workers)
                self.workers.append(SimulatedWorker(self, order.worker, order.slot))
                self.workers[-1].start()
            elif isinstance(order, Kill):
                worker = self.workers[order.worker]
                self.after(self.pause(0.5), lambda worker=worker: worker.end(0, 9))  # type: ignore[misc]
            elif isinstance(order, Send):
                if isinstance(order.message, End):
                    self.told_to_end.add(order.worker)
                    self.has_left_out |= "is left out" in order.message.text
                self.send_to_worker(self.workers[order.worker], order.message)
            elif isinstance(order, Close):
                self.open = None
            elif isinstance(order, Open):
                self.check_open(order)
                self.open, self.opened_at = order.generation, self.now
                self.groups[order.generation] = Group(order.members)
                for number, place in zip(order.members, order.places, strict=True):
                    self.send_to_worker(self.workers[number], place)
            elif isinstance(order, Finish):
                self.result = order

    # ---- The network between the members of a generation ----------------------------------------------

    def others(self, worker: SimulatedWorker, generation: int) -> list[SimulatedWorker]:
        members = [self.workers[number] for number in self.groups[generation].members]
        return [one for one in members if one is not worker and one.generation == generation]

    def link(self, worker: SimulatedWorker) -> None:
        """Links the members when all are there, and gives them the commit's state."""
        group = self.groups[worker.generation]
        if group.gone:
            kind = next(iter(group.gone.values()))
            worker.after(self.pause(5.0), "fail", kind, group.members.index(next(iter(group.gone))))
        elif all(self.workers[number].generation == worker.generation for number in group.members):
            if any(self.unreachable(number, group.members) for number in group.members):
                return  # all reach their limits
            fails = self.random.random() < self.link_failures
            step = self.workers[group.members[0]].step
            for number in group.members:
                one = self.workers[number]
                if fails:
                    one.after(self.pause(5.0), "fail_link")
                else:
                    one.after(self.pause(3.0), "receive", step)

    def unreachable(self, number: int, members: Sequence[int]) -> list[int]:
        """Returns the ranks that a worker does not reach, one for each host."""
        here, slots = self.workers[number].slot.host, [self.workers[one].slot for one in members]
        ranks = {slot.host: rank for rank, slot in enumerate(slots)}
        return [rank for host, rank in ranks.items() if frozenset((here, host)) in self.cuts]

    def cut(self) -> None:
        """Cuts two hosts from each other; the ranks agree on one of them that they blame."""
        hosts = sorted({slot.host for slot in self.all_slots})
        if len(hosts) < 2:
            return
        self.cuts.add(frozenset(self.random.sample(hosts, 2)))
        for generation, group in self.groups.items():
            linked = [one for one in group.members if self.workers[one].generation == generation]
            if blamed := [one for one in linked if self.unreachable(one, linked)]:
                culprit = self.random.choice(blamed)
                group.gone[culprit] = "peer_lost"
                for one in linked:
                    failing = self._failing(self.workers[one], generation, "peer_lost", culprit)
                    self.after(self.random.random() * 2.0, failing)

    def note_gone(self, worker: SimulatedWorker, kind: str) -> None:
        """Tells the members that one of them is gone; `kind` is their failure, if there is one."""
        for generation, group in self.groups.items():
            if generation == worker.generation and kind and worker.number in group.members:
                group.gone[worker.number] = kind
                for one in self.others(worker, generation):
                    one_turn_later = self.random.random() * 2.0
                    self.after(one_turn_later, self._failing(one, generation, kind, worker.number))

    def _failing(self, one: SimulatedWorker, generation: int, kind: str, culprit: int) -> Callable[[], None]:
        rank = self.groups[generation].members.index(culprit)
        return lambda: one.fail(kind, rank) if one.generation == generation else None

    def exchange(self, worker: SimulatedWorker) -> None:
        """Completes an exchange when all members have submitted it."""
        generation = worker.generation
        group = self.groups[generation]
        arrived = group.exchanges.setdefault(worker.step, set())
        arrived.add(worker.number)
        members = [self.workers[number] for number in group.members]
        if len(arrived) < len(members) or any(one.at is not At.EXCHANGING for one in members):
            if group.gone:
                culprit, kind = next(iter(group.gone.items()))
                self.after(self.pause(2.0), self._failing(worker, generation, kind, culprit))
            elif late := [one for one in members if one.number not in arrived]:
                blamed = next((one for one in late if one.is_stuck), late[0])
                worker.after(EXCHANGE_SECONDS, "fail", "timeout", members.index(blamed))
            return
        assert len({(one.step, one.commit) for one in members}) == 1, "the members differ in their state"
        self.has_trained = True
        for one in members:
            one.after(self.pause(1.0), "finish_exchange")

    def note_leave(self, worker: SimulatedWorker) -> None:
        """Takes the place at which a member leaves by plan: it is the same for all."""
        places = self.groups[worker.generation].left_at
        places.add((worker.checks, worker.commit, worker.step))
        assert len(places) == 1, f"members leave at different checks: {places}"

    # ---- Faults ----------------------------------------------------------------------------------------

    def maybe_inject(self) -> None:
        if self.result is None and self.faults_left and self.random.random() < self.fault_rate:
            self.faults_left -= 1
            self.inject(self.random.choice(self.kinds))

    def inject(self, kind: str) -> None:
        alive = [one for one in self.workers if one.is_running]
        self.injected.add(kind)
        if kind == "slots":
            count = self.random.choice([0, *range(1, len(self.all_slots) + 1)])
            slots = self.random.sample(self.all_slots, count)
            self.after(self.pause(1.0), lambda: self.change_slots(slots))
            return
        if kind == "cut":
            self.cut()
        elif kind == "heal":
            self.cuts.clear()
        for worker in self.random.sample(alive, min(len(alive), 2 if kind == "kill two" else 1)):
            if kind.startswith("kill"):
                worker.end(0, 9)
            elif kind == "drain":
                worker.drain()
            elif kind == "exit 1":
                worker.end(1)
            elif kind == "exit 0" and worker.at is At.STARTING:
                worker.end(0)
            elif kind == "stuck":
                worker.get_stuck()
                self.after(2000.0, lambda worker=worker: worker.end(0, 9))  # type: ignore[misc]

    def change_slots(self, slots: Sequence[Slot]) -> None:
        if self.result is None:
            self.slots = list(slots)
            self.carry_out(self.arbiter.set_slots(self.slots, self.now))

    # ---- What has to hold ------------------------------------------------------------------------------

    def check_open(self, order: Open) -> None:
        """Checks a generation at its beginning."""
        assert self.open is None, "the generation before is still open"
        assert order.generation == len(self.groups) + 1
        members = [self.workers[number] for number in order.members]
        place = order.places[0]
        if order.generation == 1:
            assert order.first_news is None
        else:
            assert order.first_news is not None
            assert self.opened_at <= order.first_news <= self.now, "news about another generation"
        has_returned = any(one.at is At.RETURNED or one.step == self.steps for one in self.workers)
        assert len(members) <= self.rules.maximum
        assert has_returned or len(members) >= self.rules.minimum
        assert len({one.slot for one in members}) == len(members)
        assert all(not one.is_over and one.number not in self.told_to_end for one in members)
        live = [one for one in self.workers if one.is_running and one.number not in self.told_to_end]
        assert all(one.at is not At.ENLISTED or one.generation == 0 for one in live)
        for one in live:
            assert one.at in (At.STARTING, At.ENLISTED, At.RETURNED), f"worker {one.number} has not left"
        counted = max((one.commit for one in live if one.at is At.ENLISTED), default=-1)
        assert place.commit >= counted, f"commit {counted} is lost"
        self.commits.append(place.commit)
        assert not self.has_trained or any(one.commit >= 0 for one in members), "the training begins anew"
        for rank in place.current:
            holder = members[rank]
            assert holder.commit == place.commit or not self.has_trained, "a source lacks the commit"
            assert holder.can_restore or not self.has_trained, "a source cannot restore the commit"
        assert 0 in place.current, "rank 0 is no source"

    def check_result(self, result: Finish) -> None:
        """Checks the verdict on the job against what has happened in it."""
        returned = [one for one in self.workers if one.step == self.steps and one.commit >= 0]
        live = [one for one in self.workers if one.is_running]
        if result.code == 0:
            never_began = all(one.commit < 0 for one in self.workers)
            assert returned or (never_began and "exit 0" in self.injected), "nobody has returned"
            assert not self.failures, "a failure is hidden"
        elif "needed, and" in result.text:
            assert self.now - self.opened_at >= self.rules.timeout
            assert len(self.slots) < self.rules.start, result.text
        elif "reset-limit" in result.text:
            assert self.rules.reset_limit is not None
            assert self.arbiter.losses == self.rules.reset_limit + 1
        elif "all ranks" in result.text:
            assert all(one.commit < 0 or one.number in self.told_to_end for one in live)
        elif "gets no further" in result.text:
            assert self.commits[-10:] == [self.commits[-1]] * 10
        elif "no rank can return" in result.text:
            assert not self.keeps_copies
            owners = [one for one in live if one.commit == max(other.commit for other in live)]
            assert not any(one.can_restore for one in owners)
        elif "has ended" in result.text:
            assert "exit 0" in self.injected
        else:
            assert self.failures, f"nothing has failed: {result.text}"
        if self.injected <= {"drain"} and not self.link_failures:
            assert result.code == 0, result.text
