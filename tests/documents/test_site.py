"""The documentation site, as `make docs` builds it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from process_world import PATIENCE

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.xdist_group("site")  # the site is built once


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the site, which is built strictly: each link leads to a page and a heading."""
    for package in ("material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package, reason="the extra `docs` is not installed: `make docs` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("backward_passes_per_step", "reference/api/torch/#sirtaki.torch.DistributedOptimizer"),
        ("-np", "reference/hvdrun/#options"),
        ("SIRTAKI_FUSION_THRESHOLD", "reference/settings/"),
        ("core-broken", "reference/findings/#sirtaki-doctor"),
        ("late-rank", "reference/findings/#sirtaki-trace-report"),
        ("PeerLostError", "reference/api/common.exceptions/#sirtaki.common.exceptions.PeerLostError"),
        ("make test-locks", "repository/CONTRIBUTING/#build-and-test"),
        ("kind: Job", "repository/examples/kubernetes/indexed-job.yaml/"),
    ],
)
def test_the_search_finds(site: Path, text: str, place: str) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"] for entry in index["docs"] if text in entry["title"] + entry["text"]}
    assert place in found or any(location.startswith(f"{place}#") for location in found), found


@pytest.mark.parametrize("name", ["sirtaki.torch", "sirtaki.numpy"])
def test_each_public_name_has_an_entry(site: Path, name: str) -> None:
    pytest.importorskip(name.removeprefix("sirtaki."))
    module = import_module(name)
    page = (site / "reference" / "api" / name.removeprefix("sirtaki.") / "index.html").read_text()
    public = [part for part in module.__all__ if not isinstance(getattr(module, part), ModuleType)]
    assert len(public) > 10  # the names were found
    assert [part for part in public if f'id="{name}.{part}"' not in page] == []
