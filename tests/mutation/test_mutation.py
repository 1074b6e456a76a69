"""The table of mutants matches the sources, and tests detect a sample of them; `run.py` tries all."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from laboratory import Laboratory
from mutants import ROOT, Mutant, load
from native import Build, BuildError

BUILD = Path(os.environ.get("CORE_TESTS", ROOT / "build" / "core"))
SEED = 1
# Folders whose tests need no framework: a trial takes a few seconds.
SAMPLED = ("adapters/common", "adapters/numpy", "bindings", "bindings/bootstrap", "runner")
QUICK = ("tests/core/", "tests/inproc", "tests/runner/test_", "tests/rendezvous", "tests/security")
MUTANTS = load()


def _sample() -> list[Mutant]:
    killed = [one for one in MUTANTS if not one.survives and one.tests.startswith(QUICK)]
    python = [one for one in killed if one.folder in SAMPLED]
    native = [one for one in killed if one.program and one.file.endswith(".cc")]
    choose = random.Random(SEED).sample
    return [*choose(python, 4), *choose(native, 2)]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    try:
        build = Build(BUILD)
        build.refuse_stale()
    except BuildError as error:
        pytest.skip(str(error))
    return Laboratory(build, tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.id) for one in MUTANTS])
def test_a_mutant_fits_its_source(mutant: Mutant) -> None:
    assert mutant.mutated() != (ROOT / mutant.file).read_text()
    for argument in mutant.selection:
        if argument.startswith("tests/"):
            assert (ROOT / argument.partition("::")[0]).exists(), argument


def test_there_are_enough_mutants() -> None:
    assert len(MUTANTS) >= 55
    assert sum(not one.survives for one in MUTANTS) >= 0.95 * len(MUTANTS)


@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.id) for one in _sample()])
def test_a_mutant_is_noticed(mutant: Mutant, laboratory: Laboratory) -> None:
    """Runs the tests with the mutant only: the tiers already run them without it, and they pass."""
    result = laboratory.run(mutant, normal_seconds=10.0)
    assert result.is_killed, f"{result.outcome}\n{result.output}"
