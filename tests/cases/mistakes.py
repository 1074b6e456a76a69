"""User mistakes: each has its exception, whose text names the remedy, and leaves the world working."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sirtaki.numpy as hvd
from cases import case
from cases.refusals import refusal_check
from sirtaki.bindings.errors import MismatchError, UnsupportedError


def still_works() -> None:
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def ranks_disagree(call: Callable[[], Any], *words: str) -> None:
    """Checks that all ranks get the same MismatchError with these words; and the next operation works."""
    with pytest.raises(MismatchError) as caught:
        call()
    text = str(caught.value)
    for word in ("rank", *words):
        assert word in text, f"{word!r} is not in {text!r}"
    texts = hvd.allgather_object(text)
    assert len(set(texts)) == 1, texts
    still_works()


# Calls that differ on ranks of odd numbers, and words of the error, by what the ranks disagree about.
DISAGREEMENTS: dict[str, tuple[Callable[[bool], Any], tuple[str, ...]]] = {
    "shapes": (
        lambda is_odd: hvd.allreduce(np.ones((2, 3 + is_odd), np.float32), name="weights"),
        ("weights", "[2, 3]", "[2, 4]"),
    ),
    "numbers of dimensions": (
        lambda is_odd: hvd.allreduce(np.ones((4,) if is_odd else (2, 2)), name="weights"),
        ("[4]", "[2, 2]"),
    ),
    "dtypes": (
        lambda is_odd: hvd.allreduce(np.ones(3, np.float64 if is_odd else np.float32), name="weights"),
        ("weights", "float32", "float64"),
    ),
    "ops": (
        lambda is_odd: hvd.allreduce(np.ones(3), op=hvd.Max if is_odd else hvd.Sum, name="loss"),
        ("loss", "sum", "max"),
    ),
    "factors": (
        lambda is_odd: hvd.allreduce(np.ones(3), prescale_factor=1.0 + is_odd, name="loss"),
        ("loss",),
    ),
    "roots": (lambda is_odd: hvd.broadcast(np.ones(3), int(is_odd), name="start"), ("start", "root")),
    "kinds": (
        lambda is_odd: (
            hvd.broadcast(np.ones(3), 0, name="thing") if is_odd else hvd.allreduce(np.ones(3), name="thing")
        ),
        ("thing",),
    ),
    "memory orders": (
        lambda is_odd: hvd.allreduce(np.ones((3, 4), order="F" if is_odd else "C"), name="weights"),
        ("weights",),
    ),
    "gathered shapes beyond dimension 0": (
        lambda is_odd: hvd.allgather(np.ones((hvd.rank(), 2 + is_odd)), name="rows"),
        ("rows",),
    ),
}


@case(least=2, about=DISAGREEMENTS)
def ranks_that_disagree(about: str) -> None:
    call, words = DISAGREEMENTS[about]
    ranks_disagree(lambda: call(hvd.rank() % 2 == 1), *words)


@case(least=2)
def a_mistake_after_many_good_steps_is_found() -> None:
    for _ in range(5):
        hvd.allreduce(np.ones(4), name="cached")
    ranks_disagree(lambda: hvd.allreduce(np.ones(4 + hvd.rank() % 2), name="cached"), "cached", "[4]", "[5]")
    hvd.allreduce(np.ones(4), name="cached")


refused = refusal_check(still_works)


@case()
def op_and_average_together() -> None:
    refused(lambda: hvd.allreduce(1.0, average=True, op=hvd.Sum), "average")


@case()
def unknown_op() -> None:
    refused(lambda: hvd.allreduce(1.0, op=6), "Sum")
    refused(lambda: hvd.allreduce(1.0, op="sum"), "op is 'sum'", "say op=hvd.Sum")
    refused(lambda: hvd.allreduce(1.0, op=True), "op is True")
    refused(lambda: hvd.allreduce(1.0, "mean"), "average is 'mean'", "say op=hvd.Average")
    refused(lambda: hvd.allreduce(1.0, "loss"), "name='loss'")
    refused(lambda: hvd.allreduce(1.0, hvd.Sum), "average is 1", "op=hvd.Sum")
    refused(lambda: hvd.grouped_allreduce([1.0], "sum"), "say op=hvd.Sum")
    refused(lambda: hvd.allreduce(1.0, name=hvd.Sum), "name is 1")
    refused(lambda: hvd.reducescatter(np.ones(4), op="max"), "say op=hvd.Max")


def refused_in_flight(first: Callable[[], Any], second: Callable[[], Any], words: str) -> Any:
    """Checks that `second` is refused while `first` is in flight; returns the result of `first`."""
    if hvd.rank() == 0:
        handle = first()
        with pytest.raises(ValueError, match=words):
            second()
        hvd.barrier()
    else:
        hvd.barrier()
        handle = first()
    result = handle.wait()
    still_works()
    return result


@case(least=2)
def a_name_that_is_already_in_flight() -> None:
    def call() -> Any:
        return hvd.allreduce_async(np.ones(3), op=hvd.Sum, name="twice")

    assert (refused_in_flight(call, call, "twice") == hvd.size()).all()


@case(least=2)
def memory_that_is_already_in_flight() -> None:
    mine = np.ones(3)
    result = refused_in_flight(
        lambda: hvd.allreduce_async_(mine, op=hvd.Sum, name="first"),
        lambda: hvd.allreduce_async_(mine, op=hvd.Sum, name="second"),
        r"'second' would use memory of 'first', .* pass a copy",
    )
    assert (result == hvd.size()).all()


@case(least=2)
def memory_that_is_written_twice() -> None:
    whole = np.ones(100)
    refused_in_flight(
        lambda: hvd.allreduce_async_(whole[:60], op=hvd.Sum, name="left"),
        lambda: hvd.allreduce_async_(whole[40:], op=hvd.Sum, name="right"),
        "right",
    )


@case(least=2)
def an_asynchronous_call_is_named_with_its_line() -> None:
    """This holds without a name, too: the waiting line does not identify one of many calls."""
    handle = hvd.reducescatter_async(np.ones((2 + hvd.rank(), 2)))
    with pytest.raises(MismatchError) as caught:
        handle.wait()
    place = r"in an_asynchronous_call_is_named_with_its_line\(\) at mistakes\.py:\d+"
    assert re.search(rf"'unnamed reduce-scatter \d+'.*\(this rank started it {place}\)$", str(caught.value))
    line = int(str(caught.value).rpartition(":")[2].rstrip(")"))
    assert "reducescatter_async(" in Path(__file__).read_text().splitlines()[line - 1]
    still_works()


@case(name=["", "x" * 1025, "a\0b", "line\nbreak"])
def names_that_are_none(name: str) -> None:
    refused(lambda: hvd.allreduce(1.0, name=name), "name")


@case()
def long_and_foreign_names_work() -> None:
    for name in ("x" * 1024, "Größe der Gewichte ∑", "ü" * 512):
        assert hvd.allreduce(1.0, op=hvd.Sum, name=name) == hvd.size()


@case(root=[-1, 4, 1 << 20])
def roots_that_are_none(root: int) -> None:
    refused(lambda: hvd.broadcast(np.ones(3), root), "root")


@case(factor=[float("nan"), float("inf"), float("-inf")])
def factors_that_are_no_numbers(factor: float) -> None:
    refused(lambda: hvd.allreduce(1.0, prescale_factor=factor), "scale")
    refused(lambda: hvd.allreduce(1.0, postscale_factor=factor), "scale")


@case()
def dtypes_that_cannot_be_exchanged() -> None:
    for array in (
        np.array(["text"]),
        np.array([object()]),
        np.array([1], ">i4"),
        np.array(["2026"], "M8[Y]"),
    ):
        refused(lambda array=array: hvd.broadcast(array, 0), str(array.dtype), kind=UnsupportedError)


@case()
def dtypes_that_cannot_be_reduced() -> None:
    for dtype, op in ((np.bool_, hvd.Sum), (np.complex64, hvd.Max), (np.int32, hvd.Adasum)):
        refused(lambda dtype=dtype, op=op: hvd.allreduce(np.ones(3, dtype), op=op), np.dtype(dtype).name)


@case()
def read_only_arrays_and_things_that_are_no_arrays_in_place() -> None:
    array = np.ones(3)
    array.flags.writeable = False
    refused(lambda: hvd.allreduce_(array), "read-only")
    refused(lambda: hvd.allreduce_([1.0]), "list", kind=TypeError)
    hvd.allreduce(array)


@case()
def too_many_dimensions() -> None:
    refused(lambda: hvd.allreduce(np.ones((1,) * 17)), "16 dimensions")


@case()
def gathering_a_scalar() -> None:
    refused(lambda: hvd.allgather(np.float32(1.0)), "dimension")
