"""Several frameworks in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

FRAMEWORKS = ("torch", "tensorflow", "jax")


@pytest.mark.full
def test_all_share_one_context(run_case: Callable[[int, str], None]) -> None:
    for framework in FRAMEWORKS:
        pytest.importorskip(framework)
    run_case(2, "frameworks.all_share_one_context")
