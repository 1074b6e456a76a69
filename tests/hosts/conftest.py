"""Two and four hosts, made once for all tests here; a test that breaks a host makes hosts of its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from .network import Network, missing

REASON = missing()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if REASON:
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    """Yields four hosts that no test breaks."""
    with Network(4) as made:
        yield made


@pytest.fixture
def fragile() -> Iterator[Network]:
    """Yields two hosts for a test that breaks them."""
    with Network(2) as made:
        yield made


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path
