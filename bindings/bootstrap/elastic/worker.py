"""This process as a worker: what it has agreed with hvdrun's arbiter, and its waits for the next generation.

docs/design/elastic_protocol.md is the specification. The connection's thread answers for the program while
that computes; `check` is the only place where both meet, and it sends nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sirtaki.bindings.bootstrap.elastic.messages import (
    Change,
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
    Standing,
    World,
    pack,
    unpack,
)
from sirtaki.bindings.bootstrap.job import RendezvousError, RendezvousTimeout
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.bindings.errors import HorovodInternalError, HostsUpdatedInterrupt

_ANSWER_SECONDS = 60.0  # for the arbiter's answer to the members' counts, which takes milliseconds
_NO_ANSWER = f"hvdrun has not answered for {_ANSWER_SECONDS:g} s"
_GONE = "hvdrun, which starts and watches the ranks of this job, is gone"


class WorkerEnded(Exception):  # it is no error of the program's
    """The arbiter has ended this worker: the process exits with `code`."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class _Agreed:
    """The state shared by the connection's thread and the program, under a lock."""

    generation: int = 0  # the one that the program takes part in; 0 for none
    checks: int = 0  # that the program has begun in this generation
    must_wait: bool = False  # the next check waits for `leave_at`
    leave_at: int = 0  # the check at which this worker leaves; 0 for none
    is_over: str = ""  # why the generation has ended
    next_world: World | None = None
    end: End | None = None
    gone: str = ""  # why there is no connection any more
    standing: Standing | None = None  # the last answer to `fence`


