"""The program of a rank that `sirtaki.run` has started: gets the function, calls it, and sends the outcome.

Nothing is unpickled before the launcher has proved that it knows the key of the job.
"""

from __future__ import annotations

import os
import socket
import sys

from sirtaki.runner.function.call import Call, settle
from sirtaki.runner.function.errors import RunError
from sirtaki.runner.function.launcher_connection import LauncherConnection, LauncherGone
from sirtaki.runner.function.pickling import import_cloudpickle
from sirtaki.runner.function.report import RETURNED, exit_code, report_of

_INTERRUPTED = 130  # a shell's exit code for a program that was interrupted


def main() -> int:
    try:
        launcher = LauncherConnection()
        # Modules of this host's own path, such as the standard library in another place, come last.
        sys.path[:] = [*launcher.path, *(one for one in sys.path if one not in launcher.path)]
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


def _load(launcher: LauncherConnection) -> Call:
    cloudpickle = import_cloudpickle()
    data = launcher.read_call()
    try:
        return cloudpickle.loads(data)
    except Exception as error:
        text = f"rank {launcher.number} on {socket.gethostname()} cannot load the function"
        advice = "; every host needs the modules that the function comes from, in the same folders"
        advice *= isinstance(error, ImportError)
        raise RunError(f"{text}: {type(error).__name__}: {error}{advice}") from error


def _send_result(launcher: LauncherConnection, result: object) -> None:
    try:
        import_cloudpickle().dump(result, launcher)
    except LauncherGone:
        raise
    except Exception as error:
        text = f"the result of rank {launcher.number}, a {type(result).__name__}, cannot be pickled: {error}"
        raise TypeError(f"{text}; return plain values, arrays or tensors") from None
    launcher.end_outcome()


def _exit(launcher: LauncherConnection, end: SystemExit) -> int:
    """Handles sys.exit(): a rank has to return, but a worker that leaves an elastic job ends in this way."""
    code = exit_code(end)
    if "SIRTAKI_ARBITER" in os.environ:
        return code
    _send_exception(launcher, end, "exited")
    return code or 1


def _fail(launcher: LauncherConnection, error: BaseException) -> None:
    """Sends an exception, and ends this rank's world as an uncaught exception does."""
    _send_exception(launcher, error, "raised")
    _abort(error)


def _abort(error: BaseException) -> None:
    from sirtaki.runner.rendezvous import lifecycle

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


if __name__ == "__main__":
    sys.exit(main())
