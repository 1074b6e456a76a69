"""One trial: a job with a random program and at most one fault, and whether it ended as required.

A trial fails if the job hangs, if a sum is wrong, if the verdict names a rank that is not at fault, if the
exit code does not match, or if anything is left of the job when hvdrun has ended: processes, the folder with
its key.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from faults import IN_A_RANK, NONE, ONLY_WITH_HOSTS, OUTSIDE, outcome_of
from program import WRONG_SUM

HERE = Path(__file__).resolve().parent
STAND_IN = HERE.parent / "runner" / "ssh_stand_in.py"
MARK = "CHAOS_TRIAL"  # in the environment of every process of a trial
HANG_SECONDS = 90.0
CLEAN_SECONDS = 15.0  # seconds that the reaper has after hvdrun was killed
DEADLINES = {
    "SIRTAKI_STALL_REPORT": "1",
    "SIRTAKI_STALL_DEADLINE": "5",
    "SIRTAKI_PROGRESS_DEADLINE": "5",
}
# Weights of each launch path and kind of program; frameworks take seconds to import.
PATHS = {"local": 5, "sockets": 3, "hosts": 2}
WEIGHTS = {"numpy": 14, "torch": 3, "DataLoader": 1, "jit": 2, "tf.function": 1, "keras": 1}


@dataclass(frozen=True)
class Plan:
    """A trial's choices, all of which follow from its seed."""

    seed: int
    path: str
    flavour: str
    ranks: int
    fault: str
    victim: int
    steps: int
    strike_at: int
    delay: float  # seconds from the first step of all ranks to a strike from outside


@dataclass
class Result:
    """The outcome of a trial; `problems` is empty if the trial succeeded."""

    plan: Plan
    code: int | None = None
    seconds: float = 0.0  # in all
    seconds_to_end: float | None = None  # from the fault to the end of hvdrun
    problems: list[str] = field(default_factory=list)
    output: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def plan_of(seed: int, flavours: dict[str, int] | None = None) -> Plan:
    """Returns the trial with this seed."""
    rng = random.Random(seed)

    def pick(weights: dict[str, int]) -> str:
        return rng.choices(list(weights), list(weights.values()))[0]

    path, flavour = pick(PATHS), pick(flavours or WEIGHTS)
    ranks = rng.choice([2, 2, 3, 4]) if flavour == "numpy" else 2
    faults = [NONE, *IN_A_RANK, *OUTSIDE]
    if path != "hosts":
        faults = [fault for fault in faults if fault not in ONLY_WITH_HOSTS]
    fault = rng.choice(faults)
    steps = 40 if fault in OUTSIDE else rng.choice([5, 20, 60])
    victim, strike_at = rng.randrange(ranks), rng.randrange(steps)
    return Plan(seed, path, flavour, ranks, fault, victim, steps, strike_at, rng.uniform(0, 0.5))


