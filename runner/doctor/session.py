"""A session with a doctor in another process, usually on another host; `answering` is its other side."""

from __future__ import annotations

import contextlib
import json
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.runner.doctor.decoding import decode, line
from sirtaki.runner.doctor.facts import HostFacts
from sirtaki.runner.doctor.gathering import MARK
from sirtaki.runner.hosts.host_connection import ANSWER_SECONDS
from sirtaki.runner.hosts.ssh import StartFailure
from sirtaki.runner.launch.child_process import ChildProcess

FACTS_SECONDS = 1500.0  # for all frameworks at their own deadlines
_NOTE_SECONDS = 300.0
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
        self._child = ChildProcess(route.command, self._take, self._take_error, has_input=True)

    def _take(self, text: str) -> None:
        """Puts a line of the doctor's into the queue, None at the end of its output."""
        if not text:
            self._lines.put(None)
        elif text.startswith(MARK):
            try:
                values = json.loads(text.removeprefix(MARK))
            except (ValueError, RecursionError):
                values = {}
            self._lines.put(values if isinstance(values, dict) else {})

    def _take_error(self, text: str) -> None:
        if text:
            self._errors.append(line(text))

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
        code = self._child.end(_CLOSE_SECONDS)
        if code is None:
            return self._failure("host-silent", "its output has ended", seconds=_CLOSE_SECONDS)
        self._child.join(_CLOSE_SECONDS)
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
        stdin = self._child.process.stdin
        assert stdin is not None
        self._asked += 1
        try:
            stdin.write(json.dumps({**question, "number": self._asked}).encode() + b"\n")
            stdin.flush()
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
        assert self._child.process.stdin is not None
        with contextlib.suppress(OSError):
            self._child.process.stdin.close()
        self._child.end(_CLOSE_SECONDS)
