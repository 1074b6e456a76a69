"""Collective operations on lists of tensors, in graphs and eagerly: one operation of TensorFlow's each.

They run on the CPU. TensorFlow copies tensors on GPUs to the host's memory and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sirtaki.common.ops import Reduction
from sirtaki.tensorflow.labels import label
from sirtaki.tensorflow.library import library

CPU = "CPU:0"


class Call(NamedTuple):
    """What the ranks recognise an operation by.

    Attributes:
        label: its name, as `labels.label` makes it.
        process_set: the core's number of it.
    """

    label: tf.Tensor
    process_set: int = 0


def call(kind: str, name: str | None, process_set: int) -> Call:
    """The call of a new operation of a kind ("allreduce", ...)."""
    with tf.device(CPU):
        return Call(label(kind, name, process_set), process_set)


def allreduce(tensors: Sequence[tf.Tensor], how: Reduction, called: Call) -> list[tf.Tensor]:
    """Combines each tensor over the ranks; all complete together."""
    return _run("allreduce", tensors, called, **_combination(how))


def reducescatter(tensors: Sequence[tf.Tensor], how: Reduction, called: Call) -> list[tf.Tensor]:
    """This rank's rows of the combination of each tensor."""
    return _run("reducescatter", tensors, called, **_combination(how))


def allgather(tensors: Sequence[tf.Tensor], called: Call) -> list[tf.Tensor]:
    """The ranks' tensors, one after another along dimension 0."""
    return _run("allgather", tensors, called)


def broadcast(tensors: Sequence[tf.Tensor], root: int, called: Call) -> list[tf.Tensor]:
    """Rank `root`'s tensors."""
    return _run("broadcast", tensors, called, root=root)


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, called: Call) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows that come from all ranks, and how many from each; no splits are equal ones."""
    refuse_xla()
    with tf.device(CPU):
        results, received = library().sirtaki_alltoall(
            label=called.label, tensors=[tensor], splits=splits, process_set=called.process_set
        )
    _run_independently(received)
    return results[0], received


def barrier(called: Call) -> Any:
    """Ends once every rank has come to it."""
    refuse_xla()
    with tf.device(CPU):
        return library().sirtaki_barrier(label=called.label, process_set=called.process_set)


def join(called: Call) -> tf.Tensor:
    """The rank that joined last."""
    refuse_xla()
    with tf.device(CPU):
        return library().sirtaki_join(label=called.label, process_set=called.process_set)


def refuse_xla() -> None:
    """Raises ValueError where XLA compiles what is traced. (AutoGraph only passes on classes it knows.)"""
    if not tf.executing_eagerly() and _is_compiled(tf.compat.v1.get_default_graph()):
        raise ValueError(
            "XLA compiles this function, and sirtaki's operations for TensorFlow are not made for XLA: use "
            "jit_compile=False for the function that exchanges data between ranks (functions that it calls "
            "may be compiled)"
        )


def _is_compiled(graph: Any) -> bool:
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:  # the kernel is then refused by XLA itself
        return False
    return GraphOrParentsInXlaContext(graph)


def _combination(how: Reduction) -> dict[str, Any]:
    # Attributes of TensorFlow's have 32 bits if they are floating.
    return {"reduce_op": how.op, "prescale": repr(how.prescale), "postscale": repr(how.postscale)}


def _run(kind: str, tensors: Sequence[tf.Tensor], called: Call, **attributes: Any) -> list[tf.Tensor]:
    if not tensors:
        return []
    refuse_xla()
    with tf.device(CPU):
        results = getattr(library(), f"sirtaki_{kind}")(
            label=called.label, tensors=list(tensors), process_set=called.process_set, **attributes
        )
    _run_independently(results[0])
    return list(results)


def _run_independently(result: tf.Tensor) -> None:
    """Lets an operation of a function run beside others that have side effects.

    TensorFlow would run them one after another. The function still ends after all of them.
    """
    if tf.executing_eagerly():
        return
    manager = getattr(result.graph, "experimental_acd_manager", None)
    if manager is not None and hasattr(manager, "run_independently"):
        manager.run_independently(result.op)
