"""The opened library, as several threads use it."""

from __future__ import annotations

import subprocess
import sys

# Uses each function, and the fields of each structure, for the first time in a finalizer as well: the garbage
# collector runs one whenever an object is created.
PROGRAM = """
import gc
from sirtaki.bindings.library import ffi, lib

class Garbage:
    def __init__(self, work):
        self.itself, self.work = self, work
    def __del__(self):
        self.work()

def leave(function, *arguments):
    gc.set_threshold(0)
    gc.collect()
    Garbage(lambda: function(*arguments))
    gc.set_threshold(1)

def fields(structure):
    return ffi.typeof(structure).fields

for name in dir(lib):
    leave(getattr, lib, name)
    getattr(lib, name)
for structure in ("srt_request", "srt_statistics", "srt_step_counts", "srt_topology"):
    leave(fields, structure)
    fields(structure)
"""


def test_a_finalizer_uses_what_is_being_used_first() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM], text=True, capture_output=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stderr) == (0, "")


# The interpreter drops this module, and with it the opened library, before it clears the attributes of `sys`.
FREED_LATE = """
import sys
from sirtaki.bindings.library import ffi, lib

sys.kept = ffi.gc(lib.srt_config_create(), lib.srt_config_destroy)
sys.exit(5)
"""


def test_an_object_outlives_the_library() -> None:
    """So do process groups of torch.distributed that a program does not destroy."""
    finished = subprocess.run(
        [sys.executable, "-c", FREED_LATE], text=True, capture_output=True, timeout=60, check=False
    )
    assert (finished.returncode, finished.stderr) == (5, "")
