"""Ranks as processes, shared by the tests of a module, and the process of pytest in which they run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

import process_world
import pytest
from hypothesis import settings
from process_world import LatestWorld
from tiers import TABLE, THIRD_TABLE, TIERS, Table, name_of, tier_of

# XLA's compiler takes a third of the time of JAX's tests. Its passes over machine code change no exchange.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# torch looks up the name of each peer of its stores; glibc waits 5 s for a lost answer by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Half of the time of a short program with a framework: tests/quick_imports/sitecustomize.py.
_QUICK_IMPORTS = str(Path(__file__).parent / "quick_imports")
if _QUICK_IMPORTS not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _QUICK_IMPORTS)))

# Machines that do something else take longer. Limits on time belong to benchmarks.
settings.register_profile("without a deadline", deadline=None)
settings.load_profile("without a deadline")

pytest_plugins = ["sirtaki.pytest_plugin"]
RunCase = Callable[[int, str], None]
latest_world = process_world.latest_world  # a fixture
# Network namespaces have fixed names: all tests with one of these fixtures run in one process of pytest.
ON_HOSTS = {"network", "fragile"}
ENGINES = {"spark", "ray_cluster"}  # each needs a GB of memory: one session of each at a time


FIRST_TIER, THIRD_TIER = Table.load(TABLE), Table.load(THIRD_TABLE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier only (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Keeps the first tier from importing files without its tests, and their frameworks."""
    if config.getoption("--tier") == "first" and not FIRST_TIER.has_tests_in(collection_path):
        return True
    return None


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if tier := config.getoption("--tier"):
        if tier == "first":
            check_entries(items, FIRST_TIER, TABLE.name)
        elif config.args_source == pytest.Config.ArgsSource.TESTPATHS:
            check_entries(items, THIRD_TIER, THIRD_TABLE.name)
        tiers = {item: tier_of(item, FIRST_TIER, THIRD_TIER) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if tiers[item] != tier])
        items[:] = [item for item in items if tiers[item] == tier]
    if config.pluginmanager.hasplugin("xdist"):
        group(items)


def check_entries(items: list[pytest.Item], table: Table, name: str) -> None:
    """Raises if an entry of a table matches no test. Processes of xdist do not: they hide the error."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if unmatched := table.unmatched({name_of(item.nodeid) for item in items}):
        raise pytest.UsageError(f"no test matches these entries of {name}: {', '.join(unmatched)}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Says in the last line what the first tier has shown, and what the second adds."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    is_whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    if config.getoption("--tier") != "first" or config.option.collectonly or not is_whole or reporter is None:
        return
    shown = FIRST_TIER.fulfilled(name_of(report.nodeid) for report in reporter.getreports("passed"))
    missing = [promise for promise in FIRST_TIER.reasons if promise not in shown]
    reporter.write_line(
        f"sirtaki: {len(shown)} of {len(FIRST_TIER.reasons)} rows of README's tables are shown to work"
        + (f"; not shown: {', '.join(missing)}" if missing else "")
        + ". `make test-full` adds other numbers of ranks, transports and backends, several hosts, trainers, "
        "Ray and Spark, elastic jobs with each framework, random faults, the pages of docs, and benchmarks."
    )


def group(items: list[pytest.Item]) -> None:
    """Marks tests that have to run in the same process of pytest, and starts with them: they take longest."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & ON_HOSTS:
            item.add_marker(pytest.mark.xdist_group("hosts"))
        elif engines := fixtures & ENGINES:
            item.add_marker(pytest.mark.xdist_group(engines.pop()))
        elif "latest_world" in fixtures:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


@pytest.fixture
def run_case(latest_world: LatestWorld) -> RunCase:
    """Returns a function that runs a case on the given number of ranks."""
    return latest_world.run


@pytest.fixture
def run_case_on_gpus(latest_world: LatestWorld) -> RunCase:
    """Works like `run_case`; torch's tensors are on GPUs of the fake libcuda, through NCCL."""
    return functools.partial(latest_world.run, TORCH_TENSORS_ON_GPUS="2", SIRTAKI_GPU_BACKEND="nccl")


@pytest.fixture
def run_case_in_one_thread(latest_world: LatestWorld) -> RunCase:
    """Works like `run_case`; TensorFlow has one thread for operations: a waiting kernel would block all."""
    return functools.partial(latest_world.run, TF_NUM_INTEROP_THREADS="1")


@pytest.fixture
def run_case_with_horovods_rules(latest_world: LatestWorld) -> RunCase:
    """Works like `run_case`, where Horovod's rules hold."""
    return functools.partial(latest_world.run, SIRTAKI_AS_HOROVOD="1", TF_CPP_MIN_LOG_LEVEL="3")


@pytest.fixture
def run_case_in_keras(latest_world: LatestWorld) -> Callable[[str, int, str], None]:
    """Works like `run_case`, with Keras' backend before the size: the backend is fixed per process."""

    def run(backend: str, size: int, name: str) -> None:
        latest_world.run(size, name, KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="3")

    return run
