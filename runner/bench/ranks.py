"""Starts the ranks of a measurement, and reads the messages that rank 0 prints."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
from argparse import Namespace
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import IO

from sirtaki.runner.bench.messages import Message, Plan, read
from sirtaki.runner.bench.peers import GLOO, MPI, NCCL, mpirun
from sirtaki.runner.command import module_words
from sirtaki.runner.errors import LaunchError

SILENCE_SECONDS = 300.0  # for a block of calls: the longest time in which rank 0 prints nothing
_END_SECONDS = 20.0
_LAST_LINES = 40
_WORKER = "sirtaki.bench.worker"
_OF_A_RANK = ("SIRTAKI_RANK", "SIRTAKI_SIZE", "SIRTAKI_JOB", "SIRTAKI_RENDEZVOUS")
# hvdrun's own lines, and those in which mpirun or a rank names a rank.
_VERDICT = re.compile(r"^hvdrun: .*|.*\brank \d+\b.*")


def command(options: Namespace, plan: Plan) -> list[str]:
    """Returns the command that runs the ranks.

    mpirun starts them if MPI is a peer, so that all implementations take turns in the same processes.
    """
    worker = [sys.executable, *module_words(_WORKER), plan.encode()]
    if MPI in plan.peers:
        # Ranks that are bound to cores would be compared with others that are not.
        spread = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
        return [mpirun(), *spread, "-np", str(options.size), *worker]
    return [sys.executable, *module_words("sirtaki.runner"), *_launch_options(options, plan), *worker]


def _launch_options(options: Namespace, plan: Plan) -> list[str]:
    """Returns the options of hvdrun that name ranks and hosts."""
    given = {
        "-np": options.size,
        "-H": options.hosts,
        "--hostfile": options.hostfile,
        "--launcher": options.launcher,
        "-p": options.ssh_port,
        "-i": options.ssh_identity_file,
        "--network-interfaces": ",".join(options.network_interfaces),
    }
    words = [word for flag, value in given.items() if value for word in (flag, str(value))]
    switches = {
        "--torch-env": not {GLOO, NCCL}.isdisjoint(plan.peers),
        "--oversubscribe": options.oversubscribe,
    }
    return [*words, *(flag for flag, is_on in switches.items() if is_on)]


def environment(plan: Plan) -> dict[str, str]:
    """Returns the variables of the launcher. Only training steps have work for more than one thread."""
    inherited = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    return inherited if plan.operation == "step" else {"OMP_NUM_THREADS": "1", **inherited}


def messages(
    arguments: Sequence[str], variables: Mapping[str, str], blocks: int = 1
) -> Generator[Message, None, None]:
    """Runs ranks; yields rank 0's messages as they come, and shows the rest of the output.

    Up to so many `blocks` of calls may lie between two messages. Raises LaunchError if the ranks fail, or are
    silent for too long; it names the rank if one is known.
    """
    silence = SILENCE_SECONDS * blocks
    process = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(variables),
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    assert process.stderr is not None
    received: queue.Queue[Message | ValueError | None] = queue.Queue()
    verdicts: deque[str] = deque(maxlen=_LAST_LINES)
    output = threading.Thread(target=_read_output, args=(process.stdout, received), daemon=True)
    errors = threading.Thread(target=_read_errors, args=(process.stderr, verdicts), daemon=True)
    try:
        output.start()
        errors.start()
        while (message := received.get(timeout=silence)) is not None:
            if isinstance(message, ValueError):
                raise LaunchError(f"a message of rank 0 cannot be read: {message}")
            yield message
        code = process.wait(_END_SECONDS)
        errors.join(_END_SECONDS)
    except (queue.Empty, subprocess.TimeoutExpired):
        raise LaunchError(f"the ranks have been silent for {silence:g} s, and were ended") from None
    finally:
        _end(process)
    if code:
        last = verdicts[-1] if verdicts else f"their launcher ended with exit code {code}"
        raise LaunchError(f"the ranks did not finish: {last}")


def _read_output(output: IO[str], received: queue.Queue[Message | ValueError | None]) -> None:
    with output:
        for line in output:
            try:
                message: Message | ValueError | None = read(line)
            except ValueError as error:
                message = error
            if message is None:
                print(line, end="", file=sys.stderr)
            else:
                received.put(message)
    received.put(None)


def _read_errors(errors: IO[str], verdicts: deque[str]) -> None:
    with errors:
        for line in errors:
            print(line, end="", file=sys.stderr)
            if _VERDICT.match(line):
                verdicts.append(line.strip().removeprefix("hvdrun: "))


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the launcher, which ends the ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
