"""Installs a wheel beside several versions of a framework, and runs that framework's tests on each.

    python tests/install/try_versions.py dist/*.whl tensorflow 2.15.1 2.18.1
    python tests/install/try_versions.py dist/*.whl jax 0.5.3 0.7.2 0.10.2

Each version gets a fresh virtual environment. Prints one line per version at the end; fails if the tests of
any version failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import floor
from place import ROOT, Place, timed


class Framework(NamedTuple):
    """The properties of a framework: packages ({} is the version), and its tests."""

    packages: list[str]
    tests: str


FRAMEWORKS = {
    "tensorflow": Framework(["tensorflow-cpu=={}"], "test_tensorflow*.py"),
    "jax": Framework(["jax=={}", "jaxlib=={}", "optax", "flax", "equinox"], "test_jax*.py"),
}


def main() -> None:
    options = arguments()
    framework = FRAMEWORKS[options.framework]
    outcomes = {version: attempt(options.wheel.resolve(), framework, version) for version in options.versions}
    for version, outcome in outcomes.items():
        print(f"{options.framework} {version}: {outcome or 'all passed'}")
    sys.exit(any(outcomes.values()))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("framework", choices=sorted(FRAMEWORKS))
    parser.add_argument("versions", nargs="+")
    return parser.parse_args()


def attempt(wheel: Path, framework: Framework, version: str) -> str:
    """Tries one version; returns the failure, or nothing."""
    packages = [package.format(version) for package in framework.packages]
    dependencies = floor.table("project")["dependencies"]
    tests = sorted((ROOT / "tests" / "adapters").glob(framework.tests))
    with tempfile.TemporaryDirectory(prefix="sirtaki-versions-") as folder:
        place = Place(Path(folder, "venv"))
        try:
            timed(" ".join(packages), lambda: place.install(*dependencies, *packages))
            place.install("--no-deps", "--no-index", wheel)
            timed("its tests", lambda: place.test(*tests))
        except (SystemExit, subprocess.TimeoutExpired) as failure:
            return str(failure)
    return ""


if __name__ == "__main__":
    main()
