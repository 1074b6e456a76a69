"""Elastic training with TensorFlow: the states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from typing import Any as _Any

import numpy as np
import tensorflow as tf

from sirtaki.common.elastic.state import ObjectState, State, fence, run
from sirtaki.numpy.elastic import ArraysState
from sirtaki.numpy.elastic.arrays_state import Entry, EntryKind


def __getattr__(name: str) -> _Any:
    """Imports the state that needs Keras on first use, because Keras takes seconds to import."""
    if name == "TensorFlowKerasState":
        from sirtaki.keras.elastic import TensorFlowKerasState

        return TensorFlowKerasState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ObjectState",
    "State",
    "TensorFlowKerasState",  # __getattr__ makes it  # noqa: F822
    "TensorFlowState",
    "fence",
    "run",
]


# ---- The state of an elastic training with TensorFlow's variables --------------------------------------


class TensorFlowState(ArraysState):
    """The state of variables, and attributes. A commit copies it.

    Trainable variables are equal on all ranks, and checked after each change of the ranks. The others are
    sent to ranks that need a state, and are otherwise each rank's own.

    Example:
        optimizer.build(model.trainable_variables)
        state = hvd.elastic.TensorFlowState([*model.variables, *optimizer.variables], epoch=0)
        # after each epoch of the function that hvd.elastic.run decorates:
        state.epoch += 1
        state.commit()
    """

    def __init__(self, variables: Iterable[Any] | None = None, session: None = None, **kwargs: Any) -> None:
        """Creates the state, and saves it.

        Args:
            variables: of TensorFlow's or Keras', in the same order on all ranks; with those of the optimizer,
                which therefore has to be built.
            session: None: only TensorFlow 1 has sessions.
            kwargs: attributes, such as `epoch=0, batch=0`.

        Raises:
            ValueError: no variables, an object that is not one, or a session.
        """
        if session is not None or not tf.executing_eagerly():
            raise ValueError("TensorFlowState needs eager execution: sessions of TensorFlow 1 are not served")
        if variables is None:
            raise ValueError(
                "TensorFlowState needs the variables, because TensorFlow 2 has no list of all of them: "
                "TensorFlowState([*model.variables, *optimizer.variables], epoch=0)"
            )
        self.variables = list(variables)
        wrong = next((variable for variable in self.variables if not hasattr(variable, "assign")), None)
        if wrong is not None:
            raise ValueError(f"TensorFlowState takes variables, not {type(wrong).__name__}")
        super().__init__(**kwargs)

    def _entries(self) -> list[Entry]:
        return [
            Entry(
                f"{place}: {getattr(variable, 'path', None) or variable.name.partition(':')[0]}",
                tuple(variable.shape),
                np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype),
                EntryKind.EQUAL if variable.trainable else EntryKind.SENT,
                variable,
            )
            for place, variable in enumerate(self.variables)
        ]

    def _read(self, entries: Sequence[Entry]) -> list[Any]:
        # A tensor shares its memory with the array; np.asarray() of a variable would be a copy.
        return [np.asarray(tf.convert_to_tensor(entry.target)) for entry in entries]

    def _write(self, entries: Sequence[Entry], arrays: Iterable[Any], details: Any) -> None:
        for entry, array in zip(entries, arrays, strict=True):
            entry.target.assign(array)
