"""Runs a script under several names, which are refused: `refusals.py FOLDER SCRIPT NAME...`.

The text of each error is saved as FOLDER/NAME-RANK. The last name has to be that of a loop that is split.
"""

import gc
import os
import runpy
import sys
from importlib import import_module  # a script that imports sirtaki is not split
from pathlib import Path


def drop_batch() -> None:
    """Drops the batch in progress, and ends the fork that waits for the rest of its step."""
    job = import_module("sirtaki.torch.auto.job").job
    batch, job.batch = job.batch, None
    if batch is not None and batch.link is not None:
        batch.link.close()
    import_module("sirtaki.torch.auto.random_states").leave_own()


folder, script, *names = sys.argv[1:]
for name in names:
    sys.argv = [script, name]
    try:
        runpy.run_path(script, run_name="__main__")
    except NotImplementedError as error:
        Path(folder, f"{name}-{os.environ['SIRTAKI_RANK']}").write_text(f"{type(error).__name__}: {error}")
    drop_batch()
    gc.collect()  # models and optimizers of one script are not those of the next
