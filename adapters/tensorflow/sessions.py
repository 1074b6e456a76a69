"""Training in sessions of TensorFlow 1: an equal start of all variables of a graph, and its hook."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.tensorflow.state import broadcast_variables


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that overwrites all global variables of this graph with rank `root_rank`'s.

    All ranks must run it in a session, once the variables have been initialised or restored.

    Raises:
        RuntimeError: there is no graph that a session runs.
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs that a session runs: elsewhere TensorFlow has no "
            "list of all variables. Use hvd.broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook of a training session: overwrites all variables with one rank's, each time a session begins.

    So all ranks start with the same values, also if only the root has restored a checkpoint.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Creates the hook.

        Args:
            root_rank: the rank whose values are copied.
            device: accepted and ignored: the operations run on the CPU.
        """
        super().__init__()
        self._root_rank = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph, before it is finalized."""
        if self._operation is None or self._operation.graph is not tf.compat.v1.get_default_graph():
            self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the operation. All ranks must get here.

        Raises:
            HorovodInternalError: a rank died. After TensorFlow's own AbortedError, MonitoredTrainingSession
                would begin another session, again and again.
        """
        try:
            session.run(self._operation)
        except (tf.errors.AbortedError, tf.errors.UnknownError) as error:
            raise HorovodInternalError(error.message) from error
