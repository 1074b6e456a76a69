"""Plain scripts with `model.fit`: ranks train as one process does, or refuse with the cause."""

from __future__ import annotations

import functools
import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process_world import PATIENCE, hvdrun
from tiers import exhaustive_unless

pytest.importorskip("keras")
pytestmark = pytest.mark.xdist_group("auto_keras")  # one process of pytest makes the results of each backend

FOLDER = Path(__file__).parent
PROGRAM, SCRIPT = FOLDER / "programs_auto_keras.py", FOLDER / "auto_scripts" / "keras_training.py"

ALIKE = (
    "sgd",
    "adam",
    "by_name_and_eagerly",
    "accumulated",
    "several_steps",
    "early_stopping",
    "weights_of_samples",
    "weights_of_classes",
    "mean_in_a_function",
    "several_outputs",
    "subclassed",
    "twice",
    "py_dataset",
    "generator",
    "ending_generator",
    "frozen_batch_norm",
    "fixed_size",
)
TUTORIALS = ("recurrent", "denoising", "pairs", "attention", "counted_classes")  # in their shapes
REFUSED = {
    "batch_norm": r"layer 'normalise' \(BatchNormalization\) computes statistics of the batch",
    "sum_reduction": "the loss 'added' is a sum over the rows, and has to be a mean",
    "sum_in_a_function": "the loss, or what add_loss.. is given, is a sum over the rows",
    "batch_negatives": r"the loss \('contrast'\), .* relates rows of the batch to each other",
    # Its gradients are nearly the sums of the parts': both causes are right.
    "everything_at_once": "relates rows of the batch to each other|is a sum over the rows",
    "masked": "the loss is a mean over what a mask leaves",
    "metric_of_the_batch": "metric 'spread' cannot be combined from the ranks' rows",
    "own_step": r"the model has its own train_step \(.*keras_training.py:\d+\)",
    "on_batch": "train_on_batch is not split over the ranks",
    "different_arrays": "array 0 of the training data has other values on rank 1",
    "different_orders": "seed the shuffle",
    "compiled_by_xla": "compiled with jit_compile=True",
}
# Keras computes means, some losses and batch normalisation in float32, on torch and JAX, whatever the dtype.
IN_FLOAT32 = 1e-6
IN_FLOAT32_ON_JAX = {"mean_in_a_function", "several_outputs", "subclassed", "frozen_batch_norm"}
WITH_FIVE_RANKS = ("sgd", "twice", "metric_of_the_batch")
BACKENDS = ("torch", "tensorflow", "jax")
# These reach the code for steps without state: state of optimizer and metrics, the end of the data, proofs
# and refusals. The rest is the same on every backend.
ON_JAX = ("adam", "ending_generator", "batch_negatives", "own_step")
NOT_HERE = {
    ("several_steps", "torch"),  # Keras itself refuses them
    ("compiled_by_xla", "jax"),  # all of its programs are
    ("ending_generator", "tensorflow"),  # Keras counts one step more than it takes
}


def names_for(backend: str) -> list[str]:
    """Returns the trainings that are compared, and those that are for one backend or need another library."""
    more = ["loader", *TUTORIALS] if backend == "torch" else []
    more += ["tf_data"] if importlib.util.find_spec("tensorflow") else []
    return [name for name in [*ALIKE, *more] if (name, backend) not in NOT_HERE]


def refusals_for(backend: str) -> list[str]:
    return [name for name in REFUSED if (name, backend) not in NOT_HERE]


