"""Ranks as processes, shared by the tests of a module, and the process of pytest in which they run."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator

import pytest
from process_world import LatestWorld

# XLA's compiler takes a third of the time of JAX's tests. Its passes over machine code change no exchange.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# torch looks up the name of each peer of its stores; glibc waits 5 s for a lost answer by default.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

RunCase = Callable[[int, str], None]
# Network namespaces have fixed names: all tests with one of these fixtures run in one process of pytest.
ON_HOSTS = {"network", "fragile"}
ENGINES = {"spark", "ray_cluster"}  # each needs a GB of memory: one session of each at a time


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in a hook of the same name
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & ON_HOSTS:
            item.add_marker(pytest.mark.xdist_group("hosts"))
        elif engines := fixtures & ENGINES:
            item.add_marker(pytest.mark.xdist_group(engines.pop()))
        elif "latest_world" in fixtures:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.fixture(scope="module")
def latest_world() -> Iterator[LatestWorld]:
    with LatestWorld() as latest:
        yield latest


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
