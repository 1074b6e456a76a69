"""Elastic training with TensorFlow: the states."""

from __future__ import annotations

from typing import Any as _Any

from sirtaki.common.elastic.decorator import run
from sirtaki.common.elastic.fencing import fence
from sirtaki.common.elastic.state import ObjectState, State
from sirtaki.tensorflow.elastic.state import TensorFlowState


def __getattr__(name: str) -> _Any:
    """Imports the state that needs Keras on first use, because Keras takes seconds to import."""
    if name == "TensorFlowKerasState":
        from sirtaki.keras.elastic import TensorFlowKerasState

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ObjectState",
    "State",
    "TensorFlowKerasState",  # __getattr__ makes it
    "TensorFlowState",
    "fence",
    "run",
]
