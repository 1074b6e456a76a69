"""Jobs with the signals of a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from launching import default_signals


@pytest.fixture(autouse=True, scope="package")
def heeded_signals() -> Iterator[None]:
    """Sets default handlers: hvdrun respects nohup and background jobs, which tests must not inherit."""
    with default_signals():
        yield
