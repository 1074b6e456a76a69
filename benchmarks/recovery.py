"""Measures how long a training stands still when a rank is killed, and when a new one joins.

Usage: python benchmarks/recovery.py [--kills 20] [--spare-kills 10] [--optimizer sgd] [--peer-kills 3]

A recovery is the time from `kill -9` of a rank, chosen at random, to the end of the survivors' first step in
the next world, without the time of one step. A join is the longest step around it, without the time of one
step. In a second job, a spare takes the place of each lost rank; its time is that from the kill to the end of
the first step in a world of full size, without the time of one step. Beside it: torchrun with --max-restarts,
whose processes all start again, with gloo; its script restores nothing.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from common.harness import Benchmark, Results
from common.jobs import environment, hvdrun
from common.measure import median, quantile
from common.options import Option, number
from common.report import Table, Target, at_most

RANKS = 4
STEADY_STEPS = 4  # in a full world, before the next kill
LIMIT_SECONDS = 300.0  # for one recovery, or a training without one: a machine with other work takes its time
END_STEPS = 1_000_000  # more than a measurement takes: the job is ended by a signal
STATE_BYTES = {"sgd": 100e6, "adam": 300e6}  # parameters, and Adam's two moments
POLL_SECONDS = 0.02  # the ranks take the times themselves
SPARE_WAITS = re.compile(rb"hvdrun: spare \d+ waits")  # with --verbose


class Step(NamedTuple):
    """The end of one rank's step."""

    moment: float
    process: int
    generation: int
    rank: int
    size: int
    number: int


class Recovery(NamedTuple):
    """One kill: seconds until the survivors trained again, what the join of the replacement cost, and seconds
    until all ranks of a full world had trained.
    """

    killed: float
    seconds: float
    join: float
    full: float


class StandstillError(RuntimeError):
    """The ranks do not train again."""


class Observed:
    """The steps that a job has noted in its file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0  # bytes
        self._steps: list[Step] = []

    def steps(self) -> list[Step]:
        """Returns all steps; reads only those that are new."""
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(self._read)
                whole, _, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + bool(whole)
            for line in whole.decode().splitlines():
                moment, *numbers = line.split()
                self._steps.append(Step(float(moment), *map(int, numbers)))
        return self._steps

    def wait(self, job: subprocess.Popen[bytes], full_since: float) -> list[Step]:
        """Waits for steady steps of a full world after a moment; returns all steps."""
        deadline = time.monotonic() + LIMIT_SECONDS
        seen, latest = 0, 0
        counts: dict[int, int] = defaultdict(int)
        while time.monotonic() < deadline and job.poll() is None:
            steps = self.steps()
            for one in steps[seen:]:
                if one.generation > latest:
                    latest = one.generation
                    counts.clear()
                if one.generation == latest and one.size == RANKS and one.moment > full_since:
                    counts[one.process] += 1
            if len(counts) == RANKS and min(counts.values()) >= STEADY_STEPS:
                return steps
            seen = len(steps)
            time.sleep(POLL_SECONDS)
        raise StandstillError("the job has ended, or its ranks do not train again")


def measure(options: Namespace) -> Results:
    """Runs the jobs, one after the other. Seconds."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and ends the job that runs
    elastic = ["--min-np", "1", "--blacklist-cooldown-range", "1", "1"]  # replacements start at once
    ours = run_job([*hvdrun(RANKS), *elastic], "sirtaki", options.optimizer, options.kills)
    results: Results = {"optimizer": options.optimizer, "sirtaki": ours, "commit": measure_commit(options)}
    if options.spare_kills:
        spares = ["--min-np", "1", "--spares", "1", "--verbose", "--blacklist-cooldown-range", "0.01", "0.01"]
        results["spares"] = run_job(
            [*hvdrun(RANKS), *spares], "sirtaki", options.optimizer, options.spare_kills, with_spares=True
        )
    if options.peer_kills:
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nproc-per-node={RANKS}",
            "--standalone",
        ]
        torchrun += [f"--max-restarts={options.peer_kills + 1}"]
        results["torchrun"] = run_job(torchrun, "torchrun", options.optimizer, options.peer_kills)
    return results


