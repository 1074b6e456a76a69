"""Counts the files of the product that an addition touches, and those that one all-reduce runs through."""

from __future__ import annotations

import re

import pytest
from test_structure import PRODUCT, ROOT, sources

# An addition, a pattern that finds every file which names one of its kind, and the most files that may.
ADDITIONS = {
    "a collective": (
        r"(?i)reduce_?-?scatter",
        37,
    ),  # with an algorithm of its own between hosts, in NCCL and for JAX's own
    "a reduce op": (r"SRT_PRODUCT|ReduceOp::product|core\.PRODUCT", 11),
    "a dtype that reduces": (r"float8_?e4m3fnuz\b|Float8E4M3fnuz", 5),
    "a wire format": (r"Fp8Code|SRT_WIRE_FP8", 3),
    "a setting": (r"\bcontrol_fan_out\b", 2),  # its row and its use
}
MOST_OF_ONE_ALLREDUCE = 14  # files of the core, between its C header and the return to it


def naming(pattern: str) -> list[str]:
    """Returns the product's files, without generated ones, in which the pattern occurs."""
    files = sources(".py", ".h", ".cc", folders=PRODUCT)
    return [str(path.relative_to(ROOT)) for path in files if re.search(pattern, path.read_text())]


@pytest.mark.parametrize("addition", ADDITIONS)
def test_an_addition_touches_few_files(addition: str) -> None:
    pattern, most = ADDITIONS[addition]
    found = naming(pattern)
    assert found  # the pattern still finds something
    assert len(found) <= most, "\n".join(found)


def test_one_allreduce_runs_through_few_files() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    way = text.partition("## One all-reduce, from hook to completion")[2].partition("\n## ")[0]
    every_step = way.partition("From the second step on")[0]
    files = set(re.findall(r"`[\w/]*?(\w+\.cc)`", every_step))
    assert len(files) > 8  # the way is described
    assert len(files) <= MOST_OF_ONE_ALLREDUCE, sorted(files)
