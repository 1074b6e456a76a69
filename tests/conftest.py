"""Worlds of processes, one per size, shared by all tests of a session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
from process_world import ProcessWorld, hvdrun

RunCase = Callable[[int, str], None]
# Fixtures that share a large object or a fixed name: all tests that use such a fixture run in one process of
# pytest.
SHARED = {
    "network": "hosts",
    "fragile": "hosts",
    "run_case": "processes",
    "run_case_on_gpus": "GPUs",
    "run_case_in_one_thread": "one thread",
    "run_case_in_keras": "Keras",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        for group in {SHARED[name] for name in getattr(item, "fixturenames", ()) if name in SHARED}:
            item.add_marker(pytest.mark.xdist_group(group))


def _run_cases(**environment: str) -> Iterator[RunCase]:
    worlds: dict[int, ProcessWorld] = {}

    def run(size: int, name: str) -> None:
        if size not in worlds:
            worlds[size] = ProcessWorld(size, hvdrun(size, **environment))
        try:
            worlds[size].run(name)
        except BaseException:
            worlds.pop(size).close()
            raise

    yield run
    for world in worlds.values():
        world.close()


@pytest.fixture(scope="session")
def run_case() -> Iterator[RunCase]:
    """Runs a case on the given number of ranks. After a failure the next case gets new processes."""
    yield from _run_cases()


@pytest.fixture(scope="session")
def run_case_on_gpus() -> Iterator[RunCase]:
    """Works like `run_case`; torch's tensors are on GPUs of the fake libcuda, through NCCL."""
    yield from _run_cases(TORCH_TENSORS_ON_GPUS="2", SIRTAKI_GPU_BACKEND="nccl")


@pytest.fixture(scope="session")
def run_case_in_one_thread() -> Iterator[RunCase]:
    """Works like `run_case`; TensorFlow has one thread for operations: a waiting kernel would block all."""
    yield from _run_cases(TF_NUM_INTEROP_THREADS="1")


@pytest.fixture(scope="session")
def run_case_in_keras() -> Iterator[Callable[[str, int, str], None]]:
    """Works like `run_case`, with Keras' backend before the size: the backend is fixed per process."""
    with contextlib.ExitStack() as worlds:
        started: dict[str, RunCase] = {}

        def run(backend: str, size: int, name: str) -> None:
            if backend not in started:
                cases = contextlib.contextmanager(_run_cases)
                settings = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
                started[backend] = worlds.enter_context(cases(**settings))
            started[backend](size, name)

        yield run
