"""Programs whose ranks change: processes that take part in several worlds, as workers of an elastic job do.

A plan names the members of each world by a letter each, in the order of ranks: ("A", "AB", "A", "ACD"). A
worker makes its objects in a world of its own, as a script does before `hvd.elastic.run`; then it takes part
in one world after another. A member of the previous world continues with its state; others receive that.

`python changing.py MODULE NAMES PLAN WORKER ADDRESS...` is one worker of the programs `NAMES` of a module,
which run in each world one after another.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

FOLDER = Path(__file__).parent
PATIENCE = 300.0  # seconds: far longer than any correct run, even on a busy machine
AFTER_A_FAILURE = 5.0  # seconds in which the other workers may report it, too
GROWTH = ("A", "AB", "A", "ACD")  # one rank, two, one, three
# Workers compile the same programs of JAX, and again in each world: the job keeps what was compiled
# once, in a folder that has a lock because its size is limited.
KEPT_PROGRAMS = {
    "JAX_COMPILATION_CACHE_MAX_SIZE": str(1 << 30),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


class Program(Protocol):
    """A program: made before the first world, then run in each. It raises if anything is wrong."""

    state: Any  # the state that is carried over; None if there is none

    def in_world(self, number: int, sizes: Sequence[int]) -> None:
        """Runs in world `number`; `sizes` are the sizes of all worlds so far, with this one."""
        ...


def run(module: str, names: Sequence[str], plan: Sequence[str] = GROWTH, **environment: str) -> None:
    """Runs programs; raises AssertionError with the output of the workers if one of them fails."""
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(len(plan))]
    workers = sorted(set("".join(plan)))
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory() as folder:
        variables |= {**KEPT_PROGRAMS, "JAX_COMPILATION_CACHE_DIR": os.path.join(folder, "programs")}
        outputs = [open(os.path.join(folder, worker), "w+") for worker in workers]  # noqa: SIM115
        running = [
            subprocess.Popen(
                [sys.executable, __file__, module, ",".join(names), ",".join(plan), worker, *addresses],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
            )
            for worker, output in zip(workers, outputs, strict=True)
        ]
        try:
            deadline = time.monotonic() + PATIENCE
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                if any(process.returncode for process in running):
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
                time.sleep(0.05)
        finally:
            for process in running:
                process.kill()
                process.wait()
        codes = [process.returncode for process in running]
        texts = []
        for worker, output in zip(workers, outputs, strict=True):
            output.seek(0)
            texts.append(f"worker {worker}:\n{output.read()}")
            output.close()
    assert codes == [0] * len(workers), "\n".join(texts)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _work(
    module: str, names: Sequence[str], plan: Sequence[str], worker: str, addresses: Sequence[str]
) -> None:
    import sirtaki.numpy as hvd
    from sirtaki.bindings.bootstrap import lifecycle
    from sirtaki.bindings.context import current
    from sirtaki.bindings.survivors import Survivors
    from sirtaki.common.elastic.state import GenerationStart

    survivors = Survivors()
    hvd.init()
    survivors.move_to(current())
    programs: list[Program] = [getattr(importlib.import_module(module), name)() for name in names]
    survivors.begin()
    hvd.shutdown()
    for number, members in enumerate(plan):
        if worker not in members:
            continue
        lifecycle._rank.generation = number  # ranks of a world have to agree on the number of init() calls
        hvd.init(rank=members.index(worker), size=len(members), address=addresses[number])
        survivors.move_to(current())
        before = plan[number - 1] if number else members[0]
        start = GenerationStart(current(), worker in before, set(members) <= set(before))
        for program in programs:
            if program.state is not None:
                program.state.receive(start)
            program.in_world(number, [len(one) for one in plan[: number + 1]])
        hvd.shutdown()


if __name__ == "__main__":
    _work(sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(","), sys.argv[4], sys.argv[5:])