def is_turn(backend: str, name: str) -> bool:
    """Returns whether the training runs on this backend before the third tier: on torch all of them do.

    The other backends take the trainings in turn; JAX, which compiles each of them, those of `ON_JAX` only.
    """
    if backend == "torch":
        return True
    names = [*ALIKE, "tf_data", *REFUSED]
    others = [one for one in BACKENDS[1:] if (name, one) not in NOT_HERE]
    is_next = backend == others[names.index(name) % len(others)]
    return is_next and (backend != "jax" or name in ON_JAX)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the folder with the results of a backend, whose trainings run when they are first asked for."""

    failures: dict[Any, BaseException] = {}

    def folder_of(backend: str, ranks: int, in_turn: bool = True) -> Path:
        if importlib.util.find_spec(backend) is None:
            pytest.skip(f"there is no {backend} here")
        job = (backend, ranks, in_turn)
        if job in failures:
            raise AssertionError("the trainings failed: see the first test") from failures[job]
        try:
            return trained(*job)
        except BaseException as error:
            failures[job] = error
            raise

    @functools.cache
    def trained(backend: str, ranks: int, in_turn: bool) -> Path:
        folder = tmp_path_factory.mktemp(backend)
        names = [name for name in names_for(backend) if is_turn(backend, name) == in_turn]
        others = [name for name in refusals_for(backend) if is_turn(backend, name) == in_turn]
        others.append("dropout")
        if ranks > 2:
            names, others = [one for one in WITH_FIVE_RANKS if one not in REFUSED], ["metric_of_the_batch"]
        settings = {
            "KERAS_BACKEND": backend,
            "JAX_ENABLE_X64": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
        }
        alone = ["env", *(f"{name}={value}" for name, value in settings.items()), sys.executable]
        run(*alone, PROGRAM, folder, "alone", SCRIPT, *names)
        command = [sys.executable, PROGRAM, folder, "auto", SCRIPT, *names, *others]
        run(*hvdrun(ranks, *command, **settings))
        return folder

    return folder_of


def run(*command: str | Path) -> None:
    finished = subprocess.run(
        [str(part) for part in command], text=True, capture_output=True, timeout=PATIENCE, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr


def result_of(folder: Path, mode: str, name: str, rank: int = 0) -> Any:
    return pickle.loads((folder / f"{mode}-{name}-{rank}.pickle").read_bytes())


def cases(chosen: Any) -> list[Any]:
    return [
        pytest.param(backend, name, id=f"{backend}-{name}", marks=exhaustive_unless(is_turn(backend, name)))
        for backend in BACKENDS
        for name in chosen(backend)
    ]


@pytest.mark.parametrize(("backend", "name"), cases(names_for))
def test_ranks_train_as_one_process(backend: str, name: str, folders: Any) -> None:
    folder = folders(backend, 2, is_turn(backend, name))
    variables, epochs, history = result_of(folder, "alone", name)
    is_single = backend == "torch" or (backend == "jax" and name in IN_FLOAT32_ON_JAX)
    rounding = IN_FLOAT32 if is_single else 1e-10
    for rank in range(2):
        found = result_of(folder, "auto", name, rank)
        assert not isinstance(found, str), found
        assert found[1] == epochs
        assert found[2].keys() == history.keys()
        for key, values in history.items():
            np.testing.assert_allclose(found[2][key], values, rtol=rounding, atol=rounding, err_msg=key)
        for one, other in zip(found[0], variables, strict=True):
            np.testing.assert_allclose(one, other, rtol=rounding, atol=rounding)


@pytest.mark.exhaustive  # two ranks have a batch of one row as well, in `twice`
@pytest.mark.parametrize("name", WITH_FIVE_RANKS)
def test_more_ranks_than_rows(name: str, folders: Any) -> None:
    """Five ranks have batches of 8, 5 and 1 rows."""
    folder = folders("torch", 5)
    expected = None if name in REFUSED else result_of(folder, "alone", name)
    for rank in range(5):
        found = result_of(folder, "auto", name, rank)
        if expected is None:
            assert REFUSED[name] in found
            continue
        for one, other in zip(found[0], expected[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=IN_FLOAT32, atol=IN_FLOAT32)
        assert found[2].keys() == expected[2].keys()


@pytest.mark.parametrize(("backend", "name"), cases(refusals_for))
def test_a_training_that_cannot_be_split_is_refused(backend: str, name: str, folders: Any) -> None:
    """On all ranks, with the user's line and the cause."""
    folder = folders(backend, 2, is_turn(backend, name))
    texts = [result_of(folder, "auto", name, rank) for rank in range(2)]
    assert isinstance(texts[0], str), "it trained"
    assert texts[0] == texts[1]
    assert "keras_training.py:" in texts[0]
    assert re.search(REFUSED[name], texts[0]), texts[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_differs_between_ranks_and_weights_do_not(backend: str, folders: Any) -> None:
    """With equal masks on both ranks the seeds of the model would be equal."""
    folder = folders(backend, 2)
    results = [result_of(folder, "auto", "dropout", rank) for rank in range(2)]
    assert not isinstance(results[0], str), results[0]
    assert results[0][2] == results[1][2]
    for one, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_array_equal(one, other)
