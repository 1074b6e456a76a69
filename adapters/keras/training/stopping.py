"""The end of a training: of all ranks at once, or of a single rank, for which all other ranks would wait."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from sirtaki.bindings.context import current
from sirtaki.bindings.errors import MismatchError
from sirtaki.common.ops.reduction import Max
from sirtaki.keras.training.gradient_reducer import GradientReduction
from sirtaki.numpy.collectives import allreduce

_ALONE = (
    "{peer} alone has ended its training, after {steps} steps, and other ranks go on: each of their steps "
    "would wait for it. A callback that looks at the loss or the metrics of its own rank ends the training "
    "there only: use hvd.callbacks.TerminateOnNaN() instead of the callback of Keras, and place "
    "hvd.callbacks.MetricAverageCallback() before EarlyStopping and its like"
)


def require_all_to_stop(optimizer: Any, exchange: GradientReduction) -> None:
    """Makes sure that all ranks end the training after this step. Those that do must call it.

    A rank that goes on exchanges the gradients of another step. The call therefore exchanges an array of
    another dtype under the name of the first of them, and so it either meets the calls of all other ranks or
    fails at once. Nothing is checked in an elastic job, whose ranks leave and join.

    Raises:
        ValueError: other ranks go on. Their step fails, and the world is aborted with this text.
    """
    context = current()
    process_set = exchange.how.process_set
    members = process_set.members(context)
    is_alone = len(members) == 1 or context.rank not in members
    if is_alone or exchange.first_name is None or context.survivors is not None:
        return
    steps = int(keras.ops.convert_to_numpy(optimizer.iterations))  # waits for the steps that are in flight
    try:
        allreduce(np.zeros(1, np.uint8), op=Max, name=exchange.first_name, process_set=process_set)
    except MismatchError:
        text = _ALONE.format(peer=context.topology.label(context.rank), steps=steps)
        context.abort(text)
        raise ValueError(text) from None
