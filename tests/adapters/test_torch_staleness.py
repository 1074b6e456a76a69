"""The clock of stale training, in virtual time, and what becomes of ranks that are lost or do nothing."""

from __future__ import annotations

import heapq
import itertools
import random
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from process_world import PATIENCE, hvdrun, run

pytest.importorskip("torch")

import torch
from world import world

import sirtaki.torch as hvd
from sirtaki.bindings.context import current
from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.torch.training.stale.rounds import ClockReport, Decision, GlobalBatchClock, WorkerClock

Duration = Callable[[int], float]  # of a rank's next step


class Simulation:
    """Ranks whose steps take given times, and whose exchanges take none."""

    def __init__(self, size: int, staleness: int, duration: Duration) -> None:
        self.clock, self.duration = GlobalBatchClock(staleness), duration
        self.contributed, self.included = [0] * size, [0] * size
        self.base, self.is_computing = [0] * size, [True] * size
        self.ages: list[int] = []  # of each gradient when it became part of an update
        self.pending: list[int] = []  # the bases of gradients in no update
        self.ends = [(duration(rank), rank) for rank in range(size)]
        heapq.heapify(self.ends)

    def run(self, until: float) -> None:
        while self.ends[0][0] < until:
            now, rank = heapq.heappop(self.ends)
            self.pending.append(self.base[rank])
            self.contributed[rank] += 1
            self.is_computing[rank] = False
            while self.clock.decide(self.reports()) is Decision.UPDATE:
                self.ages += [self.clock.updates - base for base in self.pending]
                self.clock.count(len(self.pending))
                self.pending, self.included = [], list(self.contributed)
            for other, computes in enumerate(self.is_computing):
                ahead = self.contributed[other] - self.included[other]
                if not computes and ahead <= self.clock.staleness:
                    self.base[other], self.is_computing[other] = self.clock.updates, True
                    heapq.heappush(self.ends, (now + self.duration(other), other))
            assert self.ends, "no rank may go on"

    def reports(self) -> list[ClockReport]:
        updates = self.clock.updates
        return [
            ClockReport(count, base if computes else updates, computes, False, updates, 0)
            for count, base, computes in zip(self.contributed, self.base, self.is_computing, strict=True)
        ]


def varying(durations: list[int], random_time: random.Random, rank: int) -> float:
    return durations[rank] * random_time.uniform(0.2, 2)


@pytest.mark.parametrize("staleness", [1, 2, 3, 8])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_gradient_is_older_than_promised_and_no_rank_stops(size: int, staleness: int) -> None:
    for seed in range(20):
        random_time = random.Random(seed)
        slowest = random_time.choice([1, 3, 30])
        durations = [random_time.choice([1, 1, slowest]) for _ in range(size)]

        simulation = Simulation(size, staleness, partial(varying, durations, random_time))
        simulation.run(until=60 * slowest)
        assert simulation.clock.updates > 20
        assert max(simulation.ages) <= staleness
        assert min(simulation.contributed) > 20


@pytest.mark.parametrize(("staleness", "updates"), [(1, 0.75), (2, 0.9375), (3, 0.9375)])
def test_a_rank_that_is_twice_as_slow_costs_its_own_share_only(staleness: int, updates: float) -> None:
    """One of 8 ranks contributes half, so 0.9375 of the steps are possible.

    With staleness=1, every other update waits for it, and is made of more gradients.
    """
    simulation = Simulation(8, staleness, lambda rank: 2.0 if rank == 7 else 1.0)
    simulation.run(until=1000.5)
    assert sum(simulation.contributed) / 8000 == pytest.approx(0.9375, abs=0.001)
    assert simulation.clock.updates / 1000 == pytest.approx(updates, abs=0.002)


