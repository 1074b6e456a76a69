"""The end of a training whose loss is no number, in `model.fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sirtaki.bindings.default_context import current
from sirtaki.common.ops import Min
from sirtaki.numpy.collectives import allreduce


class TerminateOnNaN(keras.callbacks.Callback):
    """Ends the training on all ranks after a batch in which the loss of any rank was NaN or infinite.

    The callback of Keras with this name ends it on that rank only, for which the others would wait. This one
    sends 4 bytes after each batch.
    """

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        context = current()
        loss: Any = (logs or {}).get("loss", 0.0)
        is_valid = bool(np.isfinite(loss))
        mine = np.array([context.size if is_valid else context.rank], np.int32)
        rank = int(allreduce(mine, op=Min, name="TerminateOnNaN")[0])
        if rank == context.size:
            return
        self.model.stop_training = True
        if rank == context.rank:
            print(f"batch {batch}: the loss of rank {rank} is {loss}, so all ranks end the training")
