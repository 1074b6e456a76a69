"""An elastic job with actors as workers: a loop around the same driver as hvdrun's elastic jobs."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.elastic.process import Assignment
from sirtaki.bindings.bootstrap.job import KEY_BYTES, Job, job_of_workers
from sirtaki.bindings.topology import RankPlacement
from sirtaki.ray.actor import RankActor
from sirtaki.ray.settings import ExecutorSettings, Shape
from sirtaki.runner.elastic.arbiter.model import Finish, Rules, Slot
from sirtaki.runner.elastic.driver import Driver, WorkerEnd
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.engines.outcomes import RankOutcome, results_of
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.launch.environment import encrypts
from sirtaki.runner.launch.errors import CannotStart
from sirtaki.runner.launch.hosts import is_own_host

_POLL_SECONDS = 1.0  # between two looks at the reservations
_LAST_MESSAGE_SECONDS = 5.0  # for the last message of a worker, which comes by another connection
_GRACE_SECONDS = 5.0  # for workers to end by themselves when the job does
_KILL_SECONDS = 30.0  # for Ray to report the end of actors that were killed
_LONGEST_REASON = 300  # characters of Ray's


@dataclass
class _Worker:
    """An actor that works. `told_at` is when its end is told at the latest, once it has ended."""

    actor: Any
    slot: Slot
    outcome: Future[RankOutcome]
    told_at: float | None = None


@dataclass(frozen=True)
class Work:
    """A call for all workers: pickled, as are the executable, and whether the call gets that."""

    executable: bytes
    call: bytes
    gives_executable: bool


class ActorJob:
    """One call of an elastic executor."""

    def __init__(
        self, settings: ExecutorSettings, shape: Shape, rules: Rules, variables: Mapping[str, str], work: Work
    ) -> None:
        self._settings, self._rules, self._shape, self._work = settings, rules, shape, work
        encrypt = encrypts({**os.environ, **variables})
        self._variables = {**variables, "SIRTAKI_ENCRYPT": str(int(encrypt))}
        self._job = Job(f"ray-{secrets.token_hex(8)}", 1, secrets.token_bytes(KEY_BYTES), VERSION, encrypt)
        self._workers: dict[int, _Worker] = {}
        self._outcomes: dict[int, RankOutcome] = {}
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        self._next_poll = 0.0
        self._kill_at: float | None = None

    def run(self) -> list[Any]:
        """Runs the job to its end; returns the results by final rank. Raises as `RayExecutor.run`."""
        with (
            contextlib.closing(self._receiver),
            contextlib.closing(self._sender),
            tempfile.TemporaryDirectory(prefix="sirtaki-") as folder,
            contextlib.closing(
                Post(self._job, folder, self._settings.nics, lambda *one: self._driver.receive(*one), _say)
            ) as self._post,
            contextlib.closing(Places(self._shape)) as self._places,
        ):
            self._driver = Driver(self._rules, self._post, self, _say, self._end)
            try:
                while self._workers or not self._driver.is_over:
                    self._iterate()
            finally:
                for worker in self._workers:
                    self.kill(worker)
            return self._results()

    # ---- The driver's orders ---------------------------------------------------------------------------

    def start(self, worker: int, slot: Slot) -> None:
        """Starts an actor in a slot. Raises CannotStart."""
        strategy = self._places.strategy(slot)
        if strategy is None:
            raise CannotStart(f"{slot.host} was lost")
        is_near = is_own_host(slot.host)
        arbiter = self._post.address if is_near else self._post.address_for_others()
        size = self._rules.start
        placement = RankPlacement(min(worker, size - 1), size, slot.index, size, 0, 1)
        job = job_of_workers(replace(self._job, encrypt=False))  # each worker has a setting of its own
        assignment = Assignment(worker, job, arbiter, "", placement)
        actor = (
            ray.remote(RankActor)
            .options(
                name=f"sirtaki-{self._job.id}-{worker}",
                num_cpus=self._shape.cpus,
                num_gpus=self._shape.gpus,
                scheduling_strategy=strategy,
                runtime_env={"env_vars": self._variables},
            )
            .remote()
        )
        work = self._work
        outcome = actor.work.remote(assignment, work.executable, work.call, work.gives_executable).future()
        self._workers[worker] = _Worker(actor, slot, outcome)
        outcome.add_done_callback(self._wake)

    def kill(self, worker: int) -> None:
        """Kills the process of an actor."""
        if worker in self._workers:
            ray.kill(self._workers[worker].actor)

    def _end(self, result: Finish) -> None:
        self._kill_at = time.monotonic() + _GRACE_SECONDS

    # ---- The loop --------------------------------------------------------------------------------------

    def _wake(self, outcome: Future[RankOutcome]) -> None:
        with contextlib.suppress(OSError):  # enough wake-ups are pending, or the job is over
            self._sender.send(b"\0")

    def _iterate(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._receiver, selectors.EVENT_READ)
            for server in self._post.servers():
                selector.register(server, selectors.EVENT_READ)
            selector.select(self._seconds_to_next())
        with contextlib.suppress(BlockingIOError):
            self._receiver.recv(4096)
        self._post.serve()
        now = time.monotonic()
        self._note_ends(now)
        if self._next_poll <= now:
            self._next_poll = now + _POLL_SECONDS
            slots = self._places.poll()
            used = [worker.slot for worker in self._workers.values()]  # their ends are reported separately
            self._driver.set_slots(list(dict.fromkeys([*slots, *used])))
        self._driver.advance(now)
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = now + _KILL_SECONDS
            for worker in self._workers:
                self.kill(worker)
        self._post.serve()  # sends what the orders have queued

    def _seconds_to_next(self) -> float:
        moments = [self._next_poll, self._driver.due, self._post.due, self._kill_at]
        moments += [worker.told_at for worker in self._workers.values()]
        return max(min(moment for moment in moments if moment is not None) - time.monotonic(), 0.0)

    def _note_ends(self, now: float) -> None:
        """Tells the driver the ends of workers, each after its last message if that can be known."""
        for number, worker in list(self._workers.items()):
            if not worker.outcome.done():
                continue
            if worker.told_at is None:
                worker.told_at = now + _LAST_MESSAGE_SECONDS
            if worker.told_at <= now or not self._post.is_connected(number):
                end = self._end_of(number, worker, now)
                self.kill(number)
                del self._workers[number]
                self._driver.note_end(number, end)

    def _end_of(self, number: int, worker: _Worker, now: float) -> WorkerEnd:
        keeps_slot = self._places.strategy(worker.slot) is not None
        error = worker.outcome.exception()
        if error is None:
            outcome = self._outcomes[number] = worker.outcome.result()
            if outcome.has_returned or outcome.report["kind"] == "exited":
                return WorkerEnd(outcome.exit_code, 0, f"called sys.exit({outcome.exit_code})", now)
            why = f"raised {outcome.report['type']}: {outcome.report['text']}"
            return WorkerEnd(1, 0, why, now, keeps_slot)
        why = f"Ray has lost its actor: {_reason(error)}"
        if _was_killed(error):
            return WorkerEnd(0, signal.SIGKILL, why, now, keeps_slot)
        return WorkerEnd(1, 0, why, now, keeps_slot)

    def _results(self) -> list[Any]:
        if summary := self._driver.summary():
            _say(summary)
        ranks, result = self._driver.last_ranks(), self._driver.result or Finish(0)
        if result.code:
            culprit = self._outcomes.get(-1 if result.culprit is None else result.culprit)
            if culprit is None or culprit.report["kind"] != "raised":
                raise RunError(f"{result.text} ({self._places.describe()})")
            assert result.culprit is not None
            results_of([replace(culprit, rank=ranks.get(result.culprit, 0), is_caused_elsewhere=False)])
        returned = [number for number, outcome in self._outcomes.items() if outcome.has_returned]
        if not returned:
            raise RunError("no rank has returned a result")
        by_rank = sorted(returned, key=lambda number: (ranks.get(number, number), number))
        return results_of([replace(self._outcomes[rank], rank=at) for at, rank in enumerate(by_rank)])


def _was_killed(error: BaseException) -> bool:
    """Returns whether an actor was lost for a reason that may not affect another actor.

    Such reasons are a crash, the end of its node, and Ray's memory monitor, which raises OutOfMemoryError, no
    RayActorError.
    """
    if isinstance(error, RayActorError):
        return not error.actor_init_failed
    # A runtime environment that cannot be made there is like an actor that cannot be.
    return isinstance(error, RayError) and not isinstance(error, RayTaskError | RuntimeEnvSetupError)


def _reason(error: BaseException) -> str:
    """Returns Ray's reason in a single line, without its description of the actor."""
    text = str(error)
    return " ".join((text.partition("The actor is dead because ")[2] or text).split())[:_LONGEST_REASON]


