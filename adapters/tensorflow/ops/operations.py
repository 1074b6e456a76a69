"""Collective operations on lists of tensors, in graphs and eagerly: each is a single TensorFlow operation.

They run on the CPU, and TensorFlow copies tensors on GPUs to host memory and back. With the setting
`tensorflow_on_gpus`, operations whose results have known sizes run on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from sirtaki.bindings import request as core
from sirtaki.bindings.context import Context, find, process
from sirtaki.common.ops.requests import Reduction
from sirtaki.common.semantics import hint
from sirtaki.tensorflow._private import control_manager_of
from sirtaki.tensorflow.ops import xla
from sirtaki.tensorflow.ops.library import library
from sirtaki.tensorflow.ops.op_names import label, part

CPU = "CPU:0"
ON_GPUS = ("allreduce", "reducescatter", "broadcast")


class Call(NamedTuple):
    """The identity of an operation, by which the ranks match it.

    Attributes:
        label: its name, as `labels.label` makes it.
        process_set: the core's number of the set.
    """

    label: tf.Tensor
    process_set: int = 0


def call(kind: str, name: str | None, process_set: int) -> Call:
    """Returns the call of a new operation of a kind ("allreduce", ...)."""
    with tf.device(CPU):
        return Call(label(kind, name, process_set), process_set)


def allreduce(tensors: Sequence[tf.Tensor], how: Reduction, called: Call) -> list[tf.Tensor]:
    """Combines each tensor over the ranks; all complete together."""
    if tensors and xla.is_compiled():
        factors = {"prescale": how.prescale, "postscale": how.postscale}
        return _compiled(core.ALLREDUCE, tensors, called, {"reduce_op": how.op, **factors})
    return _run("allreduce", tensors, called, **_combination(how))


def reducescatter(tensors: Sequence[tf.Tensor], how: Reduction, called: Call) -> list[tf.Tensor]:
    """Returns this rank's rows of the combination of each tensor."""
    return _run("reducescatter", tensors, called, **_combination(how))


def allgather(tensors: Sequence[tf.Tensor], called: Call) -> list[tf.Tensor]:
    """Returns the ranks' tensors, concatenated along dimension 0."""
    return _run("allgather", tensors, called)


def broadcast(tensors: Sequence[tf.Tensor], root: int, called: Call) -> list[tf.Tensor]:
    """Returns rank `root`'s tensors."""
    if tensors and xla.is_compiled():
        return _compiled(core.BROADCAST, tensors, called, {"root": root})
    return _run("broadcast", tensors, called, root=root)


def alltoall(tensor: tf.Tensor, splits: tf.Tensor, called: Call) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows from all ranks, and how many came from each; empty splits mean equal parts."""
    xla.refuse()
    with tf.device(CPU):
        results, received = library().sirtaki_alltoall(
            label=called.label, tensors=[tensor], splits=splits, process_set=called.process_set
        )
    _run_independently(received)
    return results[0], received


def barrier(called: Call) -> Any:
    """Completes once every rank has reached it."""
    xla.refuse()
    with tf.device(CPU):
        return library().sirtaki_barrier(label=called.label, process_set=called.process_set)


def join(called: Call) -> tf.Tensor:
    """Returns the rank that joined last."""
    xla.refuse()
    with tf.device(CPU):
        return library().sirtaki_join(label=called.label, process_set=called.process_set)


def _combination(how: Reduction) -> dict[str, Any]:
    # TensorFlow's floating attributes have 32 bits.
    return {"reduce_op": how.op, "prescale": repr(how.prescale), "postscale": repr(how.postscale)}


def _run(kind: str, tensors: Sequence[tf.Tensor], called: Call, **attributes: Any) -> list[tf.Tensor]:
    if not tensors:
        return []
    xla.refuse()
    with _where(kind):
        results = getattr(library(), f"sirtaki_{kind}")(
            label=called.label, tensors=list(tensors), process_set=called.process_set, **attributes
        )
    _run_independently(results[0])
    return list(results)


def _where(kind: str) -> AbstractContextManager[None]:
    """Returns the devices for an operation: the CPU, or those that TensorFlow chooses."""
    context = find()
    on_gpus = context is not None and context.setting("tensorflow_on_gpus") == "1"
    return nullcontext() if on_gpus and kind in ON_GPUS else tf.device(CPU)


def _compiled(
    kind: int, tensors: Sequence[tf.Tensor], called: Call, attributes: dict[str, int | float]
) -> list[tf.Tensor]:
    """Does the same by a call of a compiled program. Sums and averages can be differentiated."""

    def run(*sources: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        process_set = {"process_set": called.process_set}
        results = xla.run(kind, sources, called.label, attributes | process_set)

        def gradient(*gradients: tf.Tensor) -> list[tf.Tensor]:
            if kind != core.ALLREDUCE or attributes["reduce_op"] not in (core.SUM, core.AVERAGE):
                raise ValueError("in a function that XLA compiles, only sums and averages have gradients")
            back = called._replace(label=part(called.label, ".gradient"))
            return _compiled(
                kind, [tf.convert_to_tensor(gradient) for gradient in gradients], back, attributes
            )

        return results, gradient

    return list(tf.custom_gradient(run)(*tensors))


def _note_gpus(context: Context) -> None:
    """Warns on rank 0 that tensors on GPUs leave them for each operation."""
    if context.rank or context.setting("tensorflow_on_gpus") == "1":
        return
    if tf.test.is_built_with_cuda() and tf.config.get_visible_devices("GPU"):
        hint(
            "TensorFlow uses GPUs here, but operations between ranks run on the CPU: each copies its tensors "
            "to host memory and back. SIRTAKI_TENSORFLOW_ON_GPUS=1 uses NCCL; no GPU has run that so far. "
            "sirtaki.torch and sirtaki.jax use NCCL"
        )


process.after_init.append(_note_gpus)


def _run_independently(result: tf.Tensor) -> None:
    """Lets an operation of a function run concurrently with other operations that have side effects.

    TensorFlow would otherwise run them one after another. The function still ends after all of them.
    """
    if tf.executing_eagerly():
        return
    manager = control_manager_of(result.graph)
    if manager is not None and hasattr(manager, "run_independently"):
        manager.run_independently(result.op)
