"""Unmodified scripts on several ranks: they read the numbers of one process, or are refused by line."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_world import hvdrun, run
from tiers import exhaustive_unless

SCRIPTS = Path(__file__).with_name("auto_scripts")
SEVERAL, REFUSED = SCRIPTS / "several.py", SCRIPTS / "refused.py"
CLOSE = 1e-10
LOOPS = (
    "sgd",
    "adam",
    "plateau",
    "closure",
    "several_optimizers",
    "early_break",
    "skipped_nan",
    "accumulated",
    "counts",
    "class_counts",
    "ignored_equally",
    "iterator",
)
TUTORIALS = (
    "look_first",
    "after_the_loop",
    "labels_read",
    "phases",
    "spatial_transformer",
    "two_towers",
    "distillation",
    "translation",
    "super_resolution",
)
MODELS = (
    "own_function",
    "first_token",
    "padded",
    "recurrent",
    "checkpointed",
    "flattened",
    "one_left",
    "one_helper",
    "sparse",
    "counting",
    "centred",
    "penalised",
)
SCRIPT_OF = {
    **dict.fromkeys(LOOPS, "training.py"),
    **dict.fromkeys(TUTORIALS, "tutorials.py"),
    **dict.fromkeys(MODELS, "models.py"),
}
# Loops of `refused.py`, with the mark of the line that the error names, and its reason.
REFUSALS = {
    "sum": ("sum", 'Use a mean, such as reduction="mean"'),
    "masked_mean": ("masked_mean", "a mean over a mask"),
    "class_weights": ("class_weights", "class weights"),
    "negatives": ("negatives", "in-batch negatives"),
    "sequence_first": ("sequence_first", "batch_first=True"),
    "batch_norm": ("backward", "BatchNorm1d normalises by the statistics of the batch"),
    "running_statistics": ("", "the buffer 'running_mean' of InstanceNorm1d"),
    "new_loss": ("new_loss", "computes a loss that was not there"),
    "new_reduction": ("changed", "its arguments are now (ignore_index=-100, reduction='sum')"),
    "new_weights": ("changed", "(ignore_index=-100, reduction='mean', weight: a tensor), and were"),
    "other_weights": ("changed", "weight: a tensor of one value) when a batch"),
    "ignored": ("changed", "the mean leaves out targets"),
    "ignored_of_copies": ("changed", "the mean leaves out targets"),
    "running_mean": ("running_mean", "rows of an earlier batch only"),
    "rows_read": ("rows_read", "tolist reads a tensor"),
    "unknown_rule": ("unknown_rule", "neither their mean over rows, nor their sum"),
    "unseen": ("unseen", "was not part of a batch that was computed as a whole and in parts"),
    "selected": ("selected", "depends on the values of this rank's part"),
    "length_of_list": ("length_of_list", "code that uses rows one by one cannot be split"),
    "diverged": ("diverged", "code that uses rows one by one cannot be split"),
    "one_row": ("one_row", "neither their mean over rows, nor their sum"),
    "selected_mean": ("selected_mean", "was not part of a batch that was computed as a whole and in parts"),
    "unequal_shapes": ("unequal_shapes", "its shape depends on the rows of each rank"),
    "first_rows": ("first_rows", "tolist reads a tensor"),
    "sum_of_first_rows": ("sum_of_first_rows", "neither their mean over rows, nor their sum"),
    "sum_of_half": ("sum_of_half", "neither their mean over rows, nor their sum"),
    "sum_loss": ("sum_loss", "neither their mean over rows, nor their sum"),
    "new_function": ("new_function", "log computes with a loss where it did not"),
    "new_scale": ("new_scale", "computes with a loss where it did not"),
    "own_gradients": ("own_gradients", "without a backward pass that compares it"),
    "vmapped": ("backward", "aten.tanh.default computes with rows of the batch where it cannot be followed"),
    "joined": ("loader", "pad rows of several lengths instead of joining them"),
    "two_loaders": ("two_loaders", "this step uses batches of several loaders at once"),
}

pytest.importorskip("torch")
pytestmark = pytest.mark.xdist_group("auto_torch")  # one process of pytest runs the loops


def on_ranks(ranks: int, *script: Any) -> subprocess.CompletedProcess[str]:
    return run(*hvdrun(ranks, "--auto", sys.executable, *script))


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, list):
        for one in value:
            yield from numbers(one)
    else:
        yield float(value)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder with the results of loops on a number of ranks, which run them in one job."""
    failures: dict[Any, BaseException] = {}

    @functools.cache
    def trained(ranks: int, loops: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp(f"on_{ranks}")
        pairs = [f"{SCRIPTS / SCRIPT_OF[loop]}:{loop}" for loop in loops]
        done = (
            run(sys.executable, SEVERAL, folder, *pairs)
            if ranks == 1
            else on_ranks(ranks, SEVERAL, folder, *pairs)
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return folder

    def folder_of(ranks: int, loops: tuple[str, ...]) -> Path:
        if (ranks, loops) in failures:
            raise AssertionError("the loops failed: see the first test") from failures[ranks, loops]
        try:
            return trained(ranks, loops)
        except BaseException as error:
            failures[ranks, loops] = error
            raise

    return folder_of


@pytest.mark.parametrize(
    ("loop", "ranks", "loops"),
    [
        pytest.param(loop, ranks, loops, id=f"{loop}-{ranks}", marks=exhaustive_unless(ranks == 2))
        for ranks in (2, 3)
        for loops in (LOOPS, TUTORIALS, MODELS)
        for loop in loops
    ],
)
def test_the_numbers_are_those_of_one_process(
    loop: str, ranks: int, loops: tuple[str, ...], results: Any
) -> None:
    """Among them are loops in the shapes of tutorials, which `tutorials.py` names."""
    expected, found = (
        json.loads((results(count, loops) / f"{loop}.json").read_text()) for count in (1, ranks)
    )
    for part in ("seen", "parameters"):
        ours, theirs = list(numbers(found[part])), list(numbers(expected[part]))
        assert len(ours) == len(theirs) > 0
        assert ours == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


def line_of(mark: str) -> str:
    lines = REFUSED.read_text().splitlines()
    return f"{REFUSED}:{next(place for place, line in enumerate(lines, 1) if line.endswith(f'# {mark}'))}"


def assert_refuses(text: str, name: str) -> None:
    line, reason = REFUSALS[name]
    assert text.startswith("UnsupportedError: ")
    assert reason in text
    assert str(REFUSED) in text
    assert not line or line_of(line) in text


@pytest.fixture(scope="module")
def refusals(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Returns the folder with the errors of all loops on two ranks, and the job.

    All run in one job, which ends with a loop that is split, but draws random numbers.
    """
    folder = tmp_path_factory.mktemp("refusals")
    return folder, on_ranks(2, SCRIPTS / "refusals.py", folder, REFUSED, *REFUSALS, "dropout")


@pytest.mark.parametrize("name", REFUSALS)
def test_a_loop_that_cannot_be_split_is_refused(
    name: str, refusals: tuple[Path, subprocess.CompletedProcess[str]]
) -> None:
    folder, job = refusals
    for rank in (0, 1):
        found = folder / f"{name}-{rank}"
        assert found.exists(), job.stderr
        assert_refuses(found.read_text(), name)


def test_a_refusal_ends_the_job() -> None:
    done = on_ranks(2, REFUSED, "class_weights")
    assert done.returncode == 1, done.stdout
    for rank in (0, 1):
        last = [one for one in done.stderr.splitlines() if one.startswith(f"[{rank}] ") and "Error: " in one]
        assert last, done.stderr
        assert_refuses(last[-1][last[-1].index("UnsupportedError") :], "class_weights")


def test_a_script_that_catches_a_refusal_trains_on() -> None:
    """The step that is refused has no end, for which another pass or the next loop would wait.

    Of four batches, the first one is not split, because nothing has been trained with the loader before. The
    others are proven again each time, and the passes after the one that is refused are not compared.
    """
    alone, done = run(sys.executable, SCRIPTS / "caught.py"), on_ranks(2, SCRIPTS / "caught.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught") == 2 * (1 + 3 + 3 + 1)
    assert done.stderr.count("the script has caught an error of this step") == 1
    # Weights of two loops, and losses: of the step that was refused, before and after, and of the last one.
    expected, *found = (
        list(numbers(json.loads(line.partition("results ")[2])))
        for line in (alone.stdout + done.stdout).splitlines()
        if "results " in line
    )
    assert len(found) == 2
    for one in found:
        assert one == pytest.approx(expected, abs=CLOSE, rel=CLOSE)


def test_random_numbers_of_a_step_are_mentioned_once(
    refusals: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, job = refusals
    assert not list(folder.glob("dropout-*"))
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("the steps of this loop draw random numbers") == 1


def test_without_a_loader_nothing_is_split() -> None:
    done = on_ranks(2, REFUSED, "nothing")
    assert done.returncode == 1
    assert "sirtaki: no training" in done.stderr
    written, _, _ = done.stderr.partition("hvdrun: the last lines")  # which repeats those of one rank
    assert written.count("this step uses no batch of a DataLoader") == 1


def test_an_iterator_that_outlives_the_modules_writes_no_error() -> None:
    done = on_ranks(2, SCRIPTS / "kept.py")
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