class ElasticWorker:
    """A worker. `commit` is the number of its last commit, -1 before the first generation."""

    def __init__(self, client: RendezvousClient, number: int) -> None:
        self.number = number
        self.commit = -1
        self._agreed = _Agreed()
        self._changed = threading.Condition()
        self._fences = itertools.count()
        self._asking = threading.Lock()
        self._on_end: Callable[[End], None] | None = None
        self._on_over: Callable[[str], None] | None = None
        self._connection = ArbiterConnection(client, self._take, self._note_gone)
        self._connection.start()

    # ---- The program's side ----------------------------------------------------------------------------

    def enlist(self, message: Enlist) -> World:
        """Asks for a place in the next generation, and waits for it.

        Raises:
            WorkerEnded: this worker is not needed, or the job has ended.
            HorovodInternalError: the arbiter is gone.
        """
        with self._changed:
            self._agreed.generation, self._agreed.is_over = 0, ""
            self._agreed.next_world = None
        self._send(message)
        with self._changed:
            while self._agreed.next_world is None:
                self._raise_if_ended()
                self._changed.wait()
            world = self._agreed.next_world
            before = self._agreed
            self._agreed = _Agreed(
                world.generation,
                is_over=before.is_over,
                end=before.end,
                gone=before.gone,
                standing=before.standing,
            )
        return world

    def received(self) -> None:
        """Reports that this worker has the state of the generation's commit."""
        self._send(Received(self._agreed.generation))

    def returned(self) -> None:
        """Reports that the training function has returned."""
        with self._changed:
            generation, self._agreed.generation = self._agreed.generation, 0
        self._send(Returned(generation))

    def drain(self) -> None:
        """Asks to leave at the next change, because this process was asked to end."""
        self._send(Drain(self._agreed.generation))

    def fence(self) -> None:
        """Returns if the arbiter says that this worker still is a rank; any thread may ask.

        A worker that was told to end asks, too: if the whole job ends, nobody goes on without it.

        Raises:
            HorovodInternalError: it is none any more, or hvdrun has not answered.
        """
        with self._asking:  # questions are sent, and so answered, in the order of their numbers
            question = next(self._fences)
            self._send(Fence(self._agreed.generation, question))
        deadline = time.monotonic() + _ANSWER_SECONDS
        with self._changed:
            while (answer := self._agreed.standing) is None or answer.question < question:
                left = deadline - time.monotonic()
                if self._agreed.gone or left <= 0:
                    raise HorovodInternalError(self._agreed.gone or _NO_ANSWER)
                self._changed.wait(left)
        if not answer.is_rank:
            raise HorovodInternalError(
                "this process is no rank of the job any more: it has left, or hvdrun has given it up, and "
                "others go on without it"
            )

    def check(self, before_leaving: Callable[[], None]) -> None:
        """Counts a check; if all members leave at this check, calls `before_leaving`.

        Raises:
            HostsUpdatedInterrupt: this worker leaves its generation here.
            HorovodInternalError: the arbiter is gone.
        """
        agreed = self._agreed
        with self._changed:
            agreed.checks += 1
            if agreed.must_wait:
                self._wait_for_answer(agreed)
            if agreed.is_over or agreed.gone:
                raise HorovodInternalError(agreed.is_over or agreed.gone)
            leaves = agreed.leave_at == agreed.checks
        if leaves:
            before_leaving()
            raise HostsUpdatedInterrupt()

    @property
    def is_over(self) -> bool:
        """Returns whether the arbiter has ended this worker's generation."""
        return bool(self._agreed.is_over)

    @property
    def counts_differ(self) -> str:
        """Returns why a member may have left earlier: this worker has counted fewer checks; "" if not."""
        agreed = self._agreed
        if not agreed.leave_at or agreed.checks >= agreed.leave_at:
            return ""
        return (
            f"another rank has called state.commit() or state.check_host_updates() {agreed.leave_at} times, "
            f"and this one {agreed.checks} times: all ranks have to call them equally often"
        )

    def _wait_for_answer(self, agreed: _Agreed) -> None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while agreed.must_wait and not agreed.is_over and not agreed.end:
            left = deadline - time.monotonic()
            if agreed.gone or left <= 0:
                raise HorovodInternalError(agreed.gone or _NO_ANSWER)
            self._changed.wait(left)

    def _raise_if_ended(self) -> None:
        if self._agreed.end is not None:
            raise WorkerEnded(self._agreed.end.code, self._agreed.end.text)
        if self._agreed.gone:
            raise HorovodInternalError(self._agreed.gone)

    @property
    def end(self) -> End | None:
        """Returns the arbiter's message that ends this worker; None while it has none."""
        return self._agreed.end

    def on_end(self, callback: Callable[[End], None]) -> None:
        """Calls `callback`, from the connection's thread, when the arbiter ends this worker."""
        self._on_end = callback

    def on_over(self, callback: Callable[[str], None]) -> None:
        """Calls `callback`, from the connection's thread, when the arbiter ends the current generation."""
        self._on_over = callback

    def close(self) -> None:
        """Closes this process's end of the connection; in a forked child the parent's stays open."""
        self._connection.close()

    def _send(self, message: Message) -> None:
        try:
            self._connection.send(message)
        except (OSError, RendezvousError) as error:
            with self._changed:
                self._raise_if_ended()
            raise HorovodInternalError(f"{_GONE}: {error}") from None

    # ---- The connection's thread -----------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        answer: Message | None = None
        with self._changed:
            agreed = self._agreed
            if isinstance(message, World):
                agreed.next_world = message
            elif isinstance(message, End):
                agreed.end = message
            elif isinstance(message, Standing):
                agreed.standing = message
            elif isinstance(message, Change | LeaveAt | Over) and message.generation == agreed.generation:
                answer = self._apply(agreed, message)
            elif isinstance(message, Over) and agreed.next_world is not None:
                agreed.is_over = message.text  # before the program has taken its place there
            self._changed.notify_all()
        if answer is not None:
            self._connection.send(answer)
        if isinstance(message, End) and self._on_end is not None:
            self._on_end(message)
        if isinstance(message, Over) and self._on_over is not None and agreed.is_over:
            self._on_over(message.text)

    def _apply(self, agreed: _Agreed, message: Change | LeaveAt | Over) -> Message | None:
        """Applies a message about the current generation; returns the answer."""
        if isinstance(message, Change):
            agreed.must_wait = True
            return Counted(agreed.generation, message.question, agreed.checks)
        if isinstance(message, LeaveAt):
            agreed.must_wait, agreed.leave_at = False, message.check
        else:
            agreed.is_over = message.text or "the world has ended"
        return None

    def _note_gone(self, why: str) -> None:
        with self._changed:
            self._agreed.gone = f"{_GONE}: {why}"
            self._changed.notify_all()


# ---- The connection to hvdrun's arbiter ----------------------------------------------------------------

# Messages go in both directions, read by a thread of its own.


# Seconds for a message, in both directions, because they share the socket's time limit. It is the longest
# that poll(2) takes: the arbiter has deadlines for everything that a worker waits for.
_PATIENCE = 2e6


class ArbiterConnection:
    """A connection to the arbiter. `on_message` and `on_end` are called from the reading thread."""

    def __init__(
        self,
        client: RendezvousClient,
        on_message: Callable[[Message], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._client = client
        self._on_message = on_message
        self._on_end = on_end
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._read, name="sirtaki elastic", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Sends a message; any thread may. Raises RendezvousError if the arbiter is gone."""
        with self._sending:
            self._client.send_message(pack(message), time.monotonic() + _PATIENCE)

    def close(self) -> None:
        """Closes this process's end."""
        self._client.close()

    def _read(self) -> None:
        try:
            while True:
                with contextlib.suppress(RendezvousTimeout):  # nothing has happened for that long
                    frame = self._client.receive_message(time.monotonic() + _PATIENCE)
                    self._on_message(unpack(frame))
        except (OSError, ValueError, RendezvousError) as error:  # ValueError: closed by this process's end
            self._on_end(str(error))
