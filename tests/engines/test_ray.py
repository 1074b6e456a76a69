"""RayExecutor and the backend of Ray Train, with the real Ray on one node."""

from __future__ import annotations

import inspect
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sirtaki
import sirtaki.numpy as hvd

pytestmark = pytest.mark.usefixtures("ray_cluster")

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "ray.md"
PROGRAM_AND_OUTPUT = re.compile(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HOROVOD = {
    "__init__": (
        "self settings num_workers num_hosts num_workers_per_host cpus_per_worker use_gpu gpus_per_worker "
        "use_current_placement_group min_workers max_workers reset_limit cooldown_range elastic_timeout "
        "override_discovery"
    ),
    "create_settings": "timeout_s ssh_identity_file ssh_str placement_group_timeout_s nics",
    "start": "self executable_cls executable_args executable_kwargs extra_env_vars",
    "run": "self fn args kwargs callbacks",
    "run_remote": "self fn args kwargs callbacks",
    "execute": "self fn callbacks",
    "execute_single": "self fn",
    "shutdown": "self",
}


class Detailed(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Counter:
    """An executable: its state stays in its process from call to call."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def count(self) -> int:
        hvd.init()
        self.value += self.step * (hvd.rank() + 1)
        return self.value


def describe(factor: float = 1.0) -> tuple[Any, ...]:
    hvd.init()
    mine = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return (*mine, float(hvd.allreduce([factor * (hvd.rank() + 1)], op=hvd.Sum)[0]))


def fail_on_rank_1() -> None:
    hvd.init()
    if hvd.rank() == 1:
        raise Detailed(7)
    hvd.allreduce([1.0])


@pytest.fixture
def executor(ray_cluster: Any) -> Iterator[Any]:
    from sirtaki.ray import RayExecutor

    made = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=120), num_workers=2)
    made.start(Counter, [10], {"step": 2}, extra_env_vars={"OF_THE_EXECUTOR": "here"})
    yield made
    made.shutdown()


def test_the_parameters_are_those_of_horovod() -> None:
    from sirtaki.ray import RayExecutor

    for name, parameters in HOROVOD.items():
        assert list(inspect.signature(getattr(RayExecutor, name)).parameters) == parameters.split(), name


def test_calls_of_every_kind(executor: Any, ray_cluster: Any) -> None:
    def look() -> tuple[str | None, bool, int]:
        from sirtaki.bindings.bootstrap.providers.world import find_assigned

        world = find_assigned({})
        assert world is not None
        texts = [Path("/proc/self/environ").read_text(), *os.environ.values()]
        return (
            os.environ.get("OF_THE_EXECUTOR"),
            any(world.job.key.hex() in one for one in texts),
            os.getpid(),
        )

    expected = [(rank, 2, rank, 2, 0, 1, 30.0) for rank in range(2)]
    assert executor.run(describe, args=(10,)) == expected
    assert executor.run(describe, kwargs={"factor": 10}) == expected
    assert ray_cluster.get(executor.run_remote(describe, args=[10])) == expected
    assert executor.execute(Counter.count) == [12, 14]
    assert executor.execute(Counter.count) == [14, 18]
    assert executor.execute_single(lambda counter: counter.value) == 14
    found = executor.run(look)
    assert [one[:2] for one in found] == [("here", False)] * 2
    assert len({one[2] for one in found} | {os.getpid()}) == 3

    with pytest.raises(Detailed) as raised:  # the culprit's own, not that of its victim
        executor.run(fail_on_rank_1)
    assert raised.value.code == 7
    cause = raised.value.__cause__
    assert isinstance(cause, sirtaki.RemoteError)
    assert (cause.rank, cause.pid, cause.kind) == (1, found[1][2], "Detailed")
    assert "in fail_on_rank_1\n    raise Detailed(7)\n" in cause.traceback
    assert executor.run(describe, args=(10,)) == expected  # in a new world, by the same processes

    references = executor.run_remote(fail_on_rank_1)
    with pytest.raises(Detailed):
        ray_cluster.get(references[1])
    assert executor.run(describe, args=(10,)) == expected
    with pytest.raises(ZeroDivisionError):
        executor.execute_single(lambda counter: 1 / 0)
    assert executor.run(describe, args=(10,)) == expected
    assert [one[2] for one in executor.run(look)] == [one[2] for one in found]


def test_an_actor_that_is_lost_is_named(executor: Any) -> None:
    def die() -> None:
        hvd.init()
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce([1.0])

    named = r"^rank 1 \(actor sirtaki-ray-[0-9a-f]+-\d, pid \d+ on .+\) was lost: "
    with pytest.raises(sirtaki.RunError, match=named) as raised:
        executor.run(die)
    assert re.search(r"\nrank 0 raised PeerLostError: .*rank 1 \(pid \d+ on", str(raised.value))
    with pytest.raises(
        sirtaki.RunError, match=named + r"[\s\S]*: call shutdown\(\) and start\(\) to begin again"
    ):
        executor.run(describe)
    executor.shutdown()
    executor.start()
    assert [one[-1] for one in executor.run(describe)] == [3.0, 3.0]


def test_a_rank_that_does_not_notice_a_failure_is_ended(executor: Any) -> None:
    def work() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise Detailed(8)
        time.sleep(600)

    with pytest.raises(Detailed):
        executor.run(work)
    with pytest.raises(
        sirtaki.RunError, match=r"rank 0 .* did not end within 5 s after another one had failed"
    ):
        executor.run(describe)


def test_a_class_that_raises_ends_the_start(ray_cluster: Any) -> None:
    from sirtaki.ray import RayExecutor

    executor = RayExecutor(num_workers=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'start'"):
        executor.start(Counter)
    with pytest.raises(sirtaki.RunError, match=r"has no actors: call start\(\) before"):
        executor.run(describe)
    executor.start(Counter, [1])
    assert executor.run(describe) == [(0, 1, 0, 1, 0, 1, 1.0)]
    executor.shutdown()


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ({"num_workers": 3}, "3 times 1 CPU within"),
        ({"num_hosts": 2}, "2 times 1 CPU on as many hosts within"),
        ({"num_workers": 1, "use_gpu": True}, "1 times 1 CPU and 1 GPU within"),
    ],
)
def test_there_is_no_room(ray_cluster: Any, shape: dict[str, Any], wanted: str) -> None:
    from sirtaki.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=0.5), **shape)
    with pytest.raises(sirtaki.RunError, match=f"Ray has not reserved {wanted} 0.5 s .*of 2 CPU are free"):
        executor.start()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "either num_workers, or num_hosts"),
        ({"num_workers": 1, "num_hosts": 1}, "either num_workers, or num_hosts"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": 1, "gpus_per_worker": 1}, "gpus_per_worker is 1 without use_gpu"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], text: str) -> None:
    from sirtaki.ray import RayExecutor

    with pytest.raises(ValueError, match=text):
        RayExecutor(**arguments)


def test_callbacks_are_refused(executor: Any) -> None:
    with pytest.raises(ValueError, match="callbacks are not served"):
        executor.run(describe, callbacks=[print])
    with pytest.raises(TypeError, match="fn has to be a function, not int"):
        executor.run(5)


def lose_rank_1_first(config: dict[str, str]) -> None:
    hvd.init()
    if hvd.rank() == 1 and not Path(config["was_lost"]).exists():
        Path(config["was_lost"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    fail_on_rank_1()


def test_ray_train_begins_again_and_reports_the_exception_of_each_rank(
    ray_cluster: Any, tmp_path: Path
) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from sirtaki.ray import SirtakiConfig

    failures_allowed = FailureConfig(max_failures=1)
    trainer = DataParallelTrainer(
        lose_rank_1_first,
        train_loop_config={"was_lost": str(tmp_path / "was_lost")},
        backend_config=SirtakiConfig(start_timeout=60),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=failures_allowed),
    )
    with pytest.raises(WorkerGroupError) as raised:
        trainer.fit()
    assert (tmp_path / "was_lost").exists()
    failures = raised.value.worker_failures  # of the second worker group
    assert type(failures[1]).__name__ == "Detailed"
    assert type(failures[0]).__name__ == "AbortedError"
    assert re.search(r"rank 1 \(pid \d+ on .*\) gave up: .*Detailed: 7", str(failures[0]))
    assert "numpy/collectives.py" not in str(raised.value)  # sirtaki's own frames say nothing to users


def sum_over_the_default_group(config: dict[str, str]) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    name = f"{type(dist.group.WORLD).__name__}, {dist.get_backend()}, {int(total)}"
    Path(config["folder"], f"{dist.get_rank()}").write_text(name)


def test_the_trainer_for_torch_takes_sirtaki_for_gloo(ray_cluster: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    as_gloo = {"env_vars": {"SIRTAKI_AS": "gloo"}}
    TorchTrainer(
        sum_over_the_default_group,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "results"), worker_runtime_env=as_gloo),
    ).fit()
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["SirtakiGroup, gloo, 2"] * 2


def test_the_programs_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    programs = PROGRAM_AND_OUTPUT.findall(PAGE.read_text())
    assert len(programs) == 2
    for program, output in programs:
        exec(compile(program, str(PAGE), "exec"), {"__name__": "__main__"})
        assert capsys.readouterr().out.splitlines()[-1:] == output.splitlines()
