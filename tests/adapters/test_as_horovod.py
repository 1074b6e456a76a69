"""sirtaki under Horovod's name: its modules, its metadata, child processes, and a library that uses it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of, run

PROGRAMS = Path(__file__).with_name("programs_as_horovod.py")
ROOT = Path(__file__).parents[2]
PAGE, RUN_BLOCKS = ROOT / "docs" / "guide" / "as_horovod.md", ROOT / "tests" / "documents" / "run_blocks.py"


def python(
    code: str, *, ends: int = 0, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process without the variables of another job."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SIRTAKI_")}
    done = run(sys.executable, "-c", code, env=environment | (variables or {}))
    assert done.returncode == ends, done.stdout + done.stderr
    return done


@pytest.fixture
def real_horovod(tmp_path: Path) -> dict[str, str]:
    """Returns variables with which another package `horovod` is installed."""
    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").write_text("origin = 'elsewhere'\n")
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(tmp_path))))
    return {"PYTHONPATH": path}


def test_every_module_of_the_table_is_there() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tensorflow")
    pytest.importorskip("keras", minversion="3")
    code = """
import sirtaki.as_horovod
from importlib import import_module
from importlib.util import find_spec
from sirtaki.as_horovod.table import MODULES
for name in MODULES:
    assert find_spec(name) is not None, name
    module = import_module(name)
    assert all(hasattr(module, one) for one in module.__all__), name
    exec(f"from {name} import *")
    assert set(module.__all__) <= set(dir(module)), name
import horovod.torch, horovod.tensorflow, horovod.keras, horovod.common.exceptions
import sirtaki.torch, sirtaki.tensorflow, sirtaki.keras
assert horovod.torch.allreduce is horovod.torch.mpi_ops.allreduce is sirtaki.torch.allreduce
assert horovod.torch.elastic.run is sirtaki.torch.elastic.run
assert horovod.tensorflow.DistributedOptimizer is sirtaki.tensorflow.DistributedOptimizer
assert horovod.tensorflow.keras.load_model is horovod.keras.load_model is sirtaki.keras.load_model
assert horovod.common.exceptions.HorovodInternalError is sirtaki.torch.HorovodInternalError
print(len(MODULES))
"""
    assert int(python(code).stdout) > 20


def test_libraries_find_the_package_and_its_version() -> None:
    code = """
import sirtaki.as_horovod
import importlib.metadata, importlib.util
assert importlib.util.find_spec("horovod") is not None
import horovod
assert importlib.metadata.version("horovod") == horovod.__version__ == "0.28.1"
import horovod.common.util as util
assert [list(one) for one in util.split_list(range(5), 3)] == [[0, 1], [2, 3], [4]]
assert util.num_rank_is_power_2(4) and not util.num_rank_is_power_2(6) and not util.num_rank_is_power_2(0)
assert util.is_iterable([]) and not util.is_iterable(1)
assert not util.extension_available("mxnet") and not util.mpi_built(verbose=True)
"""
    python(code)


def test_helpers_that_programs_import() -> None:
    code = """
import sirtaki.as_horovod
import os
from horovod.common.util import _cache, env, is_version_greater_equal_than as is_newer
from horovod.runner.util.threads import in_thread
assert is_newer("2.13.0", "2.9.1") and is_newer("2.4.0+cpu", "2.4.0") and is_newer("2.4.0", "2.4.0rc1")
assert not is_newer("2.4.0rc1", "2.4.0") and not is_newer("1.15.0", "2.0.0")
try:
    is_newer("2.4", "2.4.0")
except ValueError as error:
    assert "major.minor.patch" in str(error)
calls = []
assert _cache(calls.append)(3) is None and calls == [3]
os.environ["SET"] = "before"
with env(SET="inside", UNSET="inside", LEFT_OUT=None):
    assert (os.environ["SET"], os.environ["UNSET"]) == ("inside", "inside") and "LEFT_OUT" not in os.environ
assert os.environ["SET"] == "before" and "UNSET" not in os.environ
in_thread(calls.append, (4,), name="helper").join()
in_thread(max, silent=True).join()
assert calls == [3, 4]
"""
    assert python(code).stderr == ""


def test_helpers_of_tensorflow() -> None:
    pytest.importorskip("tensorflow")
    code = """
