"""An equal start for all ranks: variables, and Python objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sirtaki.bindings.errors import HorovodInternalError
from sirtaki.common.ops import objects
from sirtaki.common.ops.process_sets import ProcessSet, global_process_set
from sirtaki.tensorflow.ops.collectives import broadcast_
from sirtaki.tensorflow.ops.library import as_written


@as_written
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> Any:
    """Overwrites variables with rank `root_rank`'s. All ranks of the set must call it.

    Args:
        variables: of TensorFlow's or Keras', in the same order on all ranks.
        root_rank: the rank whose values are copied: a rank of the world.
        process_set: the ranks that take part.
        inplace: accepted and ignored; they always are overwritten in place.

    Returns:
        None; in a graph of TensorFlow 1 the operation that overwrites them, to be run by a session.

    Raises:
        ValueError: an object that is not a variable, or a set that is not in use.
        tf.errors.InvalidArgumentError: ranks have variables of different shapes or dtypes.
        tf.errors.AbortedError: a rank died.

    Example:
        optimizer.build(model.trainable_variables)
        hvd.broadcast_variables(model.variables + optimizer.variables, root_rank=0)  # all ranks start alike
    """
    wrong = next((variable for variable in variables if not hasattr(variable, "assign")), None)
    if wrong is not None:
        raise ValueError(f"broadcast_variables takes variables, not {type(wrong).__name__}")
    written = broadcast_(variables, root_rank, process_set=process_set)
    return None if tf.executing_eagerly() or tf.inside_function() else tf.group(*written)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rank `root_rank`'s object to all ranks, all of which must call it, outside of functions.

    Args:
        obj: anything that cloudpickle can pickle; only the root's is used.
        root_rank: the rank whose object is sent.
        session: accepted and ignored: objects are sent without TensorFlow.
        name: identifies the operation on all ranks.
        process_set: the ranks that take part.

    Returns:
        The object itself on the root, a copy on the others.

    Raises:
        HorovodInternalError: the root could not pickle its object, or a rank was lost.

    Example:
        path = tf.train.latest_checkpoint("checkpoints")
        path = hvd.broadcast_object(path)  # all ranks load the checkpoint that rank 0 has found
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function of an object that works like `broadcast_object` with these arguments.

    Example:
        import time

        broadcast = hvd.broadcast_object_fn(root_rank=0)
        log_folder = broadcast(time.strftime("logs/%Y-%m-%d_%H-%M-%S"))  # the same on all ranks
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Collects an object of every rank of the set, all of which must call it, outside of functions.

    Arguments are as for `broadcast_object`. Returns the objects in the order of ranks, equal on every rank.

    Example:
        losses = hvd.allgather_object(float(loss))  # a list with a number for each rank
    """
    return objects.allgather_object(obj, name, process_set)


# ---- Training in sessions of TensorFlow 1: an equal start of all variables of a graph, and its hook ----


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that overwrites all global variables of this graph with rank `root_rank`'s.

    All ranks must run it in a session, once the variables have been initialised or restored.

    Raises:
        RuntimeError: there is no graph that a session runs.

    Example:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weights = tf.compat.v1.get_variable("weights", [8, 2])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(root_rank=0))  # all ranks start alike
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise RuntimeError(
            "hvd.broadcast_global_variables() is for graphs that a session runs: elsewhere TensorFlow has no "
            "list of all variables. Use hvd.broadcast_variables(model.variables, root_rank=0)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A hook of a training session: overwrites all variables with a rank's, each time a session begins.

    So all ranks start with the same values, also if only the root has restored a checkpoint.

    Example:
        with tf.Graph().as_default():
            weights = tf.compat.v1.get_variable("weights", [8, 2])
            hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                values = session.run(weights)  # rank 0's on all ranks
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