def _say(text: str) -> None:
    sys.stderr.write(f"sirtaki: {text}\n")


# ---- The places of workers -----------------------------------------------------------------------------

# A place is a reservation of Ray for one worker, made where there is room.


class Places:
    """Reservations for the greatest number of workers. Ray makes them when, and where, resources are free."""

    def __init__(self, shape: Shape) -> None:
        self._bundle = shape.bundle()
        self._groups = [placement_group([self._bundle]) for _ in range(shape.workers)]
        self._nodes: dict[str, str] = {}  # of the reservations that Ray has made
        self._slots: dict[str, Slot] = {}

    def poll(self) -> list[Slot]:
        """Returns the slots that exist now. A slot on a lost node does not come back."""
        own = ray.util.get_node_ip_address()
        nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
        table = placement_group_table()
        for group in self._groups:
            found = table.get(group.id.hex(), {})
            node = found.get("bundles_to_node_id", {}).get(0, "") if found.get("state") == "CREATED" else ""
            self._note(group.id.hex(), node if node in nodes else "")
        for name, node in self._nodes.items():
            if name not in self._slots:
                self._slots[name] = self._free_slot("localhost" if nodes[node] == own else nodes[node])
        return list(self._slots.values())

    def strategy(self, slot: Slot) -> Any:
        """Returns how to schedule an actor in a slot; None if the slot was lost."""
        for group in self._groups:
            if self._slots.get(group.id.hex()) == slot:
                return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        return None

    def describe(self) -> str:
        """Returns how many workers Ray has room for, for an error."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in self._bundle.items())
        return f"Ray has reserved {len(self._slots)} of {len(self._groups)} times {each}"

    def close(self) -> None:
        """Gives the reservations back."""
        for group in self._groups:
            remove_placement_group(group)

    def _note(self, name: str, node: str) -> None:
        if self._nodes.get(name) != (node or None):
            self._nodes.pop(name, None)
            self._slots.pop(name, None)
            if node:
                self._nodes[name] = node

    def _free_slot(self, host: str) -> Slot:
        used = set(self._slots.values())
        return next(slot for index in range(len(self._groups)) if (slot := Slot(host, index)) not in used)
