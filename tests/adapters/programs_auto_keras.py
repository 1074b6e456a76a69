"""Runs a plain script: `programs_auto_keras.py FOLDER auto|alone SCRIPT NAME...`, once for each NAME.

Each run's weights and history are saved as FOLDER/auto|alone-NAME-RANK.pickle; a refusal's text instead.
"""

from __future__ import annotations

import gc
import os
import pickle
import runpy
import sys
from pathlib import Path
from typing import Any


def result_of(script: str) -> Any:
    """Returns weights, optimizer's variables and history of a training; a text if it was refused."""
    import keras

    try:
        names = runpy.run_path(script, run_name="__main__")
    except NotImplementedError as error:
        return str(error)
    model = names["model"]
    variables = [keras.ops.convert_to_numpy(one) for one in [*model.weights, *model.optimizer.variables]]
    return variables, names["history"].epoch, names["history"].history


def main() -> None:
    folder, mode, script, *names = sys.argv[1:]
    rank = 0
    if mode == "auto":
        from sirtaki.keras.auto import has_split, install

        install()
        rank = int(os.environ["HOROVOD_RANK"])
    import keras

    for name in names:
        keras.utils.clear_session()
        sys.argv = [script, name]
        result = result_of(script)
        Path(folder, f"{mode}-{name}-{rank}.pickle").write_bytes(pickle.dumps(result))
        gc.collect()
    if mode == "auto":
        assert has_split()


if __name__ == "__main__":
    main()
