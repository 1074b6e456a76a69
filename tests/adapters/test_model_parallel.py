"""Models that are divided over ranks, as the examples divide them, are the undivided ones; and they learn."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from process_world import hvdrun, output_of

pytest.importorskip("torch")
pytest.importorskip("sklearn")

PROGRAMS = Path(__file__).with_name("programs_model_parallel.py")
EXAMPLES = Path(__file__).parents[2] / "examples"


def run(ranks: int, *command: str | Path) -> str:
    return output_of(*hvdrun(ranks, sys.executable, *command))


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_weights_are_those_of_one_process(ranks: int) -> None:
    """Compares divided layers, and stages, in one job."""
    output = run(ranks, PROGRAMS, "divided_layers", "stages")
    assert output.count("divided_layers is done") == output.count("stages is done") == ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousand_steps_of_a_pipeline(ranks: int) -> None:
    """Repeats what the first steps of `stages` do."""
    assert run(ranks, PROGRAMS, "many_steps_of_stages").count("is done") == ranks


@pytest.mark.parametrize("example", ["pytorch_tensor_parallel.py", "pytorch_pipeline.py"])
def test_the_examples_learn(example: str) -> None:
    output = run(4, EXAMPLES / example)
    reports = re.findall(r"epoch +(\d+): loss [\d.]+, test accuracy ([\d.]+)%", output)
    assert [int(epoch) for epoch, _ in reports] == list(range(1, 13))
    assert float(reports[-1][1]) >= 93
