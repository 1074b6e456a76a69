"""The names of `hvd.elastic` in each package, which are Horovod's."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest

from sirtaki.common.elastic.state import State, run

KERAS = {
    "KerasState": "model optimizer",
    "TensorFlowKerasState": "model optimizer backend",
    "CommitStateCallback": "state batches_per_commit",
    "UpdateBatchStateCallback": "state",
    "UpdateEpochStateCallback": "state",
}
NAMES: dict[str, dict[str, str]] = {
    "numpy": {"ArraysState": ""},
    "tensorflow": {
        "TensorFlowState": "variables session",
        "TensorFlowKerasState": "model optimizer backend",
    },
    "keras": KERAS,
    "tensorflow.keras": KERAS,
    "jax": {"JaxState": "donated"},
}


@pytest.mark.parametrize("package", NAMES)
def test_states_and_callbacks(package: str) -> None:
    pytest.importorskip(package.partition(".")[0])
    elastic: Any = import_module(f"sirtaki.{package}").elastic
    assert elastic.run is run
    assert {"ObjectState", "State", "fence", "run", *NAMES[package]} == set(elastic.__all__)
    for name, expected in NAMES[package].items():
        parameters = list(inspect.signature(getattr(elastic, name)).parameters)
        assert parameters[: len(expected.split())] == expected.split()
        assert name.endswith("Callback") or issubclass(getattr(elastic, name), State)
    assert import_module(f"sirtaki.{package}.elastic").run is run