def test_an_update_of_the_table_needs_a_push_of_each_worker_that_has_not_ended() -> None:
    def decision(clock: WorkerClock, *workers: tuple[int, bool]) -> Decision:
        return clock.decide([ClockReport(pushes, 0, True, has_ended, 0, 0) for pushes, has_ended in workers])

    clock = WorkerClock(staleness=2)
    assert decision(clock, (1, False), (0, False)) is Decision.WAIT
    assert decision(clock, (1, False), (0, True)) is Decision.UPDATE
    assert decision(clock, (3, False), (1, False)) is Decision.UPDATE
    clock.updates = 1
    assert decision(clock, (3, False), (1, False)) is Decision.WAIT
    assert decision(clock, (3, True), (1, True)) is Decision.UPDATE
    clock.updates = 3
    assert decision(clock, (3, True), (1, True)) is Decision.END
    assert decision(clock, (3, True), (1, False)) is Decision.WAIT


STALE = """
import os, signal, sys, threading
import torch
import sirtaki.torch as hvd

torch.optim.SGD([torch.ones(1)], lr=1.0)  # the first one imports much
hvd.init()
model = torch.nn.Linear(2, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), staleness=1)
step = 0
while True:
    if step == 5 and hvd.rank() == 1:
        FAULT
    optimizer.zero_grad()
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    step += 1
"""


SERVED = """
import os, signal, sys, threading
import torch
import sirtaki.torch as hvd

torch.optim.SGD([torch.ones(1)], lr=1.0)  # the first one imports much
hvd.init()
params = [torch.ones(2), torch.ones(3)]
table = hvd.ParameterServer(params, lambda own: torch.optim.SGD(own, lr=0.1), staleness=1)
while True:
    if table.pull() >= 5 and hvd.rank() == 1:
        FAULT
    table.push(params)
"""


def failing(tmp_path: Path, program: str, fault: str, **environment: str) -> str:
    """Returns the output of a job in which rank 1 does this after some steps."""
    script = tmp_path / "train.py"
    script.write_text(program.replace("FAULT", fault))
    done = run(*hvdrun(3, sys.executable, script, **environment))
    assert done.returncode != 0
    return done.stdout + done.stderr


def train_until_the_abort(*, is_served: bool) -> None:
    """Rank 1 aborts the world after some steps; all ranks get its text from their next steps."""
    parameter = torch.ones(2, requires_grad=True)
    if is_served:
        table = hvd.ParameterServer([parameter], lambda own: torch.optim.SGD(own, lr=0.1), staleness=1)
    else:
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), staleness=1)

    def train() -> None:
        for step in itertools.count():
            if step == 5 and hvd.rank() == 1:
                current().abort("the reason")
            parameter.grad = torch.ones(2)
            if is_served:
                table.push()
                table.pull()
            else:
                optimizer.step()

    with pytest.raises(HorovodInternalError, match="the reason"):
        train()


@pytest.mark.parametrize("is_served", [False, True])
def test_a_failure_elsewhere_is_raised_in_the_next_steps(is_served: bool) -> None:
    with world(3, "shm") as ranks:
        ranks.run(train_until_the_abort, is_served=is_served)


def test_a_lost_rank_ends_the_job(tmp_path: Path) -> None:
    output = failing(tmp_path, STALE, "os.kill(os.getpid(), signal.SIGKILL)")
    assert re.search(r"hvdrun: rank 1 \(pid \d+\) was killed by signal 9", output), output


def test_a_rank_that_ends_without_the_others_ends_them(tmp_path: Path) -> None:
    output = failing(tmp_path, STALE, "sys.exit()")
    assert re.search(r"PeerFinishedError: .*rank 1 .*", output), output


@pytest.mark.parametrize("program", [STALE, SERVED], ids=["stale", "served"])
def test_a_rank_that_computes_nothing_is_named_at_the_deadline(tmp_path: Path, program: str) -> None:
    fault = f"threading.Event().wait({PATIENCE})"
    output = failing(tmp_path, program, fault, SIRTAKI_STALL_DEADLINE="5")
    named = r"DeadlineError: rank [02] has waited \d+\.\d s for .* rank 1 on \S+: staleness=1"
    assert re.search(named, output), output
