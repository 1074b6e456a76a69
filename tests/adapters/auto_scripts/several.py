"""Runs scripts one after another in one process: `several.py FOLDER SCRIPT:NAME...`.

Each is given its NAME and the file FOLDER/NAME.json for its results.
"""

import gc
import runpy
import sys
from pathlib import Path

folder, *pairs = sys.argv[1:]
for pair in pairs:
    script, _, name = pair.rpartition(":")
    sys.argv = [script, name, str(Path(folder, f"{name}.json"))]
    runpy.run_path(script, run_name="__main__")
    gc.collect()  # models and optimizers of one script are not those of the next
