"""The program of a rank that `sirtaki.run` has started: gets the function, calls it, and sends the outcome.

Nothing is unpickled before the launcher has proved that it knows the key of the job.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from sirtaki.bindings.bootstrap.connection.wire import Frame, MessageKind
from sirtaki.bindings.bootstrap.job import (
    ARBITER,
    CALLS,
    WORKER,
    Identity,
    Job,
    RendezvousError,
    job_of_workers,
)
from sirtaki.bindings.bootstrap.providers import find_world
from sirtaki.bindings.bootstrap.rendezvous_client import RendezvousClient
from sirtaki.runner.function.call import FunctionCall, python_version, settle
from sirtaki.runner.function.pickling import cannot_pickle, import_cloudpickle, load_call
from sirtaki.runner.function.report import RETURNED, exit_code, report_of
from sirtaki.runner.function.service import PIECE_BYTES
from sirtaki.runner.launch.environment import encrypts

_INTERRUPTED = 130  # a shell's exit code for a program that was interrupted


def main() -> int:
    try:
        launcher = LauncherConnection()
        # Modules of this host's own path, such as the standard library in another place, come last.
        sys.path[:] = [*launcher.path, *(path for path in sys.path if path not in launcher.path)]
        return _call(launcher)
    except LauncherGone as error:
        print(f"sirtaki.run: {error}", file=sys.stderr)
        return 1


def _call(launcher: LauncherConnection) -> int:
    """Calls the function, and sends its result or its exception; returns the exit code of this process."""
    try:
        call = _load(launcher)
        settle(call)
        result = call.function(*call.args, **call.kwargs)
        launcher.begin_outcome(RETURNED)
        _send_result(launcher, result)
    except LauncherGone:
        raise
    except KeyboardInterrupt as interrupt:
        _abort(interrupt)
        return _INTERRUPTED
    except SystemExit as end:
        return _exit(launcher, end)
    except BaseException as error:
        _fail(launcher, error)
        return 1
    return 0


def _load(launcher: LauncherConnection) -> FunctionCall:
    import_cloudpickle()  # an ImportError with its command is clearer than what load_call would make of it
    advice = "; every host needs the modules that the function comes from, in the same folders"
    call: FunctionCall = load_call(launcher.read_call(), launcher.number, advice)
    return call


def _send_result(launcher: LauncherConnection, result: object) -> None:
    try:
        import_cloudpickle().dump(result, launcher)
    except LauncherGone:
        raise
    except Exception as error:
        raise cannot_pickle(result, launcher.number, error) from None
    launcher.end_outcome()


def _exit(launcher: LauncherConnection, end: SystemExit) -> int:
    """Handles sys.exit(): a rank has to return, but a worker that leaves an elastic job ends in this way."""
    code = exit_code(end)
    if ARBITER in os.environ:
        return code
    _send_exception(launcher, end, "exited")
    return code or 1


def _fail(launcher: LauncherConnection, error: BaseException) -> None:
    """Sends an exception, and ends this rank's world as an uncaught exception does."""
    _send_exception(launcher, error, "raised")
    _abort(error)


def _abort(error: BaseException) -> None:
    from sirtaki.bindings.bootstrap import lifecycle

    lifecycle.abort(error)


def _send_exception(launcher: LauncherConnection, error: BaseException, kind: str) -> None:
    report = report_of(error, kind)
    launcher.begin_outcome(report)
    try:
        import_cloudpickle().dump(error, launcher)
    except LauncherGone:
        raise
    except Exception:  # the report has to do
        launcher.begin_outcome(report)
    launcher.end_outcome()


# ---- A rank's connection to the launcher: the call comes over it, and the outcome goes back ------------

_ANSWER_SECONDS = 600.0  # for an answer, which takes milliseconds unless the launcher was stopped


class LauncherGone(Exception):
    """The launcher has ended, or refuses what this process sends; so this process ends, too."""


class LauncherConnection:
    """The connection to the launcher. `number` is that of this rank, or worker of an elastic job, there."""

    def __init__(self) -> None:
        """Connects. Raises LauncherGone if there is no launcher, or if it does not accept this process."""
        try:
            address, job, self.number, start_timeout = _find_launcher()
            mine = Identity(self.number, channel=CALLS)
            self._client = RendezvousClient.connect(address, job, mine, start_timeout)
            self._client.keep_alive()  # the function may run for days
        except RendezvousError as error:
            raise LauncherGone(str(error)) from None
        values = {"host": socket.gethostname(), "pid": os.getpid(), "python": python_version()}
        answer = self._ask(Frame.of(MessageKind.HELLO, values)).values
        self.path: list[str] = answer["path"]
        self._size: int = answer["size"]
        self._pending = bytearray()  # bytes of the outcome that have not been sent

    def read_call(self) -> bytearray:
        """Returns the pickled call."""
        call, end = bytearray(self._size), 0
        while end < self._size:
            piece = self._ask(Frame(MessageKind.READ, number=end)).payload
            call[end : end + len(piece)] = piece
            end += len(piece)
        return call

    def begin_outcome(self, report: dict[str, Any]) -> None:
        """Starts an outcome; discards an unfinished outcome."""
        self._pending.clear()
        self._ask(Frame.of(MessageKind.OUTCOME, report))

    def write(self, data: Any) -> int:
        """Sends a part of the pickled outcome, as a file that `pickle` writes to."""
        view = memoryview(data).cast("B")
        if len(self._pending) + len(view) > PIECE_BYTES:
            self._send_pending()
        if len(view) <= PIECE_BYTES:
            self._pending += view
            return len(view)
        for start in range(0, len(view), PIECE_BYTES):
            self._ask(Frame(MessageKind.PIECE, payload=bytes(view[start : start + PIECE_BYTES])))
        return len(view)

    def end_outcome(self) -> None:
        """Returns when the launcher has the whole outcome."""
        self._send_pending()
        self._ask(Frame(MessageKind.COMPLETE))

    def _send_pending(self) -> None:
        if self._pending:
            self._ask(Frame(MessageKind.PIECE, payload=bytes(self._pending)))
            self._pending.clear()

    def _ask(self, request: Frame) -> Frame:
        try:
            return self._client.call(request, time.monotonic() + _ANSWER_SECONDS)
        except (OSError, RendezvousError) as error:
            raise LauncherGone(str(error)) from None


def _find_launcher() -> tuple[str, Job, int, float]:
    """Returns the address of the launcher, the job, this process's number there, and the start timeout."""
    world = find_world()
    address, job, number = world.address, world.job, world.rank
    if ARBITER in os.environ:
        address, number, job = os.environ[ARBITER], int(os.environ[WORKER]), job_of_workers(job)
    if encrypts(os.environ):
        from sirtaki.bindings.bootstrap.lifecycle import encrypted

        job = encrypted(job)
    return address, job, number, world.start_timeout


if __name__ == "__main__":
    sys.exit(main())
