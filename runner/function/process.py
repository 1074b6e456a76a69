"""The launcher as a process of its own, and its output on this program's.

A launcher forks and handles signals. A notebook's kernel, or a program with threads, is no place for that.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, TextIO

from sirtaki.runner.cli.command import module_words

_READ_BYTES = 64 * 1024


@dataclass(frozen=True)
class LauncherOrders:
    """The input of the launcher.

    Attributes:
        parent: the process that needs the results; the job ends with it.
        options: those of hvdrun, and the command of the ranks.
        variables: of the ranks' environment, in addition.
        call, results: the descriptors of the call and of the results.
        path: the module search path for the ranks.
        python: the version of Python that the ranks have to have.
    """

    parent: int
    options: Sequence[str]
    variables: Mapping[str, str]
    call: int
    results: int
    path: Sequence[str]
    python: str


def run_launcher(orders: LauncherOrders) -> None:
    """Runs a job to its end, and shows its output. Every Ctrl-C goes to the launcher, which ends the ranks.

    Raises KeyboardInterrupt after the end of a job that was interrupted.
    """
    _flush_outputs()
    inherits = {number: _is_own(stream, number) for number, stream in ((1, sys.stdout), (2, sys.stderr))}
    process = subprocess.Popen(
        [sys.executable, *module_words("sirtaki.runner.function.launcher")],
        stdin=subprocess.PIPE,
        stdout=None if inherits[1] else subprocess.PIPE,
        stderr=None if inherits[2] else subprocess.PIPE,
        pass_fds=(orders.call, orders.results),
        start_new_session=True,  # a terminal's Ctrl-C reaches it once, by way of this process
    )
    with _ending(process):
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:  # its end is noticed below
            process.stdin.write(json.dumps(asdict(orders)).encode())
        _wait(process)


@contextlib.contextmanager
def _ending(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process after an exception, and waits for its end."""
    try:
        yield
    except KeyboardInterrupt:
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # the second one kills the ranks at once
                process.send_signal(signal.SIGINT)
                _wait(process)
        raise
    except BaseException:
        process.terminate()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        process.wait()
        raise


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Shows the output of the process until it has ended."""
    with selectors.DefaultSelector() as selector:
        for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, _Output(pipe, name))
        while selector.get_map():
            for key, _ in selector.select():
                if not key.data.show():
                    selector.unregister(key.fileobj)
                    key.data.pipe.close()
    process.wait()


class _Output:
    """A pipe from the launcher, and the stream of this program on which its text appears.

    The stream is looked up each time: a notebook's kernel may replace it.
    """

    def __init__(self, pipe: IO[bytes], name: str) -> None:
        self.pipe = pipe
        self._name = name
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def show(self) -> bool:
        """Shows what can be read; returns False at the end."""
        data = os.read(self.pipe.fileno(), _READ_BYTES)
        stream: TextIO | None = getattr(sys, self._name)
        if stream is not None:
            stream.write(self._decoder.decode(data, final=not data))
            stream.flush()
        return bool(data)


def _flush_outputs() -> None:
    """Writes what this program has printed before, so that it precedes the output of the ranks."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _is_own(stream: Any, number: int) -> bool:
    """Returns whether a stream is that of the process itself, which the launcher can use, too."""
    if stream is None or all(stream is not item for item in (sys.__stdout__, sys.__stderr__)):
        return False
    try:
        return bool(stream.fileno() == number)
    except (OSError, ValueError):
        return False
