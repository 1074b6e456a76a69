"""`sirtaki doctor --facts`: writes the facts about this host as JSON, then answers questions from its input.

Each line of output begins with MARK, because the shell of a login may print, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from sirtaki.bindings._version import VERSION
from sirtaki.runner.doctor.gathering import Choice, gather
from sirtaki.runner.doctor.probe import TOKEN_BYTES, Listener, measure, reach
from sirtaki.runner.rendezvous.interfaces import chosen_interfaces, local_addresses
from sirtaki.runner.rendezvous.job import RendezvousError

MARK = "sirtaki-doctor: "
_MAX_QUESTION = 64 * 1024


def answer_questions(choice: Choice) -> int:
    """Writes the version, then the facts, then an answer to each line of standard input, until that ends."""
    output = os.dup(1)
    os.dup2(2, 1)  # whatever else prints, must not come between the lines

    def write(**values: object) -> None:
        data = f"{MARK}{json.dumps(values)}\n".encode()
        while data:
            data = data[os.write(output, data) :]

    write(hello=VERSION)
    write(facts=asdict(gather(choice, lambda text: write(note=text))))
    while question := sys.stdin.buffer.readline(_MAX_QUESTION):
        number = 0
        try:
            values = json.loads(question)
            number = int(values["number"])
            write(number=number, answer=_QUESTIONS[values["ask"]](values))
        except (OSError, ValueError, KeyError, TypeError, RendezvousError) as error:
            write(number=number, error=f"{type(error).__name__}: {error}")
    return 0


def _listen(values: Mapping[str, Any]) -> object:
    listener = Listener(_token(values))
    return {"port": listener.port, "addresses": local_addresses(chosen_interfaces())}


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