def run_job(
    launcher: Sequence[str], name: str, optimizer: str, kills: int, with_spares: bool = False
) -> dict[str, Any]:
    """Kills ranks of one job, one after the other; `with_spares`: when a spare waits."""
    source = random.Random(1)
    python = [sys.executable] if name == "sirtaki" else []
    with tempfile.TemporaryDirectory(prefix="sirtaki-benchmark-") as folder:
        path = Path(folder, "steps")
        arguments = ["-m", "workers.recovery", name, optimizer, str(END_STEPS), str(path)]
        with open(Path(folder, "output"), "wb") as output:
            job = subprocess.Popen(
                [*launcher, *python, *arguments],
                env=environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        observed, found, failure = Observed(path), [], ""
        try:
            steps = observed.wait(job, 0.0)
            for kill in range(kills):
                if with_spares:
                    wait_for_spare(job, Path(folder, "output"), kill + 1)
                    steps = observed.wait(job, time.monotonic())
                victim = source.choice(sorted({one.process for one in steps[-RANKS:]}))
                time.sleep(source.random() * step_seconds(steps))
                killed = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                steps = observed.wait(job, killed)
                found.append(recovery(steps, killed, victim))
        except StandstillError as error:
            if name == "sirtaki":
                raise
            failure = f"{error}; the last line of its output: {last_line(Path(folder, 'output'))}"
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait(LIMIT_SECONDS)
    step = step_seconds(steps) if found else None
    return {"step": step, "kills": [one._asdict() for one in found], "failure": failure}


def last_line(output: Path) -> str:
    return (output.read_text(errors="replace").splitlines() or [""])[-1]


def wait_for_spare(job: subprocess.Popen[bytes], output: Path, number: int) -> None:
    """Waits until so many spares have imported their modules."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(SPARE_WAITS.findall(output.read_bytes())) < number:
        if time.monotonic() > deadline or job.poll() is not None:
            raise StandstillError("the job has ended, or it has no spare")
        time.sleep(POLL_SECONDS)


def step_seconds(steps: Sequence[Step]) -> float:
    """Returns the median time of a step in a full world."""
    by_world: dict[tuple[int, int], list[float]] = defaultdict(list)
    for one in steps:
        if one.size == RANKS:
            by_world[one.process, one.generation].append(one.moment)
    times = [later - earlier for moments in by_world.values() for earlier, later in pairwise(moments)]
    return median(times)


def recovery(steps: Sequence[Step], killed: float, victim: int) -> Recovery:
    """Returns what a kill has cost, without the time of one step."""
    usual = step_seconds(steps)
    last = max(one.generation for one in steps if one.process == victim)
    first: dict[int, float] = {}
    survivors = {one.process for one in steps if one.generation == last} - {victim}
    after = [one for one in steps if one.generation > last and one.moment > killed]
    for one in after:
        first.setdefault(one.process, one.moment)
    back = [moment for process, moment in first.items() if process in survivors] or list(first.values())
    joins = []
    for process in survivors:
        moments = [(one.moment, one.generation) for one in after if one.process == process]
        joins += [later - earlier for (earlier, one), (later, other) in pairwise(moments) if one != other]
    full = min(one.generation for one in after if one.size == RANKS)
    trained: dict[int, float] = {}
    for one in after:
        if one.generation == full and one.size == RANKS:
            trained.setdefault(one.process, one.moment)
    return Recovery(
        killed,
        max(back) - killed - usual,
        max(joins, default=usual) - usual,
        max(trained.values()) - killed - usual,
    )


def measure_commit(options: Namespace) -> dict[str, float]:
    """Returns the time of a step and of a commit, in a job without losses."""
    with tempfile.TemporaryDirectory(prefix="sirtaki-benchmark-") as folder:
        path = Path(folder, "steps")
        command = [*hvdrun(RANKS), "--min-np", "1", sys.executable, "-m", "workers.recovery"]
        done = subprocess.run(
            [*command, "sirtaki", options.optimizer, "40", str(path)],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_SECONDS,
            check=True,
        )
        return {
            "step": step_seconds(Observed(path).steps()),
            "commit": median(told(done.stdout, "COMMIT")),
            "bandwidth": median(told(done.stdout, "BANDWIDTH")),
        }


def told(output: str, word: str) -> list[float]:
    """Returns the numbers behind a word in the ranks' output, one a rank."""
    return [float(line.split()[-1]) for line in output.splitlines() if word in line]


def tables(results: Results) -> Iterator[Table | str]:
    rows = []
    for name in ("sirtaki", "torchrun"):
        if name not in results:
            continue
        kills = results[name]["kills"]
        if results[name]["failure"]:
            yield f"{name}, after {len(kills)} recoveries: {results[name]['failure']}"
        if kills:
            seconds, joins, full = ([kill[key] for kill in kills] for key in ("seconds", "join", "full"))
            join = "with the restart" if name == "torchrun" else median_and_worst(joins)
            times = f"{median(seconds):.2f}", f"{quantile(seconds, 0.9):.2f}", f"{max(seconds):.2f}"
            step = f"{results[name]['step']:.2f}"
            rows.append([name, str(len(seconds)), step, *times, join, median_and_worst(full)])
    head = ["launcher", "kills", "step, s", "median, s", "90 %", "worst", "join, s", f"all {RANKS} again, s"]
    yield Table(f"Recovery of {RANKS} ranks, 25 M parameters, {results['optimizer']}", head, rows)
    if "spares" in results:
        kills = results["spares"]["kills"]
        full, alone = [kill["full"] for kill in kills], [kill["seconds"] for kill in kills]
        yield (
            f"with a spare, {len(full)} kills: a step of all {RANKS} ranks after {median(full):.2f} s "
            f"(worst {max(full):.2f} s), of the survivors after {median(alone):.2f} s ({max(alone):.2f} s)"
        )
    commit = results["commit"]
    share = commit["commit"] / commit["step"]
    yield f"a commit takes {commit['commit'] * 1e3:.2f} ms, {share:.2%} of a step of {commit['step']:.2f} s"


def median_and_worst(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.2f} ({max(seconds):.2f})"


def join_limit(results: Results) -> float:
    """Returns the seconds that a join may take: half a second, and the state at the speed of a broadcast."""
    return 0.5 + STATE_BYTES[results["optimizer"]] / results["commit"]["bandwidth"]


def judge(results: Results) -> list[Target]:
    seconds = [kill["seconds"] for kill in results["sirtaki"]["kills"]]
    joins = [kill["join"] for kill in results["sirtaki"]["kills"]]
    commit = results["commit"]
    spares = results.get("spares", {"kills": []})["kills"]
    return [
        at_most("kill -9 to the next step, beyond one step: median", 0.3, median(seconds), "s"),
        at_most("the same, worst", 1.0, max(seconds), "s"),
        at_most("join of a cold replacement: median", join_limit(results), median(joins), "s"),
        at_most("commit() every step", 1.0, commit["commit"] / commit["step"] * 100, "% of the step"),
        *(
            at_most(f"a spare takes the place: {name}", 1.0, of([kill["full"] for kill in spares]), "s")
            for name, of in (("median", median), ("worst", max))
            if spares
        ),
    ]


OPTIONS = [
    number("--kills", 20, "ranks to kill under hvdrun"),
    number("--spare-kills", 10, "ranks to kill whose places spares take; 0 leaves that out"),
    number("--peer-kills", 3, "ranks to kill under torchrun; 0 leaves it out"),
    Option("--optimizer", choices=["sgd", "adam"], default="sgd", help="100 or 300 MB of state (sgd)"),
]
BENCHMARK = Benchmark(__doc__, OPTIONS, measure, tables, judge)

if __name__ == "__main__":
    BENCHMARK.main()
