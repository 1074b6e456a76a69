"""sirtaki.run: results by rank, what travels with a function, and the output of the ranks."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import FAILSAFE_SECONDS

import sirtaki

pytestmark = pytest.mark.usefixtures("functions_by_value")

SCALE = 10


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def rank() -> int:
    return int(os.environ["SIRTAKI_RANK"])


def test_results_are_in_the_order_of_ranks() -> None:
    def work(base: int, factor: int = 1) -> int:
        return (base + rank()) * factor * SCALE

    assert sirtaki.run(work, args=(3,), kwargs={"factor": 2}, np=3) == [60, 80, 100]
    assert sirtaki.run(work, (3,)) == [30]


def test_ranks_exchange_values() -> None:
    def total() -> tuple[int, int, float]:
        import sirtaki.numpy as hvd

        hvd.init()
        return hvd.rank(), hvd.size(), float(hvd.allreduce([1.0 + hvd.rank()], op=hvd.Sum)[0])

    assert sirtaki.run(total, np=2) == [(0, 2, 3.0), (1, 2, 3.0)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: lambda x: x + 1,
        lambda: functools.partial(lambda step, x: x + step, 1),
        lambda: Adder(1).add,
        lambda: Adder(1),
    ],
    ids=["lambda", "partial", "method", "object"],
)
def test_callables_of_all_kinds(make: Callable[[], Callable[[int], int]]) -> None:
    assert sirtaki.run(make(), args=(41,)) == [42]


class Adder:
    def __init__(self, step: int) -> None:
        self.step = step

    def add(self, x: int) -> int:
        return x + self.step

    __call__ = add


def test_a_class_of_the_caller_is_the_same_class_in_results() -> None:
    (result,) = sirtaki.run(lambda: Point(7))
    assert type(result) is Point
    assert result.x == 7


def test_large_arguments_and_results() -> None:
    data = os.urandom(1 << 20) * 5 + b"end"
    assert sirtaki.run(lambda data: [data, rank()], args=(data,), np=2) == [[data, 0], [data, 1]]


def test_the_results_of_ranks_that_end_at_different_times(tmp_path: Path) -> None:
    def work(folder: Path) -> int:
        if rank() == 0:
            import time

            while not (folder / "done").exists():  # by the rank that ends first
                time.sleep(0.01)
        else:
            (folder / "done").touch()
        return rank()

    assert sirtaki.run(work, args=(tmp_path,), np=2) == [0, 1]


def test_ranks_work_in_the_folder_of_the_caller_with_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "module_of_a_user.py").write_text(
        "def work():\n    import os\n    return os.getcwd()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "modules")
    from module_of_a_user import work

    assert sirtaki.run(work, np=2) == [str(tmp_path), str(tmp_path)]


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "there")
    names = ("OF_THE_CALLER", "GIVEN", "SIRTAKI_SIZE")

    def work() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    assert sirtaki.run(work, env={"GIVEN": "too"}, np=2) == [["there", "too", "2"]] * 2
    assert "GIVEN" not in os.environ


def test_output_has_the_rank_in_front(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def work() -> None:
        print(f"hello from {rank()}")
        print(f"an error of {rank()}", file=sys.stderr)

    print("before")
    assert sirtaki.run(work, np=2, output_filename=tmp_path) == [None, None]
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0] == "before"
    assert sorted(captured.out.splitlines()[1:]) == ["[0] hello from 0", "[1] hello from 1"]
    errors = [line for line in captured.err.splitlines() if not line.startswith("hvdrun: ")]
    assert sorted(errors) == ["[0] an error of 0", "[1] an error of 1"]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "hello from 1\n"


def test_a_script_needs_no_guard(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import os
import sirtaki

print("once")
offset = 5

def work(x):
    return helper(x) + offset

def helper(x):
    return x * int(os.environ["SIRTAKI_RANK"])

print(sirtaki.run(work, args=(2,), np=2))
"""
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FAILSAFE_SECONDS)
    assert done.stdout.splitlines() == ["once", "[5, 7]"], done.stderr
    assert done.returncode == 0


def test_a_thread_may_call_it() -> None:
    import threading

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(sirtaki.run(rank, np=2)))
    thread.start()
    thread.join(FAILSAFE_SECONDS)
    assert results == [[0, 1]]


def test_nothing_of_it_is_imported_before_it_is_used(environment: dict[str, str]) -> None:
    program = """
import json, sys
import sirtaki
print(json.dumps([name for name in sys.modules if name.startswith("sirtaki.runner")]))
assert "run" in dir(sirtaki) and callable(sirtaki.run)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FAILSAFE_SECONDS)
    assert json.loads(done.stdout) == [], done.stderr
    assert done.returncode == 0, done.stderr


def test_no_process_shows_the_key() -> None:
    def work() -> tuple[int, int, list[str]]:
        from key_search import processes, secrets_in

        key = bytes.fromhex(Path(os.environ["SIRTAKI_KEY_FILE"]).read_text())
        shown = dict(processes())
        launchers = sum(b"sirtaki.runner.function.launcher" in data for data in shown.values())
        return len(key), launchers, [str(path) for path, data in shown.items() if secrets_in(data, key)]

    ((length, launchers, secrets),) = sirtaki.run(work)
    assert (length, secrets) == (32, [])
    assert launchers >= 1


def test_its_parameters_are_those_of_horovod() -> None:
    horovod = (
        "func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile "
        "host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename "
        "verbose use_gloo use_mpi mpi_args network_interface network_interfaces executable np min_np max_np"
    )
    own = ["env", "oversubscribe", "launcher"]
    assert [*inspect.signature(sirtaki.run).parameters] == [*horovod.split(), *own]


def test_parameters_without_a_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    results = sirtaki.run(rank, (), None, 2, disable_cache=True, use_mpi=True, mpi_args="-x", verbose=1)
    assert results == [0, 1]
    assert "hvdrun: rank 1 is pid " in capsys.readouterr().err


def test_ranks_pickle_classes_of_a_script(tmp_path: Path, environment: dict[str, str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import pickle
import sirtaki

class Base: pass
class Model(Base):
    weight = 3

class Argument: pass

def work(argument):
    return pickle.dumps([Model(), argument])

model, argument = pickle.loads(sirtaki.run(work, args=(Argument(),))[0])
print(type(model) is Model, model.weight, type(argument) is Argument)
"""
    )
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=FAILSAFE_SECONDS)
    assert done.stdout == "True 3 True\n", done.stderr
