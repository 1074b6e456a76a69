"""Runs programs of torch one after the other in this process, each in a world of its own.

    hvdrun -np 2 python tests/documents/run_programs.py FOLDER

The programs are FOLDER/*.py; the output of each is saved as FOLDER/NAME-RANK.
"""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import sys
from pathlib import Path

import sirtaki.torch as hvd


def main(folder: Path) -> None:
    os.chdir(folder)
    for program in sorted(folder.glob("*.py")):
        output = folder / f"{program.stem}-{os.environ['SIRTAKI_RANK']}"
        with output.open("w") as file, contextlib.redirect_stdout(file):
            runpy.run_path(str(program), run_name="__main__")
        hvd.shutdown()
        gc.collect()  # models and optimizers of one program are not those of the next


if __name__ == "__main__":
    main(Path(sys.argv[1]))