def heed_interrupts() -> None:
    """Makes jobs handle SIGINT even if this process was started in the background, where shells ignore it.

    Must be called in the main thread.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)


def run(plan: Plan) -> Result:
    """Runs a trial to its end, and checks for leftovers."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        return _Trial(plan, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Trial:
    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._mark = f"{os.getpid()}-{plan.seed}"
        self._result = Result(plan)

    def run(self) -> Result:
        plan, result = self._plan, self._result
        begun = time.monotonic()
        with open(self._folder / "output", "w+b") as output:
            hvdrun = subprocess.Popen(
                self._command(), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=self._environment(), cwd=self._folder, start_new_session=True,
            )  # fmt: skip
            try:
                if plan.fault in OUTSIDE:
                    self._strike_from_outside(hvdrun)
                result.code = hvdrun.wait(HANG_SECONDS)
            except subprocess.TimeoutExpired:
                result.problems.append("hang")
            ended = time.monotonic()
            result.seconds = ended - begun
            with contextlib.suppress(OSError, ValueError):
                result.seconds_to_end = ended - float((self._folder / "struck").read_text())
            self._look_for_leftovers()
            hvdrun.kill()
            hvdrun.wait()
            output.seek(0)
            result.output = output.read().decode(errors="replace")
        self._judge()
        return result

    def _command(self) -> list[str]:
        plan = self._plan
        hosts = ["-H", f"hostA:{plan.ranks - 1},hostB:1"] if plan.path == "hosts" else []
        arguments = [
            plan.seed,
            plan.flavour,
            plan.steps,
            plan.fault,
            plan.victim,
            plan.strike_at,
            self._folder,
        ]
        return [
            *(
                sys.executable,
                "-m",
                "sirtaki.runner",
                "-np",
                str(plan.ranks),
                "--start-timeout",
                "30",
                *hosts,
            ),
            *(sys.executable, str(HERE / "program.py"), *map(str, arguments)),
        ]

    def _environment(self) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SIRTAKI_")}
        environment |= DEADLINES | {
            MARK: self._mark,
            "TMPDIR": str(self._temporary),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        if self._plan.path == "sockets":
            environment["SIRTAKI_TRANSPORT"] = "socket"
        if self._plan.path == "hosts":
            environment |= self._hosts(environment["PATH"])
        return environment

    def _hosts(self, path: str) -> dict[str, str]:
        """Makes two "hosts" on this machine, behind a stand-in for ssh; returns the environment."""
        (self._folder / "bin").mkdir()
        stand_in = self._folder / "bin" / "ssh"
        stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
        stand_in.chmod(0o755)
        kept = {MARK: self._mark, "TMPDIR": str(self._temporary)}
        book = self._temporary.parent / "hosts.json"
        book.write_text(json.dumps({name: {"environment": kept} for name in ("hostA", "hostB")}))
        return {"PATH": f"{stand_in.parent}:{path}", "SSH_STAND_IN": str(book)}

    def _strike_from_outside(self, hvdrun: subprocess.Popen[bytes]) -> None:
        plan = self._plan
        who, number, _ = OUTSIDE[plan.fault]
        deadline = time.monotonic() + HANG_SECONDS
        started = [self._folder / f"started.{rank}" for rank in range(plan.ranks)]
        while not all(file.exists() for file in started):
            if hvdrun.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.01)
        time.sleep(plan.delay)
        if who == "hvdrun":
            victims = [hvdrun.pid]
        elif who == "rank":
            victims = [int(started[plan.victim].read_text() or 0)]
        else:
            victims = [pid for pid in self._processes() if who in _command_of(pid)][:1]
        (self._folder / "struck").write_text(str(time.monotonic()))
        for victim in filter(None, victims):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, number)
                if number == signal.SIGSTOP:
                    time.sleep(1.5)
                    os.kill(victim, signal.SIGCONT)

    def _processes(self) -> Iterator[int]:
        """Yields the processes of this trial, except zombies, whose environment is gone."""
        wanted = f"{MARK}={self._mark}\0".encode()
        for entry in os.listdir("/proc"):
            if entry.isdecimal():
                with contextlib.suppress(OSError):
                    if wanted in Path(f"/proc/{entry}/environ").read_bytes() + b"\0":
                        yield int(entry)

    def _look_for_leftovers(self) -> None:
        deadline = time.monotonic() + CLEAN_SECONDS
        while True:
            folders = list(self._temporary.glob("sirtaki-*"))
            processes = [] if "hang" in self._result.problems else list(self._processes())
            if not folders and not processes:
                return
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        for pid in processes:
            self._result.problems.append(f"leftover process: {_command_of(pid)[-200:]}")
        for folder in folders:
            self._result.problems.append(f"leftover folder: {sorted(os.listdir(folder))}")
        for pid in self._processes():  # including processes of a job that hangs
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _judge(self) -> None:
        plan, result = self._plan, self._result
        outcome = outcome_of(plan.fault)
        if result.code == WRONG_SUM or "WRONG SUM" in result.output:
            result.problems.append("wrong sum")
        if result.code is None:
            return
        struck = plan.fault == NONE or (self._folder / "struck").exists()
        if result.code not in outcome.codes and (struck or result.code != 0):
            result.problems.append(f"exit code {result.code}")
        if (
            result.code > 0
            and outcome.names_rank
            and (named := _named_by_verdict(result.output)) != plan.victim
        ):
            result.problems.append(f"wrong culprit: {named} instead of {plan.victim}")


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _named_by_verdict(output: str) -> int | None:
    """Returns the first rank in the last line that hvdrun itself writes."""
    said = [line for line in output.splitlines() if line.startswith("hvdrun: ")]
    found = re.search(r"\brank (\d+)\b", said[-1]) if said else None
    return int(found[1]) if found else None
