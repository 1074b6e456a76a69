"""The arbiter of an elastic job: decides who is a rank, when all leave, and whether the job goes on.

It is a state machine without I/O: it is told what happens, with the time, and returns orders.
docs/design/elastic_protocol.md is the specification.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from sirtaki.bindings.bootstrap.elastic.messages import (
    Counted,
    Drain,
    End,
    Enlist,
    Fence,
    LeaveAt,
    Message,
    Over,
    Received,
    Returned,
)
from sirtaki.runner.elastic.arbiter.model import (
    EXIT,
    HOST,
    Account,
    Action,
    Close,
    Finish,
    Open,
    Phase,
    Rules,
    Say,
    Send,
    Slot,
    Start,
    Status,
    Worker,
    Workers,
    count_losses,
)
from sirtaki.runner.elastic.arbiter.policy import (
    PlannedChange,
    Reachability,
    Slots,
    Unrestorable,
    choose_candidates,
    form,
)

_MAX_RESTARTS = 10  # from checkpoints, so that a training that kills all its ranks ends at last


class Arbiter:
    """The arbiter. Its methods return the orders to carry out, in their order."""

    def __init__(self, rules: Rules, slots: Sequence[Slot], spares: Container[str] = ()) -> None:
        self.workers = Workers()
        self.phase = Phase.FORMING
        self.generation = 0
        self.losses = 0
        self._rules = rules
        self._slots = Slots(slots, rules.cooldown, spares)
        self._members: Sequence[Worker] = ()
        self._initial = 0  # the size of the first generation
        self._is_ending = False  # the training function has returned on a member
        self._ended_early: Worker | None = None  # with exit code 0, before the first generation
        self._has_trained = False  # all members of some generation have had the state
        self._attempts = Attempts()
        self._starts = FirstStarts(rules.start)
        self._news: list[str] = []  # since the last generation: for its text
        self._first_news = FirstNews()  # about the current generation
        self._change = PlannedChange()
        self._wait = Wait(rules.timeout, rules.patience, rules.name_of("--elastic-timeout"))
        self._reach = Reachability()
        self._orders: list[Action] = []
        self.account = Account()
        self._restarts = 0  # from a checkpoint, after the loss of all ranks
        self._late_failure: tuple[str, Worker] | None = None  # of a worker whose function had returned

    # ---- Events ----------------------------------------------------------------------------------------

    def set_slots(self, slots: Sequence[Slot], now: float) -> list[Action]:
        """Sets the usable slots; drains the workers in all other slots."""
        self._slots.replace(slots)
        for worker in self.workers.living():
            had_slot, worker.has_slot = worker.has_slot, worker.slot in self._slots
            if not worker.has_slot:
                self._drain(worker)
            elif not had_slot and not worker.was_asked:
                worker.is_draining = False
        return self._advance(now)

    def gone_since(self, number: int, moment: float) -> None:
        """Records when a worker was first suspected dead; `ended()` confirms it."""
        if self.workers[number].status is Status.MEMBER:
            self._first_news.note(moment)

    def ended(
        self, number: int, code: int, killed_by: int, why: str, now: float, keeps_slot: bool = True
    ) -> list[Action]:
        """Handles the end of a worker's process: exit code, or the signal that killed it; `why` describes it.

        `keeps_slot`: whether another worker may be started in its slot.
        """
        worker = self.workers[number]
        if not keeps_slot:
            self._slots.remove(worker.slot)
        before, worker.status, worker.is_running = worker.status, Status.ENDED, False
        is_lost = bool(killed_by) or worker.is_given_up
        ends_well = code == 0 and not is_lost
        if ends_well and before is Status.MEMBER:  # a function that has ended well is reported before
            ends_well, why = False, "ended with exit code 0, but its training function has not returned"
        if before is Status.ENDED or self.phase is Phase.OVER:
            pass
        elif ends_well:
            self._note_exit(worker)
        elif is_lost or self._rules.survive == EXIT or (self.generation and worker.first_generation == 0):
            self._note_loss(worker, before, why, now)
        else:
            self._finish(code or 1, f"{worker.name} {why}", worker)
        return self._advance(now)

    def received(self, number: int, message: Message, now: float) -> list[Action]:
        """Handles a worker's message; ignores a report about any generation but the current generation."""
        if isinstance(message, Fence) and number in self.workers:  # also from one that has left: it waits
            return [Send(number, self.workers[number].answer(message))]
        if number not in self.workers or not self.workers[number].is_alive or self.phase is Phase.OVER:
            return []
        worker = self.workers[number]
        if isinstance(message, Drain):
            worker.was_asked = True
            self._drain(worker)
        elif isinstance(message, Enlist):
            self._enlist(worker, message, now)
        elif isinstance(message, Received | Counted | Returned) and message.generation == self.generation:
            self._note_progress(worker, message)
        return self._advance(now)

    def tick(self, now: float) -> list[Action]:
        """Performs all due actions; also starts the first workers."""
        return self._advance(now)

    def stop(self) -> list[Action]:
        """Ends the job at the user's request; `Finish` is up to the caller."""
        self.phase = Phase.OVER
        return [Send(worker.number, End(1, "the job was ended")) for worker in self.workers.living()]

    @property
    def due(self) -> float | None:
        """Returns when to call `tick` (time.monotonic()); None if nothing is due."""
        if self.phase is Phase.OVER:
            return None
        times = [self._wait.due, self._change.due if self.phase is Phase.RUNNING else None]
        if self._wants_more() and self._has_room():
            times.append(self._slots.due(self.workers.used_slots()))
        return min((moment for moment in times if moment is not None), default=None)

    # ---- Messages and ends -----------------------------------------------------------------------------

    def _enlist(self, worker: Worker, message: Enlist, now: float) -> None:
        is_member = worker.status is Status.MEMBER and message.generation == self.generation
        if not is_member and worker.status is not Status.STARTING:
            return
        worker.status, worker.report = Status.ENLISTED, message
        if self._is_ending and not is_member:
            self._end_worker(worker, 0, "the training has ended")
        elif is_member and message.reason == "lost":
            self._reach.note_failure(self.generation, worker, self._members)
            self._abandon(now)
            self._judge(message)
        elif is_member and self.phase is Phase.RUNNING:
            self.phase = Phase.FORMING
            self._first_news.note(min(self._change.asked_at, now))

    def _judge(self, message: Enlist) -> None:
        """Kills the living rank that a member reports for exceeding a deadline."""
        if message.kind == "timeout" and 0 <= message.culprit < len(self._members):
            culprit = self._members[message.culprit]
            if culprit.status is Status.MEMBER and not culprit.is_given_up:
                self._orders.append(Say(f"{culprit.name} is given up and killed: {message.text}"))
                self._orders += culprit.give_up()

    def _note_progress(self, worker: Worker, message: Received | Counted | Returned) -> None:
        if worker.status is not Status.MEMBER:
            return
        if isinstance(message, Received):
            worker.has_received = True
            if all(member.has_received for member in self._members):
                self._has_trained = True
                if self.phase is Phase.LINKING:
                    self.phase = Phase.RUNNING
                    self._reach.note_links(self._members)
        elif isinstance(message, Counted):
            self._orders += self._change.note_count(worker, message)
        else:
            worker.status = Status.RETURNED
            self._begin_ending()

    def _note_exit(self, worker: Worker) -> None:
        """Records a normal exit, usually of a worker after the return of its function."""
        if self.generation and worker.first_generation == 0:
            self._orders.append(Say(f"{worker.name} has ended before it could join"))
        elif self.generation == 0:
            self._ended_early = worker

    def _note_loss(self, worker: Worker, before: Status, why: str, now: float) -> None:
        self._slots.note_loss(worker.slot, now)
        if self._rules.domain == HOST and worker.first_generation and before is not Status.RETURNED:
            self._orders += self.workers.give_up_host(worker.slot.host)
        if before is Status.RETURNED:
            self._late_failure = f"{worker.name} was lost after its training had ended: {why}", worker
            return
        self._orders.append(Say(f"{worker.name} was lost: {why}"))
        if self.generation and worker.first_generation == 0:
            return
        self.losses += 1
        self._news.append(f"{worker.name} was lost ({why})")
        limit = self._rules.reset_limit
        if limit is not None and self.losses > limit:
            lost, option = count_losses(self.losses), self._rules.name_of("--reset-limit")
            self._finish(1, f"{lost}, and {option} allows {limit}; the last: {worker.name}", worker)
        elif self.generation and not self._is_ending and not self.workers.may_have_state(self._has_trained):
            self._lose_all(f"all ranks were lost; the last one is {worker.name}: {why}", worker)
        elif not self.generation and (verdict := self._starts.judge(worker, why, self.workers, self._slots)):
            self._finish(1, verdict, worker)
        elif before is Status.MEMBER:
            self._abandon(now)

    def _abandon(self, now: float) -> None:
        """Ends the current generation: its members enlist again."""
        if self.phase not in (Phase.LINKING, Phase.RUNNING):
            return
        self.phase = Phase.FORMING
        self._first_news.note(now)
        text = "; ".join(self._news) or "the ranks have lost their links to each other"
        over = Over(self.generation, text)
        self._orders += [Send(worker.number, over) for worker in self.workers.living(Status.MEMBER)]
        self._orders.append(Close())

    def _begin_ending(self) -> None:
        if self._is_ending:
            return
        self._is_ending, self._change.due = True, None
        if self._change.is_asked:
            off = LeaveAt(self.generation, 0)
            self._orders += [Send(worker.number, off) for worker in self.workers.living(Status.MEMBER)]
        for worker in self.workers.living(Status.STARTING, Status.ENLISTED):
            if worker.first_generation == 0:
                self._end_worker(worker, 0, "the training has ended")

    def _drain(self, worker: Worker) -> None:
        if worker.is_draining:
            return
        worker.is_draining = True
        if worker.first_generation == 0:
            self._end_worker(worker, 0, "it is not needed")

    def _end_worker(self, worker: Worker, code: int, text: str) -> None:
        """Ends a worker by a message, or, if it has not yet connected, by killing it."""
        if worker.status is Status.STARTING:
            self._orders += worker.give_up()
        else:
            self._orders.append(Send(worker.number, End(code, text)))
        worker.status = Status.ENDED

    def _finish(self, code: int, text: str, culprit: Worker | None = None) -> None:
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            self._orders += [Send(worker.number, End(code, text)) for worker in self.workers.living()]
            self._orders.append(Finish(code, text, culprit.number if culprit else None))

    # ---- Decisions -------------------------------------------------------------------------------------

    def _advance(self, now: float) -> list[Action]:
        """Decides what can be decided now, and returns all orders since the last call."""
        if self._ended_early is not None and self.workers.living(Status.ENLISTED):
            text = "has ended before it called the function of hvd.elastic.run, in which others wait for it"
            self._finish(1, f"{self._ended_early.name} {text}", self._ended_early)
        if self.phase is Phase.FORMING:
            self._try_to_form(now)
        if self.phase is Phase.RUNNING and not self._is_ending:
            joiners, awaits_more = self._joiners(), bool(self.workers.living(Status.STARTING))
            self._orders += self._change.advance(self.generation, self._members, joiners, now, awaits_more)
        self._finish_without_workers()
        if self._wants_more():
            self._fill(now)
        self.account.note(self.phase is Phase.RUNNING, now)
        orders, self._orders = self._orders, []
        return orders

    def _finish_without_workers(self) -> None:
        """Ends a job without workers if its function has returned, or all have ended without calling it."""
        if self.workers.living():
            return
        if self._late_failure is not None:
            self._finish(1, *self._late_failure)
        elif self._is_ending or (self._ended_early is not None and not self.losses):
            self._finish(0, "")
        elif self._ended_early is not None:
            self._finish(1, f"{self._ended_early.name} has ended, and another one was lost before it joined")

    def _try_to_form(self, now: float) -> None:
        if awaited := self.workers.living(Status.MEMBER):
            self._orders += self._wait.for_members(awaited, now)
            return
        if self._has_trained and not self.workers.may_have_state(True):
            self._end_without_state()
            return
        enlisted = self.workers.living(Status.ENLISTED)
        candidates = choose_candidates(enlisted)
        for worker in enlisted:
            if worker.is_draining and worker not in candidates:
                self._news.append(f"{worker.name} leaves")
                self._end_worker(worker, 0, "it has left")
        needs_all = not self._has_trained and not self._is_ending and not self._wait.is_too_long(now)
        wanted = self._rules.start if needs_all else 1 if self._is_ending else self._rules.minimum
        candidates = self._without_separated(candidates, wanted, now)
        if not candidates or len(candidates) < wanted:
            self._slots.resume_hosts()  # one that was left out may be the only way to go on
            orders, failure = self._wait.for_workers(len(candidates), wanted, now)
            self._orders += orders
            if failure:
                self._finish(1, failure)
            return
        self._form(candidates)
        self._wait.end()

    def _end_without_state(self) -> None:
        """Ends a job, or what is left of it, in which no worker has the state of the training."""
        self._wait.end()
        if not self._is_ending:
            self._lose_all("all ranks that had the state of the training were lost")
            return
        for worker in self.workers.living(Status.ENLISTED):
            self._end_worker(worker, 0, "the training has ended")

    def _lose_all(self, text: str, last: Worker | None = None) -> None:
        """Ends a job that has lost its state; or lets new workers start it again, from a checkpoint."""
        reports = [member.report for member in self._members if member.report is not None]
        if self._restarts == _MAX_RESTARTS or not any(report.has_checkpoints for report in reports):
            self._finish(1, text, last)
            return
        self._restarts += 1
        self._has_trained, self.phase = False, Phase.FORMING
        self._orders += [Say("all ranks were lost: new ones start from the newest checkpoint"), Close()]

    def _form(self, candidates: Sequence[Worker]) -> None:
        try:
            formation = form(candidates, self._rules.maximum)
        except Unrestorable as error:
            self._finish(1, str(error))
            return
        self._attempts.note(formation.commit, bool(self._news))
        reports = [member.report.text for member in self._members if member.report and member.report.text]
        if verdict := self._attempts.verdict(reports[-1] if reports else "their links were lost"):
            self._finish(1, verdict)
            return
        members = formation.members
        joined = [member for member in members if member.first_generation == 0]
        if self.generation and joined:
            self._news.append(f"{len(joined)} {'rank joins' if len(joined) == 1 else 'ranks join'}")
        usual = "the ranks have linked anew" if self.generation else "the job starts"
        text = "; ".join(self._news) or usual
        self.generation += 1
        for rank, worker in enumerate(members):
            worker.status, worker.rank, worker.has_received, worker.checks = Status.MEMBER, rank, False, -1
            worker.first_generation = worker.first_generation or self.generation
        self._members, self._news, self._change = members, [], PlannedChange()
        self.phase, self._initial = Phase.LINKING, self._initial or len(members)
        places = formation.places(self.generation, self._initial, text)
        if self.generation > 1:
            self._orders.append(Say(f"{formation.summary}: {text}"))
        self._orders += [Close(), Open(self.generation, formation.numbers, places, self._first_news.take())]

    def _without_separated(self, candidates: list[Worker], wanted: int, now: float) -> list[Worker]:
        """Leaves out hosts that other hosts cannot reach, unless too few workers remain."""
        separated = self._reach.separated(candidates)
        staying = [candidate for candidate in candidates if candidate.slot.host not in separated]
        if len(staying) < max(wanted, 1):
            return candidates
        for host, other in separated.items():
            self._slots.pause_host(host, now + self._reach.leave_out(host))
            text = f"{host} is left out: it and {other} do not reach each other, although hvdrun reaches both"
            self._news.append(text)
            for worker in self.workers.living(Status.STARTING, Status.ENLISTED):
                if worker.slot.host == host:
                    self._end_worker(worker, 0, text)
        return staying

    def _joiners(self) -> list[Worker]:
        """Returns the workers that can join the current generation, if it has room."""
        staying = sum(not member.is_draining for member in self._members if member.is_alive)
        room = max(self._rules.maximum - staying, 0)
        return [worker for worker in self.workers.living(Status.ENLISTED) if not worker.is_draining][:room]

    def _wants_more(self) -> bool:
        """Returns whether workers are to be started where slots are free."""
        if self._is_ending or self._ended_early is not None:
            return False
        is_forming = self.phase is Phase.FORMING and not self.workers.living(Status.MEMBER)
        return self.phase is Phase.RUNNING or is_forming

    def _has_room(self) -> bool:
        """Returns whether there may be more workers."""
        staying = sum(not worker.is_draining for worker in self.workers.living())
        return staying < (self._rules.maximum if self.generation else self._rules.start)

    def _fill(self, now: float) -> None:
        for slot in self._slots.startable(self.workers.used_slots(), now):
            if self._has_room():
                self._orders.append(Start(self.workers.add(slot, now).number, slot))


