"""Installs a wheel in an environment without a compiler and sirtaki, and runs a sum over two ranks with it.

    python tests/install/try_wheel.py dist/*.whl [--torch torch==2.4.0] [--adapters]

Everything runs in a fresh virtual environment, the only entry of PATH. A given version of torch is installed
without CUDA's libraries (see empty_cuda.py) and runs a sum, too; with --adapters, all tests of sirtaki.torch
run on it. Prints the duration of each part.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import empty_cuda
import floor
from place import ROOT, Place, timed

SUM = Path(__file__).resolve().parent / "sum_over_ranks.py"
BESIDE_TORCH = ["filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"]


def add_torch(place: Place, requirement: str) -> None:
    """Installs PyPI's torch, and empty libraries in place of CUDA's."""
    place.install("--no-deps", requirement)
    place.install(*BESIDE_TORCH)
    torch = next(place.folder.glob("lib/python*/site-packages/torch"))
    empty_cuda.build_all(torch, place.folder / "cuda")
    place.environment["LD_LIBRARY_PATH"] = str(place.folder / "cuda")


def main() -> None:
    options = arguments()
    wheel = options.wheel.resolve()
    dependencies = [*floor.table("project")["dependencies"], "numpy"]
    with tempfile.TemporaryDirectory(prefix="sirtaki-wheel-") as folder:
        place = Place(Path(folder, "venv"))
        timed("the registry's packages that it needs", lambda: place.install(*dependencies))
        timed("the wheel", lambda: place.install("--no-deps", "--no-index", wheel))
        timed("import sirtaki", lambda: place.run("python", "-c", "import sirtaki"))
        timed("hvdrun, two ranks, numpy", lambda: place.run("hvdrun", "-np", "2", "python", SUM, "numpy"))
        if options.torch:
            timed(options.torch, lambda: add_torch(place, options.torch))
            timed("hvdrun, two ranks, torch", lambda: place.run("hvdrun", "-np", "2", "python", SUM, "torch"))
        if options.adapters:
            tests = sorted((ROOT / "tests" / "adapters").glob("test_torch*.py"))
            timed("the tests of sirtaki.torch", lambda: place.test(*tests))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--torch", metavar="REQUIREMENT", help="install it, and sum with it")
    parser.add_argument("--adapters", action="store_true", help="run tests/adapters, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
