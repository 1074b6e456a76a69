"""A session with a doctor in another process, usually on another host; `answering` is its other side."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from sirtaki.bindings._version import VERSION
from sirtaki.runner.doctor.decoding import decode, line
from sirtaki.runner.doctor.facts import HostFacts
from sirtaki.runner.doctor.gathering import MARK
from sirtaki.runner.hosts.host_connection import ANSWER_SECONDS
from sirtaki.runner.hosts.ssh import StartFailure

FACTS_SECONDS = 1500.0  # for all frameworks at their own deadlines
_NOTE_SECONDS = 300.0
_MAX_LINE = 1 << 20
_LAST_LINES = 20
_CLOSE_SECONDS = 5.0
FAILURES = {
    "host-silent": (
        "{host} has not answered in {seconds:g} s",
        "look whether the login there is slow, and try `{trial}`",
    ),
    "facts-malformed": (
        "{host} has sent facts that cannot be read",
        "look whether {trial} works, and whether sirtaki is installed properly there",
    ),
    "versions-differ": (
        "{host} has sirtaki {version}, and this host {own}",
        "install the same version on both",
    ),
}


class SessionError(Exception):
    """A question had no answer; the text gives the reason."""


@dataclass(frozen=True)
class DoctorRoute:
    """The way to a host: the command that starts a doctor there, a command to try by hand, and how to
    explain its failure from its exit code and last lines.
    """

    command: Sequence[str]
    trial: str
    explain: Callable[[int, Sequence[str]], StartFailure]


class Session:
    """The process of a doctor, which is ssh for other hosts."""

    def __init__(self, host: str, route: DoctorRoute) -> None:
        self.host = host
        self._route = route
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(64)
        self._asked = 0
        self._errors: deque[str] = deque(maxlen=_LAST_LINES)
        self._process = subprocess.Popen(
            route.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        self._reader = threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, output: IO[bytes]) -> None:
        mark = MARK.encode()
        while text := output.readline(_MAX_LINE):
            if text.startswith(mark):
                try:
                    values = json.loads(text.removeprefix(mark))
                except (ValueError, RecursionError):
                    values = {}
                self._lines.put(values if isinstance(values, dict) else {})
        self._lines.put(None)

    def _read_errors(self, errors: IO[bytes]) -> None:
        while text := errors.readline(_MAX_LINE):
            self._errors.append(line(text.decode(errors="replace")))

    def facts(self, note: Callable[[str], None]) -> HostFacts | StartFailure:
        """Returns the facts about the host, or why there are none."""
        deadline = time.monotonic() + FACTS_SECONDS
        limit = ANSWER_SECONDS
        while time.monotonic() < deadline:
            try:
                values = self._lines.get(timeout=limit)
            except queue.Empty:
                return self._failure("host-silent", seconds=limit)
            limit = _NOTE_SECONDS
            if values is None:
                return self._explain_end()
            if "note" in values:
                note(line(values["note"], 100))
            elif "hello" in values and values["hello"] != VERSION:
                return self._failure("versions-differ", version=line(values["hello"], 50), own=VERSION)
            elif "hello" not in values:
                return self._decode(values.get("facts"))
        return self._failure("host-silent", seconds=FACTS_SECONDS)

    def _explain_end(self) -> StartFailure:
        """Explains why the output has ended before the facts came."""
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._failure("host-silent", "its output has ended", seconds=_CLOSE_SECONDS)
        self._reader.join(_CLOSE_SECONDS)
        return self._route.explain(code, list(self._errors))

    def _decode(self, values: object) -> HostFacts | StartFailure:
        try:
            return decode(HostFacts, values)
        except (ValueError, RecursionError) as error:
            return self._failure("facts-malformed", line(error, 200))

    def _failure(self, kind: str, evidence: str = "", **values: object) -> StartFailure:
        texts = [text.format(host=self.host, trial=self._route.trial, **values) for text in FAILURES[kind]]
        return StartFailure(kind, texts[0], texts[1], evidence)

    def ask(self, question: Mapping[str, object], seconds: float) -> Any:
        """Asks a question and returns the answer, which is still to be checked. Raises SessionError."""
        assert self._process.stdin is not None
        self._asked += 1
        try:
            self._process.stdin.write(json.dumps({**question, "number": self._asked}).encode() + b"\n")
            self._process.stdin.flush()
            found = self._next(self._asked, time.monotonic() + seconds)
        except queue.Empty:
            raise SessionError(f"{self.host} has not answered in {seconds:g} s") from None
        except OSError:
            found = None
        if found is None:
            raise SessionError(f"the connection to {self.host} has ended")
        if "answer" not in found:
            raise SessionError(f"{self.host}: {line(found.get('error', 'no answer'), 300)}")
        return found["answer"]

    def _next(self, number: int, deadline: float) -> dict[str, Any] | None:
        """Returns the answer numbered `number`, None at the end; skips late answers to earlier questions."""
        while True:
            found = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            if found is None or found.get("number") == number:
                return found

    def close(self) -> None:
        """Ends the doctor there: its input ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
