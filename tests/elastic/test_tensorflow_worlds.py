"""TensorFlow's objects in one world after another: one rank, two, one, three."""

from __future__ import annotations

import importlib.util

import pytest
from elastic.changing import run

if importlib.util.find_spec("tensorflow") is None:  # its import would fix the backend of Keras
    pytest.skip("there is no tensorflow here", allow_module_level=True)

PROGRAMS = ("Tape", "EagerTape", "Accumulator", "Normalisation", "Datasets", "TopologyOps")


def test_one_rank_two_one_three() -> None:
    run("programs_tensorflow", PROGRAMS)


def test_the_loss_of_rank_0() -> None:
    run("programs_tensorflow", PROGRAMS, ("ABC", "BC", "CD"))


def test_a_failed_exchange_leaves_all_variables_as_they_were() -> None:
    run("programs_tensorflow", ("FailedExchange", "Refusals"), ("AB",))