import sirtaki.as_horovod
import tensorflow as tf
from horovod.tensorflow import util
from horovod.tensorflow.util import _cache, _executing_eagerly, _make_subgraph
assert _executing_eagerly() and not tf.function(lambda: tf.constant(_executing_eagerly()))()
variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
found = util.refs_to_vars(util.vars_to_refs(variables))
assert found[0] is variables[0] and found[1][0] is variables[1][0]
calls = []
remember = _cache(calls.append)
remember(1), remember(1), _make_subgraph(lambda: remember(1))()
assert calls == [1, 1]
"""
    python(code)


def test_child_processes_see_it(tmp_path: Path) -> None:
    """Covers a spawned process, and another program, which does not import sirtaki."""
    script = tmp_path / "script.py"
    script.write_text("""
import sirtaki.as_horovod
import multiprocessing, subprocess, sys
import horovod.common.exceptions

def stands_for_sirtaki(kind):
    return issubclass(kind, ImportError) and sys.modules["horovod"].STANDS_FOR_SIRTAKI

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        kind = horovod.common.exceptions.HorovodVersionMismatchError
        assert pool.apply(stands_for_sirtaki, (kind,))
    subprocess.run([sys.executable, "-c", "import horovod; assert horovod.STANDS_FOR_SIRTAKI"], check=True)
""")
    output_of(sys.executable, script)


def test_it_comes_before_a_real_horovod(real_horovod: dict[str, str]) -> None:
    code = "import sirtaki.as_horovod, horovod; print(horovod.STANDS_FOR_SIRTAKI)"
    assert python(code, variables=real_horovod).stdout == "True\n"


def test_after_a_real_horovod_it_is_too_late(real_horovod: dict[str, str]) -> None:
    done = python("import horovod, sirtaki.as_horovod", ends=1, variables=real_horovod)
    assert "ImportError: horovod has been imported from" in done.stderr
    assert str(Path(real_horovod["PYTHONPATH"].rpartition(os.pathsep)[2], "horovod")) in done.stderr


def test_a_real_horovod_may_be_wanted(real_horovod: dict[str, str]) -> None:
    code = "import sirtaki.as_horovod, horovod; print(horovod.origin)"
    assert python(code, variables={**real_horovod, "SIRTAKI_AS_HOROVOD": "0"}).stdout == "elsewhere\n"


@pytest.mark.parametrize(
    ("statement", "error", "advice"),
    [
        ("import horovod.spark", "ModuleNotFoundError", "import sirtaki.spark, whose run takes the same"),
        ("from horovod import mxnet", "ModuleNotFoundError", "MXNet is retired"),
        ("from horovod.common.basics import HorovodBasics", "ModuleNotFoundError", "the module's functions"),
        ("import horovod.common.util as u; u.no_such_name", "AttributeError", "docs/guide/as_horovod.md"),
        ("from horovod.run.runner import run", "ModuleNotFoundError", "docs/guide/as_horovod.md"),
    ],
)
def test_a_missing_name_says_what_to_do(statement: str, error: str, advice: str) -> None:
    done = python(f"import sirtaki.as_horovod; {statement}", ends=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{error}: horovod"), done.stderr
    assert advice in last


def test_run_is_that_of_sirtaki() -> None:
    code = """
import sirtaki.as_horovod
import horovod
from horovod.runner import run
assert run is horovod.run is sirtaki.run
print(run(max, args=(1, 2), np=2))
"""
    assert python(code).stdout == "[2, 2]\n"


def test_ignite_runs_on_it() -> None:
    pytest.importorskip("ignite")
    command = hvdrun(2, "--as-horovod", sys.executable, PROGRAMS, "collectives", "training")
    output = output_of(*command)
    for program in ("collectives", "training"):
        assert output.count(f"{program}: as expected") == 2


def test_the_code_of_the_page_runs() -> None:
    pytest.importorskip("torch")
    output = output_of(*hvdrun(2, sys.executable, RUN_BLOCKS, PAGE))
    assert output.count(f"ran {PAGE.read_text().count('```python')} blocks") == 2
