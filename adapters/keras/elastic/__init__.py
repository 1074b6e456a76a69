"""Elastic training with Keras: the states, and callbacks that keep them up to date in `model.fit`."""

from __future__ import annotations

from sirtaki.common.elastic.decorator import run
from sirtaki.common.elastic.fencing import fence
from sirtaki.common.elastic.state import ObjectState, State
from sirtaki.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)
from sirtaki.keras.elastic.state import KerasState, TensorFlowKerasState

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "fence",
    "run",
]