# ---- Generations that fail one after the other although no rank was lost: such a job ends at last ------

_MOST_FAILURES = 10


class Attempts:
    """The generations in a row that have begun with the same commit, without any news in between.

    Their ranks cannot link to each other, or link, and fail at the same place of the program each time.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._commit = -1

    def note(self, commit: int, has_news: bool) -> None:
        """Records that a generation starts from this commit. `has_news`: the ranks have changed."""
        self._failures = 0 if has_news or commit > self._commit else self._failures + 1
        self._commit = commit

    def verdict(self, why: str) -> str:
        """Returns why the job ends; "" if it may try again. `why` is the last failure."""
        if self._failures < _MOST_FAILURES:
            return ""
        begun = f"begun {_MOST_FAILURES} times from commit {self._commit}, and none of them was lost"
        return f"the training gets no further: the ranks have {begun}: {why}"


# The moment of the first news that makes a generation end, from which the time of a change is counted.


class FirstNews:
    """The first news about the current generation.

    A lost worker's host may have been silent before its loss was noticed: the earliest moment counts, in
    whatever order the moments become known.
    """

    def __init__(self) -> None:
        self._moment: float | None = None

    def note(self, moment: float) -> None:
        """Records news at a moment (time.monotonic())."""
        self._moment = moment if self._moment is None else min(self._moment, moment)

    def take(self) -> float | None:
        """Returns the moment of the first news, None if there was none; begins another generation."""
        moment, self._moment = self._moment, None
        return moment


# ---- The arbiter's waits, which tell the user for what, and end ----------------------------------------

_TELL_SECONDS = 10.0


class Wait:
    """A wait of the arbiter before it can form a generation."""

    def __init__(self, timeout: float, patience: float, option: str) -> None:
        """`option` is how the user calls the timeout."""
        self._timeout, self._patience, self._option = timeout, patience, option
        self._subject = ""  # a wait for something else begins anew
        self._since = 0.0
        self._is_told = False
        self.due: float | None = None  # when the wait has news (time.monotonic())

    def end(self) -> None:
        self._subject, self.due = "", None

    def is_too_long(self, now: float) -> bool:
        """Returns whether enough workers for the start have been awaited for too long."""
        return self._subject == "workers" and now >= self._since + self._timeout

    def for_members(self, awaited: Sequence[Worker], now: float) -> list[Action]:
        """Waits for members that live, and have not left their generation; at last, gives them up."""
        names = ", ".join(worker.name for worker in awaited)
        if self._is_over("members", self._patience, now):
            kills = [order for worker in awaited for order in worker.give_up()]
            late = "has not noticed that the ranks change, or not returned to its commit"
            what = f"{names} {late}, for {self._patience:g} s: it is given up"
            return [Say(what), *kills] if kills else []
        what = f"waiting for {names} to notice that the ranks change, or to return to its commit"
        return self._tell(what, self._patience, now)

    def for_workers(self, present: int, wanted: int, now: float) -> tuple[list[Action], str]:
        """Waits for more workers; returns orders, and why the job ends if it has taken too long."""
        ranks = "1 rank is" if wanted == 1 else f"{wanted} ranks are"
        if self._is_over("workers", self._timeout, now):
            there = f"{present} {'was' if present == 1 else 'were'} there"
            return [], f"{ranks} needed, and {there} after {self._timeout:g} s"
        limit = f"up to {self._timeout:g} s ({self._option})"
        here = f"{present} {'is' if present == 1 else 'are'} here"
        return self._tell(f"{ranks} needed, and {here}: waiting for more, {limit}", self._timeout, now), ""

    def _is_over(self, subject: str, limit: float, now: float) -> bool:
        """Starts the wait if it has not started; returns whether `limit` seconds have passed."""
        if self._subject != subject:
            self._subject, self._since, self._is_told = subject, now, False
            self.due = now + min(_TELL_SECONDS, limit)
        if now < self._since + limit:
            return False
        self.due = None
        return True

    def _tell(self, text: str, limit: float, now: float) -> list[Action]:
        """Returns the order to show for what is waited, once, when it is due."""
        if self._is_told or now < self._since + _TELL_SECONDS:
            return []
        self._is_told, self.due = True, self._since + limit
        return [Say(text)]


# Processes that end before any worker has enlisted: a program that cannot start ends the job at last.


_PER_SLOT = 3  # losses: a process may be killed for reasons outside of the program
_MOST_LOSSES = 30  # losses of each rank at the start: short lives may use ever more slots
_NOT_THERE = "before it calls the function of hvd.elastic.run"


class FirstStarts:
    """The losses of processes before any worker has enlisted, by slot; `start` is the number of ranks."""

    def __init__(self, start: int) -> None:
        self._start = start
        self._losses: Counter[Slot] = Counter()

    def judge(self, lost: Worker, why: str, workers: Workers, slots: Slots) -> str:
        """Records a loss. Returns why the job ends; "" if another process may succeed.

        The loss of a whole host, whose slots are not there any more, does not count. Of several hosts, at
        least two have to have failed, so that one host without memory does not end the job.
        """
        if any(worker.report is not None for worker in workers.all()) or lost.slot not in slots:
            return ""
        self._losses[lost.slot] += 1
        used = {worker.slot for worker in workers.all() if worker.slot in slots}
        starting = {worker.slot for worker in workers.living(Status.STARTING)}
        if len({slot.host for slot in used}) < min(2, len(slots.hosts())):
            return ""
        failed_everywhere = all(self._losses[slot] >= _PER_SLOT for slot in used)
        is_over = self._losses.total() >= _MOST_LOSSES * self._start and starting <= self._losses.keys()
        if not failed_everywhere and not is_over:
            return ""
        memory = ", often because the machine ran out of memory" * ("SIGKILL" in why)
        times = f"it was started {self._losses.total()} times, in {len(used)} {_slots(len(used))}"
        return f"the program ends {_NOT_THERE}: {times}; the last one was {lost.name}: {why}{memory}"


def _slots(count: int) -> str:
    return "slot" if count == 1 else "slots"
