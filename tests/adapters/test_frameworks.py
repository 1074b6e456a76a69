"""Rules for the packages of all frameworks: names that are imported on first use, and one context."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ADAPTERS = Path(__file__).parents[2] / "adapters"

FRAMEWORKS = ("torch", "tensorflow", "jax")


def test_all_share_one_context(run_case: Callable[[int, str], None]) -> None:
    for framework in FRAMEWORKS:
        pytest.importorskip(framework)
    run_case(2, "frameworks.all_share_one_context")


def later_names(source: str) -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Returns the names that a package imports for type checkers, with their modules, and its table."""
    checked: set[tuple[str, str]] = set()
    table: set[tuple[str, str]] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [one for one in node.body if isinstance(one, ast.ImportFrom)]
            checked = {(one.module or "", name.name) for one in imports for name in one.names}
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATER":
            homes = ast.literal_eval(node.value)
            table = {(home, name) for home, names in homes.items() for name in names}
    return checked, table


@pytest.mark.parametrize("package", ["numpy", "torch", "tensorflow", "keras", "jax"])
def test_type_checkers_see_the_names_that_are_imported_on_first_use(package: str) -> None:
    checked, table = later_names((ADAPTERS / package / "__init__.py").read_text())
    found = {(f"sirtaki.{package}.{home}", name) for home, name in table}
    assert checked == {*found, (f"sirtaki.{package}", "elastic")}


# For each package, modules of parts that most programs do not use.
RARE = {
    "torch": [
        "data",
        "elastic",
        "one_batch",
        "sync_batch_norm",
        "training.optimizer",
        "training.periodic",
        "training.sharded",
        "training.stale",
    ],
    "jax": ["elastic", "training.one_batch", "training.optimizer", "training.periodic"],
}


@pytest.mark.parametrize("package", RARE)
def test_names_are_imported_on_first_use(package: str) -> None:
    pytest.importorskip(package)
    code = f"""
import pickle, sys
import sirtaki.{package} as hvd
loaded = [name for name in {RARE[package]} if f"sirtaki.{package}.{{name}}" in sys.modules]
loaded += [name for name in sys.modules if name.startswith("sirtaki.runner")]
assert not loaded, loaded
assert dir(hvd) == sorted(hvd.__all__) and len(set(hvd.__all__)) == len(hvd.__all__)
assert not hasattr(hvd, "no_such_name")
from sirtaki.{package} import DistributedOptimizer
assert vars(hvd)["DistributedOptimizer"] is DistributedOptimizer is hvd.DistributedOptimizer
names = {{}}
exec("from sirtaki.{package} import *", names)
assert set(hvd.__all__) <= set(names)
for name in (name for later in hvd._LATER.values() for name in later):
    value = getattr(hvd, name)
    assert value is names[name] is pickle.loads(pickle.dumps(value)), name
"""
    finished = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert finished.returncode == 0, finished.stderr
