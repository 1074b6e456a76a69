"""An elastic job on this host: the main loop that carries out the arbiter's orders."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.capacity import Capacity
from sirtaki.runner.cores import usable_cores
from sirtaki.runner.display import Display
from sirtaki.runner.elastic.actions import Action, Close, Finish, Kill, Open, Say, Send, Slot, Start
from sirtaki.runner.elastic.arbiter import Arbiter, Phase
from sirtaki.runner.elastic.discovery import Discovery
from sirtaki.runner.elastic.post import Post
from sirtaki.runner.elastic.settings import ElasticSettings
from sirtaki.runner.environment import RankEnvironment, thread_counts
from sirtaki.runner.failure_analysis import ExitStatus, signal_name
from sirtaki.runner.job_directory import make_job_directory
from sirtaki.runner.launch import Settings, with_reaper, write_job_key
from sirtaki.runner.process import RankProcess
from sirtaki.runner.rank_start import REPORTS, describe_start_failure
from sirtaki.runner.reaper import Reaper
from sirtaki.runner.rendezvous.elastic.messages import End, Message
from sirtaki.runner.rendezvous.elastic.process import ARBITER
from sirtaki.runner.rendezvous.job import Job, RendezvousError
from sirtaki.runner.rendezvous.lifecycle import WORKER
from sirtaki.runner.signals import WakeupPipe, stop_this_process
from sirtaki.runner.supervisor import KILL_SECONDS, READER_GONE

_END_SECONDS = 30.0  # for a worker that was told to end, and may have files to write


class ElasticJob:
    """A job whose workers come and go. All of it runs in the main thread, so that workers can be forked."""

    def __init__(
        self, settings: Settings, elastic: ElasticSettings, wakeup: WakeupPipe, reaper: Reaper
    ) -> None:
        self._settings = settings
        self._wakeup = wakeup
        self._reaper = reaper
        self._selector = selectors.PollSelector()  # epoll refuses regular files
        self._display = Display(self._selector, settings.verbose)
        folder = make_job_directory(reaper)
        self._key_file = os.path.join(folder, "key")
        job = Job(secrets.token_hex(8), 1, write_job_key(self._key_file), VERSION)
        self._job, self._folder = job, Path(folder)
        self._post = Post(job, folder, self._receive, self._display.say)
        self._discovery = Discovery(elastic.script, elastic.slots_per_host, self._display.say)
        self._most = max(elastic.rules.maximum, len(elastic.slots))
        self._slots: Sequence[Slot] = elastic.slots
        if elastic.script:
            self._slots = self._discovery.first()[: self._most]
        self._arbiter = Arbiter(elastic.rules, self._slots)
        self._size = elastic.rules.start
        self._processes: dict[int, RankProcess] = {}  # by worker number
        self._running: set[int] = set()
        self._ends: dict[int, float] = {}  # when to kill workers that were told to end
        self._result: Finish | None = None
        self._kill_at: float | None = None
        self._signal_to_send: int | None = None
        self._started = time.monotonic()
        self._skips_output = False

    def run(self) -> int:
        """Runs the job to its end; returns hvdrun's exit code. Raises LaunchError if it cannot start."""
        for notice in self._settings.notices:
            self._display.say(notice)
        capacity = Capacity(self._size, usable_cores())
        if not self._settings.oversubscribe:
            capacity.check()
        self._display.expect(self._most, self._settings.output_folder)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._handle_wakeup)
        self._wakeup.unblock_signals()
        self._carry_out(self._arbiter.start(time.monotonic()))
        while self._running or self._arbiter.phase is not Phase.OVER:
            self._iterate()
        return self._conclude()

    # ---- The loop --------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        self._display.balance()
        servers = self._post.servers()
        for server in servers:
            self._selector.register(server, selectors.EVENT_READ, lambda: None)  # all are served below
        ready = [key.data for key, _ in self._selector.select(self._time_to_next_deadline())]
        for server in servers:
            self._selector.unregister(server)
        for handle in ready:
            handle()
        self._serve()
        now = time.monotonic()
        for slots in self._discovery.poll(now):
            self._set_slots(slots)
        if (due := self._arbiter.due) is not None and due <= now:
            self._carry_out(self._arbiter.tick(now))
        if self._kill_at is not None and self._kill_at <= now:
            self._kill_at = now + KILL_SECONDS
            self._signal(signal.SIGKILL)
        for worker in [one for one, due in self._ends.items() if due <= now]:
            del self._ends[worker]
            self._processes[worker].signal(signal.SIGKILL)
        if error := self._display.reader_error:
            is_closed = isinstance(error, BrokenPipeError)
            text = "" if is_closed else f"cannot write to standard output: {error.strerror}"
            self._stop(Finish(READER_GONE if is_closed else 1, text), signal.SIGTERM)
        self._serve()  # sends what the orders have queued
        if self._signal_to_send is not None:
            self._signal(self._signal_to_send)
            self._signal(signal.SIGCONT)  # a stopped process does not handle signals
            self._signal_to_send = None

    def _serve(self) -> None:
        """Serves the connections; a handler may close one, or open another."""
        for server in self._post.servers():
            if server in self._post.servers():
                server.poll()

    def _time_to_next_deadline(self) -> float | None:
        now = time.monotonic()
        moments = [self._arbiter.due, self._kill_at, self._discovery.due, *self._ends.values()]
        times = [one - now for one in moments if one is not None]
        times += [
            one for server in self._post.servers() if (one := server.time_to_next_deadline()) is not None
        ]
        return max(min(times), 0.0) if times else None

    def _handle_wakeup(self) -> None:
        numbers = self._wakeup.read()
        if self._reaper.replace_if_killed():
            self._display.say("the process that cleans up after this job was killed; another one replaces it")
        ended = [status for number in sorted(self._running) if (status := self._processes[number].check())]
        if ended:
            self._serve()  # a worker's last message precedes its end
        for status in ended:
            self._note_end(status)
        for number in numbers:
            self._handle_signal(number)

    def _note_end(self, status: ExitStatus) -> None:
        number = next(one for one in self._running if self._processes[one].pid == status.pid)
        self._running.discard(number)
        self._ends.pop(number, None)
        if status.failed:
            self._processes[number].signal(signal.SIGKILL)  # its children may hold a GPU
            self._processes[number].reap()
            self._reaper.forget_group(status.pid)
        why = f"failed with exit code {status.code}" if status.code else "ended"
        if status.killed_by:
            why = f"killed by signal {status.killed_by} ({signal_name(status.killed_by)})"
        now = time.monotonic()
        self._carry_out(self._arbiter.ended(number, status.code, status.killed_by, why, now))

    def _receive(self, worker: int, message: Message) -> None:
        self._carry_out(self._arbiter.received(worker, message, time.monotonic()))

    def _set_slots(self, slots: Sequence[Slot]) -> None:
        self._slots = slots[: self._most]
        self._carry_out(self._arbiter.set_slots(self._slots, time.monotonic()))

    # ---- Orders ----------------------------------------------------------------------------------------

    def _carry_out(self, orders: Sequence[Action]) -> None:
        for order in orders:
            if isinstance(order, Say):
                self._display.say(order.text)
            elif isinstance(order, Send):
                self._post.send(order.worker, order.message)
                if isinstance(order.message, End):
                    self._ends[order.worker] = time.monotonic() + _END_SECONDS
            elif isinstance(order, Open):
                self._open(order)
            elif isinstance(order, Close):
                self._post.close_generation()
            elif isinstance(order, Start) and self._result is None:
                self._start(order)
            elif isinstance(order, Kill) and order.worker in self._running:
                self._processes[order.worker].signal(signal.SIGKILL)
            elif isinstance(order, Finish):
                self._end(order, signal.SIGTERM)

    def _open(self, order: Open) -> None:
        try:
            self._post.open(order)
        except RendezvousError as error:
            self._stop(Finish(1, f"the ranks cannot meet: {error}"), signal.SIGTERM)

    def _start(self, order: Start) -> None:
        command, environment = self._settings.command, self._environment(order)
        try:
            process = RankProcess(order.slot.index, command, environment, self._reaper)
        except OSError as error:
            text = describe_start_failure(order.slot.index, command, error)
            self._carry_out(self._arbiter.ended(order.worker, 126, 0, text, time.monotonic()))
            return
        self._processes[order.worker] = process
        self._running.add(order.worker)
        self._display.read_rank(order.slot.index, process.stdout, process.stderr)
        self._display.detail(f"the worker in slot {order.slot} is pid {process.pid}")

    def _environment(self, order: Start) -> Mapping[str, str]:
        """Returns a worker's environment. Its rank and size are provisional, until a world exists."""
        settings, size = self._settings, self._size
        threads = thread_counts(min(size, len(self._slots)), usable_cores(), os.environ)
        additions = {**threads, **settings.additions}
        additions.setdefault(REPORTS, os.environ.get(REPORTS, str(self._folder)))
        additions |= {WORKER: str(order.worker), ARBITER: self._post.address, "HOROVOD_ELASTIC": "1"}
        rank = min(order.slot.index, size - 1)
        placement = RankPlacement(rank, size, order.slot.index, size, 0, 1)
        environment = RankEnvironment(
            self._job.id, self._post.address, self._key_file, settings.start_timeout, additions
        )
        return environment.of(placement, os.environ)

    # ---- The end ---------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._signal(number)
            stop_this_process()
        elif number in (signal.SIGCONT, signal.SIGHUP):
            self._signal(number)
        elif number in (signal.SIGINT, signal.SIGTERM):
            self._terminate(number)

    def _terminate(self, number: int) -> None:
        if self._kill_at is not None:
            self._signal(signal.SIGKILL)
            return
        if self._arbiter.phase is Phase.OVER and not self._running:
            self._skips_output = True
            return
        text = "terminated (SIGTERM): ending all ranks"
        if number == signal.SIGINT:
            self._display.say("interrupted: ending all ranks (Ctrl-C again kills them at once)")
            shown = [self._processes[one].rank for one in self._running]
            self._display.mute_errors_except(min(shown, default=0))
            text = ""
        self._stop(Finish(128 + number, text), number)

    def _stop(self, result: Finish, number: int) -> None:
        """Ends the job although the arbiter has not decided that."""
        self._carry_out(self._arbiter.stop())
        self._end(result, number)

    def _end(self, result: Finish, number: int) -> None:
        """Ends the job: asks all workers to end, and kills those that do not."""
        if self._result is not None:
            return
        self._result = result
        self._kill_at = time.monotonic() + KILL_SECONDS
        if result.code:
            self._signal_to_send = number  # after the message with the reason

    def _signal(self, number: int) -> None:
        for worker in self._running:
            self._processes[worker].signal(number)

    def _conclude(self) -> int:
        self._post.close()
        self._discovery.close()
        for process in self._processes.values():
            process.reap()
        self._reaper.release()
        while not self._reaper.ended() and not self._skips_output:
            self._selector.select(0.02)
            self._wakeup.read()
        self._display.close_streams()
        result = self._result or Finish(0)
        reason = ""
        if result.culprit is not None and result.culprit in self._processes:
            reason = self._display.show_error_of(self._processes[result.culprit].rank)
        if self._arbiter.generation > 1 or self._arbiter.losses:
            seconds, arbiter = time.monotonic() - self._started, self._arbiter
            account, workers = arbiter.account, arbiter.workers.all()
            self._display.say(account.summary(arbiter.generation, arbiter.losses, workers, seconds))
        if result.text:
            self._display.say(f"{result.text}{reason and ': '}{reason}")
        while not self._display.all_shown and not self._skips_output:
            for key, _ in self._selector.select():
                key.data()
        return result.code


def run_elastic_job(settings: Settings, elastic: ElasticSettings) -> int:
    """Runs an elastic job to its end; returns hvdrun's exit code. Raises LaunchError if it cannot start."""
    return with_reaper(lambda wakeup, reaper: ElasticJob(settings, elastic, wakeup, reaper).run())
