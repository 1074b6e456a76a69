"""Runs a script under several names, which are refused: `refusals.py FOLDER SCRIPT NAME...`.

The text of each error is saved as FOLDER/NAME-RANK. The last name has to be that of a loop that is split.
"""

import gc
import os
import runpy
import sys
from pathlib import Path

folder, script, *names = sys.argv[1:]
for name in names:
    sys.argv = [script, name]
    try:
        runpy.run_path(script, run_name="__main__")
    except NotImplementedError as error:
        Path(folder, f"{name}-{os.environ['SIRTAKI_RANK']}").write_text(f"{type(error).__name__}: {error}")
    gc.collect()  # models and optimizers of one script are not those of the next
