"""`sirtaki doctor --facts`: writes the facts about this host as JSON, then answers questions from its input.

Each line of output begins with MARK, because the shell of a login may print, too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.bindings.bootstrap.connection.address import chosen_interfaces, local_addresses
from sirtaki.bindings.bootstrap.job import RendezvousError
from sirtaki.runner.doctor.decoding import MAX_ADDRESSES, shortened
from sirtaki.runner.doctor.gathering import Choice, gather
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure, reach

MARK = "sirtaki-doctor: "
_MAX_QUESTION = 64 * 1024
_IDLE_SECONDS = 1800.0  # the first question waits for the facts of the slowest host


def answer_questions(choice: Choice) -> int:
    """Writes the version, then the facts, then an answer to each line of standard input, until that ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # whatever else prints, must not come between the lines

    def write(**values: object) -> None:
        data = f"{MARK}{json.dumps(values)}\n".encode()
        while data:
            data = data[os.write(output, data) :]

    write(hello=VERSION)
    write(facts=shortened(asdict(gather(choice, lambda text: write(note=text)))))
    while question := _next_question():
        number = 0
        try:
            values = json.loads(question)
            number = int(values["number"])
            write(number=number, answer=_QUESTIONS[values["ask"]](values))
        except (OSError, ValueError, KeyError, TypeError, RendezvousError) as error:
            write(number=number, error=f"{type(error).__name__}: {error}")
    return 0


def _next_question() -> bytes:
    """Returns the next line of input, b"" at its end. This process ends if none comes for a long time."""
    signal.setitimer(signal.ITIMER_REAL, _IDLE_SECONDS)
    question = sys.stdin.buffer.readline(_MAX_QUESTION)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return question


def _listen(values: Mapping[str, Any]) -> object:
    listener = Listener(_token(values))
    return {"port": listener.port, "addresses": local_addresses(chosen_interfaces())[:MAX_ADDRESSES]}


def _reach(values: Mapping[str, Any]) -> object:
    found = reach(list(values["addresses"]), int(values["port"]), _token(values), float(values["seconds"]))
    return [asdict(attempt) for attempt in found]


def _measure(values: Mapping[str, Any]) -> object:
    return asdict(measure(str(values["address"]), int(values["port"]), _token(values)))


def _token(values: Mapping[str, Any]) -> bytes:
    token = bytes.fromhex(values["token"])
    if len(token) != TOKEN_BYTES:
        raise ValueError("the token has a wrong size")
    return token


_QUESTIONS: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "clock": lambda _: time.time(),
    "listen": _listen,
    "reach": _reach,
    "measure": _measure,
}
