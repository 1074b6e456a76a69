"""Every body about Keras, on each backend, on ranks that are processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("torch")
with mock.patch.dict(os.environ, KERAS_BACKEND="torch"):  # here the cases are only counted
    pytest.importorskip("keras")

    from bodies import KERAS_MODULES, Case, cases_for

    CASES = cases_for(2, KERAS_MODULES)

BACKENDS = ["tensorflow", "torch"]


@pytest.mark.parametrize(
    ("backend", "case"),
    [pytest.param(backend, case, id=f"{backend}-{case.name}") for backend in BACKENDS for case in CASES],
)
def test_as_processes(backend: str, case: Case, run_case_in_keras: Callable[[str, int, str], None]) -> None:
    run_case_in_keras(backend, 2, case.name)
