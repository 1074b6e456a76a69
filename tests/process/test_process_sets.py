"""Process sets from init() to shutdown(), in a user's script."""

from __future__ import annotations

from pathlib import Path

from process_world import run_script

STATIC = """
import sirtaki.numpy as hvd
first, rest = hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])
hvd.init(process_sets=[first, rest])
hvd.init(process_sets=[first, rest])
try:
    hvd.init(process_sets=[[0, 1]])
except ValueError as error:
    print("other", "by hvd.init(process_sets=[[0], [1, 2]])" in str(error))
mine = first if hvd.rank() == 0 else rest
print("sum", hvd.allreduce(hvd.rank() + 1.0, op=hvd.Sum, process_set=mine), mine.process_set_id)
hvd.shutdown()
assert mine.process_set_id is None
hvd.init(process_sets="dynamic")
try:
    hvd.allreduce(1.0, process_set=mine)
except ValueError as error:
    print("told", "add_process_set" in str(error))
hvd.add_process_set(rest)
print("again", rest.included())
"""

TWICE = """
import sirtaki.numpy as hvd
sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([0]), hvd.ProcessSet([0])]
try:
    hvd.init(process_sets=sets)
except ValueError as error:
    print("told", error)
print("left", [one.process_set_id for one in sets])
hvd.add_process_set(sets[1])
hvd.add_process_set(sets[0])
print("sum", hvd.allreduce(1.0, op=hvd.Sum))
"""


def test_sets_that_init_adds(tmp_path: Path) -> None:
    printed = sorted(run_script(tmp_path, STATIC).splitlines())
    assert [line for line in printed if "sum" in line] == ["[0] sum 1.0 1", "[1] sum 5.0 2", "[2] sum 5.0 2"]
    assert sum("other True" in line for line in printed) == 3
    assert sum("told True" in line for line in printed) == 3
    assert sum("again True" in line for line in printed) == 2


def test_a_set_given_twice_leaves_the_rank_initialised(tmp_path: Path) -> None:
    printed = run_script(tmp_path, TWICE).splitlines()
    assert sum("has these ranks already" in line for line in printed) == 3
    assert sum("left [None, None, None]" in line for line in printed) == 3
    assert sum("sum 3.0" in line for line in printed) == 3
