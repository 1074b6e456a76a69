"""sirtaki.spark.run with the real Spark in local mode."""

from __future__ import annotations

import inspect
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import sirtaki
import sirtaki.numpy as hvd

pytestmark = pytest.mark.usefixtures("spark")

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "spark.md"
PROGRAM_AND_OUTPUT = re.compile(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOROVOD = (
    "fn args kwargs num_proc start_timeout use_mpi use_gloo extra_mpi_args env stdout stderr verbose nics "
    "prefix_output_with_timestamp executable"
)


class Detailed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def run(*arguments: Any, **options: Any) -> list[Any]:
    import sirtaki.spark

    return sirtaki.spark.run(*arguments, **options)


def describe(factor: float = 1.0) -> tuple[Any, ...]:
    hvd.init()
    mine = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return (*mine, float(hvd.allreduce([factor * (hvd.rank() + 1)], op=hvd.Sum)[0]))


def test_the_parameters_are_those_of_horovod() -> None:
    import sirtaki.spark

    assert list(inspect.signature(sirtaki.spark.run).parameters) == HOROVOD.split()


def test_results_are_returned_by_rank() -> None:
    expected = [(rank, 2, rank, 2, 0, 1, 30.0) for rank in range(2)]
    assert run(describe, args=(10,), num_proc=2) == expected
    assert run(describe, kwargs={"factor": 10}) == expected  # one rank per slot
    assert run(describe, num_proc=1) == [(0, 1, 0, 1, 0, 1, 1.0)]


def test_a_process_that_is_used_again_keeps_nothing_of_an_earlier_job() -> None:
    def work(leaves: bool) -> tuple[bool, str | None, int, int]:
        was_initialised, variable = hvd.is_initialized(), os.environ.get("OF_THE_JOB")
        hvd.init()
        if leaves:  # another number of worlds than that of the other rank
            hvd.shutdown()
            return was_initialised, variable, hvd.is_initialized(), os.getpid()
        return was_initialised, variable, hvd.size(), os.getpid()

    first = run(work, args=(False,), num_proc=2, env={"OF_THE_JOB": "here"})
    alone = run(work, args=(True,), num_proc=1)
    second = run(work, args=(False,), num_proc=2)
    assert [one[:3] for one in first] == [(False, "here", 2)] * 2
    assert alone[0][:3] == (False, None, False)
    assert [one[:3] for one in second] == [(False, None, 2)] * 2
    pids = {one[3] for one in [*first, *alone, *second]}
    assert len(pids) == 2  # Spark has used its processes again


def test_no_process_of_the_job_has_its_key_in_the_environment() -> None:
    def work() -> tuple[int, bool]:
        from sirtaki.bindings.bootstrap.providers.world import find_assigned

        hvd.init()
        world = find_assigned({})
        assert world is not None
        texts = [
            Path("/proc/self/environ").read_text(),
            Path("/proc/self/cmdline").read_text(),
            *os.environ.values(),
        ]
        return len(world.job.key), any(world.job.key.hex() in text for text in texts)

    assert run(work, num_proc=2) == [(32, False)] * 2


def test_the_exception_of_the_culprit_is_raised() -> None:
    def work() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise Detailed(7)
        hvd.allreduce([1.0])

    with pytest.raises(Detailed) as raised:
        run(work, num_proc=2)
    assert raised.value.code == 7
    cause = raised.value.__cause__
    assert isinstance(cause, sirtaki.RemoteError)
    assert (cause.rank, cause.host, cause.kind) == (1, os.uname().nodename, "Detailed")
    assert "in work\n    raise Detailed(7)\n" in cause.traceback
    assert describe_works()


def describe_works() -> bool:
    return [one[-1] for one in run(describe, num_proc=2)] == [3.0, 3.0]


def test_ranks_that_do_not_notice_a_failure_are_ended() -> None:
    def work() -> None:
        from pyspark import BarrierTaskContext

        if BarrierTaskContext.get().partitionId() == 1:
            raise Detailed(8)
        time.sleep(600)

    with pytest.raises(Detailed):
        run(work, num_proc=2)
    assert describe_works()


def test_a_task_that_is_killed_is_named() -> None:
    def work() -> None:
        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce([1.0])

    with pytest.raises(sirtaki.RunError, match="rank 1 was lost, and Spark has ended the job") as raised:
        run(work, num_proc=2)
    assert "Python worker exited unexpectedly" in str(raised.value)
    assert "\tat " not in str(raised.value)  # the frames of Spark say nothing to users
    assert describe_works()


def test_sys_exit_is_no_result() -> None:
    with pytest.raises(sirtaki.RunError, match=r"rank 0 .* called sys.exit\(3\) instead of returning"):
        run(lambda: os.sys.exit(3), num_proc=1)  # type: ignore[attr-defined]


def test_fewer_slots_than_ranks() -> None:
    with pytest.raises(sirtaki.RunError, match=r"num_proc is 3, but Spark has 2 slots \(master local\[2\]\)"):
        run(describe, num_proc=3, start_timeout=600)


def test_two_jobs_at_once() -> None:
    results: dict[int, list[Any]] = {}

    def start(number: int) -> None:
        results[number] = run(describe, args=(number,), num_proc=1)

    threads = [threading.Thread(target=start, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [(0, 1, 0, 1, 0, 1, float(number))] for number in (1, 2)}


def test_slots_that_another_job_uses(tmp_path: Path) -> None:
    def hold(started: str, may_end: str) -> str:
        Path(started).touch()
        while not Path(may_end).exists():
            time.sleep(0.05)
        return "held"

    started, may_end, results = tmp_path / "started", tmp_path / "may_end", []
    holder = threading.Thread(
        target=lambda: results.extend(run(hold, args=(str(started), str(may_end)), num_proc=1))
    )
    holder.start()
    while not started.exists():
        time.sleep(0.05)
    with pytest.raises(sirtaki.RunError, match=r"started 0 of 2 tasks within 1 s \(start_timeout\)"):
        run(describe, num_proc=2, start_timeout=1)
    may_end.touch()
    holder.join()
    assert results == ["held"]
    assert describe_works()


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="fn has to be a function, not int"):
        run(5)
    lock = threading.Lock()
    with pytest.raises(TypeError, match="because of its variable 'lock', a lock"):
        run(lambda: lock, num_proc=1)
    with pytest.raises(ValueError, match="num_proc is 0"):
        run(describe, num_proc=0)
    with pytest.raises(ValueError, match="start_timeout is -1"):
        run(describe, num_proc=1, start_timeout=-1)


def test_the_programs_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    programs = PROGRAM_AND_OUTPUT.findall(PAGE.read_text())
    assert len(programs) == 2
    for program, output in programs:
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out == output
